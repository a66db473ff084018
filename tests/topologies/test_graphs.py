"""Properties of all graphs and mixing rules, then known values of each."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from topologies import (
    MIXINGS,
    TOPOLOGIES,
    Clustered,
    GraphError,
    WeightedGraph,
    build,
    graphs,
    mixing,
    mixings,
    pattern,
    spectrum,
    topology,
)

Floats = NDArray[np.float64]

OPTIONS: dict[str, dict[str, float]] = {
    "erdos_renyi": {"p": 0.5},
    "regular": {"k": 3},
    "small_world": {"k": 2, "p": 0.2},
    "geometric": {"radius": 1.5},
    "clustered": {"clusters": 2, "inside": 1.0, "between": 0.5},
    "caveman": {"size": 3},
    "directed_random": {"k": 2},
    "equitopo": {"one_peer": False},
}
SIZES: dict[str, tuple[int, ...]] = {
    "torus": (9, 12, 16),
    "hypercube": (1, 2, 8, 16),
    "grid": (4, 6, 16),
    "regular": (4, 6, 16),
    "one_peer_hypercube": (1, 2, 8, 16),
}
SINGLE = (
    "ring",
    "chain",
    "star",
    "complete",
    "hypercube",
    "exponential",
    "one_peer_exponential",
    "erdos_renyi",
    "tree",
    "one_peer_hypercube",
    "directed_exponential",
    "geometric",
    "spanning_tree",
)
RANDOM = ("regular", "erdos_renyi", "small_world", "barabasi_albert", "spanning_tree", "clustered")
OWN_WEIGHTS = ("edges", "base_graph", "equitopo", "teleportation")
"""Graphs that come with weights: see test_base_k_graphs, test_families."""
ENDLESS = ("random_matching", "random_out", "random_regular", "teleportation")
"""Graphs that every round draws anew: see test_sequences."""
RULES = [rule for rule in MIXINGS if rule != "fastest"]
"""All rules but the one that optimises: see test_fastest."""
BY_COLUMN = ("out_degree",)
DIRECTED = ("exponential", "one_peer_exponential", "directed_exponential", "directed_random")
UNEVEN = ("directed_random",)
"""Directed graphs on which peers receive from different numbers of others."""
CASES = [
    (name, peers)
    for name in TOPOLOGIES
    if name not in (*OWN_WEIGHTS, *ENDLESS, "d_cliques")
    for peers in SIZES.get(name, (1, 2, 3, 5, 16) if name in SINGLE else (4, 7, 16))
]


def graph(name: str, **options: Any) -> Callable[[int, Generator], Any]:
    return partial(TOPOLOGIES[name], **(options or OPTIONS.get(name, {})))


def network(
    name: str, peers: int, mixing: str = "metropolis", seed: int = 0, **options: Any
) -> WeightedGraph:
    return build(graph(name, **options), MIXINGS[mixing], peers, np.random.default_rng(seed))


def dense(net: WeightedGraph) -> list[Floats]:
    return [w.toarray() for w in net.weights]


def doubly(weights: Floats) -> bool:
    return np.allclose(weights.sum(axis=0), 1, atol=1e-12)


@pytest.mark.parametrize("mixing", RULES)
@pytest.mark.parametrize(("name", "peers"), CASES)
def test_weights_average_over_the_graph_and_nothing_else(
    name: str, peers: int, mixing: str
) -> None:
    net = network(name, peers, mixing)
    drawn = graph(name)(peers, np.random.default_rng(0))
    drawn = drawn.graph if isinstance(drawn, Clustered) else drawn
    rounds = [drawn] if isinstance(drawn, csr_array) else drawn
    for weights, w, adjacency in zip(net.weights, dense(net), rounds, strict=True):
        assert weights.dtype == np.float64
        assert weights.shape == (peers, peers)
        assert weights.has_canonical_format
        assert (weights.data > 0).all()
        np.testing.assert_allclose(w.sum(axis=0 if mixing in BY_COLUMN else 1), 1, atol=1e-12)
        np.testing.assert_array_equal((w - np.diag(np.diag(w))) != 0, adjacency.toarray())


@pytest.mark.parametrize("mixing", ["metropolis", "max_degree", "lazy"])
@pytest.mark.parametrize(("name", "peers"), CASES)
def test_metropolis_max_degree_and_lazy_keep_the_mean(name: str, peers: int, mixing: str) -> None:
    net = network(name, peers, mixing)
    assert name in UNEVEN or all(doubly(w) for w in dense(net))
    assert name in DIRECTED or all((w == w.T).all() for w in dense(net))
    assert name in UNEVEN or not any("doubly" in note for note in net.notes)


@pytest.mark.parametrize("mixing", ["uniform", "neighbors"])
@pytest.mark.parametrize(("name", "peers"), CASES)
def test_uniform_and_neighbors_warn_where_they_do_not_keep_the_mean(
    name: str, peers: int, mixing: str
) -> None:
    net = network(name, peers, mixing)
    assert all(doubly(w) for w in dense(net)) != any(
        "not doubly stochastic" in note for note in net.notes
    )
    if mixing == "neighbors" and peers > 1:
        assert all((np.diag(w) == 0).all() for w in dense(net))


@pytest.mark.parametrize(("name", "peers"), CASES)
def test_edges_degrees_and_directed_describe_the_graph(name: str, peers: int) -> None:
    net = network(name, peers)
    union = np.sum(dense(net), axis=0) != 0
    np.fill_diagonal(union, False)
    assert connected_components(csr_array(union), connection="strong")[0] == 1
    assert net.degrees.dtype == np.int64
    np.testing.assert_array_equal(net.degrees, union.sum(axis=0))
    assert net.edges == union.sum() / (1 if net.directed else 2)
    assert net.directed == any((w != w.T).any() for w in dense(net))


@pytest.mark.parametrize("name", RANDOM)
def test_a_seed_decides_on_a_random_graph(name: str) -> None:
    first, again, other = (network(name, 30, seed=seed).weights[0] for seed in (1, 1, 2))
    assert (first != again).nnz == 0
    assert (first != other).nnz > 0


def test_options_can_be_read_from_the_signatures() -> None:
    for function in TOPOLOGIES.values():
        parameters = list(inspect.signature(function).parameters.values())
        fixed = ["peers", "rng", *(["labels"] if hasattr(function, "needs_labels") else [])]
        assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == fixed
        assert function.__doc__
    assert all(rule.__doc__ for rule in MIXINGS.values())


@pytest.mark.parametrize(
    ("name", "peers", "options", "edges", "degrees"),
    [
        ("ring", 2, {}, 1, {1}),
        ("ring", 16, {}, 16, {2}),
        ("chain", 5, {}, 4, {1, 2}),
        ("tree", 7, {}, 6, {1, 2, 3}),
        ("tree", 13, {"branches": 3}, 12, {1, 3, 4}),
        ("tree", 5, {"branches": 1}, 4, {1, 2}),
        ("star", 5, {}, 4, {1, 4}),
        ("complete", 7, {}, 21, {6}),
        ("complete", 1000, {}, 499_500, {999}),
        ("grid", 12, {}, 17, {2, 3, 4}),
        ("torus", 12, {}, 24, {4}),
        ("hypercube", 16, {}, 32, {4}),
        ("regular", 10, {"k": 3}, 15, {3}),
        ("regular", 10, {"k": 7}, 35, {7}),
        ("regular", 6, {"k": 5}, 15, {5}),
        ("small_world", 12, {"k": 4, "p": 0.0}, 24, {4}),
        ("erdos_renyi", 9, {"p": 1.0}, 36, {8}),
        ("exponential", 16, {}, 64, {4}),
        ("exponential", 10, {}, 40, {4}),
        ("one_peer_exponential", 10, {}, 40, {4}),
        ("regular", 10_000, {"k": 4}, 20_000, {4}),
    ],
)
def test_graphs_have_known_edges_and_degrees(
    name: str, peers: int, options: dict[str, Any], edges: int, degrees: set[int]
) -> None:
    net = network(name, peers, **options)
    assert net.edges == edges
    assert set(net.degrees) == degrees


def test_random_graphs_of_ten_thousand_peers_have_the_expected_edges() -> None:
    assert network("barabasi_albert", 10_000, m=2).edges == 2 * 9_998
    assert network("small_world", 10_000, k=4).edges == 20_000
    assert abs(network("erdos_renyi", 10_000, p=0.002).edges - 100_000) < 2_000


def test_hypercube_links_numbers_that_differ_in_one_bit() -> None:
    i, j = np.nonzero(graph("hypercube")(16, np.random.default_rng(0)).toarray())
    assert {bin(a ^ b).count("1") for a, b in zip(i.tolist(), j.tolist(), strict=True)} == {1}


def test_exponential_peers_hear_powers_of_two_behind() -> None:
    (w,) = dense(network("exponential", 10))
    assert set(np.flatnonzero(w[0])) == {0, 9, 8, 6, 2}
    np.testing.assert_allclose(w[w > 0], 1 / 5)


@pytest.mark.parametrize("peers", range(2, 18))
def test_one_peer_exponential_averages_exactly_for_powers_of_two(peers: int) -> None:
    net = network("one_peer_exponential", peers)
    assert len(net.weights) == int(np.ceil(np.log2(peers)))
    assert all(set(w.data) == {0.5} for w in net.weights)
    product = np.linalg.multi_dot([*reversed(dense(net)), np.eye(peers)])
    assert np.allclose(product, 1 / peers, atol=1e-12) == (peers & (peers - 1) == 0)


def test_weights_on_a_chain_of_three_equal_their_formulas() -> None:
    expected: dict[str, list[list[float]]] = {
        "metropolis": [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]],
        "max_degree": [[2 / 3, 1 / 3, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 3, 2 / 3]],
        "lazy": [[5 / 6, 1 / 6, 0], [1 / 6, 2 / 3, 1 / 6], [0, 1 / 6, 5 / 6]],
        "uniform": [[1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3], [0, 1 / 2, 1 / 2]],
        "neighbors": [[0, 1, 0], [1 / 2, 0, 1 / 2], [0, 1, 0]],
    }
    for rule, weights in expected.items():
        np.testing.assert_allclose(dense(network("chain", 3, rule))[0], weights)


@pytest.mark.parametrize(("name", "peers"), CASES)
def test_out_degree_shares_what_a_peer_has_in_equal_parts(name: str, peers: int) -> None:
    net = network(name, peers, "out_degree")
    assert net.columns_sum
    for w in dense(net):
        sends = (w != 0).sum(axis=0)
        np.testing.assert_allclose(w, (w != 0) / sends)
    assert not any("doubly" in note for note in net.notes)


def test_out_degree_is_uniform_of_the_reversed_graph() -> None:
    directed = csr_array(np.array([[0, 0, 1], [1, 0, 0], [1, 1, 0]], dtype=bool))
    expected = [[1 / 3, 0, 1 / 2], [1 / 3, 1 / 2, 0], [1 / 3, 1 / 2, 1 / 2]]
    net = build(lambda peers, rng: directed, MIXINGS["out_degree"], 3, np.random.default_rng(0))
    np.testing.assert_allclose(dense(net)[0], expected)
    assert (net.rows_sum, net.columns_sum) == (False, True)


@pytest.mark.parametrize("count", [1, 3])
def test_columns_have_the_spectrum_of_their_transposes(count: int) -> None:
    rng = np.random.default_rng(3)
    columns = [rng.random((6, 6)) for _ in range(count)]
    columns = [w / w.sum(axis=0) for w in columns]
    found = spectrum([csr_array(w) for w in columns])
    product = np.linalg.multi_dot([*reversed(columns), np.eye(6)])
    if count == 1:
        assert found.second == pytest.approx(np.sort(np.abs(np.linalg.eigvals(product)))[-2])
    alike = [w.T for w in reversed(columns)]
    assert found == spectrum([csr_array(w) for w in alike])


def test_rounds_whose_rows_sum_do_not_mix_with_rounds_whose_columns_do() -> None:
    row, column = (
        csr_array(np.array(w)) for w in ([[0.5, 0.5], [0.2, 0.8]], [[0.5, 0.2], [0.5, 0.8]])
    )
    with pytest.raises(GraphError, match="only rows sum to 1, and in others only columns"):
        build(lambda peers, rng: [row, column], MIXINGS["lazy"], 2, np.random.default_rng(0))


@pytest.mark.parametrize(("name", "peers"), CASES)
def test_sinkhorn_keeps_the_mean_on_every_graph(name: str, peers: int) -> None:
    assert all(doubly(w) for w in dense(network(name, peers, "sinkhorn")))


@settings(max_examples=20, deadline=None)
@given(peers=st.integers(2, 30), k=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_sinkhorn_scales_directed_graphs(peers: int, k: int, seed: int) -> None:
    net = network("directed_random", peers, "sinkhorn", seed, k=min(k, peers - 1))
    (w,) = dense(net)
    assert doubly(w)
    own = np.diag(w)
    np.testing.assert_allclose(w * w.T, np.outer(own, own) * ((w * w.T) != 0), atol=1e-12)


def test_sinkhorn_refuses_an_edge_without_a_way_back() -> None:
    one_way = csr_array(np.array([[0, 0], [1, 0]], dtype=bool))
    with pytest.raises(GraphError, match="edge from peer 0 to peer 1"):
        MIXINGS["sinkhorn"](one_way)


@pytest.mark.parametrize("peers", [1, 2, 3, 4, 9, 12, 16])
def test_common_graphs_are_those_of_networkx(peers: int) -> None:
    rng = np.random.default_rng(0)
    networks = {
        "ring": nx.cycle_graph(peers),
        "chain": nx.path_graph(peers),
        "star": nx.star_graph(peers - 1),
    }
    rows = {4: 2, 9: 3, 12: 3, 16: 4}.get(peers)
    if rows:
        networks["grid"] = nx.grid_2d_graph(rows, peers // rows)
    if rows and rows >= 3:
        networks["torus"] = nx.grid_2d_graph(rows, peers // rows, periodic=True)
    for name, network in networks.items():
        found, expected = TOPOLOGIES[name](peers, rng), pattern(network)
        assert isinstance(found, csr_array)
        for part in ("data", "indices", "indptr"):
            one, other = getattr(found, part), getattr(expected, part)
            assert one.dtype == other.dtype, (name, part)
            np.testing.assert_array_equal(one, other, name)


def test_metropolis_and_max_degree_differ_where_degrees_differ() -> None:
    kite = pattern(nx.Graph([(0, 1), (0, 2), (0, 3), (1, 2)]))
    assert MIXINGS["metropolis"](kite)[1, 2] == pytest.approx(1 / 3)
    assert MIXINGS["max_degree"](kite)[1, 2] == pytest.approx(1 / 4)


@settings(max_examples=30, deadline=None)
@given(
    peers=st.integers(2, 40),
    p=st.floats(0.3, 1),
    seed=st.integers(0, 2**32),
    rule=st.sampled_from(sorted(set(RULES) - set(BY_COLUMN))),
)
def test_averaging_never_leaves_the_range_of_the_peers(
    peers: int, p: float, seed: int, rule: str
) -> None:
    rng = np.random.default_rng(seed)
    (w,) = build(graph("erdos_renyi", p=p), MIXINGS[rule], peers, rng).weights
    x = rng.standard_normal(peers)
    assert x.min() - 1e-9 <= (w @ x).min()
    assert (w @ x).max() <= x.max() + 1e-9


@pytest.mark.parametrize(
    ("name", "peers", "options", "message"),
    [
        ("ring", 0, {}, "peers must be between 1 and .*, not 0"),
        ("ring", 10**9, {}, "peers must be between 1 and .*, not 1,000,000,000"),
        ("complete", 10_000, {}, "99,990,000 directed edges; at most 20,000,000"),
        ("random_out", 20_000, {"s": 5000}, "100,000,000 directed edges"),
        ("random_regular", 20_000, {"s": 5000}, "100,000,000 directed edges"),
        ("base_graph", 5_000_000, {}, "115,000,000 directed edges"),
        ("teleportation", 10_000_000, {"active": 8_000_000}, "26,000,000 directed edges"),
        ("erdos_renyi", 10_000, {"p": 0.5}, "49,995,000 directed edges"),
        ("regular", 100_000, {"k": 400}, "40,000,000 directed edges"),
        ("small_world", 100_000, {"k": 400}, "40,000,000 directed edges"),
        ("barabasi_albert", 100_000, {"m": 200}, "40,000,000 directed edges"),
        ("exponential", 2_000_000, {}, "42,000,000 directed edges"),
        ("grid", 13, {}, r"at least 2; 13 peers can only be 1 x 13; .* is 14 \(2 x 7\)"),
        ("grid", 1, {}, r"1 x 1; .* is 4 \(2 x 2\)"),
        ("torus", 8, {}, r"at least 3; 8 peers can only be 2 x 4; .* is 9 \(3 x 3\)"),
        ("hypercube", 12, {}, "such as 8 or 16, not 12"),
        ("regular", 4, {"k": 4}, "1 <= k < peers.*k=4, peers=4"),
        ("regular", 5, {"k": 3}, r"k\*peers even: k=3, peers=5"),
        ("regular", 16, {"k": 1}, "none of 100 random graphs was connected; k of 3"),
        ("small_world", 16, {"k": 3}, "even k .*k=3, peers=16"),
        ("small_world", 4, {"k": 4}, "k=4, peers=4"),
        ("small_world", 16, {"k": 4, "p": 1.5}, "p must be between 0 and 1, not 1.5"),
        ("erdos_renyi", 16, {"p": -0.1}, "p must be between 0 and 1, not -0.1"),
        ("erdos_renyi", 16, {"p": float("nan")}, "p must be between 0 and 1, not nan"),
        (
            "erdos_renyi",
            100,
            {"p": 0.001},
            "p=0.001 of 100 peers: none of 100 .* p of 0.092 or more",
        ),
        ("erdos_renyi", 2, {"p": 1e-30}, "p=1e-30 of 2 peers: none of 100"),
        ("clustered", 8, {"between": 1e-17}, "between=1e-17 of 8 peers: none of 100"),
        ("tree", 5, {"branches": 0}, "branches of at least 1, not 0"),
        ("barabasi_albert", 16, {"m": 16}, "1 <= m < peers: m=16, peers=16"),
    ],
)
def test_bad_options_are_refused_with_the_value(
    name: str, peers: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        network(name, peers, **options)
    assert "\n" not in str(caught.value)


def test_a_users_graph_must_be_connected() -> None:
    two_rings = pattern(nx.disjoint_union_all([nx.cycle_graph(n) for n in (3, 5)]))
    with pytest.raises(GraphError, match="not connected: 2 pieces, the largest of 5 of 8 peers"):
        build(lambda peers, rng: two_rings, MIXINGS["lazy"], 8, np.random.default_rng(0))


def test_rounds_may_be_disconnected_if_their_union_is_connected() -> None:
    odd, even = np.zeros((4, 4), dtype=bool), np.zeros((4, 4), dtype=bool)
    odd[[0, 1, 2, 3], [1, 0, 3, 2]] = even[[1, 2], [2, 1]] = True
    net = build(
        lambda peers, rng: [csr_array(odd), csr_array(even)],
        MIXINGS["metropolis"],
        4,
        np.random.default_rng(0),
    )
    assert (net.edges, net.directed, net.degrees.tolist()) == (3, False, [1, 2, 2, 1])


def test_weights_that_do_not_average_are_refused() -> None:
    with pytest.raises(GraphError, match="weights of peer 0 sum to 2; each row must sum to 1"):
        build(
            graph("ring"),
            lambda adjacency: adjacency.astype(np.float64),
            5,
            np.random.default_rng(0),
        )


def test_the_decorators_register_a_graph_and_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "TOPOLOGIES", {})
    monkeypatch.setattr(mixings, "MIXINGS", {})

    @topology
    def pair(peers: int, rng: Generator) -> csr_array:
        return pattern(nx.path_graph(2))

    @mixing
    def half(adjacency: csr_array) -> csr_array:
        return csr_array(np.full((2, 2), 0.5))

    assert graphs.TOPOLOGIES["pair"] is pair
    assert mixings.MIXINGS["half"] is half
    assert build(pair, half, 2, np.random.default_rng(0)).spectrum.second == 0


def test_a_name_belongs_to_one_graph_and_one_rule() -> None:
    def other(given: Any) -> Any: ...

    decorators: list[tuple[str, Any, Any]] = [
        ("ring", topology, TOPOLOGIES),
        ("metropolis", mixing, MIXINGS),
    ]
    for name, add, registry in decorators:
        there = registry[name]
        assert add(there) is there  # the same definition
        other.__name__ = name
        with pytest.raises(GraphError, match=f" {name} is both topologies.* and .*other: "):
            add(other)
        assert registry[name] is there


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda peers: None, "or a list or tuple of these, not a value of type NoneType"),
        (lambda peers: [[1]], "the topology must return a matrix of bool or of float, a networkx"),
        (lambda peers: [], "or a list or tuple of these, not a value of type list"),
        (lambda peers: nx.cycle_graph(peers + 1), r"matrix \(6, 6\), not \(7, 7\)"),
        (lambda peers: np.ones(peers, bool), r"matrix \(6, 6\), not \(6,\)"),
        (lambda peers: [np.eye(peers), np.eye(2)], r"matrix \(6, 6\), not \(2, 2\)"),
        (lambda peers: int("few"), "ValueError: invalid literal"),
    ],
)
def test_a_graph_of_another_form_is_refused(made: Callable[[int], Any], message: str) -> None:
    with pytest.raises(GraphError, match=message) as caught:
        build(lambda peers, rng: made(peers), MIXINGS["uniform"], 6, np.random.default_rng(0))
    assert "\n" not in str(caught.value)


def test_a_rule_returns_a_matrix() -> None:
    missing: Any = lambda adjacency: None  # noqa: E731
    with pytest.raises(GraphError, match="the mixing rule must return a matrix"):
        build(TOPOLOGIES["ring"], missing, 6, np.random.default_rng(0))


@pytest.mark.parametrize("made", [nx.cycle_graph(6), nx.cycle_graph(6, nx.DiGraph)])
def test_a_graph_may_be_one_of_networkx(made: Any) -> None:
    """An edge i -> j of a directed graph: j receives from i."""
    there = build(lambda peers, rng: made, MIXINGS["uniform"], 6, np.random.default_rng(0))
    weights = there.weights[0]
    assert all(weights[j, i] for i, j in made.edges)
    assert (weights.nnz == 12) == made.is_directed()
