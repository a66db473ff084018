"""python -m dfl.run: a command line becomes a Run, is simulated, and reported.

Rank 0 alone reads the command line and talks to the terminal; the other ranks are told.
"""

import json
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from dfl.config import Run, describe, flag
from dfl.errors import DivergedError, InputError
from dfl.mpi import World, connect


def main() -> int:
    """Run what the command line asks for.

    Returns:
        The exit code: 0 done, 2 something asked for cannot be done, 3 a peer diverged.
    """
    world = World()
    try:
        world = connect()
        asked = json.loads(world.from_root(lambda: json.dumps(_asked(sys.argv[1:], world.size)).encode()))
        if asked["run"] is not None:
            _simulate(Run.from_dict(asked["run"]), asked["dry_run"], world)
    except (InputError, DivergedError) as error:
        code = 2 if isinstance(error, InputError) else 3
        if world.rank == 0:
            print(f"dfl: {error}", file=sys.stderr, flush=True)
        world.leave(code)
        return code
    return 0


def _simulate(run: Run, dry_run: bool, world: World) -> None:
    from dfl.simulation import prepare, simulate

    if dry_run:
        setting = prepare(run, world)
        if world.rank == 0:
            from dfl.terminal import Terminal

            Terminal().dry_run(setting)
        return
    report = None
    if world.rank == 0:
        from dfl.report import Report
        from dfl.terminal import Terminal

        report = Report(run.out, Terminal())
    for _ in simulate(run, report=report):
        pass


def _asked(tokens: list[str], ranks: int) -> dict[str, Any]:
    """What a command line asks for: a run and whether only to look at it; no run where --help was the question.

    Raises:
        InputError: an unknown flag or component, or a bad value.
    """
    from cyclopts import App, CycloptsError, Parameter
    from cyclopts.config import Dict

    from dfl.simulation import KINDS, check

    app = App(name="python -m dfl.run", result_action="return_value", version_flags=[], help_format="plaintext")
    app.help = "Simulate federated learning without a server: peers on a graph, momentum SGD, b-bit messages."
    app.help_epilogue = "\n\n".join(f"{flag(kind)}  {describe(registry)}" for kind, registry in KINDS.items())
    found: dict[str, Any] = {"run": None, "dry_run": False}

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
        settled = run.settled(ranks)
        check(settled)
        out = run.out or _default_folder(settled)
        found.update(run=replace(run, out=out).to_dict(), dry_run=dry_run)

    app.config = Dict({flag(k)[2:]: v for k, v in _settings(tokens).items()}, source="--config")
    try:
        app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise InputError(" ".join(str(error).split())) from None
    return found


def _settings(tokens: list[str]) -> dict[str, Any]:
    """What the file behind --config says, if there is one."""
    given = [
        t.partition("=")[2] if "=" in t else n
        for t, n in zip(tokens, [*tokens[1:], ""], strict=False)
        if t.partition("=")[0] == "--config"
    ]
    if not given or not given[0]:
        return {}
    path = Path(given[0])
    try:
        text = path.read_text()
        values = json.loads(text)["run"] if path.suffix == ".json" else tomllib.loads(text)
        return Run.from_dict(values).to_dict()
    except OSError as error:
        raise InputError(f"--config {path}: cannot be read ({error.strerror})") from None
    except InputError as error:
        raise InputError(f"--config {path}: {error}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"--config {path}: not a TOML file of settings ({error})") from None


def _default_folder(run: Run) -> Path:
    """runs/<time>-<what>, where nothing is yet."""
    names = (run.algorithm or "", run.topology, run.dataset)
    what = "-".join(name.partition(":")[0] for name in names)
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{what}"


if __name__ == "__main__":
    sys.exit(main())
