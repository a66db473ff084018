"""python -m dfl.run: a command line becomes a Run, is simulated, and reported.

Rank 0 alone reads the command line and talks to the terminal; the other ranks are told.
"""

import json
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dfl.comm.startup import first, seen
from dfl.config import MOST, Run
from dfl.core import command_line
from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.reading import SETTINGS, read_bounded
from dfl.core.registry import describe, flag
from dfl.store.manifest import checksum
from dfl.store.resume import over, settings
from dfl.store.run_directory import refuse_unusable

if TYPE_CHECKING:
    from dfl.comm.mpi import World
    from dfl.simulation.prepare import Prepared
    from dfl.store.callbacks import Callback

GRACE = 2.0
"""Seconds that rank 0 has to print why it ends, before another rank does."""
_ABOUT = (
    "Simulate federated learning without a server: peers on a graph, momentum SGD, b-bit messages."
)

RECORD = 2**20
"""Bytes that a run.json may have."""


def main() -> int:
    """Run what the command line asks for.

    Returns:
        The exit code: 0 done, 2 something asked for cannot be done, 3 a peer diverged, 75 told to stop, 130 Ctrl-C.
    """
    world: World | None = None
    asked: dict[str, Any] = {"run": None}
    with command_line.steady():
        try:
            from dfl.comm.mpi import (
                connect,
            )  # here, because it takes a while and Ctrl-C may come meanwhile

            world = connect(_timeout(sys.argv[1:]))
            world.busy = True
            asked |= json.loads(world.from_root(partial(_packed, sys.argv[1:], world.size)))
            if asked["run"] is not None:
                with _heeding(world):
                    _simulate(asked, world)
        except (InputError, DivergedError, Suspended) as error:
            if _speaks(world):
                command_line.complain(error)
            if world:
                world.leave(error.code)
            return error.code
        except KeyboardInterrupt:
            return _interrupted(world, asked["run"])
        world.busy = False
    return 0


def _speaks(world: "World | None") -> bool:
    """Return whether this rank is to print what is wrong: the first, or one that alone cannot join the others."""
    if world is None and not first():
        time.sleep(GRACE)  # rank 0 ends, if the same is wrong there
        rank_0 = seen().get(0)
        return rank_0 is not None and rank_0.waits
    return first() and (world is None or world.rank == 0)


def _interrupted(world: "World | None", run: dict[str, Any] | None) -> int:
    """Print once that a run was interrupted, and how it goes on; return the exit code."""
    folder = Path((run or {}).get("out", ""))
    rounds = [
        int(each.stem) for each in (folder / "checkpoint").glob("*.json") if each.stem.isdecimal()
    ]
    onwards = f": go on after round {max(rounds)} with --resume {folder}" if run and rounds else ""
    if not first():
        time.sleep(
            GRACE + min(world.rank if world else 0, 20)
        )  # a lower rank ends the job, if interrupted as well
    if first() or 0 in seen():
        command_line.complain(f"interrupted{onwards}")
    if world and world.size > 1:
        world.end(130)
    return 130


def _packed(tokens: Sequence[str], ranks: int) -> bytes:
    return json.dumps(_asked(tokens, ranks)).encode()


def _timeout(tokens: Sequence[str]) -> float:
    """Return the seconds for which to wait for ranks that do not start: what --timeout says, before it is checked."""
    for name, value in zip(tokens, [*tokens[1:], ""], strict=False):
        flag, equals, said = name.partition("=")
        with suppress(ValueError):
            if flag == "--timeout" and 1 <= float(said if equals else value) <= MOST:
                return float(said if equals else value)
    return Run.timeout


