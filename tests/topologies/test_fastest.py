"""The fastest weights: known optima, never slower than metropolis, refusals."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from topologies import MIXINGS, TOPOLOGIES, GraphError, WeightedGraph, build


def network(name: str, peers: int, mixing: str = "fastest", **options: int) -> WeightedGraph:
    graph = partial(TOPOLOGIES[name], **options)
    return build(graph, MIXINGS[mixing], peers, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("name", "peers", "second"),
    [
        ("ring", 4, 1 / 3),
        ("chain", 2, 0),
        ("chain", 5, np.cos(np.pi / 5)),
        ("chain", 10, np.cos(np.pi / 10)),
        ("star", 6, 4 / 5),
        ("complete", 5, 0),
        ("ring", 8, 1 - 2 * (1 - np.cos(np.pi / 4)) / (3 - np.cos(np.pi / 4))),
    ],
)
def test_small_graphs_have_their_known_optimum(name: str, peers: int, second: float) -> None:
    """A chain has weights 1/2 (Boyd, Diaconis, Xiao 2004); a star 1/(P-1); a ring w with 1 - 2w (1
    - cos(2 pi/P)) = 4w - 1.
    """
    assert network(name, peers).spectrum.second == pytest.approx(second, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "peers"), [("chain", 20), ("star", 12), ("grid", 20), ("barabasi_albert", 20)]
)
def test_they_beat_metropolis_and_keep_the_mean(name: str, peers: int) -> None:
    fast = network(name, peers)
    (w,) = (each.toarray() for each in fast.weights)
    np.testing.assert_array_equal(w, w.T)
    np.testing.assert_allclose(w.sum(axis=0), 1, atol=1e-12)
    assert fast.spectrum.gap > 1.05 * network(name, peers, "metropolis").spectrum.gap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "peers"), [("grid", 20), ("barabasi_albert", 20), ("caveman", 12), ("tree", 15)]
)
def test_they_are_those_of_a_solver_of_semidefinite_programs(name: str, peers: int) -> None:
    """min ||W - 11'/P|| over symmetric W >= 0 on the edges and the diagonal, W 1 = 1."""
    cp: Any = pytest.importorskip("cvxpy", reason="cvxpy is not installed")
    edges = network(name, peers, "metropolis").weights[0].toarray() != 0
    W = cp.Variable((peers, peers), symmetric=True)
    others = ~(edges | np.eye(peers, dtype=bool))
    constraints = [W >= 0, cp.sum(W, axis=1) == 1, W[others.nonzero()] == 0]
    optimum = cp.Problem(cp.Minimize(cp.sigma_max(W - 1 / peers)), constraints)
    optimum.solve(solver=cp.CLARABEL)
    fast = network(name, peers).spectrum
    assert optimum.value - 1e-6 < fast.second
    assert fast.gap > 0.999 * (1 - optimum.value)


@pytest.mark.parametrize(
    ("name", "peers", "message"),
    [("exponential", 10, "both ways"), ("ring", 201, "at most 200 peers, not 201")],
)
def test_other_graphs_are_refused(name: str, peers: int, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        network(name, peers)
