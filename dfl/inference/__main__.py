"""The command `python -m dfl.inference FILE...`: fit a model to the examples of sites.

Rank 0 alone reads the command line and the files, and writes.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dfl.comm.startup import first
from dfl.core import command_line
from dfl.core.errors import InputError
from dfl.core.files import atomically, writing
from dfl.core.help.help_page import HelpPage
from dfl.core.registry import split_specs
from dfl.inference.frames import read_csv

if TYPE_CHECKING:
    from dfl.comm.mpi import World
    from dfl.inference.result import Result

_ABOUT = "Estimate coefficients that sites have in common, each of which keeps its examples."
TABLES = ("estimates.csv", "sites.csv", "revealed.csv", "traffic.csv")
"""The tables in a folder of results."""
PAGES = ("summary.txt", "forest.png")
"""The printed summary and the figure in it."""
TIMEOUT = 600.0
"""Seconds that a rank waits for others."""


def main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code: 0 done, 2 something is refused, 130 Ctrl-C.
    """
    world: World | None = None
    with command_line.steady():
        try:
            from dfl.comm.mpi import connect

            world = connect()
            world.busy = True
            _run(sys.argv[1:], world)
            world.busy = False
            return 0
        except InputError as error:
            prints = first() and (world is None or world.rank == 0)
            if prints:
                command_line.print_error(error)
            if world:
                world.leave(error.code, None if prints else error)
            return error.code
        except KeyboardInterrupt:
            if first():
                command_line.print_error("interrupted")
            if world and world.size > 1:
                world.end(130)
            return 130


def _run(tokens: Sequence[str], world: "World") -> None:
    frames: list[Any] = []

    def read() -> bytes:
        settings = read_command(tokens)
        if settings is None:
            return b""
        files = [Path(file) for file in settings.pop("files")]
        frame, settings["site"] = read_csv(files, settings["site"])
        frames.append(frame)
        if settings["out"] is not None:
            _claim(Path(settings["out"]), files)
        return json.dumps(settings).encode()

    message = world.from_root(read)
    if not message:
        return  # after --help
    settings = json.loads(message)
    out, quiet = settings.pop("out"), settings.pop("quiet")
    world.limit_start(TIMEOUT)
    with world.alive(None, TIMEOUT):
        import torch  # noqa: F401 - before garbage is searched for

        from dfl.inference.fitting import fit

        command_line.search_garbage()
        results = [
            fit(frames[0] if frames else None, estimator=estimator, **settings)
            for estimator in split_specs(settings.pop("estimator"))
        ]
        world.busy = True
        world.from_root(lambda: _show(results, out, quiet))


def read_command(tokens: Sequence[str]) -> dict[str, Any] | None:
    """Read a command line: the arguments of `fit`, `files` and `out`; None after --help.

    Raises:
        InputError: an unknown flag, or a bad value.
    """
    from cyclopts import Parameter

    from dfl.inference.estimators import ESTIMATORS
    from dfl.inference.fitting import Messaging
    from dfl.inference.models import MODELS

    app = command_line.app("inference", _ABOUT)
    example = f"{app.name[0]} sites.csv --sites site --outcome y --covariates x"
    page = HelpPage(components={"--model": MODELS, "--estimator": ESTIMATORS}, example=example)

    @app.default
    def command(
        *files: Path,
        outcome: str,
        covariates: Annotated[tuple[str, ...], Parameter(consume_multiple=True)],
        sites: str | None = None,
        own_covariates: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
        intercept: bool = True,
        event: str | None = None,
        offset: str | None = None,
        model: str = "logistic",
        estimator: str = "tilted_score",
        messaging: Annotated[Messaging, Parameter(name="*")] = Messaging(),  # noqa: B008
        out: Path | None = None,
        quiet: Annotated[bool, Parameter(negative="")] = False,
    ) -> dict[str, Any]:
        """Fit.

        Parameters
        ----------
        files: Path
            A CSV file with a column of sites, or one file per site.
        outcome: str
            The column of outcomes, or of times.
        covariates: tuple[str, ...]
            The columns whose coefficients are common to all sites.
        sites: str
            The column of sites; without it each file is a site.
        own_covariates: tuple[str, ...]
            Columns whose coefficients are each site's own.
        intercept: bool
            Whether each site has an intercept of its own.
        event: str
            The column with 1 for events and 0 for censored times.
        offset: str
            A column that is added to the linear predictor.
        model: str
            The model.
        estimator: str
            The estimator, or several joined by +.
        out: Path
            Folder for estimates.csv, sites.csv, revealed.csv, traffic.csv, summary.txt and
            forest.png, new, empty or written by dfl.
        quiet: bool
            Print warnings and the last line only; it needs --out.
        """
        if quiet and out is None:
            raise InputError("--quiet needs --out: nothing would be left of the estimates")
        return {
            "files": [str(file) for file in files], "outcome": outcome, "covariates": covariates,
            "site": sites, "own_covariates": own_covariates, "intercept": intercept,
            "event": event, "offset": offset, "model": model, "estimator": estimator,
            "out": None if out is None else str(out), "quiet": quiet, **asdict(messaging),
        }  # fmt: skip

    settings: dict[str, Any] | None = command_line.call(app, tokens, page)
    return settings


def _claim(out: Path, files: "Sequence[Path]") -> None:
    """Create the folder of the results.

    Raises:
        InputError: it has files of another program, or a file of examples would be overwritten.
    """
    from dfl.store.run_directory import claim

    written = {(out / name).resolve() for name in (*TABLES, *PAGES)}
    for file in files:
        if file.resolve() in written:
            raise InputError(f"--out {out} would overwrite the examples in {file}: give another")
    claim(out)


def _show(results: "Sequence[Result]", out: str | None, quiet: bool) -> bytes:
    """Print the results, and write them to a folder."""
    page = "\n\n".join(result.summary() for result in results)
    if not quiet:
        print(page)
    if out is not None:
        with writing(f"--out {out}"):
            _write(results, Path(out), page)
        print(command_line.look_at(Path(out), ("forest.png",)))
    return b""


def _write(results: "Sequence[Result]", out: Path, page: str) -> None:
    import pandas as pd

    from dfl.inference.plots import forest

    tables = (
        pd.concat([result.table() for result in results]),
        results[0].sites,
        pd.concat([r.revealed.assign(estimator=r.estimator) for r in results]),
        pd.concat([r.traffic.assign(estimator=r.estimator) for r in results]),
    )
    for name, table in zip(TABLES, tables, strict=True):
        with atomically(out / name) as part:
            table.to_csv(part, index=False, lineterminator="\n")
    summary, figure = PAGES
    with atomically(out / summary) as part:
        part.write_text(f"{page}\n", encoding="utf-8")
    with atomically(out / figure) as part:
        forest(results).savefig(part, format="png", dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    command_line.spare_imports()
    sys.exit(main())
