"""Graphs and mixing matrices that `Run` takes as objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import csr_array

import dfl
from tests.support.given import PEERS, last, refused, ring_matrix, small
from tests.support.stopping import crash, same
from topologies.graphs import pattern
from topologies.sequences import Drawn, EveryRound


def test_the_number_of_peers_is_that_of_the_graph() -> None:
    graph = nx.cycle_graph(PEERS)
    assert last(small(peers=None, topology=graph)) == last(small(topology="ring"))
    assert "--topology" in (line := refused(lambda: small(peers=5, topology=graph)))
    assert "6 nodes" in line


def test_the_direction_of_an_edge() -> None:
    """With the edge 0 -> 1 peer 1 receives from peer 0, not the other way round."""
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
    matrix = csr_array(np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]))
    by_rule = last(small(peers=3, topology=graph, mixing="uniform"))
    assert by_rule == last(small(peers=3, mixing=matrix))
    assert by_rule != last(small(peers=3, mixing=csr_array(matrix.T)))


def test_a_mixing_matrix_is_the_graph_where_none_is_given() -> None:
    matrix = ring_matrix(csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS))))
    expected = last(small(topology="ring"))
    assert last(small(peers=None, mixing=matrix)) == expected
    assert last(small(mixing=matrix.toarray())) == expected
    assert last(small(topology=nx.cycle_graph(PEERS), mixing=matrix)) == expected
    line = refused(lambda: small(topology=nx.path_graph(PEERS), mixing=matrix))
    assert "--mixing has a weight of peer 0 for peer 5" in line
    assert "--mixing" in refused(lambda: small(topology="ring", mixing=matrix[:4, :4]))


def test_a_graph_for_each_round() -> None:
    pairs = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(0, 3), (1, 2)])]
    for graph in pairs:
        graph.add_nodes_from(range(4))
    ordered = [nx.Graph() for _ in pairs]
    for graph, other in zip(ordered, pairs, strict=True):
        graph.add_nodes_from(range(4))
        graph.add_edges_from(other.edges)
    run = small(peers=4, topology=ordered, mixing="uniform", rounds=2, lr=1e-9, init="independent")
    row = last(run)
    assert row["consensus_distance"] < 1e-6  # two rounds of pairwise means are the mean of four
    assert last(replace(run, rounds=1))["consensus_distance"] > 1e-3


def test_named_nodes_are_the_same_peers_in_every_round() -> None:
    one = nx.Graph([("a", "b"), ("b", "c")])
    other = nx.Graph([("c", "b"), ("b", "a")])
    line = refused(lambda: small(peers=None, topology=[one, other]))
    assert line.startswith("--topology")
    assert "round 1" in line
    assert "\n" not in line
    ordered = nx.Graph()
    ordered.add_nodes_from(one)
    ordered.add_edges_from(other.edges)
    chain = small(peers=3, topology="chain")
    assert last(small(peers=None, topology=[one, ordered])) == last(chain)


def test_nodes_that_are_numbers_are_the_peers_of_these_numbers() -> None:
    graph = nx.Graph([(0, 3), (3, 1), (1, 4), (4, 2), (2, 5)])
    ordered = nx.Graph()
    ordered.add_nodes_from(range(PEERS))
    ordered.add_edges_from(graph.edges)
    attacked = {"attack": "scale:peers=0", "topology": graph}
    assert last(small(**attacked)) == last(small(**attacked | {"topology": ordered}))


def test_an_edge_that_is_stored_as_zero_is_none() -> None:
    matrix = csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS)))
    matrix[0, PEERS - 1] = 0
    matrix[PEERS - 1, 0] = 0
    assert last(small(topology=matrix.astype(bool))) == last(small(topology="chain"))


@pytest.mark.usefixtures("without_figures")
def test_a_run_with_a_mixing_matrix_is_resumed_with_it(tmp_path: Path) -> None:
    matrix = ring_matrix(csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS))))
    run = small(rounds=4, checkpoint_every=2, mixing=matrix, peers=None, dataset="digits")
    list(dfl.simulate(replace(run, out=tmp_path / "whole")))
    crash(replace(run, out=tmp_path / "cut"), 2)
    list(dfl.simulate(dfl.resumed(tmp_path / "cut", mixing=matrix)))
    same(tmp_path / "whole", tmp_path / "cut")


def by_turns(t: int) -> Any:
    return pattern([nx.path_graph(PEERS), nx.star_graph(PEERS - 1)][t % 2])


def test_a_graph_that_is_made_for_every_round() -> None:
    """By an object, with the number of its peers, and by what a function returns."""
    expected = last(small(topology=[by_turns(0), by_turns(1)]))
    every = EveryRound(by_turns)
    assert last(small(peers=None, topology=every)) == expected
    assert last(small(topology=lambda peers, rng: every)) == expected
    assert last(small(topology=lambda peers, rng: Drawn(every))) == expected
    assert "(5, 5), not (6, 6)" in refused(lambda: small(peers=5, topology=every))


def test_nodes_are_peers_of_their_numbers_in_every_form() -> None:
    graph = nx.Graph([(0, 3), (3, 1), (1, 4), (4, 2), (2, 5)])
    expected = last(small(topology=graph, attack="scale:peers=0"))
    for form in (EveryRound(lambda t: graph), lambda peers, rng: graph):
        assert last(small(topology=form, attack="scale:peers=0")) == expected


def ending(t: int) -> Any:
    return [by_turns(0), by_turns(1)][t]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"topology": EveryRound(ending)}, "--topology own:EveryRound with 6 peers: round 2 fails"),
        ({"topology": EveryRound(lambda t: 3)}, "--topology own:EveryRound with 6 peers: the topo"),
        ({"peers": None, "topology": EveryRound([].__getitem__)}, "--topology fails in round 0: I"),
        ({"topology": Drawn(EveryRound(by_turns))}, "--topology must be a spec, a matrix, a netw"),
        ({"mixing": EveryRound(by_turns)}, "--mixing must be a spec, a matrix, a list or tuple"),
    ],
)
def test_graphs_of_every_round_that_are_none(settings: dict[str, Any], line: str) -> None:
    assert refused(lambda: small(**settings)).startswith(line)


def test_the_rest_of_an_endless_sequence_is_endless() -> None:
    later = EveryRound(by_turns)[1:]
    expected = last(small(topology=[by_turns(1), by_turns(0)]))
    assert last(small(peers=None, topology=later)) == expected


@pytest.mark.parametrize("form", [np.asarray, csr_array, nx.from_numpy_array])
def test_rounds_have_no_edge_beyond_the_possible_ones(form: Any) -> None:
    """Methods keep memory for the possible edges only."""
    ring = nx.to_numpy_array(nx.cycle_graph(PEERS)) > 0
    expected = last(small(topology=nx.cycle_graph(PEERS), algorithm="qdfedavgm"))

    def drawn(peers: int, rng: Any, *, last: int = 10**6) -> Drawn:
        other = pattern(nx.complete_graph(peers))
        return Drawn(EveryRound(lambda t: other if t >= last else csr_array(ring)), form(ring))

    found = last(small(topology=drawn, algorithm="qdfedavgm"))
    assert found["accuracy_mean"] == expected["accuracy_mean"]
    beyond = partial(drawn, last=0)
    line = refused(lambda: small(topology=beyond, algorithm="qdfedavgm"))
    assert "which is no edge of `possible`" in line


def test_the_nodes_of_every_round_are_the_same_peers() -> None:
    graph = nx.cycle_graph(list("abcdef"))
    other = nx.cycle_graph(list("fedcba"))
    expected = last(small(topology=graph))
    assert last(small(topology=EveryRound(lambda t: graph))) == expected
    drawn = EveryRound(lambda t: [graph, other][t % 2])
    wanted = "the graph of round 1 are not those of round 0"
    assert wanted in refused(lambda: small(topology=drawn))
    assert wanted in refused(lambda: small(topology=lambda peers, rng: [graph, other]))


class Turns(Sequence[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, t: Any) -> Any:
        return [by_turns(0), by_turns(1)][t]


def test_arrays_of_three_axes_and_sequences_are_graphs_of_rounds() -> None:
    expected = last(small(topology=[by_turns(0), by_turns(1)]))
    stacked = np.stack([by_turns(t).toarray() for t in range(2)])
    assert last(small(peers=None, topology=stacked)) == expected
    assert last(small(peers=None, topology=Turns())) == expected
    assert last(small(topology=lambda peers, rng: stacked)) == expected
    ring = ring_matrix(csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS)))).toarray()
    assert last(small(peers=None, mixing=np.stack([ring]))) == last(small(topology="ring"))
    both = {"topology": np.stack([ring > 0] * 2), "mixing": np.stack([ring] * 3)}
    assert "--mixing has 3 matrices, and --topology 2 graphs" in refused(lambda: small(**both))


def endless() -> Iterator[Any]:
    yield from map(by_turns, itertools.count())


def made(peers: int, rng: Any) -> Iterator[Any]:
    return endless()


@pytest.mark.parametrize(
    ("graphs", "part"),
    [
        (endless(), "a list or tuple of these, an EveryRound, or a function (peers, rng)"),
        (itertools.islice(endless(), 2), "a list or tuple of these, an EveryRound, or a function"),
        (endless, "--topology own:endless must take (peers, rng) and return a graph, and takes ()"),
        (by_turns, "--topology own:by_turns must take (peers, rng) and return a graph, and takes"),
        (made, "a networkx graph, or a list or tuple of these, not a value of type generator"),
    ],
)
def test_what_is_no_sequence_of_graphs_is_refused_with_the_forms(graphs: Any, part: str) -> None:
    assert part in refused(lambda: small(topology=graphs))


def test_as_many_matrices_as_graphs() -> None:
    graph = nx.cycle_graph(PEERS)
    matrix = ring_matrix(csr_array(nx.to_numpy_array(graph)))
    assert last(small(topology=graph, mixing=[matrix])) == last(small(topology="ring"))
    for graphs, matrices in ((1, 2), (3, 2), (2, 3)):
        run = small(topology=[graph] * graphs, mixing=[matrix] * matrices)
        with pytest.raises(dfl.InputError) as caught:
            list(dfl.simulate(run))
        line = str(caught.value)
        assert "--mixing" in line
