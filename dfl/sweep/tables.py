"""Tables of a sweep: a row per cell, and means over the seeds.

DIR/sweep.csv      name, what varies, status, and the last row of the cell's metrics.csv, in the
                   order of the grid
DIR/summary.csv    a row per group of cells that differ in their seed only: means and standard
                   deviations over the finished ones, of the rounds too where cells of a group end
                   at different ones
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from dfl.core.errors import printable
from dfl.core.files import atomically
from dfl.core.parse import unquoted
from dfl.reporting.text import size
from dfl.store.tables import as_table
from dfl.sweep.grid import Grid
from dfl.sweep.status import DONE, States

CLOCKS = ("seconds",)
"""Columns of metrics.csv that differ between two launches of the same run; they come last."""
MEASURES = ("accuracy_mean", "accuracy_min", "test_loss_mean", "payload_bytes")
"""Columns that are averaged over seeds; without accuracies, the training loss is the first."""
TITLES = {
    "accuracy_mean": "accuracy",
    "accuracy_min": "worst peer",
    "train_loss": "loss",
    "test_loss_mean": "test loss",
    "payload_bytes": "payload",
    "round": "round",
}
"""Headings of the measures on a terminal."""


def cells(grid: Grid, states: States) -> pd.DataFrame:
    """Return a row per cell as text, with the last row of its metrics.csv as it stands there."""
    rows = []
    for cell in grid.cells:
        state = states[cell.name]
        varies = {field: unquoted(cell.values.get(field)) for field in grid.varies}
        rows.append({"name": cell.name, **varies, "status": state.status, **state.row})
    table = pd.DataFrame(rows, dtype=object)
    clocks = [name for name in CLOCKS if name in table]
    return table[[*(name for name in table if name not in clocks), *clocks]]


def group_fields(grid: Grid) -> list[str]:
    """Return the fields that vary besides the seed, by which cells are grouped."""
    return [name for name in grid.varies if name != "seed"]


def curves(grid: Grid, states: States) -> pd.DataFrame:
    """Return all rows of metrics.csv of the finished cells.

    Further columns, as text, are `cell` and the fields that vary.
    """
    tables = []
    for cell in grid.cells:
        state = states[cell.name]
        if state.status == DONE and state.row:
            varies = {field: unquoted(cell.values.get(field)) for field in grid.varies}
            tables.append(as_table(state.table).assign(cell=cell.name, **varies))
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def summary(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return means and standard deviations over the seeds, of the cells that have finished.

    Args:
        table: as `cells` makes it.
        by: the fields that distinguish groups, as `group_fields` returns them.

    Returns:
        A row per group in the order of the table: its values of `by`, how many cells have finished
        (`seeds`) and how many there are (`of`), and for every measure its mean and its standard
        deviation, empty for less than two. The round is a measure where cells of a group end at
        different ones, as with `--until`.
    """
    done = table["status"] == DONE
    keys: Any = [table[name] for name in by] or [pd.Series(0, table.index)]
    names = [*measures(table), *(name for name in table if name == "round")]
    groups = table[names].astype(float).where(done).groupby(keys, sort=False)
    if "round" in names and not (groups["round"].nunique() > 1).any():
        names.remove("round")
    result = pd.DataFrame({"seeds": done.groupby(keys, sort=False).sum(), "of": groups.size()})
    for name in names:
        result[name] = groups[name].mean()
        result[f"{name}_deviation"] = groups[name].std()
    return result.reset_index(drop=not by)


def measures(table: pd.DataFrame) -> tuple[str, ...]:
    """Return the columns that are averaged: accuracies and bytes, or losses and bytes."""
    present = [
        name for name in MEASURES if name in table and table[name].astype(float).notna().any()
    ]
    if "accuracy_mean" in present:
        return tuple(present)
    return tuple(name for name in ("train_loss", *present) if name in table)


def write(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, whole or not at all."""
    with atomically(path) as part:
        table.to_csv(part, index=False, lineterminator="\n", errors="backslashreplace")


def terminal_table(table: pd.DataFrame, by: Sequence[str]) -> Table:
    """Return a summary as a table for a terminal; empty columns of deviations are left out."""
    names = [name for name in table if name in TITLES]
    shown_table = Table(box=None, pad_edge=False, header_style="bold")
    for name in by:
        shown_table.add_column(name)
    shown_table.add_column("seeds", justify="right")
    columns = [
        column
        for name in names
        for column in (name, f"{name}_deviation")
        if column in names or table[column].any()
    ]
    for column in columns:
        shown_table.add_column(TITLES.get(str(column), "std"), justify="right")
    for row in table.to_dict("records"):
        seeds = f"{row['seeds']}" if row["seeds"] == row["of"] else f"{row['seeds']} of {row['of']}"
        shown_table.add_row(
            *(printable(str(row[name])) for name in by),
            seeds,
            *(_figure(str(column), row[column]) for column in columns),
        )
    return shown_table


def _figure(name: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    if name.startswith("payload"):
        return size(value)
    if name.startswith("round"):
        return f"{value:.1f}"
    return f"{value:.4f}" if name.startswith("accuracy") else f"{value:.4g}"
