"""Figures of a sweep: a line per group of cells, by round and by bytes, and a map of two fields."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dfl.reporting.lines import (
    CUT,
    Y_LABELS,
    Styles,
    cut,
    draw,
    groups,
    label_x,
    measure_of,
    over_seeds,
    title,
)
from dfl.reporting.plots import plain
from dfl.reporting.text import title_of

LINES = 12
"""Maximum number of lines in a panel, where the fields can be split over several panels."""
WIDE = 3
"""Number of panels in a row."""
MAPS = 9
"""Maximum number of maps in a figure."""


def figures(
    rows: pd.DataFrame, summary: pd.DataFrame, by: Sequence[str], sweep: str
) -> dict[str, Figure]:
    """Return the figures of a sweep by file name; none where no cell has finished.

    Args:
        rows: as `dfl.sweep.tables.curves` makes them.
        summary: as `dfl.sweep.tables.summary` makes it.
        by: the fields by which cells are grouped.
        sweep: the name of the sweep, for the titles.
    """
    if rows.empty:
        return {}
    measure = measure_of(rows)
    name = measure.removesuffix("_mean")
    subtitle = plain(sweep) + _seeds(rows, by)
    on_lines = f"{subtitle}; {CUT}" if cut(rows, by) else subtitle
    drawn = {f"{name}_by_round": _lines(rows, by, "round", measure, on_lines)}
    if rows["payload_bytes"].any():
        drawn[f"{name}_by_bytes"] = _lines(rows, by, "payload_bytes", measure, on_lines)
    if axes := map_axes(summary, by):
        rest = [field for field in by if field not in axes]
        drawn["map_" + "_by_".join(axes)] = _maps(summary, axes, rest, measure, subtitle)
    return drawn


def map_axes(summary: pd.DataFrame, by: Sequence[str]) -> tuple[str, str] | None:
    """Return the two fields of the axes of a map, graph and bits first; None for no map."""
    pair, maps = _possible_maps(summary, by)
    return (pair[0], pair[1]) if len(pair) == 2 and maps <= MAPS else None


def map_note(summary: pd.DataFrame, by: Sequence[str]) -> str:
    """Return a line on the maps that are too many to draw; empty where they are not."""
    pair, maps = _possible_maps(summary, by)
    if len(pair) < 2 or maps <= MAPS:
        return ""
    return f"no map of {pair[0]} by {pair[1]}: there would be {maps}, and at most {MAPS} are drawn"


def _possible_maps(summary: pd.DataFrame, by: Sequence[str]) -> tuple[list[str], int]:
    """Return the fields of the axes of maps, two where there are maps, and their number."""
    several = [name for name in by if summary[name].nunique() > 1]
    first = [name for name in ("topology", "bits") if name in several]
    pair = [*first, *(name for name in several if name not in first)][:2]
    rest = [name for name in several if name not in pair]
    return pair, len(groups(summary, rest))


def possible_names(by: Sequence[str]) -> set[str]:
    """Return the names that figures of a sweep may have."""
    lines = product((name.removesuffix("_mean") for name in Y_LABELS), ("round", "bytes"))
    maps = (f"map_{one}_by_{other}" for one, other in permutations(by, 2))
    return {f"{measure}_by_{x}" for measure, x in lines} | set(maps)


def panels(rows: pd.DataFrame, by: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the fields by which panels differ, and those by which the lines in a panel differ.

    The first fields are taken for panels until a panel has at most `LINES` lines.
    """
    split = 0
    while split < len(by) - 1 and len(groups(rows, by[split:])) > LINES:
        split += 1
    return list(by[:split]), list(by[split:])


def _seeds(rows: pd.DataFrame, by: Sequence[str]) -> str:
    """Return what lines and bands are, where there are several seeds."""
    counts = [group["cell"].nunique() for _, group in groups(rows, by)]
    many = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else f"{max(counts)}"
    return f", mean and standard deviation over {many} seeds" if max(counts) > 1 else ""


