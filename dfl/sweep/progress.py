"""What a sweep prints: a bar, a line per cell where there is no terminal, and states."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dfl.core.errors import printable
from dfl.reporting.console import print_line
from dfl.sweep.grid import Grid
from dfl.sweep.scheduler import Callback, Scheduler
from dfl.sweep.status import (
    DONE,
    RUNNING,
    STATUSES,
    STOPPED,
    CellState,
    States,
)


def overview(grid: Grid, states: States, queue: Mapping[str, str]) -> Table:
    """Return a table of the cells: status, last evaluated round, accuracy and remarks.

    Args:
        grid: the cells.
        states: their states.
        queue: remarks on cells that a cluster has in its queue or has ended, by name.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("cell", overflow="fold")
    table.add_column("status", no_wrap=True)
    for name in ("round", "accuracy"):
        table.add_column(name, justify="right", no_wrap=True)
    remarks = {
        name: "; ".join(filter(None, (queue.get(name, ""), state.reason)))
        for name, state in states.items()
    }
    if any(remarks.values()):
        table.add_column("remark", overflow="fold")
    for cell in grid.cells:
        state = states[cell.name]
        rounds = f"{state.row['round']}/{cell.run.rounds}" if state.row else "-"
        remark = (printable(remarks[cell.name]),) if any(remarks.values()) else ()
        table.add_row(cell.name, state.status, rounds, accuracy(state) or "-", *remark)
    return table


def accuracy(state: CellState) -> str:
    """Return the last accuracy of a cell as text; empty where there is none."""
    value = float(state.row.get("accuracy_mean") or "nan")
    return "" if math.isnan(value) else f"{value:.4f}"


def counts(states: States) -> str:
    """Return the number of cells of each status, as "6 cells: 5 done, 1 waiting"."""
    number = Counter(state.status for state in states.values())
    listed = ", ".join(f"{number[status]} {status}" for status in STATUSES if number[status])
    return f"{len(states)} cell{'s' * (len(states) != 1)}: {listed}"


def remarks_at_end(states: States) -> Iterator[str]:
    """Yield a line for every cell that failed, stopped, or is run by another program."""
    for name, state in states.items():
        if state.bad:
            yield f"{state.status:<10} {name}: {state.reason}"
        elif state.status == RUNNING:
            yield f"{state.status:<10} {name}: another program is running it"
        elif state.status == STOPPED:
            yield f"{state.status:<10} {name}: {_where_stopped(state)}"


def _where_stopped(state: CellState) -> str:
    if not state.row:
        return "interrupted before its first row"
    return f"interrupted after round {state.row['round']} or later"


@contextmanager
def progress_bar(
    console: Console, scheduler: Scheduler, done: int, total: int
) -> Iterator[Callback]:
    """Show the progress of a sweep; yield the callback of `Scheduler.run`.

    Args:
        console: a terminal or a pipe.
        scheduler: of the cells.
        done: number of cells that had ended before.
        total: number of cells of the grid.
    """
    columns = (
        TextColumn("cells"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, expand=True, disable=not console.is_terminal
    ) as progress:
        bar = progress.add_task("", total=total, completed=done)
        printed = done
        waiting = False

        def print_waiting() -> None:
            nonlocal waiting
            before = waiting
            waiting = bool(scheduler.elsewhere) and not (scheduler.running or scheduler.waiting)
            if waiting and not before and not console.is_terminal:
                names = ", ".join(folder.name for folder in scheduler.elsewhere)
                print_line(progress.console, f"waiting for what another program runs: {names}")

        def callback(folder: Path | None) -> None:
            nonlocal printed
            ended = done + len(scheduler.ended)
            progress.update(bar, completed=ended, description=_description(scheduler))
            if folder is None:
                print_waiting()
                return
            printed += 1
            state = scheduler.ended[folder]
            if not (console.is_terminal and state.status == DONE):
                line = f"[{printed}/{total}] {folder.name}: {_summary(state)}"
                print_line(progress.console, line)

        yield callback


def _description(scheduler: Scheduler) -> str:
    """Return the number of cells that run, that ended badly, and that another program runs."""
    bad = Counter(state.status for state in scheduler.ended.values() if state.status != DONE)
    parts = [f"{len(scheduler.running)} running"]
    parts += [f"{number} {status}" for status, number in bad.items()]
    if scheduler.elsewhere:
        parts.append(f"{len(scheduler.elsewhere)} run by another program")
    return ", ".join(parts)


def _summary(state: CellState) -> str:
    """Return a short summary of a cell that has ended."""
    if state.status == DONE:
        parts = (DONE, f"round {state.row['round']}", f"accuracy {accuracy(state)}")
        return ", ".join(filter(None, parts))
    return f"{state.status}: {state.reason}" if state.reason else state.status
