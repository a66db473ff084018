"""Families of graphs: EquiTopo, exponential, clusters, trees, geometric, teleportation."""

from functools import partial
from math import ceil, log, log2
from typing import Any

import networkx as nx
import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

from topologies import (
    MIXINGS,
    TOPOLOGIES,
    Clustered,
    GraphError,
    WeightedGraph,
    build,
    pattern,
)
from topologies.clusters import skew
from topologies.hops import _basis


def network(
    name: str,
    peers: int,
    seed: int = 0,
    mixing: str = "metropolis",
    labels: Any = None,
    **more: Any,
) -> WeightedGraph:
    rng = np.random.default_rng(seed)
    return build(partial(TOPOLOGIES[name], **more), MIXINGS[mixing], peers, rng, labels)


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("peers", [20, 100, 600])
def test_the_norm_of_equitopo_is_bounded_whatever_the_number_of_peers(
    peers: int, directed: bool
) -> None:
    """With m = 8 log(2 P / p) / (3 rho^2), ||W - 11'/P|| <= rho with probability 1 - p."""
    rho, p = 0.5, 0.01
    for seed in range(3):
        m = int(8 * log(2 * peers / p) / 3 / rho**2)
        net = network("equitopo", peers, seed, m=m, directed=directed)
        (w,) = (each.toarray() for each in net.weights)
        assert np.linalg.norm(w - 1 / peers, 2) <= rho
        assert net.own_weights


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 16, 33])
@pytest.mark.parametrize("directed", [False, True])
def test_equitopo_has_the_weights_of_the_paper(peers: int, directed: bool) -> None:
    net = network("equitopo", peers, directed=directed)
    (w,) = (each.toarray() for each in net.weights)
    np.testing.assert_allclose(w.sum(axis=0), 1)
    np.testing.assert_allclose(w.sum(axis=1), 1)
    if peers == 1:
        return
    np.testing.assert_allclose(np.diag(w), 1 / peers)
    m = ceil(log2(peers))
    hops = _basis(peers, np.random.default_rng(0), m)
    expected = np.eye(peers) / peers
    for hop in hops:
        shift = np.roll(np.eye(peers), hop, axis=0) * (peers - 1) / peers / m
        expected += shift if directed else (shift + shift.T) / 2
    np.testing.assert_allclose(w, expected)


@pytest.mark.parametrize("m", [None, 3])
@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("peers", [2, 3, 8, 15])
def test_one_peer_equitopo_draws_a_hop_every_round(
    peers: int, directed: bool, m: int | None
) -> None:
    net = network("equitopo", peers, directed=directed, one_peer=True, m=m)
    assert net.endless
    assert (net.possible is None) == (m is None)
    for w in net.weights[:20]:
        dense = w.toarray()
        off = (dense - np.diag(np.diag(dense))) != 0
        assert off.sum(axis=0).max() == off.sum(axis=1).max() == 1
        np.testing.assert_allclose(dense.sum(axis=0), 1)
        assert directed or (dense == dense.T).all()
        assert net.possible is None or not (off & ~net.possible.toarray()).any()


def test_undirected_pairs_leave_few_peers_alone() -> None:
    """A cycle of hops of length n leaves at most every third peer alone."""
    for w in network("equitopo", 30, one_peer=True).weights[:30]:
        assert (w.diagonal() == 1).sum() <= 10


@pytest.mark.parametrize("peers", [1, 2, 4, 8, 64])
def test_one_peer_hypercube_averages_exactly(peers: int) -> None:
    net = network("one_peer_hypercube", peers)
    assert len(net.weights) == max(1, peers.bit_length() - 1)
    product = np.eye(peers)
    for w in net.weights:
        product = w @ product
    np.testing.assert_allclose(product, 1 / peers, atol=1e-15)


@pytest.mark.parametrize(("peers", "k"), [(27, 2), (16, 3), (25, 4), (8, 1)])
def test_directed_exponential_averages_powers_of_k_plus_one_exactly(peers: int, k: int) -> None:
    net = network("directed_exponential", peers, k=k, mixing="out_degree")
    product = np.eye(peers)
    for w in net.weights:
        assert ((w != 0).sum(axis=0) == k + 1).all()
        product = w @ product
    np.testing.assert_allclose(product, 1 / peers, atol=1e-14)


@pytest.mark.parametrize("peers", [1, 2, 5, 8, 13])
def test_directed_exponential_of_one_is_one_peer_exponential(peers: int) -> None:
    one, other = (network(name, peers) for name in ("directed_exponential", "one_peer_exponential"))
    for ours, known in zip(one.weights, other.weights, strict=True):
        assert (ours != known).nnz == 0


@pytest.mark.parametrize(("peers", "k"), [(2, 1), (3, 2), (12, 1), (12, 3), (40, 2)])
def test_directed_random_sends_to_k_others(peers: int, k: int) -> None:
    net = network("directed_random", peers, k=k, mixing="out_degree")
    assert set(net.degrees) == {k}
    assert net.columns_sum
    redrawn = network("directed_random", peers, k=k, redraw=True, mixing="out_degree")
    assert redrawn.endless
    assert all(
        connected_components(w, connection="strong", return_labels=False) == 1
        for w in redrawn.weights[:5]
    )


