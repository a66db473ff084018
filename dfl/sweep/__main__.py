"""python -m dfl.sweep GRID: a grid of runs, each a launch of dfl.run, and what came out of them in tables and figures.

A cell is known by its settings and its folder alone: the folders say what is left to do.
"""

from __future__ import annotations

if __name__ == "__main__":
    from dfl.core.command_line import leave_on_interrupt

    leave_on_interrupt()

import shlex
import signal
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from dfl.core import command_line
from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically, make_directory
from dfl.store.run_directory import claim
from dfl.sweep import grid, progress, slurm
from dfl.sweep.cells import DAMAGED, DIVERGED, DONE, FAILED, RUNNING, Sight, see
from dfl.sweep.scheduler import Jobs, launcher
from dfl.sweep.slurm import Slurm

_ABOUT = """Run the cells of a grid that have not finished: a TOML file with settings as for dfl.run --config, and a
table [sweep] of lists, whose combinations are the cells. The same command goes on with what was interrupted."""

BAD = (FAILED, DIVERGED, DAMAGED)
"""How a cell ends that is not done."""

Yes = Annotated[bool, Parameter(negative="")]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What a sweep can be asked for."""

    out: Path | None = None
    """Folder of the sweep; sweeps/<name of the grid's file> where not given."""
    jobs: int = 1
    """Cells to run at a time."""
    ranks: int = 1
    """Ranks of each cell, started by mpirun."""
    dry_run: Yes = False
    """Check every cell, list them with what is done and what is left, and run nothing."""
    status: Yes = False
    """List how far every cell is, and run nothing."""
    table: Yes = False
    """Write tables and figures of what there is so far, and run nothing."""
    slurm: Yes = False
    """Submit what is left as a job array of Slurm, and run nothing here."""
    no_submit: Yes = False
    """With --slurm, write the script of the job array, and do not submit it."""

    def __post_init__(self) -> None:
        for name in ("jobs", "ranks"):
            if not 1 <= getattr(self, name) <= 4096:
                raise InputError(f"--{name} must be from 1 to 4096, not {getattr(self, name)}")
        if self.slurm and (self.jobs, self.ranks) != (1, 1):
            raise InputError(
                "--jobs and --ranks are for this machine: with --slurm, say --at-once and --ntasks"
            )
        if self.no_submit and not self.slurm:
            raise InputError("--no-submit has no part without --slurm: leave it out")


def main() -> int:
    """Do what the command line says.

    Returns:
        The exit code: 0 all cells are done, 1 some failed or diverged, 2 something asked for cannot be done, 75 some
        are left, 130 Ctrl-C.
    """
    return command_line.answer(_asked)


def _asked(tokens: Sequence[str]) -> int | None:
    app, again = (
        command_line.app("python -m dfl.sweep", _ABOUT),
        shlex.join(["python", "-m", "dfl.sweep", *tokens]),
    )

    @app.default
    def command(
        path: Path,
        /,
        options: Annotated[Options, Parameter(name="*")] = Options(),
        job: Annotated[Slurm, Parameter(name="*", group="With --slurm")] = Slurm(),  # noqa: B008
    ) -> int:
        """Run it.

        Parameters
        ----------
        path: Path
            The file of the grid.
        """
        if job != Slurm() and not options.slurm:
            raise InputError(
                "what a job array asks for has no part without --slurm: --help says what that is"
            )
        sweep = Sweep.of(path, options, job.ntasks if options.slurm else options.ranks)
        return sweep.submit(job, options) if options.slurm else sweep.run(options, again)

    code: int | None = command_line.call(app, tokens)
    return code


