"""Graphs that every round draws anew: addressed, bounded in memory, measured."""

from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csr_array

from topologies import MIXINGS, TOPOLOGIES, GraphError, WeightedGraph, build
from topologies.sequences import ENDLESS, KEPT, SAMPLED, Drawn, EveryRound, drawn


def network(
    name: str, peers: int, seed: int = 0, mixing: str = "metropolis", **options: Any
) -> WeightedGraph:
    graph = partial(TOPOLOGIES[name], **options)
    return build(graph, MIXINGS[mixing], peers, np.random.default_rng(seed))


def test_a_round_does_not_depend_on_the_rounds_asked_for_before() -> None:
    one, other = network("random_matching", 9), network("random_matching", 9)
    expected = {t: one.weights[t].toarray() for t in (0, 1, 5, 1000, ENDLESS - 1)}
    for t in (1000, 5, ENDLESS - 1, 0, 1, 5):
        np.testing.assert_array_equal(other.weights[t].toarray(), expected[t])
    assert len({matrix.tobytes() for matrix in expected.values()}) == 5
    again = network("random_matching", 9, seed=1).weights[0].toarray()
    assert (again != expected[0]).any()


def test_only_one_round_is_kept() -> None:
    made: list[int] = []

    def make(t: int) -> int:
        made.append(t)
        return t

    rounds = EveryRound(make)
    assert [rounds[3], rounds[3], rounds[4], rounds[3]] == [3, 3, 4, 3]
    assert made == [3, 4, 3]
    assert list(rounds[2:4]) == [2, 3]
    assert rounds[-1] == ENDLESS - 1
    with pytest.raises(IndexError):
        rounds[ENDLESS]