def test_teleportation_moves_the_average_of_the_active_peers() -> None:
    net = network("teleportation", 12, active=4)
    x = np.random.default_rng(1).standard_normal(12)
    active: set[Any] = set()
    for w in net.weights[:6]:
        dense = w.toarray()
        then = set(np.flatnonzero((dense != np.eye(12)).any(axis=1)))
        senders = set(np.flatnonzero(dense[sorted(then)].any(axis=0)))
        assert len(then) <= 4
        assert not active or senders <= active | then
        np.testing.assert_allclose(dense.sum(axis=1), 1)
        before, x = x, dense @ x
        assert set(np.flatnonzero(x != before)) <= then
        active = then
    # The spectrum is that of the active peers, whose ring of four has the gap 2/3.
    assert net.spectrum.gap == pytest.approx(2 / 3, rel=1e-9)
    assert network("teleportation", 3, active=3).spectrum.gap > 0
    with pytest.raises(GraphError, match="active <= peers, not 4 of 3"):
        network("teleportation", 3)


def test_caveman_links_cliques_on_a_ring() -> None:
    net = network("caveman", 16)
    assert net.edges == 4 * 6 + 4
    drawn = nx.from_scipy_sparse_array(net.weights[0])
    drawn.remove_edges_from(nx.selfloop_edges(drawn))
    assert sorted(map(len, nx.find_cliques(drawn)))[-4:] == [4, 4, 4, 4]
    assert network("caveman", 3, size=9).edges == 3


def test_clustered_has_more_edges_inside() -> None:
    net = network("clustered", 60, clusters=3, inside=0.9, between=0.1)
    own = np.arange(60) // 20
    dense = net.weights[0].toarray() != 0
    same = own[:, None] == own
    assert dense[same].mean() > 0.8 > 0.2 > dense[~same].mean()


def test_weights_within_a_cluster_are_equal() -> None:
    net = network("caveman", 7, size=3)
    clusters = np.array([0, 0, 0, 0, 1, 1, 1])
    same = clusters[:, None] == clusters
    assert net.clusters is not None
    assert np.array_equal(net.clusters, clusters)
    assert net.within is not None
    np.testing.assert_allclose(net.within.toarray(), same / same.sum(axis=1), atol=1e-15)
    loose = network("clustered", 20, clusters=2, inside=0.6, between=0.5)
    assert loose.within is not None
    expected = (loose.weights[0].toarray() > 0) & (
        np.arange(20)[:, None] // 10 == np.arange(20) // 10
    )
    np.testing.assert_allclose(
        loose.within.toarray(), expected / expected.sum(axis=1, keepdims=True), atol=1e-15
    )
    assert network("ring", 5).within is None


