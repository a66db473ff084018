"""What does a sweep look like? A line per group of cells, by round and by bytes, and a map of any two that vary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, MaxNLocator

from dfl.plots import GREY

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind readers can tell apart; more values than these are shades of viridis."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2, 1, 1, 1, 1, 1, 2)))
MARKS = ("", "o", "s", "^", "D", "v")
"""Behind the last dash, dashes begin again with another mark."""
PANELS = 9
"""Up to how many maps are drawn side by side."""
Y_LABELS = {"accuracy_mean": "accuracy on the test set\n(mean over the peers)", "train_loss": "training loss (mean)"}


@dataclass(frozen=True)
class Curve:
    """A line of a figure.

    Attributes:
        rows: `round` and `payload_bytes`, and under `mean` and `deviation` what is shown of them.
        style: its colour, dash and mark.
    """

    rows: pd.DataFrame
    style: dict[str, Any]


def figures(rows: pd.DataFrame, found: pd.DataFrame, by: Sequence[str], sweep: str) -> dict[str, Figure]:
    """Every figure that a sweep has something to show in, by file name.

    Args:
        rows: as `dfl.tables.curves` makes them.
        found: as `dfl.tables.summary` makes it.
        by: what tells groups apart.
        sweep: what it is called, for the titles.
    """
    if rows.empty:
        return {}
    measure = "accuracy_mean" if rows["accuracy_mean"].notna().any() else "train_loss"
    sweep += seeds_of(rows, by)
    drawn = {
        f"{measure.removesuffix('_mean')}_by_{name}": _lines(rows, by, (column, measure), sweep)
        for name, column in (("round", "round"), ("bytes", "payload_bytes"))
    }
    if axes := map_axes(found, by):
        drawn["map_" + "_by_".join(axes)] = _maps(found, axes, [n for n in by if n not in axes], (measure, sweep))
    return drawn


def map_axes(found: pd.DataFrame, by: Sequence[str]) -> tuple[str, str] | None:
    """The two fields whose values span a map: graph and bits where they vary, else the first two that do."""
    several = [name for name in by if found[name].nunique() > 1]
    first = [name for name in ("topology", "bits") if name in several]
    pair = [*first, *(name for name in several if name not in first)][:2]
    rest = [name for name in several if name not in pair]
    panels = len(found.groupby(rest)) if rest else 1
    return (pair[0], pair[1]) if len(pair) == 2 and panels <= PANELS else None


def _lines(rows: pd.DataFrame, by: Sequence[str], columns: tuple[str, str], sweep: str) -> Figure:
    x, measure = columns
    named = Styles.of(rows, by)
    figure = Figure(figsize=(6.4 + 0.09 * named.width, max(4.2, 0.23 * named.height)), layout="constrained")
    axes = figure.subplots()
    what = measure.removesuffix("_mean").replace("_", " ")
    title(axes, f"{what.capitalize()} by {'round' if x == 'round' else 'bytes said'}", sweep)
    for values, group in groups(rows, by):
        mean = over_seeds(group, measure)
        draw(axes, Curve(mean, named.style(values)), x)
    axes.set_ylabel(Y_LABELS[measure])
    label_x(axes, x)
    named.legend(figure)
    return figure


def groups(rows: pd.DataFrame, by: Sequence[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The rows by what they have of some columns, in the order in which they come."""
    if not by:
        return [((), rows)]
    return [(tuple(map(str, values)), group) for values, group in rows.groupby(list(by), sort=False)]


