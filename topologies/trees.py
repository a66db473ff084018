"""Trees: graphs without a cycle, as methods that relay messages need them. `chain` and `star` in
`graphs` are trees too.
"""

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array, triu
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from topologies.errors import GraphError
from topologies.graphs import TOPOLOGIES, Clustered, Graph, affordable, from_pairs, topology
from topologies.specs import choose


@topology
def tree(peers: int, rng: Generator, *, branches: int = 2) -> csr_array:
    """A tree with root 0, whose levels are filled in order: peer i has the parent (i - 1) //
    branches.
    """
    if branches < 1:
        raise GraphError(f"tree needs branches of at least 1, not {branches}")
    branches = min(branches, peers)
    child = np.arange(1, peers)
    return from_pairs(peers, child, (child - 1) // branches)


@topology
def double_tree(peers: int, rng: Generator) -> list[csr_array]:
    """Two binary trees in turn, `tree` and the same with the peers in reverse order, so that no
    peer has children in both (Sanders, Speck, Träff 2009). RelaySGD uses both in every round.
    """
    one = tree(peers, rng)
    return [one, csr_array(one[::-1, ::-1])]


@topology
def spanning_tree(peers: int, rng: Generator, *, of: str = "complete", count: int = 1) -> Graph:
    """Spanning trees of another graph, which `of` names with at most one option. A tree is that of
    least weight, for random weights of the edges, larger for those of the trees before it.

    Args:
        peers, rng: as of every topology.
        of: the other graph, which is undirected and does not change.
        count: the trees, used in turn. RelaySGD uses all of them in every round.
    """
    chosen = choose(of, TOPOLOGIES)
    if hasattr(chosen.func, "needs_labels"):
        raise GraphError(f"spanning_tree of {of}: it depends on labels")
    if not 1 <= count <= max(1, peers // 2):
        raise GraphError(f"spanning_tree needs 1 <= count <= peers/2: count={count}, peers={peers}")
    affordable("spanning_tree", peers, 2 * count * peers)
    graph = chosen(peers, rng)
    graph = graph.graph if isinstance(graph, Clustered) else graph
    if not isinstance(graph, csr_array) or graph.dtype.kind == "f" or (graph != graph.T).nnz:
        raise GraphError(f"spanning_tree needs an undirected graph that does not change, not {of}")
    i, j = (ends.astype(np.int64) for ends in triu(graph, format="coo").coords)
    used = np.zeros(len(i))
    trees = []
    for _ in range(count):
        weights = csr_array((1 + used + rng.random(len(i)), (i, j)), shape=graph.shape)
        kept = minimum_spanning_tree(weights).tocoo()
        used += np.isin(i * peers + j, kept.row.astype(np.int64) * peers + kept.col)
        trees.append(from_pairs(peers, kept.row, kept.col))
    if connected_components(trees[0], directed=False, return_labels=False) > 1:
        raise GraphError(f"spanning_tree: {of} of {peers} peers is not connected")
    return trees if count > 1 else trees[0]