def test_d_cliques_bring_all_labels_together() -> None:
    labels = np.eye(10, dtype=np.int64)[np.arange(100) // 10] * 7
    net = network("d_cliques", 100, labels=labels)
    drawn = nx.from_scipy_sparse_array(net.weights[0])
    drawn.remove_edges_from(nx.selfloop_edges(drawn))
    cliques = [c for c in nx.find_cliques(drawn) if len(c) == 10]
    assert len(cliques) == 10
    skews = [float(skew(labels[c].sum(axis=0), labels.sum(axis=0))) for c in cliques]
    assert max(skews) < 0.5
    unsorted = network("d_cliques", 100, labels=labels, steps=0)
    random = nx.from_scipy_sparse_array(unsorted.weights[0])
    first = [c for c in nx.find_cliques(random) if len(c) == 10]
    assert np.mean(skews) < np.mean(
        [float(skew(labels[c].sum(axis=0), labels.sum(axis=0))) for c in first]
    )
    assert net.edges == 10 * 45 + 10
    everyone = network("d_cliques", 100, labels=labels, between="complete")
    assert everyone.edges == 10 * 45 + 45
    assert set(everyone.degrees) == {9, 10}


def cliques_and_links(between: str, cliques: int, size: int) -> tuple[set[Any], Any]:
    """Return the pairs of cliques that are linked, and the links of every peer."""
    peers = cliques * size
    labels = np.ones((peers, 2), dtype=np.int64)
    options: dict[str, Any] = {"between": between, "size": size, "steps": 0}
    (w,) = network("d_cliques", peers, labels=labels, **options).weights
    order = np.random.default_rng(0).permutation(peers)  # cliques, as they are drawn
    dense = w.toarray()[np.ix_(order, order)] != 0
    np.fill_diagonal(dense, False)
    own = np.arange(peers) // size
    assert dense[own[:, None] == own].sum() == peers * (size - 1)
    ends = np.nonzero(dense & (own[:, None] != own))
    return set(zip(*own[np.array(ends)], strict=True)), np.bincount(ends[0], minlength=peers)


def test_fractal_d_cliques_are_groups_of_groups() -> None:
    """Of 9 cliques of 3: every two of three neighbours, and every two of these groups."""
    found, links = cliques_and_links("fractal", 9, 3)
    inside = {(a, b) for a, b in found if a // 3 == b // 3}
    assert inside == {(a, b) for a in range(9) for b in range(9) if a // 3 == b // 3 and a != b}
    assert {(a // 3, b // 3) for a, b in found - inside} == {
        (a, b) for a in range(3) for b in range(3) if a != b
    }
    assert links.sum() == 2 * (9 + 3)
    assert links.max() == 1


def test_small_world_d_cliques_are_linked_at_powers_of_two() -> None:
    found, links = cliques_and_links("small_world", 20, 10)
    hops = {2**k + more for k in range(5) for more in (0, 1)}
    assert {(b - a) % 20 for a, b in found} == hops | {20 - hop for hop in hops}
    assert links.max() - links.min() <= 1


@pytest.mark.parametrize("between", ["ring", "fractal", "small_world", "complete"])
@pytest.mark.parametrize("peers", [1, 2, 5, 13, 30])
def test_d_cliques_of_any_size(peers: int, between: str) -> None:
    labels = np.random.default_rng(0).integers(0, 9, (peers, 3))
    for size in (1, 4):
        network("d_cliques", peers, labels=labels, size=size, between=between)


@pytest.mark.parametrize("labels", [None, np.zeros((4, 0), np.int64)])
def test_d_cliques_without_labels_are_refused(labels: Any) -> None:
    with pytest.raises(GraphError, match="labels"):
        network("d_cliques", 4, labels=labels)


@pytest.mark.parametrize("of", ["complete", "torus", "regular:k=4", "star"])
def test_a_spanning_tree_has_edges_of_its_graph_only(of: str) -> None:
    net = network("spanning_tree", 16, of=of)
    assert net.edges == 15
    (tree,) = net.weights
    name, _, k = of.partition(":k=")
    more: dict[str, Any] = {"k": int(k)} if k else {}
    graph = network(name, 16, **more).weights[0]
    assert not ((tree != 0).astype(int) - (graph != 0).astype(int) > 0).nnz


@pytest.mark.parametrize(
    ("of", "message"),
    [
        ("rign", "unknown 'rign'"),
        ("exponential", "undirected graph that does not change, not exponential"),
        ("base_graph", "not base_graph"),
        ("regular:q=4", "unknown option 'q'; choose from k"),
        ("regular:k=3,k=3", "regular: option 'k' is given twice; give it once"),
        ("ring:q=4", "unknown option 'q'; it has none"),
        ("regular:k=x", "k must be int, not 'x'"),
        ("erdos_renyi", "erdos_renyi needs p"),
        ("d_cliques", "d_cliques"),
    ],
)
def test_a_graph_that_has_no_spanning_tree_is_refused(of: str, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        network("spanning_tree", 16, of=of)


def test_geometric_links_peers_within_the_radius() -> None:
    few, many = (network("geometric", 40, radius=radius).edges for radius in (0.4, 0.8))
    assert few < many < 40 * 39 / 2
    assert network("geometric", 40, radius=1.5).edges == 40 * 39 / 2
    with pytest.raises(GraphError, match="none of 100 random graphs"):
        network("geometric", 40, radius=0.01)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("equitopo", {"m": 0}, "not m=0"),
        ("directed_exponential", {"k": 0}, "k of at least 1, not 0"),
        ("directed_random", {"k": 9}, "k=9, peers=9"),
        ("one_peer_hypercube", {}, "power of two peers, such as 8 or 16, not 9"),
        ("caveman", {"size": 0}, "size of at least 1, not 0"),
        ("clustered", {"clusters": 10}, "clusters=10"),
        ("clustered", {"between": 1.5}, "between must be between 0 and 1, not 1.5"),
        ("geometric", {"radius": -1.0}, "radius of at least 0, not -1"),
        ("teleportation", {"active": 0}, "not 0 of 9"),
    ],
)
def test_bad_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        network(name, 9, **options)
    assert "\n" not in str(caught.value)


def test_clusters_are_checked() -> None:
    def built(given: Any) -> WeightedGraph:
        made = Clustered(pattern(nx.cycle_graph(4)), given)
        return build(lambda *_: made, MIXINGS["metropolis"], 4, np.random.default_rng(0))

    for given in ([0, 0, 1, 1], np.array([0, 0, 1, 1], np.int8)):
        clusters = built(given).clusters
        assert clusters is not None
        assert clusters.dtype == np.int64
        assert clusters.tolist() == [0, 0, 1, 1]
    for bad in ([0, 0, 1], [0.0, 0.0, 1.0, 1.0], [[0, 0, 1, 1]]):
        with pytest.raises(GraphError, match="clusters"):
            built(bad)