def over_seeds(group: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The mean and deviation over cells, at the rounds at which all of them were looked at."""
    each = group.groupby("round", as_index=False)
    mean = each.agg(
        payload_bytes=("payload_bytes", "mean"), mean=(measure, "mean"), deviation=(measure, "std"), n=(measure, "size")
    )
    return mean[mean["n"] == group["cell"].nunique()]


def draw(axes: Axes, curve: Curve, x: str) -> None:
    """Draw a line, and a band of the deviation around it; by bytes, only where some were said."""
    rows = curve.rows[curve.rows[x] > 0] if x == "payload_bytes" else curve.rows
    dots = {} if len(rows) > 1 else {"marker": "o"}
    axes.plot(rows[x], rows["mean"], **({"linewidth": 1.6, "markersize": 4, "markevery": 0.1} | curve.style | dots))
    if rows["deviation"].notna().any():
        low, high = rows["mean"] - rows["deviation"], rows["mean"] + rows["deviation"]
        axes.fill_between(rows[x], low, high, color=curve.style["color"], alpha=0.12, lw=0)


def label_x(axes: Axes, x: str) -> None:
    """Say what is to the right; bytes, which differ by magnitudes, on a logarithmic axis."""
    if x == "round":
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return
    axes.set_xlabel("payload of all peers together (bytes)")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))


def title(axes: Axes, text: str, below: str) -> None:
    """Head a figure as `dfl.plots` does."""
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.annotate(below, (0, 1), (0, 7), "axes fraction", "offset points", fontsize=8, color="#555555")
    axes.spines[["top", "right"]].set_visible(False)


def seeds_of(rows: pd.DataFrame, by: Sequence[str]) -> str:
    """What lines and bands stand for."""
    counts = sorted({group["cell"].nunique() for _, group in groups(rows, by)})
    if counts[-1] == 1:
        return ""
    return f", mean and standard deviation over {' to '.join(map(str, {counts[0]: 0, counts[-1]: 0}))} seeds"


def shades(count: int) -> list[Any]:
    """Colours for so many lines."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [colormaps["viridis"](0.95 * i / (count - 1)) for i in range(count)]


@dataclass(frozen=True)
class Styles:
    """How lines are told apart: by colour for the first of what varies, by dash for the rest together.

    Attributes:
        by: what varies.
        first: the values that have a colour each.
        rest: the combinations of all other values, with a dash each.
    """

    by: tuple[str, ...]
    first: tuple[str, ...]
    rest: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: pd.DataFrame, by: Sequence[str]) -> Styles:
        """Styles for all values that there are."""
        found = [values for values, _ in groups(rows, by)]
        firsts, rests = (dict.fromkeys(each) for each in ([v[:1] for v in found], [v[1:] for v in found]))
        return cls(tuple(by), tuple(v[0] for v in firsts if v), tuple(rests))

    def style(self, values: tuple[str, ...]) -> dict[str, Any]:
        """The colour, dash and mark of a line."""
        if not values:
            return {"color": COLOURS[0]}
        return {"color": self._colour(values[0]), **self._dash(values[1:])}

    def _colour(self, value: str) -> Any:
        return shades(len(self.first))[self.first.index(value)]

    def _dash(self, values: tuple[str, ...]) -> dict[str, Any]:
        marks, dash = divmod(self.rest.index(values), len(DASHES))
        return {"linestyle": DASHES[dash], "marker": MARKS[marks % len(MARKS)]}

    def legend(self, figure: Figure) -> None:
        """Explain colours and dashes beside a figure, each under a heading."""
        if not self.by:
            return
        head, *others = self.by
        colours = [Line2D([], [], color=self._colour(value), label=value) for value in self.first]
        dashes = [Line2D([], [], color=GREY, **self._dash(values), label=", ".join(values)) for values in self.rest]
        heads = [Line2D([], [], linestyle="none", label=text) for text in (head, ", ".join(others))]
        lines = [heads[0], *colours, *([heads[1], *dashes] if len(dashes) > 1 else [])]
        legend = figure.legend(handles=lines, loc="outside right upper", frameon=False, fontsize=8, handlelength=3.2)
        for line, text in zip(lines, legend.get_texts(), strict=True):
            text.set_fontweight("bold" if line in heads else "normal")

    @property
    def height(self) -> int:
        """Lines of the legend."""
        return len(self.first) + len(self.rest) + 4

    @property
    def width(self) -> int:
        """Letters of the widest line of the legend."""
        texts = [*self.first, *(", ".join(values) for values in self.rest), ", ".join(self.by[1:])]
        return max(map(len, texts), default=0) + 8 if self.by else 0


def _maps(found: pd.DataFrame, axes: tuple[str, str], rest: list[str], names: tuple[str, str]) -> Figure:
    """Maps of two fields, one for each combination of the others, on one scale."""
    measure, sweep = names
    parts, texts = groups(found, rest), [list(dict.fromkeys(found[name])) for name in axes]
    wide = min(3, len(parts))
    high = -(-len(parts) // wide)
    size = 1.6 + 0.08 * max(map(len, texts[0])) + 0.85 * len(texts[1]), 1.5 + 0.5 * len(texts[0])
    figure = Figure(figsize=(max(5.2, size[0] * wide + 1.2), max(3.2, size[1] * high + 0.4)), layout="constrained")
    grid = figure.subplots(high, wide, squeeze=False)
    limits = found[measure].min(), found[measure].max()
    for (values, part), panel in zip(parts, grid.flat, strict=False):
        _map(panel, part, (axes, texts), (measure, limits))
        panel.set_title(", ".join(f"{n} {v}" for n, v in zip(rest, values, strict=True)), fontsize=9, loc="left")
    for idle in grid.flat[len(parts) :]:
        idle.set_visible(False)
    what = f"{measure.removesuffix('_mean').replace('_', ' ').capitalize()} at the end"
    if len(parts) == 1:
        title(grid[0, 0], what, sweep)
    else:
        figure.suptitle(f"{what}, {sweep}", x=0.01, ha="left", fontsize=12, fontweight="bold")
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
    tables = [part.pivot(index=down, columns=across, values=name) for name in (measure, f"{measure}_deviation")]
    means, deviations = (each.reindex(index=rows, columns=columns).to_numpy(np.float64) for each in tables)
    colours = colormaps["viridis"].with_extremes(bad="#dddddd")
    image = axes.imshow(means, aspect="auto", cmap=colours, vmin=limits[0], vmax=limits[1])
    for i, j in product(*map(range, means.shape)):
        text = "none\nfinished" if np.isnan(means[i, j]) else f"{means[i, j]:.3f}"
        text += "" if np.isnan(deviations[i, j]) else f"\n± {deviations[i, j]:.3f}"
        bright = np.isnan(means[i, j]) or bool(np.asarray(image.norm(means))[i, j] > 0.6)
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color="black" if bright else "white")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set(xlabel=across, ylabel=down)
