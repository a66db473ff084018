"""What came out of a sweep? A row per cell, and means over the seeds.

DIR/sweep.csv      name, what varies, status, and the last row of the cell's metrics.csv, in the order of the grid
DIR/summary.csv    a row per group of cells that differ in their seed only: means and deviations over the finished
"""

from __future__ import annotations

from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
from rich.filesize import decimal
from rich.table import Table

from dfl.core.errors import printable
from dfl.core.files import atomically
from dfl.sweep.cells import DONE, Sight
from dfl.sweep.grid import Grid, shown

CLOCKS = ("seconds",)
"""Columns of metrics.csv that another launch of the same run has other values of; they come last."""
MEASURES = ("accuracy_mean", "accuracy_min", "payload_bytes")
"""What is averaged over seeds; where there is no accuracy, the loss takes its place."""
TITLES = {
    "accuracy_mean": "accuracy", "accuracy_min": "worst peer", "train_loss": "loss", "payload_bytes": "payload",
}  # fmt: skip
"""What the measures are called on a terminal."""


def cells(grid: Grid, sight: Sight) -> pd.DataFrame:
    """A row per cell, as text: what a cell's metrics.csv says last is taken as it is written there."""
    rows = []
    for cell in grid.cells:
        seen = sight[cell.name]
        varies = {field: shown(value) for field, value in cell.values.items()}
        rows.append({"name": cell.name, **varies, "status": seen.status, **seen.row})
    table = pd.DataFrame(rows, dtype=object)
    return table[
        [
            *(name for name in table if name not in CLOCKS),
            *(name for name in CLOCKS if name in table),
        ]
    ]


def grouped(grid: Grid) -> list[str]:
    """By what cells are told apart when seeds are averaged over."""
    return [name for name in grid.varies if name != "seed"]


def curves(grid: Grid, sight: Sight) -> pd.DataFrame:
    """All rows of metrics.csv of the finished cells, with `cell` and what varies, as text, in further columns."""
    found = []
    for cell in grid.cells:
        seen = sight[cell.name]
        if seen.status == DONE and seen.row:
            varies = {field: shown(value) for field, value in cell.values.items()}
            found.append(pd.read_csv(StringIO(seen.table)).assign(cell=cell.name, **varies))
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame()


def summary(table: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Means and deviations over the seeds, of the cells that have finished.

    Args:
        table: as `cells` makes it.
        by: what tells groups apart, as `grouped` says.

    Returns:
        A row per group in the order of the table: what it has of `by`, how many cells have finished and how many
        there are, and for every measure its mean and its standard deviation, empty for less than two.
    """
    done = table["status"] == DONE
    names = measures(table)
    numbers = table[list(names)].apply(pd.to_numeric).where(done)
    keys: Any = [table[name] for name in by] or [pd.Series(0, table.index)]
    each = numbers.groupby(keys, sort=False)
    found = pd.DataFrame({"seeds": done.groupby(keys, sort=False).sum(), "of": each.size()})
    for name in names:
        found[name], found[f"{name}_deviation"] = each[name].mean(), each[name].std()
    return found.reset_index(drop=not by)


def measures(table: pd.DataFrame) -> tuple[str, ...]:
    """The columns worth a mean: accuracies and bytes, or the loss where nothing is called accuracy."""
    there = [
        name for name in MEASURES if name in table and pd.to_numeric(table[name]).notna().any()
    ]
    return (
        tuple(there)
        if "accuracy_mean" in there
        else tuple(n for n in ("train_loss", *there) if n in table)
    )


def write(table: pd.DataFrame, path: Path) -> None:
    """Write a table as CSV, whole or not at all."""
    with atomically(path) as part:
        table.to_csv(part, index=False, lineterminator="\n", errors="backslashreplace")


def screen(found: pd.DataFrame, by: Sequence[str]) -> Table:
    """A summary as a terminal shows it."""
    names = [name for name in found if name in TITLES]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in by:
        table.add_column(name, no_wrap=True)
    table.add_column("seeds", justify="right")
    columns = [
        each
        for name in names
        for each in (name, f"{name}_deviation")
        if each in names or found[each].any()
    ]
    for name in columns:
        table.add_column(TITLES.get(str(name), "std"), justify="right", no_wrap=True)
    for row in found.to_dict("records"):
        seeds = f"{row['seeds']}" if row["seeds"] == row["of"] else f"{row['seeds']} of {row['of']}"
        table.add_row(
            *(printable(str(row[name])) for name in by),
            seeds,
            *(_figure(str(name), row[name]) for name in columns),
        )
    return table


def _figure(name: str, value: float) -> str:
    if pd.isna(value):
        return "-"
    if name.startswith("payload"):
        return decimal(round(value), precision=2)
    return f"{value:.4g}" if name.startswith("train_loss") else f"{value:.4f}"
