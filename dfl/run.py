"""The command `python -m dfl.run`: read the command line on rank 0, broadcast it, simulate the run.

Rank 0 alone reads the command line and writes to the terminal.
"""

import json
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dfl.comm.startup import first, seen
from dfl.config import COMPONENTS, SECTIONS, Run, checked_settings
from dfl.core import command_line
from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.help.help_page import HelpPage
from dfl.core.options import MOST
from dfl.core.reading import SETTINGS, read_text
from dfl.core.registry import flag
from dfl.store.manifest import LONGEST, checksum
from dfl.store.resume import describe_finished, describe_objects, run_to_resume
from dfl.store.run_directory import refuse_unusable

if TYPE_CHECKING:
    from dfl.comm.mpi import World
    from dfl.store.callbacks import Callback

GRACE = 2.0
"""Seconds that rank 0 has to print an error before another rank ends the job."""
_ABOUT = (
    "Simulate federated learning without a server: peers on a graph, momentum SGD, b-bit messages."
)


@dataclass
class Command:
    """A command line, read.

    Attributes:
        run: the run; None where there is nothing to simulate, as after --help.
        dry_run: whether to check and show the run only.
        quiet: whether to print warnings and the last line only.
        verbose: whether to print every evaluation on a line of its own, and what is logged.
        created: the folder that was created for the run; None where --out names one.
    """

    run: Run | None = None
    dry_run: bool = False
    quiet: bool = False
    verbose: bool = False
    created: Path | None = None

    def to_bytes(self) -> bytes:
        """Encode the command for other ranks."""
        values = asdict(replace(self, run=None)) | {
            "run": self.run and self.run.to_dict(),
            "created": self.created and str(self.created),
        }
        return json.dumps(values).encode()

    @classmethod
    def from_bytes(cls, encoded: bytes) -> "Command":
        """The inverse of `to_bytes`."""
        values = json.loads(encoded)
        run = None if values["run"] is None else Run.from_dict(values["run"])
        created = None if values["created"] is None else Path(values["created"])
        return cls(**values | {"run": run, "created": created})


def main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code: 0 done, 2 an option is refused, 3 a peer diverged, 75 stopped by a signal
        after a checkpoint, 130 Ctrl-C.
    """
    world: World | None = None
    command = Command()
    with command_line.steady():
        try:
            from dfl.comm.mpi import connect  # takes a while, in which Ctrl-C may come

            world = connect(_startup_timeout(sys.argv[1:]))
            world.busy = True
            command = _read_on_root(sys.argv[1:], world)
            if command.run is not None:
                with _stopping_on_signals(world):
                    _execute(command, command.run, world)
            world.busy = False
            return 0
        except (InputError, DivergedError, Suspended) as error:
            return _fail(error, world)
        except KeyboardInterrupt:
            return _interrupt(world, command.run)


def _read_on_root(tokens: Sequence[str], world: "World") -> Command:
    """Read the command line on rank 0 and broadcast it.

    Raises:
        InputError: on every rank, an unknown flag or component, or a bad value.
    """
    encoded = world.from_root(lambda: read_command(tokens, world.size).to_bytes())
    return Command.from_bytes(encoded)


def _execute(command: Command, run: Run, world: "World") -> None:
    """Simulate a run, or show what it would be."""
    try:
        if command.dry_run:
            _show(run, world)
        else:
            _simulate(command, run, world)
    finally:
        if command.created:
            _remove_unused(command.created)


def _simulate(command: Command, run: Run, world: "World") -> None:
    from dfl.reporting.simulate import simulate
    from dfl.store.logs import printed

    callbacks: list[Callback] = []
    if world.rank == 0:
        from dfl.reporting.callbacks.terminal import Terminal

        callbacks.append(Terminal(quiet=command.quiet, verbose=command.verbose))
    with printed() if command.verbose and world.rank == 0 else nullcontext():
        for _ in simulate(run, callbacks=callbacks):
            command_line.search_garbage()  # at round 0 all is imported


def _show(run: Run, world: "World") -> None:
    """Prepare a run and print its graph, its data and the cost of a round."""
    from dfl.simulation.heartbeats import alive
    from dfl.simulation.prepare import prepare

    with alive(world, None, run.timeout):
        info = prepare(run, world).info
        if info:
            from dfl.reporting.callbacks.terminal import Terminal

            Terminal().dry_run(info)


@contextmanager
def _stopping_on_signals(world: "World") -> Iterator[None]:
    """Let SIGTERM and SIGUSR1 end the run after its round, and a second one end it at once.

    Clusters send them as a warning.
    """

    def handler(number: int, frame: object) -> None:
        world.stop_signal = number
        signal.signal(number, signal.SIG_DFL)

    world.stop_signal = 0
    before = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _fail(error: InputError | DivergedError | Suspended, world: "World | None") -> int:
    """Print an error on one rank and leave the job; return the exit code."""
    if prints := _prints_errors(world):
        command_line.print_error(error)
    if world:
        world.leave(error.code, None if prints else error)
    return error.code


def _prints_errors(world: "World | None") -> bool:
    """Return whether this rank prints an error.

    Rank 0 does, and another rank where it alone cannot connect and rank 0 waits for it.
    """
    if world is None and not first():
        time.sleep(GRACE)  # rank 0 ends by itself if it has the same error
        rank_0 = seen().get(0)
        return rank_0 is not None and rank_0.waits
    return first() and (world is None or world.rank == 0)


def _interrupt(world: "World | None", run: Run | None) -> int:
    """Print once how to resume an interrupted run, and end the job; return the exit code."""
    hint = ""
    if run is not None and run.out is not None:
        names = [path.stem for path in (run.out / "checkpoint").glob("*.json")]
        rounds = [int(name) for name in names if name.isdecimal()]
        if rounds:
            hint = f": resume after round {max(rounds)} with --resume {run.out}"
    if not first():
        rank = world.rank if world else 0
        time.sleep(GRACE + min(rank, 20))  # a lower rank ends the job if it is interrupted as well
    if first() or 0 in seen():
        command_line.print_error(f"interrupted{hint}")
    if world and world.size > 1:
        world.end(130)
    return 130


def _startup_timeout(tokens: Sequence[str]) -> float:
    """Return the value of --timeout, which is needed before the command line is checked."""
    for name, following in zip(tokens, [*tokens[1:], ""], strict=False):
        option, equals, value = name.partition("=")
        with suppress(ValueError):
            seconds = float(value if equals else following)
            if option == "--timeout" and 1 <= seconds <= MOST:
                return seconds
    return Run.timeout


class _Flags(Run):
    """The settings that flags give, unchecked: they may be valid only together with a file's."""

    def __post_init__(self) -> None:
        """Check nothing."""


