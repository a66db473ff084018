"""Lines of many runs in one figure, distinguished by colour and dash, with a legend beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from dfl.reporting.plots import GREY, plain

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can distinguish. More values than these get
shades of viridis.
"""

Colour: TypeAlias = str | tuple[float, float, float, float]
Dash: TypeAlias = str | tuple[int, tuple[float, ...]]

DASHES: tuple[Dash, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2, 1, 1, 1, 1, 1, 2)),
)
MARKS = ("", "o", "s", "^", "D", "v")
"""Markers: after the last dash, dashes are used again with another marker."""
Y_LABELS = {
    "accuracy_mean": "accuracy on the test set\n(mean over the peers)",
    "test_loss_mean": "loss on the test set\n(mean over the peers)",
    "train_loss": "training loss (mean)",
    "consensus_distance": "consensus distance",
}
"""Labels of the y axis, by column of metrics.csv."""
CUT = "lines end where the first run of a group ends"
"""A note on figures whose lines `cut` is true of."""


def measure_of(rows: pd.DataFrame) -> str:
    """Return the column that is drawn: the accuracy, else the loss on the test set, else that of
    training.
    """
    for name in ("accuracy_mean", "test_loss_mean"):
        if name in rows and rows[name].notna().any():
            return name
    return "train_loss"


def groups(rows: pd.DataFrame, by: Sequence[str]) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """Return the rows grouped by some columns, as text, in order of first appearance."""
    if not by:
        return [((), rows)]
    return [
        (tuple(map(str, values)), group) for values, group in rows.groupby(list(by), sort=False)
    ]


