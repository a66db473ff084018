"""`dfl.plot`: figures of runs for notebooks, as dfl.plot.accuracy(runs).

A run is what `dfl.load` returns, or the folder of one, finished or not. A figure is matplotlib's; a
notebook shows it without pyplot.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from matplotlib.figure import Figure

from dfl.core.errors import InputError
from dfl.core.parse import shown
from dfl.reporting.differences import differences
from dfl.reporting.lines import Y_LABELS, draw, label_x, run_styles, title
from dfl.reporting.plots import plain
from dfl.reporting.text import title_of
from dfl.store.results import Result, load

if TYPE_CHECKING:
    from typing import Any

Runs: TypeAlias = Result | Path | str | Sequence[Result | Path | str]
X: TypeAlias = Literal["round", "payload_bytes"]


class Plot(Figure):
    """A figure that notebooks show by themselves."""

    def _repr_png_(self) -> bytes:
        """Return the figure as PNG."""
        page = io.BytesIO()
        self.savefig(page, format="png", dpi=100)
        return page.getvalue()


def accuracy(runs: Runs, x: X = "round") -> Plot:
    """Draw the mean accuracy of runs, and of each the range from the worst to the best peer.

    Args:
        runs: one or several.
        x: round, or payload_bytes, the bytes that all peers have sent.

    Raises:
        InputError: a folder holds no run, or `runs` or `x` is something else.
    """
    return _curves(runs, x, "accuracy_mean", ("accuracy_min", "accuracy_max"))


def loss(runs: Runs, x: X = "round") -> Plot:
    """Draw the training loss of runs, as `accuracy` draws accuracies."""
    return _curves(runs, x, "train_loss")


def consensus(runs: Runs, x: X = "round") -> Plot:
    """Draw the consensus distance of runs, as `accuracy` draws accuracies."""
    return _curves(runs, x, "consensus_distance")


def _curves(runs: Runs, x: X, column: str, ends: tuple[str, str] | None = None) -> Plot:
    if x not in ("round", "payload_bytes"):
        raise InputError(f"x must be round or payload_bytes, not {shown(x)}")
    results = _results(runs)
    settings = [each.record["run"] for each in results]
    differ = differences(settings, [each.folder for each in results])
    figure = Plot(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for result, named, look in zip(results, differ, run_styles(differ), strict=True):
        label = ", ".join(v if k == "run" else f"{k}={v}" for k, v in named.items())
        rows = result.rows
        if column in rows:
            more = {"low": rows[ends[0]], "high": rows[ends[1]]} if ends else {}
            style: dict[str, Any] = {**look, "label": plain(label)}
            draw(axes, rows.assign(mean=rows[column], **more), x, style)
    below = "shaded: from the worst to the best peer" if ends else ""
    name = title_of(column)
    title(axes, f"{name} by {'round' if x == 'round' else 'bytes sent'}", below)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel(Y_LABELS[column])
    if axes.lines:
        label_x(axes, x)
        axes.legend(frameon=False, fontsize=8)
    return figure


def _results(runs: Runs) -> list[Result]:
    every = [runs] if isinstance(runs, Result | str | Path) else runs
    if not isinstance(every, list | tuple) or not every:
        raise InputError(f"runs must be what dfl.load returns, or folders, not {shown(runs)}")
    return [each if isinstance(each, Result) else load(each) for each in every]