def read_command(tokens: Sequence[str], ranks: int) -> Command:
    """Read a command line and create the folder of its run.

    Args:
        tokens: the arguments.
        ranks: the number of ranks of this launch.

    Raises:
        InputError: an unknown flag or component, or a bad value.
    """
    from cyclopts import Parameter

    from dfl.reporting.callbacks import tensorboard
    from dfl.simulation.components import check, registries
    from dfl.simulation.defaults import settle

    result = Command()
    given: set[str] = set()
    app = command_line.app("run", _ABOUT)
    app.config = lambda app, commands, arguments: given.update(
        argument.name for argument in arguments if argument.tokens
    )

    @app.default
    def command(
        flags: Annotated[_Flags, Parameter(name="*")] = _Flags(),  # noqa: B008
        *,
        config: Path | None = None,
        dry_run: Annotated[bool, Parameter(negative="")] = False,
        quiet: Annotated[bool, Parameter(negative="")] = False,
        verbose: Annotated[bool, Parameter(negative="")] = False,
    ) -> None:
        """Run it.

        Parameters
        ----------
        config: Path
            A TOML file whose keys are these flags (local_epochs = 2), or a run.json; flags override
            it.
        dry_run: bool
            Check everything, show the graph, the data and what a round costs, and train nothing.
        quiet: bool
            Print warnings and the last line only.
        verbose: bool
            Print every evaluation on a line of its own, and what is logged, every round included.
        """
        command_line.refuse_several(quiet=quiet, verbose=verbose)
        filed = _read_config(config) if config else {}
        flagged = {name: getattr(flags, name) for name in _fields(given)}
        try:
            run = Run(**filed | flagged)
        except InputError as error:
            where = "" if flagged or not filed else f"--config {config}: "
            raise InputError(f"{where}{error}") from None
        if run.out:
            refuse_unusable(run.out, run.resume is not None, run.report)
        if run.resume:
            run = run_to_resume(run, {*filed, *_fields(given)}, partial(settle, ranks=ranks))
            if message := describe_finished(run):
                print(f"dfl: {message}")
                return
        settled = settle(run, ranks)
        check(settled)
        if run.tensorboard:
            tensorboard.check()
        if run.out is None and not dry_run:
            result.created = _new_folder(settled)
            run = replace(run, out=result.created)
        result.run, result.dry_run = run, dry_run
        result.quiet, result.verbose = quiet, verbose

    page = HelpPage(
        {flag(name): title for name, title in SECTIONS.items()},
        {flag(kind): registries()[kind] for kind in COMPONENTS},
        f"{command_line.program('run')} --peers 16",
    )
    command_line.call(app, tokens, page)
    return result


def _fields(flags: set[str]) -> set[str]:
    """Return the fields of `Run` that flags name."""
    return {name for name in Run.__annotations__ if flag(name) in flags}


def _read_config(path: Path) -> dict[str, Any]:
    """Read a file of settings. The folder of a run.json is left out: a replay is another run.

    Raises:
        InputError: it cannot be read, or has an unknown name or a bad value. Whether its settings
            are compatible is not checked: flags may complete them.
    """
    try:
        page = read_text(path, LONGEST if path.suffix == ".json" else SETTINGS)
        values = _replayed(json.loads(page)) if path.suffix == ".json" else tomllib.loads(page)
        settings = checked_settings(values)
        if line := describe_objects(settings):
            raise InputError(f"{line}: only Python can replay it")
        return settings
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
    """Return the settings in a run.json.

    Raises:
        InputError: its checksum does not match. One that was edited has no checksum.
    """
    values: dict[str, Any] = page["run"] | {"out": None}
    if "checksum" in page and page["checksum"] != checksum(page):
        raise InputError(
            'its checksum does not match: it is damaged, or was edited: then remove "checksum"'
        )
    return values


def _new_folder(run: Run) -> Path:
    """Create the folder runs/<time>-<components> of a run, with a number after it where it exists.

    Raises:
        InputError: it cannot be created.
    """
    components = "-".join(
        str(spec).partition(":")[0] for spec in (run.algorithm, run.topology, run.dataset) if spec
    )
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{components}"
    for n in count(1):
        folder = Path("runs") / (name if n == 1 else f"{name}-{n}")
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"--out: {folder} cannot be created ({error.strerror}): give another folder"
            ) from None
    return folder


def _remove_unused(folder: Path) -> None:
    """Remove a folder that was created for a run, unless the run has begun to write to it."""
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


if __name__ == "__main__":
    command_line.spare_imports()
    sys.exit(main())
