"""The callback that prints a run on the terminal: a header, progress and a summary.

Progress is a bar on a terminal, and lines where output is piped. All text is ASCII and unwrapped,
so that it can be piped, kept in a cluster's log and searched.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from dfl.config import Run
from dfl.evaluation.goals import reached
from dfl.reporting.callbacks.profile import table
from dfl.reporting.distribution import distribution
from dfl.reporting.text import Line, clock, figures, header, memory, needs, no_contraction, summary
from dfl.store.callbacks import Callback, Outcome, Row, RunInfo
from dfl.store.logs import LOG


class Terminal(Callback):
    """Prints a run.

    Args:
        console: a terminal or a pipe; standard output where not given.
        quiet: whether to print warnings and the last line only.
        verbose: whether to print a line for each evaluation on a terminal, too.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.console = console or Console(highlight=False)
        self.quiet, self.verbose = quiet, verbose
        self.rounds = 0
        self.bar: Progress | None = None
        self.last = Row()
        self.run: Run
        self.warned = False

    def start(self, info: RunInfo) -> None:
        """Print the header, and start the bar on a terminal."""
        self.run = info.run
        self.rounds = info.run.rounds
        if not self.quiet:
            self._print(header(info))
        self._warn(info.notes)
        if self.console.is_terminal and not (self.quiet or self.verbose):
            columns = (
                TextColumn("round {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                _Figures("{task.description}", table_column=Column(no_wrap=False)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4, expand=True)
            self.bar.add_task("", total=self.rounds)
            self.bar.start()

    def round(self, t: int) -> None:
        """Show on the bar that t rounds are done."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t)

    def row(self, row: Row) -> None:
        """Print an evaluation: beside the bar, or on a line of its own."""
        self.last = row
        t = int(row["round"])
        warning = "" if self.warned else no_contraction(row)
        if warning:
            self.warned = True
            self._warn([warning])
            LOG.warning(warning)
        shown = figures(row)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t, description=", ".join(shown))
            return
        if self.quiet:
            return
        seconds = row["seconds"] / t * (self.rounds - t) if t else 0.0
        left = [f"{clock(seconds)} left"] if seconds else []
        line = ", ".join([f"round {t}/{self.rounds}", *shown, *left])
        self.console.print(line, soft_wrap=True, markup=False)

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the peers, the cost of the run, and its folder."""
        self._stop()
        run = self.run
        goal: list[Line] = []
        if run.until:
            met = reached(self.last, run.goal)
            goal.append(("until", f"{run.until} {'reached' if met else 'not reached'}"))
        lines = [*goal, *summary(outcome.peers, self.last), ("files", str(run.out or "none"))]
        self._print([] if self.quiet else lines)
        if outcome.profile is not None and not self.quiet:
            self.console.print(table(outcome.profile), soft_wrap=True, markup=False)
        self._print(_look_at(run.out))

    def close(self, error: BaseException | None) -> None:
        """Stop the bar; the error is printed by the caller."""
        self._stop()

    def dry_run(self, info: RunInfo) -> None:
        """Print the header, the memory, and the distribution of the training examples."""
        self._print([*header(info), *needs(info), *memory(info)])
        self._warn(info.notes)
        for line in distribution(info):
            self.console.print(line, soft_wrap=True, markup=False)

    def _print(self, lines: Iterable[Line]) -> None:
        for name, value in lines:
            self.console.print(Text.assemble((f"{name:<11}", "bold"), value), soft_wrap=True)

    def _warn(self, notes: Iterable[str]) -> None:
        for note in dict.fromkeys(notes):
            self.console.print(Text(f"warning: {note}", "yellow"), soft_wrap=True)

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


class _Figures(TextColumn):
    """The figures beside the bar, on one line, which a narrow terminal cuts before other columns.

    rich narrows only columns that may wrap, and cuts all of them if there is none.
    """

    def render(self, task: Task) -> Text:
        """Return the text, which its column may not wrap."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


def _look_at(out: Path | None) -> list[Line]:
    """Return the last line of a run: the file or the folder to open, the most telling there is."""
    if out is None:
        return []
    found = next((path for path in (out / "report.html", out / "figures") if path.exists()), out)
    return [("look at", str(found))]
