"""The command `python -m dfl.sweep GRID`: its options, and what it does with the cells of a grid.

Cells are known by their settings and their folders alone: the folders show what is left to run.
"""

from __future__ import annotations

import shlex
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from dfl.core import command_line
from dfl.core.errors import InputError
from dfl.core.files import Lock
from dfl.reporting.console import make_console, print_line
from dfl.store.run_directory import PAGE, refuse_foreign_page
from dfl.sweep import folder as sweep_folder
from dfl.sweep import grid, progress, slurm
from dfl.sweep.live_page import LivePage
from dfl.sweep.scheduler import Scheduler, launcher
from dfl.sweep.slurm import Slurm
from dfl.sweep.status import (
    DAMAGED,
    RUNNING,
    STOPPED,
    WAITING,
    States,
    read_states,
)

_ABOUT = (
    "Run the cells of a grid that have not finished. A grid is a TOML file with settings as for "
    "dfl.run --config, and a table [sweep] of lists, whose combinations are the cells. The same "
    "command resumes what was interrupted."
)

Flag = Annotated[bool, Parameter(negative="")]
"""An option that is on where it is given."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command.

    Raises:
        InputError: a number out of its range, or options that exclude each other.
    """

    out: Path | None = None
    """Folder of the sweep; sweeps/<name of the grid's file> where not given."""
    jobs: int = 1
    """Cells to run at a time."""
    ranks: int = 1
    """Ranks of each cell, started by mpirun."""
    dry_run: Flag = False
    """Check every cell with its data and its graph, list them with what is done and what is left,
    and run nothing.
    """
    status: Flag = False
    """List how far every cell is, and run nothing."""
    table: Flag = False
    """Write tables and figures of what there is so far, and run nothing."""
    slurm: Flag = False
    """Submit what is left as a job array of Slurm, and run nothing here."""
    no_submit: Flag = False
    """With --slurm, write the script of the job array, and do not submit it."""

    report: bool = True
    """Write report.html into the folder of the sweep; those of cells are their own settings."""
    quiet: Flag = False
    """Print the cells that ended badly and the last line only."""
    verbose: Flag = False
    """Print a line for every cell that ends, on a terminal too."""

    def __post_init__(self) -> None:
        for name in ("jobs", "ranks"):
            if not 1 <= getattr(self, name) <= 4096:
                raise InputError(f"--{name} must be from 1 to 4096, not {getattr(self, name)}")
        if self.slurm and (self.jobs, self.ranks) != (1, 1):
            raise InputError(
                "--jobs and --ranks are for this machine: with --slurm, give --at-once and --ntasks"
            )
        command_line.refuse_several(
            dry_run=self.dry_run, status=self.status, table=self.table, slurm=self.slurm
        )
        command_line.refuse_several(quiet=self.quiet, verbose=self.verbose)
        if self.no_submit and not self.slurm:
            raise InputError("--no-submit needs --slurm: give both, or leave it out")


