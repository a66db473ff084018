"""Graphs that are drawn by arrays are those of networkx."""

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array

from topologies import drawn_by_arrays, pattern
from topologies.drawn_by_arrays import erdos_renyi, random_regular, watts_strogatz


def same(drawn: csr_array, graph: nx.Graph) -> bool:
    wanted = pattern(graph)
    return drawn.shape == wanted.shape and all(
        np.array_equal(getattr(drawn, part), getattr(wanted, part))
        for part in ("data", "indices", "indptr")
    )


@pytest.mark.parametrize(
    ("peers", "k"), [(1, 0), (2, 1), (6, 0), (6, 4), (9, 8), (12, 5), (40, 3), (41, 18), (3000, 4)]
)
def test_random_regular(peers: int, k: int) -> None:
    """Also where networkx starts again, since the last peers have no partner."""
    for seed in range(12):
        graph = nx.random_regular_graph(k, peers, seed)
        assert same(random_regular(peers, k, seed), graph)


@pytest.mark.parametrize("p", [0.0, 1e-12, 0.01, 0.3, 0.999, 1.0])
@pytest.mark.parametrize("peers", [1, 2, 7, 90])
def test_erdos_renyi(peers: int, p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few random numbers at a time, too."""
    for seed in range(6):
        graph = nx.fast_gnp_random_graph(peers, p, seed)
        assert same(erdos_renyi(peers, p, seed), graph)
        monkeypatch.setattr(drawn_by_arrays, "DRAWS", 5 + seed)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.7, 1.0])
@pytest.mark.parametrize(("peers", "k"), [(3, 2), (6, 4), (7, 6), (30, 4), (400, 6)])
def test_watts_strogatz(peers: int, k: int, p: float) -> None:
    for seed in range(6):
        assert same(watts_strogatz(peers, k, p, seed), nx.watts_strogatz_graph(peers, k, p, seed))


@pytest.mark.parametrize(
    "draw",
    [
        lambda n: random_regular(n, 4, 0),
        lambda n: erdos_renyi(n, 4 / n, 0),
        lambda n: watts_strogatz(n, 4, 0.1, 0),
    ],
)
def test_no_object_is_made_for_a_peer(
    draw: Callable[[int], csr_array], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nx.Graph, "__init__", None)
    assert draw(1000).nnz > 3000
