"""Base-(k+1) graphs: exact for every number of peers, of degree k, short."""

from functools import partial
from math import log

import numpy as np
import pytest

from topologies import MIXINGS, TOPOLOGIES, GraphError, WeightedGraph, build

QUICK = (1, 2, 3, 5, 6, 7, 11, 16, 22, 25, 45)


def network(peers: int, k: int, simple: bool) -> WeightedGraph:
    graph = partial(TOPOLOGIES["base_graph"], k=k, simple=simple)
    return build(graph, MIXINGS["metropolis"], peers, np.random.default_rng(0))


def check(peers: int, k: int, simple: bool) -> int:
    """Assert what the paper states of one graph, and return its length."""
    net = network(peers, k, simple)
    product = np.eye(peers)
    for w in net.weights:
        assert (w != w.T).nnz == 0
        assert (np.diff(w.indptr) - (w.diagonal() != 0)).max() <= k
        np.testing.assert_allclose(w.sum(axis=1), 1, atol=1e-12)
        product = w @ product
    np.testing.assert_allclose(product, 1 / peers, atol=1e-12)
    assert len(net.weights) <= max(1, 2 * log(peers) / log(k + 1) + 2)
    return len(net.weights)


@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("k", range(1, 6))
def test_a_period_averages_exactly(k: int, simple: bool) -> None:
    for peers in QUICK:
        check(peers, k, simple)


@pytest.mark.slow
@pytest.mark.parametrize("simple", [False, True])
@pytest.mark.parametrize("k", range(1, 6))
def test_a_period_averages_any_number_of_peers_exactly(k: int, simple: bool) -> None:
    for peers in range(1, 201):
        check(peers, k, simple)


def test_it_is_never_longer_than_its_simple_form() -> None:
    for k in (1, 2, 4):
        assert all(check(n, k, False) <= check(n, k, True) for n in range(1, 40))
    assert check(6, 1, False) == 4  # figure 3 of the paper
    assert check(6, 1, True) == 5


def test_powers_of_k_plus_one_are_hypercubes() -> None:
    assert check(16, 1, False) == 4
    assert check(27, 2, True) == 3
    cube = build(
        TOPOLOGIES["one_peer_hypercube"], MIXINGS["metropolis"], 8, np.random.default_rng(0)
    )
    for ours, known in zip(network(8, 1, False).weights, cube.weights, strict=True):
        np.testing.assert_array_equal(ours.toarray(), known.toarray())


def test_links_of_the_first_part_have_the_weight_of_the_paper() -> None:
    """5 = 4 + 1: peer 4 is linked with weight 4/5 to one peer of the first four."""
    weights = [w.toarray() for w in network(5, 1, True).weights]
    assert max(w[4, :4].max() for w in weights) == pytest.approx(4 / 5)


def test_a_bad_k_is_refused() -> None:
    with pytest.raises(GraphError, match="k of at least 1, not 0"):
        network(5, 0, False)
