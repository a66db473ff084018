"""What does the user of a sweep see? A bar, or a line per cell where there is no terminal; the state of every cell."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dfl.core.errors import printable
from dfl.sweep.cells import (
    DAMAGED,
    DIVERGED,
    DONE,
    FAILED,
    RUNNING,
    STATUSES,
    STOPPED,
    CellState,
    Sight,
)
from dfl.sweep.grid import Grid
from dfl.sweep.scheduler import Jobs

WIDEST = 10_000
"""Columns of what is no terminal."""


def console() -> Console:
    """Where to print: the terminal, or a pipe, in which tables are as wide as they are. Text means what it says."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal of ASCII shows é as \xe9
    there = Console(highlight=False, markup=False, emoji=False)
    return (
        there
        if there.is_terminal
        else Console(highlight=False, markup=False, emoji=False, width=WIDEST)
    )


def say(console: Console, text: str) -> None:
    """Print a line, however wide."""
    console.print(printable(text), soft_wrap=True)


def overview(grid: Grid, sight: Sight, queue: Mapping[str, str]) -> Table:
    """Every cell: its status, the round that it has reached, its accuracy, and what else there is to say.

    Args:
        grid: the cells.
        sight: how they were seen.
        queue: what is said of them in the queue of a cluster.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("round", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for cell in grid.cells:
        seen = sight[cell.name]
        reached = f"{seen.row['round']}/{cell.run.rounds}" if seen.row else "-"
        said = "; ".join(filter(None, (queue.get(cell.name, ""), seen.reason)))
        table.add_row(cell.name, seen.status, reached, accuracy(seen) or "-", printable(said))
    return table


def accuracy(seen: CellState) -> str:
    """The accuracy that a cell has reached; empty where there is none."""
    value = float(seen.row.get("accuracy_mean") or "nan")
    return "" if math.isnan(value) else f"{value:.4f}"


def counts(sight: Sight) -> str:
    """How many cells are in which state."""
    many = Counter(seen.status for seen in sight.values())
    said = ", ".join(f"{many[status]} {status}" for status in STATUSES if many[status])
    return f"{len(sight)} cell{'s' * (len(sight) != 1)}: {said}"


def ending(sight: Sight) -> Iterator[str]:
    """What is to be said of the cells that are not done: a line for each that ended badly or that others write to."""
    for name, seen in sight.items():
        if seen.status in (FAILED, DIVERGED, DAMAGED):
            yield f"{seen.status:<10} {name}: {seen.reason}"
        elif seen.status == RUNNING:
            yield f"{seen.status:<10} {name}: another program writes to it, to which it is left"
        elif seen.status == STOPPED:
            yield f"{seen.status:<10} {name}: {_so_far(seen)}"


def _so_far(seen: CellState) -> str:
    return (
        f"interrupted after round {seen.row['round']} or later"
        if seen.row
        else "interrupted before its first row"
    )


@contextmanager
def following(
    console: Console, jobs: Jobs, done: int, total: int
) -> Iterator[Callable[[Path | None], None]]:
    """Show how a sweep goes on, as `Jobs.work` tells it.

    Args:
        console: the terminal, or a pipe.
        jobs: what runs.
        done: cells that had ended before.
        total: cells of the grid.
    """
    columns = (
        TextColumn("cells"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
    )
    with Progress(
        *columns, TimeElapsedColumn(), console=console, expand=True, disable=not console.is_terminal
    ) as progress:
        bar, spoken, waiting = progress.add_task("", total=total, completed=done), done, False

        def tell_of_waiting() -> None:
            nonlocal waiting
            before, waiting = waiting, bool(jobs.elsewhere) and not (jobs.running or jobs.waiting)
            if waiting and not before and not console.is_terminal:
                names = ", ".join(folder.name for folder in jobs.elsewhere)
                say(progress.console, f"waiting for what another program runs: {names}")

        def tell(folder: Path | None) -> None:
            nonlocal spoken
            ended = done + len(jobs.ended)
            bad = Counter(seen.status for seen in jobs.ended.values() if seen.status != DONE)
            now = [
                f"{len(jobs.running)} running",
                *(f"{count} {status}" for status, count in bad.items()),
            ]
            now += [f"{len(jobs.elsewhere)} run by another program"] if jobs.elsewhere else []
            progress.update(bar, completed=ended, description=", ".join(now))
            if folder is None:
                tell_of_waiting()
                return
            spoken, seen = spoken + 1, jobs.ended[folder]
            if not (console.is_terminal and seen.status == DONE):
                say(progress.console, f"[{spoken}/{total}] {folder.name}: {_brief(seen)}")

        yield tell


def _brief(seen: CellState) -> str:
    """A cell that has ended, in a few words."""
    if seen.status == DONE:
        return ", ".join(
            filter(None, (DONE, f"round {seen.row['round']}", f"accuracy {accuracy(seen)}"))
        )
    return f"{seen.status}: {seen.reason}" if seen.reason else seen.status