def over_seeds(group: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return the mean over cells and its standard deviation band, at the rounds that all evaluated.

    Args:
        group: rows of metrics.csv of some cells, with their names in the column `cell`.
        measure: the column to average.

    Returns:
        round, payload_bytes, mean, low, high; the last two are NaN for a single cell.
    """
    each = group.groupby("round", as_index=False)
    mean = each.agg(
        payload_bytes=("payload_bytes", "mean"),
        mean=(measure, "mean"),
        deviation=(measure, "std"),
        n=(measure, "size"),
    )
    low, high = mean["mean"] - mean["deviation"], mean["mean"] + mean["deviation"]
    if measure.startswith("accuracy"):
        low, high = low.clip(0, 1), high.clip(0, 1)
    return mean.assign(low=low, high=high)[mean["n"] == group["cell"].nunique()]


def cut(rows: pd.DataFrame, by: Sequence[str]) -> bool:
    """Return whether the line of some group ends before some of its cells, which end at different
    rounds, as with `--until`.

    Args:
        rows: rows of metrics.csv of some cells, with their names in the column `cell`.
        by: the columns by which they are grouped.
    """
    return any(group.groupby("cell")["round"].max().nunique() > 1 for _, group in groups(rows, by))


def draw(axes: Axes, rows: pd.DataFrame, x: str, style: dict[str, Any]) -> None:
    """Draw a line, with its band if it has one; a single point as a dot, with an error bar.

    Args:
        axes: the axes to draw on.
        rows: as `over_seeds` returns them.
        x: the column of the x axis, round or payload_bytes. Rows with 0 bytes are left out, since
            the axis is logarithmic.
        style: keyword arguments of `Axes.plot`.
    """
    rows = rows[rows[x] > 0] if x == "payload_bytes" else rows
    single = rows["mean"].notna().sum() == 1
    dots = {"marker": "o", "markevery": None} if single else {}
    axes.plot(
        rows[x],
        rows["mean"],
        **({"linewidth": 1.6, "markersize": 4, "markevery": 0.15} | style | dots),
    )
    if "low" in rows and rows["low"].notna().any():
        band, colour = (rows[x], rows["low"], rows["high"]), style["color"]
        if single:
            axes.vlines(*band, colour, style.get("linestyle", "-"), alpha=0.5)
        else:
            axes.fill_between(*band, color=colour, alpha=0.12, lw=0)


def label_x(axes: Axes, x: str) -> None:
    """Label the x axis, after all lines are drawn; the axis of bytes is logarithmic."""
    if x == "round":
        axes.set_xlabel("round")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return
    axes.set_xlabel("payload of all peers together (bytes)")
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.tick_params(axis="x", which="both", length=3.5, pad=3.5, labelsize="medium")
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.xaxis.set_minor_formatter(EngFormatter(unit="B") if high < 40 * low else NullFormatter())


def title(axes: Axes, text: str, below: str) -> None:
    """Set a title and a subtitle in the style of `dfl.reporting.plots`."""
    axes.set_title(text, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.annotate(
        below, (0, 1), (0, 7), "axes fraction", "offset points", fontsize=8, color="#555555"
    )


def shades(count: int) -> list[Colour]:
    """Return `count` colours."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [colormaps["viridis"](0.95 * i / (count - 1)) for i in range(count)]


def run_styles(differ: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return a style for each of some runs, as keyword arguments of `Axes.plot`.

    Runs that differ in their seed only have one colour, with a dash for each.

    Args:
        differ: of each run, the settings by which it differs from the others.
    """
    groups = [{name: v for name, v in each.items() if name != "seed"} for each in differ]
    kinds = [group for i, group in enumerate(groups) if group not in groups[:i]]
    if len(kinds) in (1, len(groups)):
        return [{"color": colour} for colour in shades(len(groups))]
    colours = shades(len(kinds))
    return [
        {"color": colours[kinds.index(group)], **_dash(groups[:i].count(group))}
        for i, group in enumerate(groups)
    ]


def _dash(number: int) -> dict[str, Any]:
    """Return the dash and the marker of one of many lines as keyword arguments of `Axes.plot`."""
    marks, dash = divmod(number, len(DASHES))
    return {"linestyle": DASHES[dash], "marker": MARKS[marks % len(MARKS)]}


@dataclass(frozen=True)
class Styles:
    """Styles of lines: a colour for the first field, a dash for the other fields together.

    Attributes:
        by: the fields that vary.
        first: the values of the first field, with a colour each.
        rest: the combinations of values of the other fields, with a dash each.
    """

    by: tuple[str, ...]
    first: tuple[str, ...]
    rest: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, rows: pd.DataFrame, by: Sequence[str]) -> Styles:
        """Return the styles for all values in some rows."""
        found = [values for values, _ in groups(rows, by)]
        first = dict.fromkeys(values[0] for values in found if values)
        rest = dict.fromkeys(values[1:] for values in found)
        return cls(tuple(by), tuple(first), tuple(rest))

    def style(self, values: tuple[str, ...]) -> dict[str, Any]:
        """Return the colour, dash and marker of a line as keyword arguments of `Axes.plot`."""
        if not values:
            return {"color": COLOURS[0]}
        return {"color": self._colour(values[0]), **self._dash(values[1:])}

    def _colour(self, value: str) -> Colour:
        return shades(len(self.first))[self.first.index(value)]

    def _dash(self, values: tuple[str, ...]) -> dict[str, Any]:
        return _dash(self.rest.index(values))

    def legend(self, figure: Figure) -> None:
        """Add a legend of colours and dashes beside a figure, each under a heading."""
        if not self.by:
            return
        head, *others = self.by
        colours = [
            Line2D([], [], color=self._colour(value), label=plain(value)) for value in self.first
        ]
        dashes = [
            Line2D([], [], color=GREY, **self._dash(values), label=plain(", ".join(values)))
            for values in self.rest
        ]
        heads = [
            Line2D([], [], linestyle="none", label=plain(text))
            for text in (head, ", ".join(others))
        ]
        lines = [heads[0], *colours, *([heads[1], *dashes] if len(dashes) > 1 else [])]
        legend = figure.legend(
            handles=lines, loc="outside right upper", frameon=False, fontsize=8, handlelength=3.2
        )
        for line, text in zip(lines, legend.get_texts(), strict=True):
            text.set_fontweight("bold" if line in heads else "normal")

    @property
    def size(self) -> tuple[float, float]:
        """The approximate width and height of the legend in inches."""
        if not self.by:
            return 0.0, 0.0
        texts = [*self.first, *(", ".join(values) for values in self.rest), ", ".join(self.by[1:])]
        return 0.7 + 0.075 * max(map(len, texts)), 0.2 * (len(self.first) + len(self.rest) + 3)
