"""What does a run look like? Figures of plain tables and arrays, for a run's folder and for
experiments alike.

    accuracy_by_round(pandas.read_csv("runs/ring/metrics.csv")).savefig("accuracy.png")

Colours are Okabe and Ito's and viridis, which colour-blind readers can tell apart. Nothing here
touches pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, NullFormatter
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

BLUE, ORANGE, GREEN, PINK, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#999999"
DOTS = 30
"""Up to how many evaluations each is marked by a dot."""
NAMED = 32
"""Up to how many peers carry their number."""
SMALL = 100
"""Up to how many peers the drawing is worth a slow layout."""
DRAWN_EDGES = 20_000
"""Beyond which edges are a grey disc, and are left out."""


def figures(
    rows: pd.DataFrame,
    peers: Mapping[str, Floats],
    weights: Sequence[csr_array],
    label_counts: NDArray[np.int64],
    run: str = "",
) -> dict[str, Figure]:
    """Every figure that a run has something to show in, by file name.

    Args:
        rows: metrics.csv.
        peers: accuracy and train_loss (P,) at the end.
        weights: the mixing matrices; none where peers do not gossip.
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        run: what ran, for the titles.
    """
    drawn = {"consensus_distance": consensus_distance(rows, run)} if weights else {}
    value, name = peers["train_loss"], "training loss"
    if not np.isnan(peers["accuracy"]).all():
        value, name = peers["accuracy"], "accuracy on the common test set"
        drawn |= {
            "accuracy_by_round": accuracy_by_round(rows, run),
            "accuracy_by_bytes": accuracy_by_bytes(rows, run),
        }
        drawn |= (
            {"accuracy_by_sim_seconds": accuracy_by_sim_seconds(rows, run)}
            if "sim_seconds" in rows
            else {}
        )
    if weights:
        drawn["graph"] = graph(weights, value, name, run)
    if label_counts.size:
        drawn["label_distribution"] = label_distribution(label_counts, run)
    return drawn


def accuracy_by_round(rows: pd.DataFrame, run: str = "") -> Figure:
    """Accuracy of the peers, of the mean model, and on each peer's own part of the test set, by
    round.

    Args:
        rows: metrics.csv.
        run: what ran, for the title.
    """
    figure, axes = _figure("Accuracy by round", run)
    _accuracy(axes, rows, "round")
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def accuracy_by_bytes(rows: pd.DataFrame, run: str = "") -> Figure:
    """The same curves by the payload that all peers together have said.

    Args:
        rows: metrics.csv.
        run: what ran, for the title.
    """
    return _accuracy_by(
        rows, run, ("bytes said", "payload_bytes", "payload of all together (bytes)", "B")
    )


def accuracy_by_sim_seconds(rows: pd.DataFrame, run: str = "") -> Figure:
    """The same curves by the time that it would have taken on the simulated network; arguments as
    above.
    """
    return _accuracy_by(
        rows, run, ("simulated time", "sim_seconds", "time of the slowest peer (seconds)", "s")
    )


def consensus_distance(rows: pd.DataFrame, run: str = "") -> Figure:
    """How far the peers are apart, sqrt(mean_i ||x_i - mean x||^2), by round, on a logarithmic
    axis.

    Args:
        rows: metrics.csv.
        run: what ran, for the title.
    """
    figure, axes = _figure("Consensus distance by round", run)
    apart = rows["consensus_distance"].to_numpy(np.float64)
    if (apart > 0).any():  # where all start at the same point the first distance is 0
        apart = np.where(apart > 0, apart, np.nan)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(
            "{x:g}" if np.nanmax(apart) < 10 * np.nanmin(apart) else NullFormatter()
        )
    axes.plot(rows["round"], apart, color=BLUE, marker=_marker(rows), clip_on=False)
    axes.set_xlabel("round")
    axes.set_ylabel(
        "distance of the peers from their mean\n(root mean square, in units of parameters)"
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return figure


def graph(weights: Sequence[csr_array], values: Floats, name: str, run: str = "") -> Figure:
    """The peers and who speaks to whom, each peer coloured by a value.

    Args:
        weights: (P, P) mixing matrices; their union over all rounds is drawn.
        values: (P,); grey where NaN.
        name: what the values are, for the colour bar.
        run: what ran, for the title.
    """
    figure, axes = _figure(f"The peers, by {name}", run, size=(7.2, 6.4))
    hears = csr_array(sum((abs(w) for w in weights), start=csr_array(weights[0].shape)))
    hears.setdiag(0)
    hears.eliminate_zeros()
    peers, places = hears.shape[0], layout(hears)
    side = min(400.0, 14000 / peers)
    if hears.nnz <= DRAWN_EDGES:
        _edges(axes, hears, places, side)
    else:
        axes.set_xlabel(f"{hears.nnz:,} directed edges, not drawn")
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
    """Who trains on how many examples of which label.

    Args:
        label_counts: (P, classes) training examples. Many peers are ordered by their most frequent
            label, so that what they have in common shows.
        run: what ran, for the title.
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


