"""Figures of a run, drawn from plain tables and arrays.

    accuracy_by_round(pandas.read_csv("runs/ring/metrics.csv")).savefig("accuracy.png")

Colours are Okabe and Ito's and viridis, which colour-blind readers can distinguish. Pyplot is not
used.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array

from dfl.core.errors import printable
from dfl.reporting.layout import layout

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
Table: TypeAlias = "pd.DataFrame | Mapping[str, ArrayLike]"
"""A table by column."""

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"
DOTS = 30
"""The most evaluations that are marked by a dot each."""
NAMED = 32
"""The most peers that are labelled by their number."""
DRAWN_EDGES = 20_000
"""The most edges that are drawn; more would be a grey disc."""


def figures(
    rows: Table,
    peers: Mapping[str, Floats],
    weights: Sequence[csr_array],
    label_counts: NDArray[np.int64],
    run: str = "",
) -> dict[str, Figure]:
    """Return the figures of a run, by file name; one without data is left out.

    Args:
        rows: metrics.csv.
        peers: accuracy and train_loss (P,) at the end.
        weights: the mixing matrices; none where peers do not gossip.
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        run: a description of the run, for the subtitles.
    """
    drawn = {"consensus_distance": consensus_distance(rows, run)} if weights else {}
    has_accuracy = not np.isnan(peers["accuracy"]).all()
    if has_accuracy:
        drawn["accuracy_by_round"] = accuracy_by_round(rows, run)
        drawn["accuracy_by_bytes"] = accuracy_by_bytes(rows, run)
        if "sim_seconds" in rows:
            drawn["accuracy_by_sim_seconds"] = accuracy_by_sim_seconds(rows, run)
    if weights and has_accuracy:
        drawn["graph"] = graph(weights, peers["accuracy"], "accuracy on the common test set", run)
    elif weights:
        drawn["graph"] = graph(weights, peers["train_loss"], "training loss", run)
    if label_counts.size:
        drawn["label_distribution"] = label_distribution(label_counts, run)
    return drawn


def accuracy_by_round(rows: Table, run: str = "") -> Figure:
    """Draw accuracy by round: of the peers, of the mean model, and on the peers' own test parts.

    Args:
        rows: metrics.csv.
        run: a description of the run, for the subtitle.
    """
    figure, axes = _figure("Accuracy by round", run)
    _accuracy(axes, rows, "round")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def accuracy_by_bytes(rows: Table, run: str = "") -> Figure:
    """Draw the curves of `accuracy_by_round` by the payload of all peers.

    Args:
        rows: metrics.csv.
        run: a description of the run, for the subtitle.
    """
    label = "payload of all peers together (bytes)"
    return _accuracy_by(rows, run, "bytes sent", "payload_bytes", label, "B")


def accuracy_by_sim_seconds(rows: Table, run: str = "") -> Figure:
    """Draw the curves of `accuracy_by_round` by the time on the simulated links.

    Args:
        rows: metrics.csv.
        run: a description of the run, for the subtitle.
    """
    label = "simulated time of the slowest peer (seconds)"
    return _accuracy_by(rows, run, "simulated time", "sim_seconds", label, "s")


def consensus_distance(rows: Table, run: str = "") -> Figure:
    """Draw the consensus distance sqrt(mean_i ||x_i - mean x||^2) by round, on a logarithmic axis.

    Args:
        rows: metrics.csv.
        run: a description of the run, for the subtitle.
    """
    figure, axes = _figure("Consensus distance by round", run)
    rounds, distance = _column(rows, "round"), _column(rows, "consensus_distance")
    unit = "root mean square, in units of parameters"
    if (distance > 0).any():  # it is 0 before round 0 where all peers start at the same point
        distance = np.where(distance > 0, distance, np.nan)
        axes.set_yscale("log")
        unit += ", logarithmic"
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(
            "{x:g}" if np.nanmax(distance) < 10 * np.nanmin(distance) else NullFormatter()
        )
    axes.plot(rounds, distance, color=BLUE, marker=_marker(rows), clip_on=False)
    axes.set_xlabel("round")
    axes.set_xlim(0, max(1, rounds.max()))
    axes.set_ylabel(f"distance of the peers from their mean\n({unit})")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def graph(weights: Sequence[csr_array], values: Floats, name: str, run: str = "") -> Figure:
    """Draw the graph, each peer coloured by a value.

    Args:
        weights: (P, P) mixing matrices; the union of their graphs over all rounds is drawn.
        values: (P,); grey where NaN.
        name: the name of the values, for the colour bar.
        run: a description of the run, for the subtitle.
    """
    figure, axes = _figure(f"Graph of the peers, coloured by {name}", run, size=(7.2, 6.4))
    receives = csr_array(sum((abs(w) for w in weights), start=csr_array(weights[0].shape)))
    receives.setdiag(0)
    receives.eliminate_zeros()
    peers = receives.shape[0]
    places = layout(receives)
    side = min(400.0, 14000 / peers)
    if receives.nnz <= DRAWN_EDGES:
        _edges(axes, receives, places, side)
    else:
        axes.set_xlabel(f"{receives.nnz:,} directed edges, not drawn")
    x, y = places.T
    rim = min(1.0, side / 40)
    shades = colormaps["viridis"].with_extremes(bad=GREY)
    dots = axes.scatter(
        x,
        y,
        side,
        values,
        cmap=shades,
        edgecolors="white",
        linewidths=rim,
        zorder=2,
        plotnonfinite=True,
    )
    figure.colorbar(dots, ax=axes, label=name, shrink=0.8)
    bright = np.asarray(dots.norm(values)) > 0.6
    for i, place in enumerate(places if peers <= NAMED else ()):
        shade = "black" if bright[i] else "white"
        axes.annotate(str(i), place, ha="center", va="center", fontsize=8, color=shade, zorder=3)
    axes.set_aspect("equal")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    axes.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
    return figure


def label_distribution(label_counts: NDArray[np.int64], run: str = "") -> Figure:
    """Draw the number of training examples of each label at each peer.

    More than `NAMED` peers are ordered by their most frequent label.

    Args:
        label_counts: (P, classes) training examples.
        run: a description of the run, for the subtitle.
    """
    peers, classes = label_counts.shape
    figure, axes = _figure("Training examples of each label at each peer", run, size=(8, 4.6))
    named = peers <= NAMED
    order = np.arange(peers) if named else np.lexsort((label_counts.max(1), label_counts.argmax(1)))
    image = axes.imshow(
        label_counts[order].T,
        aspect="auto",
        cmap="Blues",
        vmin=0,
        origin="lower",
        interpolation="nearest",
    )
    figure.colorbar(image, ax=axes, label="training examples")
    axes.set_xlabel("peer" if named else "peers, ordered by their most frequent label")
    axes.set_ylabel("label")
    for axis, count in ((axes.xaxis, peers), (axes.yaxis, classes)):
        axis.set_major_locator(MaxNLocator(min(count, 16), integer=True, min_n_ticks=1))
    return figure


def _edges(axes: Axes, receives: csr_array, places: Floats, side: float) -> None:
    """Draw lines between peers that receive from each other, and arrows to receivers otherwise.

    Args:
        axes: the axes to draw on.
        receives: (P, P), entry (i, j) where peer i receives from peer j.
        places: (P, 2), the positions of the peers.
        side: the area of a dot, in square points.
    """
    entries = receives.tocoo()
    receivers, senders = entries.row.astype(np.int64), entries.col.astype(np.int64)
    mutual = np.isin(senders * len(places) + receivers, receivers * len(places) + senders)
    pale: dict[str, Any] = {
        "alpha": float(np.clip(1500 / max(1, receives.nnz), 0.12, 0.7)),
        "color": GREY,
        "zorder": 1,
    }
    pairs = np.stack([receivers, senders], 1)[mutual & (receivers < senders)]
    axes.add_collection(LineCollection(list(places[pairs]), linewidths=0.8, **pale))
    start, end = places[senders[~mutual]], places[receivers[~mutual]]
    if not len(start):
        return
    length = np.maximum(np.linalg.norm(end - start, axis=1, keepdims=True), 1e-9)
    # Arrows end at the rim of a dot.
    reach = (end - start) * np.maximum(0.0, 1 - 0.004 * np.sqrt(side) / length)
    axes.quiver(
        *start.T,
        *reach.T,
        angles="xy",
        scale_units="xy",
        scale=1,
        width=0.0025,
        headwidth=5,
        **pale,
    )


def _accuracy_by(rows: Table, run: str, name: str, column: str, label: str, unit: str) -> Figure:
    """Draw accuracy by a column of metrics.csv.

    Args:
        rows: metrics.csv.
        run: a description of the run, for the subtitle.
        name: of the quantity, for the title.
        column: of the quantity.
        label: of the axis.
        unit: of the axis.
    """
    figure, axes = _figure(f"Accuracy by {name}", run)
    _accuracy(axes, rows, column)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    return figure


def _accuracy(axes: Axes, rows: Table, by: str) -> None:
    """Draw the accuracies of a run by a column of metrics.csv, and a legend."""
    column = partial(_column, rows)
    x = column(by)
    dots: dict[str, Any] = {"marker": _marker(rows), "markersize": 4}
    differ = any((column(name) > 1e-9).any() for name in ("consensus_distance", "accuracy_std"))
    is_global = "upload_bytes" in rows and not differ  # all peers have the server's model
    if not is_global:
        mean, std = column("accuracy_mean"), column("accuracy_std")
        _spread(axes, x, column("accuracy_min"), column("accuracy_max"), mean, std)
    axes.plot(
        x,
        column("accuracy_mean"),
        color=BLUE,
        label="server's model" if is_global else "mean of the peers",
        **dots,
    )
    same_as_server = ("accuracy_mean_model", "accuracy_ensemble") if is_global else ()
    for name, colour, dash, label in (
        ("accuracy_mean_model", ORANGE, "--", "mean model"),
        ("local_accuracy_mean", GREEN, ":", "mean of the peers, own test parts"),
        ("accuracy_ensemble", PINK, (0, (1, 1)), "ensemble of all models, by mean output"),
        ("backdoor_success_mean", GREY, "-.", "success rate of the backdoor"),
    ):
        if name in rows and name not in same_as_server and not np.isnan(column(name)).all():
            axes.plot(x, column(name), color=colour, linestyle=dash, label=label, **dots)
    axes.set_ylabel("accuracy on the test set")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _spread(axes: Axes, x: Floats, worst: Floats, best: Floats, mean: Floats, std: Floats) -> None:
    """Draw bands from the worst to the best peer, and of one standard deviation."""
    low, high = np.maximum(mean - std, worst), np.minimum(mean + std, best)
    axes.fill_between(x, worst, best, color=BLUE, alpha=0.15, lw=0, label="worst to best peer")
    axes.fill_between(x, low, high, color=BLUE, alpha=0.3, lw=0, label="one standard deviation")


def _marker(rows: Table) -> str:
    """Return the marker of evaluations; none if there are many."""
    return "o" if len(_column(rows, "round")) <= DOTS else ""


def _column(rows: Table, name: str) -> Floats:
    return np.asarray(rows[name], dtype=np.float64)


def plain(text: str) -> str:
    """Return a text for matplotlib: on one line, with $ escaped, which would begin a formula.

    A space precedes _, since a legend leaves out labels that begin with it.
    """
    line = printable(text).replace("$", r"\$")
    return f" {line}" if line.startswith("_") else line


def _figure(title: str, run: str, size: tuple[float, float] = (6.4, 4.2)) -> tuple[Figure, Axes]:
    """Return a figure of a size in inches with a title, and its axes."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    lines = textwrap.wrap(run, int(15 * size[0])) or [""]
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=10 + 10 * len(lines))
    subtitle = axes.annotate(
        "\n".join(map(plain, lines)),
        (0, 1),
        (0, 7),
        "axes fraction",
        "offset points",
        fontsize=8,
        color="#555555",
    )
    subtitle.set_in_layout(False)  # else a long one narrows the axes, and moves the title out
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
