"""The page of a sweep, report.html in its folder: groups of cells, a map, curves, every cell."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from dfl.core.files import writing
from dfl.core.parse import unquoted
from dfl.reporting.collection import (
    LINES,
    TITLES,
    Cell,
    Link,
    Map,
    Table,
    collection_page,
    shaded,
)
from dfl.reporting.lines import CUT, cut, groups, measure_of, over_seeds
from dfl.reporting.page import Line, chart, columns, write
from dfl.store.run_directory import GRID
from dfl.sweep import grid as grids
from dfl.sweep import tables
from dfl.sweep.folder import peers
from dfl.sweep.grid import Grid
from dfl.sweep.plots import map_axes
from dfl.sweep.status import DONE, States, read_states

CONFIDENCE = 0.95
"""The confidence of the intervals."""


def write_again(folder: Path) -> Path:
    """Write the page of the sweep in a folder from its grid and its cells, and return its path.

    Raises:
        InputError: its grid is damaged, or it cannot be written to.
    """
    grid = grids.read(folder / GRID, peers(folder), runs=False)
    states = read_states(folder, (cell.name for cell in grid.cells))
    with writing(str(folder)):
        return write(folder, sweep_page(grid, states, folder))


def sweep_page(grid: Grid, states: States, folder: Path, running: bool = False) -> str:
    """Return the page of a sweep.

    Args:
        grid: the cells.
        states: their states.
        folder: of the sweep.
        running: whether the page is written again soon, and reloads itself.
    """
    by = tables.group_fields(grid)
    table = tables.cells(grid, states)
    summary = tables.summary(table, by)
    rows = tables.curves(grid, states)
    count = sum(state.status == DONE for state in states.values())
    done = f"{count} of {len(grid.cells)} cells done"
    content = {
        "status": {"kind": "running", "text": f"running, {done}"} if running else None,
        "generator": "dfl.sweep",
        "kind": "Sweep",
        "title": folder.resolve().name,
        "subtitle": f"{done}; varied: {', '.join(grid.varies)}",
        "folder": str(folder),
        "map_note": f"Mean of the finished cells, ± half the {CONFIDENCE:.0%} interval over seeds.",
    }
    shown_tables = [_groups(grid, summary, by, folder), _cells(grid, states, folder)]
    drawn, notes = _curves(rows, summary, by)
    return collection_page(content, shown_tables, drawn, _maps(summary, by), notes)


def half_width(deviation: float, count: float) -> float:
    """Return half the confidence interval of a mean by Student's t; NaN for less than two values.

    Args:
        deviation: the standard deviation of the values.
        count: their number.
    """
    if count < 2:
        return math.nan
    quantile = float(stdtrit(count - 1, (1 + CONFIDENCE) / 2))
    return quantile * deviation / math.sqrt(count)


def _groups(grid: Grid, summary: pd.DataFrame, by: Sequence[str], folder: Path) -> Table:
    """Return the table of groups of cells that differ in their seed only."""
    names = [name for name in (*tables.MEASURES, "train_loss", "round") if name in summary]
    members: dict[tuple[str, ...], list[Link]] = {}
    for cell in grid.cells:
        key = tuple(unquoted(cell.values.get(name)) for name in by)
        label = unquoted(cell.values["seed"]) if "seed" in cell.values else "open"
        members.setdefault(key, []).append(Link.to(folder / cell.name, cell.name, label))
    rows = []
    for row in summary.to_dict("records"):
        key = tuple(str(row[name]) for name in by)
        finished = f"{row['seeds']} of {row['of']}"
        means = [
            Cell.of(name, row[name], half_width(row[f"{name}_deviation"], row["seeds"]))
            for name in names
        ]
        links = Cell(links=tuple(members.get(key, ())))
        rows.append([*map(Cell, key), Cell(finished, row["seeds"]), *means, links])
    note = f"Means over the finished cells, ± half the {CONFIDENCE:.0%} interval over seeds."
    link = "seeds" if "seed" in grid.varies else "cell"
    return Table("groups", "Groups", note, [*by, "finished", *names, link], rows)


def _cells(grid: Grid, states: States, folder: Path) -> Table:
    """Return the table of all cells."""
    names = [name for name in TITLES if any(name in state.row for state in states.values())]
    rows = []
    for cell in grid.cells:
        state = states[cell.name]
        figures = [Cell.of(name, float(state.row.get(name) or "nan")) for name in names]
        reached = Cell.of("round", float(state.row.get("round") or "nan"))
        name = Cell(links=(Link.to(folder / cell.name, cell.name, cell.name),))
        rows.append([name, Cell(state.status), reached, *figures])
    note = "The last evaluation of every cell."
    return Table("cells", "Cells", note, ["cell", "status", "round", *names], rows)


def _curves(
    rows: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str]
) -> tuple[tuple[list[Mapping[str, object]], list[Mapping[str, object]]], list[str]]:
    """Return the tables and the charts of the groups, and notes on them.

    The line of a group looks the same however many other groups have finished cells, unless there
    are more groups than styles.
    """
    if rows.empty:
        return ([], []), ["No cell has finished."]
    parts = groups(rows, by)
    every = groups(summary, by)
    places = {values: k for k, (values, _) in enumerate(every if len(every) <= LINES else parts)}
    held: list[Mapping[str, object]] = []
    charts: list[Mapping[str, object]] = []
    for measure, title in TITLES.items():
        if measure not in rows or not rows[measure].notna().any():
            continue
        lines = []
        for values, part in parts[:LINES]:
            name = ", ".join(f"{f}={v}" for f, v in zip(by, values, strict=True)) or "all cells"
            mean = over_seeds(part, measure)
            lines.append(Line(len(held), "mean", name, "low", "high", places[values]))
            held.append(columns(mean, ("round", "payload_bytes", "mean", "low", "high")))
        charts.append(chart(title, lines, log=measure == "consensus_distance"))
    notes = ["Lines are means over seeds, bands a standard deviation to either side."]
    if cut(rows, by):
        notes.append(f"{CUT.capitalize()}.")
    if len(parts) > LINES:
        notes.append(f"The first {LINES} of {len(parts)} groups are drawn.")
    return (held, charts), notes


def _maps(summary: pd.DataFrame, by: Sequence[str]) -> list[Map]:
    """Return maps of two fields, one for each combination of the others; none for fewer fields."""
    axes = map_axes(summary, by)
    measure = measure_of(summary)
    if axes is None or measure not in summary or not summary[measure].notna().any():
        return []
    scale = float(summary[measure].min()), float(summary[measure].max())
    names, heads = (list(dict.fromkeys(map(str, summary[axis]))) for axis in axes)
    rest = [field for field in by if field not in axes]
    maps = []
    for values, part in groups(summary, rest):
        found = {
            (str(row[axes[0]]), str(row[axes[1]])): shaded(
                row[measure], half_width(row[f"{measure}_deviation"], row["seeds"]), scale
            )
            for row in part.to_dict("records")
        }
        empty = shaded(np.nan, np.nan, scale)
        rows = [(name, [found.get((name, head), empty) for head in heads]) for name in names]
        title = ", ".join(f"{f} {v}" for f, v in zip(rest, values, strict=True))
        maps.append(Map(title, f"{measure}: {axes[0]} by {axes[1]}", heads, rows))
    return maps