def layout(hears: csr_array) -> Floats:
    """Where to draw the peers, (P, 2) in -1 to 1: on a circle if all see the same, else near those
    they hear.

    Few peers are placed by Kamada and Kawai; more by Brandes and Pich's PivotMDS and as many spring
    steps on top as take a second or two.

    Args:
        hears: (P, P), entry (i, j) where peer i hears peer j; nobody hears itself.
    """
    peers = hears.shape[0]
    if _circulant(hears):
        angles = np.pi / 2 - 2 * np.pi * np.arange(peers) / peers
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    both = csr_array(hears + hears.T)
    network = nx.from_scipy_sparse_array(both)
    if peers <= SMALL:
        placed = nx.kamada_kawai_layout(network, weight=None)
    else:
        placed = dict(enumerate(_pivots(both)))
        if steps := min(50, 10**7 // peers**2):
            placed = nx.spring_layout(
                network, pos=placed, iterations=steps, method="force", weight=None, seed=0
            )
    places = np.array([placed[i] for i in range(peers)])
    places -= (places.min(0) + places.max(0)) / 2
    return np.asarray(places / np.abs(places).max())


def _pivots(both: csr_array, pivots: int = 50) -> Floats:
    """Places (P, 2) whose distances resemble those on the graph, from the distances to a few peers
    (PivotMDS, 2006).
    """
    peers = both.shape[0]
    chosen = np.unique(np.linspace(0, peers - 1, pivots).astype(np.int64))
    squares = shortest_path(both, unweighted=True, indices=chosen) ** 2
    centred = squares - squares.mean(0) - squares.mean(1, keepdims=True) + squares.mean()
    _, modes = np.linalg.eigh(centred @ centred.T)
    places = centred.T @ modes[:, -2:]
    places /= np.abs(places).max()
    # peers at the same distances from all pivots, as the leaves of a star, would lie on each other
    return np.asarray(places + np.random.default_rng(0).normal(0, 0.02, places.shape))


def _circulant(hears: csr_array) -> bool:
    """Whether peer i hears i + s (mod P) for the same s as every other peer."""
    peers = hears.shape[0]
    entries = hears.tocoo()
    counts = np.bincount((entries.col - entries.row) % peers, minlength=peers)
    return bool(np.isin(counts, (0, peers)).all())


def _edges(axes: Axes, hears: csr_array, places: Floats, side: float) -> None:
    """Lines where two peers hear each other, arrows to the one that hears where it is one-sided."""
    entries = hears.tocoo()
    listeners, speakers = entries.row.astype(np.int64), entries.col.astype(np.int64)
    mutual = np.isin(speakers * len(places) + listeners, listeners * len(places) + speakers)
    pale: dict[str, Any] = {
        "alpha": float(np.clip(1500 / max(1, hears.nnz), 0.12, 0.7)),
        "color": GREY,
        "zorder": 1,
    }
    pairs = mutual & (listeners < speakers)
    axes.add_collection(
        LineCollection(
            list(places[np.stack([listeners, speakers], 1)[pairs]]), linewidths=0.8, **pale
        )
    )
    start, end = places[speakers[~mutual]], places[listeners[~mutual]]
    if not len(start):
        return
    length = np.maximum(np.linalg.norm(end - start, axis=1, keepdims=True), 1e-9)
    reach = (end - start) * np.maximum(
        0.0, 1 - 0.004 * np.sqrt(side) / length
    )  # arrows end at the rim of a dot
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


def _accuracy_by(rows: pd.DataFrame, run: str, by: tuple[str, str, str, str]) -> Figure:
    """Accuracy by something: what it is, its column, how the axis is called, and its unit."""
    what, column, label, unit = by
    figure, axes = _figure(f"Accuracy by {what}", run)
    _accuracy(axes, rows, column)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(EngFormatter(unit=unit))
    return figure


def _accuracy(axes: Axes, rows: pd.DataFrame, by: str) -> None:
    def column(name: str) -> Floats:
        return rows[name].to_numpy(np.float64)

    x = column(by)
    dots: dict[str, Any] = {"marker": _marker(rows), "markersize": 4}
    apart = rows[["consensus_distance", "accuracy_std"]].to_numpy() > 1e-9
    served = "upload_bytes" in rows and not apart.any()  # the server's model is everybody's
    if not served:
        _spread(axes, x, [column(f"accuracy_{name}") for name in ("min", "max", "mean", "std")])
    axes.plot(
        x,
        column("accuracy_mean"),
        color=BLUE,
        label="the server's model" if served else "mean of the peers",
        **dots,
    )
    for name, colour, dash, label in (
        ("accuracy_mean_model", ORANGE, "--", "the mean model"),
        ("local_accuracy_mean", GREEN, ":", "mean of the peers, own test parts"),
        ("accuracy_ensemble", PINK, (0, (1, 1)), "all models together, by their mean output"),
        ("backdoor_success_mean", GREY, "-.", "success of the backdoor"),
    ):
        if name in rows and not np.isnan(column(name)).all() and not (served and colour == ORANGE):
            axes.plot(x, column(name), color=colour, linestyle=dash, label=label, **dots)
    axes.set_ylabel("accuracy on the test set (share)")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _spread(axes: Axes, x: Floats, of: Sequence[Floats]) -> None:
    """Bands from the worst to the best peer, and of one standard deviation."""
    worst, best, mean, std = of
    within = np.maximum(mean - std, worst), np.minimum(mean + std, best)
    axes.fill_between(x, worst, best, color=BLUE, alpha=0.15, lw=0, label="worst to best peer")
    axes.fill_between(x, *within, color=BLUE, alpha=0.3, lw=0, label="one standard deviation")


def _marker(rows: pd.DataFrame) -> str:
    return "o" if len(rows) <= DOTS else ""


def _figure(title: str, run: str, size: tuple[float, float] = (6.4, 4.2)) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=20)
    axes.annotate(
        run, (0, 1), (0, 7), "axes fraction", "offset points", fontsize=8, color="#555555"
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes
