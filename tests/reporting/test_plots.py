"""Figures are complete and labelled for any number of peers, and without optional data."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver
from scipy.sparse import csr_array

import topologies
from dfl.reporting import plots
from dfl.reporting.layout import layout
from tests.support.growth import growth


def table(evaluations: int) -> pd.DataFrame:
    t = np.arange(evaluations) * 10
    mean = 0.9 - 0.8 * np.exp(-t / 40)
    return pd.DataFrame({
        "round": t, "accuracy_mean": mean, "accuracy_min": mean - 0.1, "accuracy_max": mean + 0.05,
        "accuracy_std": np.full(evaluations, 0.03), "accuracy_mean_model": mean + 0.02,
        "local_accuracy_mean": mean + 0.04,
        "consensus_distance": np.where(t > 0, np.exp(-t / 50), 0.0),
        "payload_bytes": t * 5_000.0,
    })  # fmt: skip


def weights(name: str, peers: int) -> Sequence[csr_array]:
    mixing = topologies.MIXINGS["metropolis"]
    return topologies.build(
        topologies.TOPOLOGIES[name], mixing, peers, np.random.default_rng(0)
    ).weights


def drawn(figure: Figure) -> Figure:
    """Render a figure, and return it."""
    figure.savefig(io.BytesIO(), format="png", dpi=50)
    return figure


def peers_of(peers: int, accuracy: float = 0.8) -> dict[str, np.ndarray]:
    return {"accuracy": np.full(peers, accuracy), "train_loss": np.linspace(0, 1, peers)}


@pytest.mark.parametrize(("peers", "evaluations"), [(1, 1), (2, 2), (16, 3), (300, 50)])
def test_every_figure_has_a_title_and_units(peers: int, evaluations: int) -> None:
    labels = np.random.default_rng(0).integers(0, 20, (peers, 10))
    found = plots.figures(
        table(evaluations), peers_of(peers), weights("ring", peers), labels, "a ring"
    )
    assert list(found) == [
        "consensus_distance",
        "accuracy_by_round",
        "accuracy_by_bytes",
        "graph",
        "label_distribution",
    ]
    for name, figure in found.items():
        axes = drawn(figure).axes
        assert axes[0].get_title(loc="left")
        assert "a ring" in [text.get_text() for text in axes[0].texts]
        named = (
            [axes[1].get_ylabel()]
            if name == "graph"
            else [axes[0].get_xlabel(), axes[0].get_ylabel()]
        )
        assert all(named)


def test_accuracy_shows_mean_spread_and_mean_model() -> None:
    axes = plots.accuracy_by_round(table(5)).axes[0]
    labels = axes.get_legend_handles_labels()[1]
    assert labels == [
        "worst to best peer", "one standard deviation", "mean of the peers", "mean model",
        "mean of the peers, own test parts",
    ]  # fmt: skip
    assert (
        np.asarray(axes.lines[0].get_xydata())[:, 1].tolist() == table(5)["accuracy_mean"].tolist()
    )


def test_a_server_has_one_curve_and_no_spread() -> None:
    rows = table(5).assign(
        upload_bytes=1.0, backdoor_success_mean=0.3, consensus_distance=0.0, accuracy_std=1e-16
    )
    axes = drawn(plots.accuracy_by_round(rows)).axes[0]
    assert axes.get_legend_handles_labels()[1] == [
        "server's model", "mean of the peers, own test parts", "success rate of the backdoor",
    ]  # fmt: skip
    assert list(plots.figures(rows, peers_of(4), (), np.ones((4, 2), np.int64))) == [
        "accuracy_by_round", "accuracy_by_bytes", "label_distribution",
    ]  # fmt: skip


def test_peers_with_personal_parameters_have_a_spread_with_a_server() -> None:
    for other in ({"consensus_distance": 0.0}, {"accuracy_std": 0.0}):
        axes = drawn(plots.accuracy_by_round(table(5).assign(upload_bytes=1.0, **other))).axes[0]
        assert "mean of the peers" in axes.get_legend_handles_labels()[1]
        assert "the server's model" not in axes.get_legend_handles_labels()[1]


def test_ticks_of_bytes_have_decimal_units() -> None:
    axes = drawn(plots.accuracy_by_bytes(table(5))).axes[0]
    assert any(label.get_text().endswith(" kB") for label in axes.get_xticklabels())


def test_figures_without_data_are_left_out() -> None:
    rows = table(3).assign(local_accuracy_mean=np.nan)
    assert len(drawn(plots.accuracy_by_round(rows)).axes[0].lines) == 2
    nothing = plots.figures(
        rows, peers_of(4, np.nan), weights("ring", 4), np.zeros((4, 0), np.int64)
    )
    assert list(nothing) == ["consensus_distance", "graph"]
    assert drawn(nothing["graph"]).axes[1].get_ylabel() == "training loss"


def test_consensus_distance_is_logarithmic_unless_it_is_zero() -> None:
    axes = drawn(plots.consensus_distance(table(5))).axes[0]
    assert axes.get_yscale() == "log"
    assert np.isnan(np.asarray(axes.lines[0].get_xydata())[0, 1])
    zero = table(5).assign(consensus_distance=0.0)
    assert drawn(plots.consensus_distance(zero)).axes[0].get_yscale() == "linear"


@pytest.mark.parametrize(
    ("name", "peers"),
    [("ring", 16), ("complete", 7), ("exponential", 32), ("one_peer_exponential", 8)],
)
def test_circulant_graphs_are_circles(name: str, peers: int) -> None:
    receives = csr_array(sum(weights(name, peers), start=csr_array((peers, peers))))
    receives.setdiag(0)
    receives.eliminate_zeros()
    assert np.hypot(*layout(receives).T) == pytest.approx(np.ones(peers))


@pytest.mark.parametrize(
    ("name", "peers"), [("grid", 25), ("star", 40), ("chain", 150), ("regular", 400)]
)
def test_neighbours_are_drawn_near_each_other(name: str, peers: int) -> None:
    (matrix,) = weights(name, peers)
    places = layout(matrix - csr_array(np.diag(matrix.diagonal())))
    entries = matrix.tocoo()
    other = entries.row != entries.col
    near = np.linalg.norm(places[entries.row[other]] - places[entries.col[other]], axis=1).mean()
    all_pairs = np.linalg.norm(places[:, None] - places, axis=2).mean()
    assert near < all_pairs
    assert np.abs(places).max() == pytest.approx(1)
    assert len(np.unique(places.round(6), axis=0)) == peers


def test_one_sided_links_are_arrows() -> None:
    kinds = [
        type(each)
        for each in plots.graph(weights("exponential", 9), np.zeros(9), "x").axes[0].collections
    ]
    assert kinds == [LineCollection, Quiver, PathCollection]
    kinds = [
        type(each) for each in plots.graph(weights("ring", 9), np.zeros(9), "x").axes[0].collections
    ]
    assert kinds == [LineCollection, PathCollection]


def test_arrows_point_to_the_receiver() -> None:
    cycle = csr_array(
        np.eye(4) / 2 + np.eye(4, k=-1) / 2 + np.eye(4, k=3) / 2
    )  # peer i receives from peer i - 1
    arrows = plots.graph([cycle], np.zeros(4), "x").axes[0].collections[1]
    assert isinstance(arrows, Quiver)
    angles = np.pi / 2 - np.pi / 2 * np.arange(4)
    places = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    starts = np.asarray(arrows.XY)
    ends = starts + np.stack([arrows.U, arrows.V], axis=1)
    senders, receivers = (
        np.linalg.norm(places - each[:, None], axis=2).argmin(1) for each in (starts, ends)
    )
    assert sorted(senders) == [0, 1, 2, 3]
    assert receivers.tolist() == ((senders + 1) % 4).tolist()


def test_a_peer_without_a_value_is_grey() -> None:
    values = np.array([0.1, 0.5, np.nan, 0.9])
    figure = drawn(plots.graph(weights("ring", 4), values, "x"))
    dots = figure.axes[0].collections[-1]
    assert dots.get_cmap().get_bad() == pytest.approx([0.6, 0.6, 0.6, 1])


@pytest.mark.slow
def test_a_thousand_peers_take_the_time_of_a_hundred_times_ten() -> None:
    many, few = weights("regular", 1000), weights("regular", 100)
    ratio = growth(
        lambda: drawn(plots.graph(many, np.linspace(0, 1, 1000), "x")),
        lambda: drawn(plots.graph(few, np.linspace(0, 1, 100), "x")),
    )
    assert ratio < 30


def test_edges_are_counted_where_they_are_too_many_to_draw() -> None:
    axes = drawn(plots.graph(weights("complete", 200), np.zeros(200), "x")).axes[0]
    assert axes.get_xlabel() == "39,800 directed edges, not drawn"


@pytest.mark.slow
def test_many_peers_are_ordered_by_label() -> None:
    counts = np.zeros((100, 3), np.int64)
    counts[np.arange(100), np.arange(100) % 3] = 5
    axes = drawn(plots.label_distribution(counts)).axes[0]
    shown = np.asarray(axes.images[0].get_array()).argmax(0)
    assert (np.diff(shown) >= 0).all()
    assert "ordered" in axes.get_xlabel()
    few = np.asarray(plots.label_distribution(counts[:4]).axes[0].images[0].get_array())
    assert few.tolist() == counts[:4].T.tolist()


@pytest.mark.slow
def test_pyplot_is_not_imported() -> None:
    code = "import sys, dfl.reporting.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_subtitle_may_have_dollars_and_bytes_that_are_no_text() -> None:
    figure, _ = plots._figure("title", "--model a$x_$b/m\udcff.py:net")
    figure.savefig(io.BytesIO(), format="png")