@dataclass(frozen=True)
class Sweep:
    """A grid, the folder of its cells, and where to speak.

    Attributes:
        grid: the cells.
        folder: where they are.
        console: a terminal or a pipe.
    """

    grid: grid.Grid
    folder: Path
    console: Console

    @classmethod
    def of(cls, path: Path, options: Options, ranks: int) -> Sweep:
        """The sweep that a command line means.

        Args:
            path: the file of its grid.
            options: what is asked for.
            ranks: of a cell.

        Raises:
            InputError: the grid is bad, does not fit what the folder holds, or cannot be run here.
        """
        launcher(options.ranks)
        read, folder = grid.read(path, ranks), options.out or Path("sweeps") / path.stem
        grid.fits(read, folder)
        return cls(read, folder, progress.console())

    def run(self, options: Options, again: str) -> int:
        """Do what is asked for; the exit code.

        Args:
            options: what.
            again: the command line that goes on.
        """
        if options.status or options.dry_run:
            queue, sight = slurm.queued(self.folder) if self.folder.exists() else {}, self.see()
            self.console.print(progress.overview(self.grid, sight, queue))
            progress.say(self.console, f"{progress.counts(sight)}, in {self.folder}")
            return 0
        if options.table:
            self.publish(self.see())
            return 0
        grid.keep(self.grid, self.folder)
        return self.work(options, again)

    def see(self) -> Sight:
        """How all cells are."""
        return see(self.folder, (cell.name for cell in self.grid.cells))

    def work(self, options: Options, again: str) -> int:
        """Run what is left, and publish what came out unless a signal ended it; the exit code."""
        before = self.see()
        left = [
            self.folder / name
            for name, seen in before.items()
            if seen.status not in (DONE, DIVERGED)
        ]
        for name, seen in before.items():
            if seen.status == DAMAGED:
                progress.say(
                    self.console,
                    f"{seen.status:<10} {name}: {seen.reason}; its run is gone on with",
                )
        jobs = Jobs(deque(left), options.jobs, options.ranks)
        with progress.following(self.console, jobs, len(before) - len(left), len(before)) as tell:
            jobs.work(tell)
        after = self.see()
        sight = {**after} | {folder.name: seen for folder, seen in jobs.ended.items()}
        rest = sum(seen.status not in (DONE, *BAD) for seen in sight.values())
        if not jobs.told:
            self.publish(after)
        for line in progress.ending(sight):
            progress.say(self.console, line)
        progress.say(self.console, progress.counts(sight))
        if rest:
            progress.say(self.console, f"{rest} left; to go on: {again}")
        if jobs.told:
            return 130 if jobs.told[0] == signal.SIGINT else 75
        bad = any(seen.status in BAD for seen in sight.values())
        return 1 if bad else 75 if rest else 0

    def submit(self, asked: Slurm, options: Options) -> int:
        """Hand what is left, and neither runs nor waits already, to Slurm; the exit code."""
        grid.keep(self.grid, self.folder)
        with Lock(
            self.folder, patience=grid.PATIENCE
        ):  # no other sweep submits the same cells meanwhile
            return self._submit(asked, options)

    def _submit(self, asked: Slurm, options: Options) -> int:
        queue, over = slurm.queued(self.folder), (DONE, DIVERGED, RUNNING)
        left = [
            name
            for name, seen in self.see().items()
            if seen.status not in over and name not in queue
        ]
        if not left:
            progress.say(
                self.console,
                f"{progress.counts(self.see())}; {len(queue)} in the queue, none to submit",
            )
            return 0
        script = slurm.write(self.folder, [self.folder / name for name in left], asked)
        how = (
            f"to submit: sbatch {shlex.quote(str(script))}"
            if options.no_submit
            else f"job {slurm.submit(script)}"
        )
        progress.say(
            self.console, f"{len(left)} of {len(self.grid.cells)} cells in {script}; {how}"
        )
        return 0

    def publish(self, sight: Sight) -> None:
        """Write sweep.csv, summary.csv and figures of what there is, and print the summary.

        Raises:
            InputError: the folder cannot be written to.
        """
        from dfl.sweep import plots, tables

        claim(self.folder)
        table, by = tables.cells(self.grid, sight), tables.grouped(self.grid)
        found = tables.summary(table, by)
        drawn = plots.figures(tables.curves(self.grid, sight), found, by, self.folder.name)
        try:
            with Lock(self.folder, patience=grid.PATIENCE):
                tables.write(table, self.folder / "sweep.csv")
                tables.write(found, self.folder / "summary.csv")
                make_directory(self.folder / "figures")
                for title, figure in drawn.items():
                    with atomically(self.folder / "figures" / f"{title}.png") as part:
                        figure.savefig(part, format="png", dpi=150)
        except OSError as error:
            raise InputError(
                f"--out {self.folder} cannot be written to: {error.strerror}"
            ) from None
        self.console.print(tables.screen(found, by))
        progress.say(self.console, f"tables and figures are in {self.folder}")


if __name__ == "__main__":
    sys.exit(main())