@contextmanager
def _heeding(world: "World") -> Iterator[None]:
    """Have SIGTERM and SIGUSR1, by which clusters warn, end the run after its round; a second one, at once."""

    def told(number: int, frame: object) -> None:
        world.told = number
        signal.signal(number, signal.SIG_DFL)

    world.told = 0
    before = {number: signal.signal(number, told) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _simulate(asked: dict[str, Any], world: "World") -> None:
    try:
        from dfl.api import simulate
        from dfl.simulation.liveness import alive
        from dfl.simulation.prepare import prepare

        run = Run.from_dict(asked["run"])
        if asked["dry_run"]:
            with alive(world, None, run.timeout):
                _show(prepare(run, world))
            return
        callbacks: list[Callback] = []
        if world.rank == 0:
            from dfl.reporting.terminal import Terminal

            callbacks.append(Terminal())
        for _ in simulate(run, callbacks=callbacks):
            pass
    finally:
        if asked["made"]:
            _take_back(Path(asked["made"]))


def _show(prepared: "Prepared") -> None:
    if prepared.info:
        from dfl.reporting.terminal import Terminal

        Terminal().dry_run(prepared.info)


def _asked(tokens: Sequence[str], ranks: int) -> dict[str, Any]:
    """What a command line asks for: `run`, whether `dry_run`, and the folder `made` for it; no run after --help.

    Raises:
        InputError: an unknown flag or component, or a bad value.
    """
    from cyclopts import Parameter

    from dfl.reporting import tensorboard
    from dfl.simulation.components import check, components

    found: dict[str, Any] = {"run": None, "dry_run": False, "made": None}
    given: set[str] = set()
    app = command_line.app("python -m dfl.run", _ABOUT)
    app.help_epilogue = "\n\n".join(
        f"{flag(kind)}  {describe(registry)}" for kind, registry in components().items()
    )
    app.config = lambda app, commands, arguments: given.update(
        each.name for each in arguments if each.tokens
    )

    @app.default
    def command(
        run: Annotated[Run, Parameter(name="*")] = Run(),  # noqa: B008
        *,
        config: Path | None = None,
        dry_run: Annotated[bool, Parameter(negative="")] = False,
    ) -> None:
        """Run it.

        Parameters
        ----------
        config: Path
            A TOML file whose keys are these flags (local_epochs = 2), or a run.json; flags go over it.
        dry_run: bool
            Check everything, show the graph, the data and what a round costs, and train nothing.
        """
        filed = _filed(config) if config else {}
        run = replace(
            run, **{name: value for name, value in filed.items() if flag(name) not in given}
        )
        if run.out:
            refuse_unusable(run.out, run.resume is not None)
        run = settings(run, {*filed, *_fields(given)}, ranks) if run.resume else run
        if run.resume and (done := over(run)):
            print(f"dfl: {done}")
            return
        settled = run.settled(ranks)
        check(settled)
        if run.tensorboard:
            tensorboard.check()
        made = None if run.out or dry_run else _new_folder(settled)
        run = replace(run, out=run.out or made)
        found.update(run=run.to_dict(), dry_run=dry_run, made=made and str(made))

    command_line.call(app, tokens)
    return found


def _fields(flags: set[str]) -> set[str]:
    """The fields of `Run` that flags name."""
    return {name for name in Run.__annotations__ if flag(name) in flags}


def _filed(path: Path) -> dict[str, Any]:
    """What a file of settings says; where a run.json wrote to is left out, as a replay is another run.

    Raises:
        InputError: it cannot be read, or says something unknown or bad.
    """
    try:
        page = read_bounded(path, RECORD if path.suffix == ".json" else SETTINGS).decode("utf-8")
        values = _replayed(json.loads(page)) if path.suffix == ".json" else tomllib.loads(page)
        if "own" in (values.get("model"), values.get("dataset")):
            raise InputError(
                "that run had its caller's own model or data: only Python can replay it"
            )
        return Run.from_dict(values).to_dict()
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        wanted = "the run.json of a run" if path.suffix == ".json" else "a TOML file of settings"
        raise InputError(
            f"--config {path}: not {wanted} ({type(error).__name__}: {error})"
        ) from None


def _replayed(page: dict[str, Any]) -> dict[str, Any]:
    """What a run.json says of its run, or one that was edited, if it has no checksum any more."""
    values: dict[str, Any] = page["run"] | {"out": None}
    if "checksum" in page and page["checksum"] != checksum(page):
        raise InputError(
            'its checksum is another: it is damaged, or was edited and needs no "checksum"'
        )
    return values


def _new_folder(run: Run) -> Path:
    """Make the folder runs/<time>-<what> for a run, or one with a number behind it where another run was faster.

    Raises:
        InputError: it cannot be made.
    """
    what = "-".join(
        spec.partition(":")[0] for spec in (run.algorithm, run.topology, run.dataset) if spec
    )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{what}"
    for n in count(1):
        folder = Path("runs") / (name if n == 1 else f"{name}-{n}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"--out: {folder} cannot be made ({error.strerror}): give another folder"
            ) from None
    return folder


def _take_back(folder: Path) -> None:
    """Remove a folder that was made for a run, unless the run has begun to write to it."""
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


if __name__ == "__main__":
    sys.exit(main())