def test_the_first_rounds_are_kept_while_they_fit() -> None:
    made: list[int] = []

    def make(t: int) -> int:
        made.append(t)
        return t

    rounds = EveryRound(make, lambda t: KEPT // 3)
    for _ in range(2):
        assert list(rounds[:5]) == [0, 1, 2, 3, 4]
    assert made == [0, 1, 2, 3, 4, 3, 4]  # three of them fit
    assert [rounds[SAMPLED], rounds[0], rounds[SAMPLED]] == [SAMPLED, 0, SAMPLED]
    assert made[7:] == [SAMPLED]


def test_what_is_known_of_a_graph_draws_each_of_its_first_rounds_once() -> None:
    made: list[int] = []

    def count(peers: int, rng: np.random.Generator) -> Drawn:
        def make(t: int) -> csr_array:
            made.append(t)
            return csr_array(np.roll(np.eye(peers, dtype=bool), 1 + t % (peers - 1), axis=0))

        return Drawn(EveryRound(make))

    net = build(count, MIXINGS["metropolis"], 9, np.random.default_rng(0))
    _ = (net.spectrum, net.notes, net.edges, net.directed, net.rows_sum, net.columns_sum)
    assert sorted(made) == list(range(SAMPLED))
    made.clear()
    build(count, MIXINGS["metropolis"], 9, np.random.default_rng(0), examine=False)
    assert made == [0]


@pytest.mark.parametrize("peers", [1, 2, 3, 8, 15])
def test_a_matching_pairs_all_peers_but_one(peers: int) -> None:
    net = network("random_matching", peers)
    assert (net.endless, net.directed, net.edges) == (True, False, peers // 2)
    for w in net.weights[:5]:
        dense = w.toarray()
        np.testing.assert_array_equal(dense, dense.T)
        np.testing.assert_allclose(dense @ dense, dense)  # pairs average exactly
        assert ((dense != 0).sum(axis=1) == 2).sum() == peers // 2 * 2


def test_every_pair_meets() -> None:
    met = sum((w.toarray() for w in network("random_matching", 6).weights[:100]), np.zeros((6, 6)))
    assert (met > 0).all()


def test_the_contraction_of_matchings_is_that_of_theory() -> None:
    """E W = 1/2 + (1/2) (J - I) / (P - 1): disagreement squared shrinks to 1/2 - 1/(2 (P - 1))."""
    spectrum = network("random_matching", 1000).spectrum
    assert spectrum.second == pytest.approx(np.sqrt(0.5 - 0.5 / 999), rel=0.02)
    assert network("random_matching", 2).spectrum.gap == 1
    assert network("random_matching", 16).spectrum.smallest == 0


def test_rounds_that_average_exactly_by_chance_are_not_counted() -> None:
    """Of 4 peers, a matching leaves one of three directions of disagreement: a factor 1/sqrt(3).

    The next one averages exactly, unless it is the same one (a third), whose factor is 1: of three
    counted rounds two have the factor 1/sqrt(3).
    """
    seconds = [network("random_matching", 4, seed=seed).spectrum.second for seed in range(20)]
    assert np.mean(seconds) == pytest.approx(3 ** (-1 / 3), rel=0.04)
    gaps = [
        network("equitopo", peers, seed=seed, one_peer=True).spectrum.gap
        for peers in (8, 16, 32)
        for seed in range(5)
    ]
    assert 0.2 < min(gaps) < max(gaps) < 0.45


def test_rounds_that_all_average_exactly_have_the_gap_one() -> None:
    assert network("random_regular", 6, s=5).spectrum.gap == 1


@pytest.mark.parametrize(
    ("name", "options", "one_way"),
    [
        ("random_matching", {}, False),
        ("random_regular", {"s": 2}, False),
        ("random_out", {"s": 2}, True),
        ("random_out", {"s": 7}, False),
        ("directed_random", {"redraw": True}, False),
        ("equitopo", {"one_peer": True}, False),
        ("teleportation", {"active": 4}, True),
        ("teleportation", {"active": 8}, False),
    ],
)
def test_a_graph_states_whether_a_round_may_have_an_edge_without_a_way_back(
    name: str, options: dict[str, Any], one_way: bool
) -> None:
    graph = partial(TOPOLOGIES[name], **options)
    net = build(graph, MIXINGS["uniform"], 8, np.random.default_rng(0))
    assert net.one_way is one_way
    assert any(pi is None for pi in net.stationary[:SAMPLED]) is one_way


def test_draws_of_one_matrix_have_its_spectrum() -> None:
    ring = build(TOPOLOGIES["ring"], MIXINGS["metropolis"], 8, np.random.default_rng(0))
    same = build(
        lambda peers, rng: drawn(lambda _: ring.weights[0], rng),
        MIXINGS["lazy"],
        8,
        np.random.default_rng(0),
    )
    assert same.own_weights
    assert same.spectrum.second == pytest.approx(ring.spectrum.second, rel=1e-3)
    assert same.spectrum.smallest == pytest.approx(ring.spectrum.smallest)
    assert len(same.examples) == SAMPLED


def test_columns_that_sum_to_one_are_measured_too() -> None:
    def draw(rng: np.random.Generator) -> csr_array:
        return csr_array(np.roll(np.eye(7, dtype=bool), 1 + rng.integers(6), axis=0))

    def shifts(peers: int, rng: np.random.Generator) -> object:
        return drawn(draw, rng)

    by_row, by_column = (
        build(shifts, MIXINGS[rule], 7, np.random.default_rng(0)).spectrum.second
        for rule in ("uniform", "out_degree")
    )
    assert 0 < by_column < 1
    assert by_column == pytest.approx(by_row, rel=0.2)


def test_possible_edges_must_connect_the_peers() -> None:
    empty = csr_array((4, 4), dtype=bool)
    with pytest.raises(GraphError, match="not connected: 4 pieces"):
        build(
            lambda peers, rng: drawn(lambda _: empty, rng, empty),
            MIXINGS["lazy"],
            4,
            np.random.default_rng(0),
        )


def test_bad_weights_of_a_drawn_round_are_refused() -> None:
    with pytest.raises(GraphError, match="weights of peer 0 sum to 2"):
        build(
            lambda peers, rng: drawn(lambda _: csr_array(2 * np.eye(3)), rng),
            MIXINGS["lazy"],
            3,
            np.random.default_rng(0),
        )
