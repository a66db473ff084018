"""Writes the tables and figures of a sweep into its folder."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from dfl.core.files import Lock, atomically, make_directory, writing
from dfl.reporting.console import print_line, print_table
from dfl.reporting.page import write
from dfl.store.run_directory import claim
from dfl.sweep import plots, tables
from dfl.sweep.folder import PATIENCE
from dfl.sweep.grid import Grid
from dfl.sweep.page import sweep_page
from dfl.sweep.status import States


def publish(
    grid: Grid, states: States, folder: Path, console: Console, report: bool = True
) -> None:
    """Write sweep.csv, summary.csv, the figures and the page of the cells so far, and print the
    summary. Figures that an earlier call drew and this one does not are removed.

    Args:
        grid: the cells.
        states: their states.
        folder: of the sweep.
        console: where to print.
        report: whether to write the page.

    Raises:
        InputError: the folder cannot be written to.
    """
    claim(folder)
    by = tables.group_fields(grid)
    table = tables.cells(grid, states)
    summary = tables.summary(table, by)
    figures = plots.figures(tables.curves(grid, states), summary, by, folder.name)
    with writing(f"--out {folder}"), Lock(folder, patience=PATIENCE):
        tables.write(table, folder / "sweep.csv")
        tables.write(summary, folder / "summary.csv")
        make_directory(folder / "figures")
        for name, figure in figures.items():
            with atomically(folder / "figures" / f"{name}.png") as part:
                figure.savefig(part, format="png", dpi=150)
        for name in plots.possible_names(by) - figures.keys():  # of an earlier call
            if (stale := folder / "figures" / f"{name}.png").is_file():
                stale.unlink()
        if report:
            write(folder, sweep_page(grid, states, folder))
    shown_table = tables.terminal_table(summary, by)
    print_table(console, shown_table, len(by) + 1, str(folder / "summary.csv"))
    if figures and (note := plots.map_note(summary, by)):
        print_line(console, note)
