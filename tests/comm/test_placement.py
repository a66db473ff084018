"""Peers are placed so that few messages cross between ranks, and the ranks stay balanced."""

import networkx as nx
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.placement import crossing, placed
from dfl.comm.plan import Arcs, peer_plan
from dfl.core.layout import Layout


def mixing(graph: nx.Graph) -> csr_array:
    """Return weights on a graph, with a diagonal."""
    return csr_array(nx.to_scipy_sparse_array(graph, dtype=float) + np.eye(len(graph)))


def shuffled(graph: nx.Graph) -> nx.Graph:
    """Return a graph whose nodes are numbered at random."""
    names = np.random.default_rng(0).permutation(len(graph)).tolist()
    renamed = nx.relabel_nodes(graph, dict(zip(graph, names, strict=True)))
    ordered = nx.Graph()
    ordered.add_nodes_from(range(len(graph)))
    ordered.add_edges_from(renamed.edges)
    return ordered


def crossed(matrix: csr_array, layout: Layout) -> int:
    """Return the messages that cross, by the plans of the ranks."""
    return sum(sum(peer_plan(matrix, layout, rank).sends.values()) for rank in range(layout.ranks))


@pytest.mark.parametrize("ranks", [2, 3, 16])
@pytest.mark.parametrize(
    "graph",
    [
        shuffled(nx.cycle_graph(60)),
        shuffled(nx.grid_2d_graph(8, 8, periodic=True)),
        shuffled(nx.random_geometric_graph(64, 0.3, seed=1)),
        shuffled(nx.random_labeled_tree(64, seed=1)),
    ],
    ids=["ring", "torus", "geometric", "tree"],
)
def test_another_order_saves_messages(graph: nx.Graph, ranks: int) -> None:
    matrix = mixing(graph)
    peers = matrix.shape[0]
    layout = placed([matrix], peers, ranks)
    before = Layout(peers, ranks)
    assert layout.order is not None
    assert sorted(layout.order) == list(range(peers))
    assert layout.starts == before.starts
    hosted = [layout.hosted(rank) for rank in range(ranks)]
    assert all((np.diff(each) > 0).all() for each in hosted)
    assert crossed(matrix, layout) <= 0.9 * crossed(matrix, before)


def test_a_ring_at_random_places_is_cut_twice() -> None:
    matrix = mixing(shuffled(nx.cycle_graph(60)))
    assert crossed(matrix, placed([matrix], 60, 2)) == 4  # two edges, both ways


@pytest.mark.parametrize(
    ("matrices", "peers", "ranks"),
    [
        ([mixing(nx.cycle_graph(16))], 16, 4),
        ([mixing(nx.complete_graph(16))], 16, 4),
        ([mixing(shuffled(nx.cycle_graph(16)))], 16, 1),
        ([mixing(shuffled(nx.cycle_graph(16)))], 16, 16),
        ([csr_array(np.roll(np.eye(16), 5, axis=1))], 16, 4),
        ([mixing(nx.barabasi_albert_graph(1024, 2, seed=0))], 1024, 16),
        ([], 16, 4),
    ],
    ids=["ring", "complete", "one rank", "a rank each", "an edge each", "a little", "server"],
)
def test_peers_are_consecutive_where_nothing_is_saved(
    matrices: list[csr_array], peers: int, ranks: int
) -> None:
    assert placed(matrices, peers, ranks).order is None


def test_all_graphs_of_a_sequence_count() -> None:
    ring = shuffled(nx.cycle_graph(32))
    edges = list(ring.edges)
    halves = [nx.Graph(), nx.Graph()]
    for half, own in zip(halves, (edges[::2], edges[1::2]), strict=True):
        half.add_nodes_from(range(32))
        half.add_edges_from(own)
    assert crossed(mixing(ring), placed([mixing(half) for half in halves], 32, 2)) == 4


def ends(matrix: csr_array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    arcs = Arcs.of(matrix)
    return arcs.sender, arcs.receiver


def test_a_message_crosses_to_a_rank_once() -> None:
    star = mixing(nx.star_graph(5))
    assert crossing(Layout(6, 2), *ends(star)) == 1 + 3  # the centre once, and three leaves
    assert crossing(Layout(6, 2), *ends(star)) == crossed(star, Layout(6, 2))