def main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code: 0 all cells are done, 1 some failed or diverged, 2 an option or the grid is
        refused, 75 some are left, 130 Ctrl-C.
    """
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> int | None:
    app = command_line.app("sweep", _ABOUT)

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
        if not options.slurm:
            job.refuse_given()
        launcher(options.ranks)
        folder = options.out or Path("sweeps") / path.stem
        runs = not (options.status or options.table)
        cells = grid.read(path, _ranks(options, job, folder), runs=runs)
        sweep_folder.check(folder, cells.cells)
        console = make_console(quiet=options.quiet, verbose=options.verbose)
        sweep = Sweep(cells, folder, console, make_console(), options.report)
        if options.slurm:
            return sweep.submit(job, dry=options.no_submit)
        if options.dry_run:
            sweep.check()
        if options.status or options.dry_run:
            return sweep.show()
        if options.table:
            sweep.publish(sweep.states())
            sweep.look_at()
            return 0
        return sweep.run(options, f"{command_line.program('sweep')} {shlex.join(tokens)}")

    code: int | None = command_line.call(app, tokens)
    return code


@dataclass(frozen=True)
class Sweep:
    """A grid with its folder; the methods are the actions of the command and return its exit code.

    Attributes:
        grid: the cells.
        folder: of the cells.
        console: a terminal or a pipe; it prints nothing after --quiet.
        always: the same, which prints what --quiet leaves: cells that ended badly, the last line.
        report: whether to write report.html.
    """

    grid: grid.Grid
    folder: Path
    console: Console
    always: Console
    report: bool = True

    def states(self, models: bool = True) -> States:
        """Return the states of all cells, as `read_states` does."""
        return read_states(self.folder, (cell.name for cell in self.grid.cells), models)

    def check(self) -> None:
        """Read the data and build the graphs of the cells that have not ended, as their runs do.

        Raises:
            InputError: some cells cannot be run; the line names them all, and why the first cannot.
        """
        from dfl.simulation.defaults import settle
        from dfl.simulation.read_on_root import read_on_root

        states = self.states()
        refused = dict[str, str]()
        for cell in self.grid.cells:
            if not states[cell.name].over:
                try:
                    read_on_root(settle(cell.run, 1))
                except InputError as error:
                    refused[cell.name] = str(error)
        if refused:
            (name, reason), *others = refused.items()
            more = f"; nor can {', '.join(other for other, _ in others)}" if others else ""
            raise InputError(f"cell {name} cannot be run: {reason}{more}")

    def show(self) -> int:
        """Print the states of all cells."""
        states = self.states()
        queue = self._queue()
        ended = slurm.endings(self.folder)
        remarks = {
            name: ended[name]
            for name, state in states.items()
            if name in ended and state.status in (WAITING, STOPPED)
        }
        self.console.print(progress.overview(self.grid, states, remarks | queue))
        print_line(self.always, f"{progress.counts(states)}, in {self.folder}{_then(states)}")
        return 0

    def _queue(self) -> dict[str, str]:
        """Return the cells in the queue. If Slurm does not answer, warn and return none."""
        try:
            return slurm.queued(self.folder)
        except InputError as error:
            print_line(self.always, f"warning: the queue is unknown: {error}")
            return {}

    def publish(self, states: States) -> None:
        """Write the tables, the figures and the page."""
        from dfl.sweep.publish import publish

        publish(self.grid, states, self.folder, self.console, self.report)

    def look_at(self) -> None:
        """Print the last line. A page that an earlier call wrote is not named."""
        written = (PAGE, "figures") if self.report else ("figures",)
        print_line(self.always, command_line.look_at(self.folder, written))

    def run(self, options: Options, command: str) -> int:
        """Run the cells that have not ended, and publish the results unless a signal stopped it.

        Args:
            options: of the command.
            command: the command line that resumes the sweep.
        """
        if self.report:
            refuse_foreign_page(self.folder)
        sweep_folder.write(self.folder, self.grid.cells, self.grid.text)
        before = self.states()
        left = [name for name, state in before.items() if not (state.over or state.changed)]
        for name in left:
            if before[name].status == DAMAGED:
                line = f"{DAMAGED:<10} {name}: {before[name].reason}; the run is resumed"
                print_line(self.always, line)
        folders = deque(self.folder / name for name in left)
        scheduler = Scheduler(folders, options.jobs, options.ranks)
        done = len(before) - len(left)
        page = LivePage(self.grid, self.folder, self.report)
        with progress.progress_bar(self.console, scheduler, done, len(before)) as callback:
            scheduler.run(page.after(callback))
        after = self.states(models=not scheduler.signals)  # a signal is obeyed at once
        ended = {folder.name: state for folder, state in scheduler.ended.items()}
        states = {**after, **ended}
        try:
            if scheduler.signals:
                page.finish()
            else:
                self.publish(states)
        finally:  # where the disk is full, too
            for line in progress.remarks_at_end(states):
                print_line(self.always, line)
            print_line(self.console, progress.counts(states))
        rest = sum(not (state.over or state.bad) for state in states.values())
        if rest:
            print_line(self.always, f"{rest} left; to resume: {command}")
        else:
            self.look_at()
        if scheduler.signals:
            return 130 if scheduler.signals[0] == signal.SIGINT else 75
        if any(state.bad for state in states.values()):
            return 1
        return 75 if rest else 0

    def submit(self, job: Slurm, dry: bool) -> int:
        """Submit the cells that neither have ended, nor run, nor are queued, as a job array.

        Args:
            job: the options of the job array.
            dry: whether to write the script only.

        Raises:
            InputError: before anything is written: there is no Slurm, or a script cannot have an
                option or a path. After that, Slurm refuses.
        """
        if not all(state.over for state in self.states(models=False).values()):
            if not dry:
                slurm.need_sbatch()
            slurm.check(self.folder, [self.folder / cell.name for cell in self.grid.cells], job)
        sweep_folder.write(self.folder, self.grid.cells, self.grid.text)
        # The lock keeps other sweeps from submitting the same cells meanwhile.
        with Lock(self.folder, patience=sweep_folder.PATIENCE):
            queue = self._queue() if dry else slurm.queued(self.folder)
            states = self.states()
            left = [
                name
                for name, state in states.items()
                if not (state.over or state.changed or state.status == RUNNING or name in queue)
            ]
            if not left:
                line = f"{progress.counts(states)}; {len(queue)} in the queue, none to submit"
                line += _then(states)
                print_line(self.always, line)
                return 0
            script = slurm.write(self.folder, [self.folder / name for name in left], job)
            submitted = (
                f"to submit: sbatch {shlex.quote(str(script))}"
                if dry
                else f"job {slurm.submit(script)}"
            )
            line = f"{len(left)} of {len(self.grid.cells)} cells in {script}; {submitted}"
            print_line(self.always, line)
        return 0


def _ranks(options: Options, job: Slurm, folder: Path) -> int:
    """Return the number of ranks of a cell, which is its number of peers if the grid gives none.

    Options that start no cell take the number of peers that the cells in the folder have.
    """
    if options.slurm:
        return job.ntasks
    looks = options.dry_run or options.status or options.table
    return sweep_folder.peers(folder) if looks and options.ranks == 1 else options.ranks


def _then(states: States) -> str:
    """Return what is left to do once all cells have ended; empty before."""
    over = all(state.over or state.bad for state in states.values())
    return "; --table writes tables and figures" if over else ""