def _lines(rows: pd.DataFrame, by: Sequence[str], x: str, measure: str, subtitle: str) -> Figure:
    """Draw a measure against a column, a line per group of cells."""
    panel_fields, line_fields = panels(rows, by)
    styles = Styles.of(rows, line_fields)
    parts = groups(rows, panel_fields)
    wide = min(WIDE, len(parts))
    high = -(-len(parts) // wide)
    legend_width, legend_height = styles.size
    panel_width, panel_height = (6.4, 4.2) if len(parts) == 1 else (3.8, 3.0)
    size = panel_width * wide + legend_width, max(panel_height * high, legend_height)
    figure, grid = _grid(size, len(parts), share=True)
    for k, ((values, part), axes) in enumerate(zip(parts, grid.flat, strict=False)):
        for group_values, group in groups(part, line_fields):
            draw(axes, over_seeds(group, measure), x, styles.style(group_values))
        axes.set_title(_panel_title(panel_fields, values), fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
        label_x(axes, x)
        axes.set_ylabel(Y_LABELS[measure])
        if len(parts) > wide:
            label = axes.get_xlabel()
            axes.label_outer()
            if k + wide >= len(parts):  # no panel is below it
                axes.tick_params(axis="x", which="both", labelbottom=True)
                axes.set_xlabel(label)
    by_what = "round" if x == "round" else "bytes sent"
    _set_title(figure, grid, f"{title_of(measure)} by {by_what}", subtitle)
    styles.legend(figure)
    return figure


def _maps(
    summary: pd.DataFrame, axes: tuple[str, str], rest: list[str], measure: str, subtitle: str
) -> Figure:
    """Draw maps of two fields, one for each combination of the others, on one scale."""
    parts = groups(summary, rest)
    rows, columns = (list(dict.fromkeys(summary[name])) for name in axes)
    wide = min(WIDE, len(parts))
    high = -(-len(parts) // wide)
    panel_width = 1.6 + 0.08 * max(map(len, rows)) + 0.85 * len(columns)
    panel_height = 1.5 + 0.5 * len(rows)
    size = max(5.2, panel_width * wide + 1.2), max(3.2, panel_height * high + 0.4)
    figure, grid = _grid(size, len(parts), share=False)
    scale = Normalize(summary[measure].min(), summary[measure].max())
    for (values, part), panel in zip(parts, grid.flat, strict=False):
        means, deviations = (
            part.pivot(index=axes[0], columns=axes[1], values=name)
            .reindex(index=rows, columns=columns)
            .to_numpy(np.float64)
            for name in (measure, f"{measure}_deviation")
        )
        _map(panel, means, deviations, scale)
        panel.set_xticks(range(len(columns)), map(plain, columns))
        panel.set_yticks(range(len(rows)), map(plain, rows))
        panel.set(xlabel=axes[1], ylabel=axes[0])
        panel.set_title(_panel_title(rest, values), fontsize=9, loc="left")
    _set_title(figure, grid, f"{title_of(measure)} at the end", subtitle)
    figure.colorbar(grid[0, 0].images[0], ax=grid, label=Y_LABELS[measure])
    return figure


def _map(
    axes: Axes, means: NDArray[np.float64], deviations: NDArray[np.float64], scale: Normalize
) -> None:
    """Draw a map (rows, columns) of means and write the figures into its fields."""
    colours = colormaps["viridis"].with_extremes(bad="#dddddd")
    image = axes.imshow(means, aspect="auto", cmap=colours, norm=scale)
    for i, j in product(*map(range, means.shape)):
        text = "none\nfinished" if np.isnan(means[i, j]) else f"{means[i, j]:.3f}"
        text += "" if np.isnan(deviations[i, j]) else f"\n± {deviations[i, j]:.3f}"
        bright = np.isnan(means[i, j]) or bool(np.asarray(image.norm(means))[i, j] > 0.6)
        colour = "black" if bright else "white"
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    axes.spines[:].set_visible(False)


def _grid(size: tuple[float, float], count: int, share: bool) -> tuple[Figure, Any]:
    """Return a figure with a number of panels, `WIDE` in a row, and the array of its panels."""
    wide = min(WIDE, count)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(-(-count // wide), wide, squeeze=False, sharex=share, sharey=share)
    for unused in grid.flat[count:]:
        unused.set_visible(False)
    return figure, grid


def _set_title(figure: Figure, grid: Any, text: str, subtitle: str) -> None:
    """Set the title of a figure, above its only panel or above all."""
    if grid.size == 1:
        title(grid[0, 0], text, subtitle)
    else:
        figure.suptitle(f"{text}: {subtitle}", x=0.01, ha="left", fontsize=12, fontweight="bold")


def _panel_title(names: Sequence[str], values: Sequence[str]) -> str:
    return plain(", ".join(f"{name} {value}" for name, value in zip(names, values, strict=True)))
