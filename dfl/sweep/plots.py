"""What does a sweep look like? A line per group of cells, by round and by bytes, and a map of any two that vary."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dfl.reporting.lines import Y_LABELS, Styles, draw, groups, label_x, over_seeds, plain, title

LINES = 12
"""Up to how many lines are drawn in one panel, where what varies can be split over several."""
MAPS = 9
"""Up to how many maps are drawn side by side."""


def figures(
    rows: pd.DataFrame, found: pd.DataFrame, by: Sequence[str], sweep: str
) -> dict[str, Figure]:
    """Every figure that a sweep has something to show in, by file name.

    Args:
        rows: as `dfl.sweep.tables.curves` makes them.
        found: as `dfl.sweep.tables.summary` makes it.
        by: what tells groups apart.
        sweep: what it is called, for the titles.
    """
    if rows.empty:
        return {}
    measure = "accuracy_mean" if rows["accuracy_mean"].notna().any() else "train_loss"
    name, sweep = measure.removesuffix("_mean"), plain(sweep) + _seeds(rows, by)
    drawn = {f"{name}_by_round": _lines(rows, by, ("round", measure), sweep)}
    if rows["payload_bytes"].any():
        drawn[f"{name}_by_bytes"] = _lines(rows, by, ("payload_bytes", measure), sweep)
    if axes := map_axes(found, by):
        drawn["map_" + "_by_".join(axes)] = _maps(
            found, axes, [n for n in by if n not in axes], (measure, sweep)
        )
    return drawn


def map_axes(found: pd.DataFrame, by: Sequence[str]) -> tuple[str, str] | None:
    """The two fields whose values span a map: graph and bits where they vary, else the first two that do."""
    several = [name for name in by if found[name].nunique() > 1]
    first = [name for name in ("topology", "bits") if name in several]
    pair = [*first, *(name for name in several if name not in first)][:2]
    rest = [name for name in several if name not in pair]
    maps = len(groups(found, rest))
    return (pair[0], pair[1]) if len(pair) == 2 and maps <= MAPS else None


def panels(rows: pd.DataFrame, by: Sequence[str]) -> tuple[list[str], list[str]]:
    """Which fields tell panels apart, and which the lines in a panel: few lines are all in one."""
    apart = 0
    while apart < len(by) - 1 and len(groups(rows, by[apart:])) > LINES:
        apart += 1
    return list(by[:apart]), list(by[apart:])


def _seeds(rows: pd.DataFrame, by: Sequence[str]) -> str:
    """What lines and bands stand for."""
    counts = [group["cell"].nunique() for _, group in groups(rows, by)]
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    return f", mean and standard deviation over {many} seeds" if max(counts) > 1 else ""


def _lines(rows: pd.DataFrame, by: Sequence[str], columns: tuple[str, str], sweep: str) -> Figure:
    (x, measure), (apart, together) = columns, panels(rows, by)
    styles, parts = Styles.of(rows, together), groups(rows, apart)
    wide = min(3, len(parts))
    width, height = styles.size
    panel = (6.4, 4.2) if len(parts) == 1 else (3.8, 3.0)
    size = panel[0] * wide + width, max(panel[1] * -(-len(parts) // wide), height)
    figure, grid = _grid(size, len(parts), share=True)
    for (values, part), axes in zip(parts, grid.flat, strict=False):
        for each, group in groups(part, together):
            draw(axes, over_seeds(group, measure), x, styles.style(each))
        axes.set_title(_said(apart, values), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        label_x(axes, x)
        axes.set_ylabel(Y_LABELS[measure])
        axes.label_outer() if len(parts) > wide else None
    _head(figure, grid, f"{_called(measure)} by {'round' if x == 'round' else 'bytes said'}", sweep)
    styles.legend(figure)
    return figure


def _maps(
    found: pd.DataFrame, axes: tuple[str, str], rest: list[str], names: tuple[str, str]
) -> Figure:
    """Maps of two fields, one for each combination of the others, on one scale."""
    measure, sweep = names
    parts, texts = groups(found, rest), [list(dict.fromkeys(found[name])) for name in axes]
    wide = min(3, len(parts))
    size = 1.6 + 0.08 * max(map(len, texts[0])) + 0.85 * len(texts[1]), 1.5 + 0.5 * len(texts[0])
    size = max(5.2, size[0] * wide + 1.2), max(3.2, size[1] * -(-len(parts) // wide) + 0.4)
    figure, grid = _grid(size, len(parts), share=False)
    limits = found[measure].min(), found[measure].max()
    for (values, part), panel in zip(parts, grid.flat, strict=False):
        _map(panel, part, (axes, texts), (measure, limits))
        panel.set_title(_said(rest, values), fontsize=9, loc="left")
    _head(figure, grid, f"{_called(measure)} at the end", sweep)
    figure.colorbar(grid[0, 0].images[0], ax=grid, label=Y_LABELS[measure])
    return figure


def _map(
    axes: Axes,
    part: pd.DataFrame,
    fields: tuple[tuple[str, str], list[list[str]]],
    scale: tuple[str, tuple[float, float]],
) -> None:
    """Draw a map and write into each of its fields what it shows."""
    ((down, across), (rows, columns)), (measure, limits) = fields, scale
    tables = [
        part.pivot(index=down, columns=across, values=name)
        for name in (measure, f"{measure}_deviation")
    ]
    means, deviations = (
        each.reindex(index=rows, columns=columns).to_numpy(np.float64) for each in tables
    )
    colours = colormaps["viridis"].with_extremes(bad="#dddddd")
    image = axes.imshow(means, aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1])
    for i, j in product(*map(range, means.shape)):
        text = "none\nfinished" if np.isnan(means[i, j]) else f"{means[i, j]:.3f}"
        text += "" if np.isnan(deviations[i, j]) else f"\n± {deviations[i, j]:.3f}"
        bright = np.isnan(means[i, j]) or bool(np.asarray(image.norm(means))[i, j] > 0.6)
        axes.text(
            j, i, text, ha="center", va="center", fontsize=8, color="black" if bright else "white"
        )
    axes.set_xticks(range(len(columns)), map(plain, columns))
    axes.set_yticks(range(len(rows)), map(plain, rows))
    axes.set(xlabel=across, ylabel=down)
    axes.spines[:].set_visible(False)


def _grid(size: tuple[float, float], count: int, share: bool) -> tuple[Figure, Any]:
    """A figure with so many panels, three abreast."""
    wide = min(3, count)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(-(-count // wide), wide, squeeze=False, sharex=share, sharey=share)
    for idle in grid.flat[count:]:
        idle.set_visible(False)
    return figure, grid


def _head(figure: Figure, grid: Any, text: str, below: str) -> None:
    """Head a figure, above its only panel or above all."""
    if grid.size == 1:
        title(grid[0, 0], text, below)
    else:
        figure.suptitle(f"{text}: {below}", x=0.01, ha="left", fontsize=12, fontweight="bold")


def _said(names: Sequence[str], values: Sequence[str]) -> str:
    return plain(", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)))


def _called(measure: str) -> str:
    return measure.removesuffix("_mean").replace("_", " ").capitalize()
