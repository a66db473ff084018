"""Trees: graphs without a cycle, as methods that relay messages need them. `chain` and `star` in
`graphs` are trees too.
"""

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array, triu
from scipy.sparse.csgraph import connected_components, minimum_spanning_tree

from topologies.errors import GraphError
from topologies.graphs import TOPOLOGIES, from_pairs, topology
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
def spanning_tree(peers: int, rng: Generator, *, of: str = "complete") -> csr_array:
    """A spanning tree of another graph, which `of` names with at most one option: the tree of least
    weight, for random weights of the edges.
    """
    chosen = choose(of, TOPOLOGIES)
    if hasattr(chosen.func, "needs_labels"):
        raise GraphError(f"spanning_tree of {of}: it depends on labels")
    graph = chosen(peers, rng)
    if not isinstance(graph, csr_array) or graph.dtype.kind == "f" or (graph != graph.T).nnz:
        raise GraphError(f"spanning_tree needs an undirected graph that does not change, not {of}")
    edges = triu(graph, format="coo")
    weights = csr_array((1 + rng.random(edges.nnz), (edges.row, edges.col)), shape=graph.shape)
    kept = minimum_spanning_tree(weights).tocoo()
    made = from_pairs(peers, kept.row, kept.col)
    if connected_components(made, directed=False, return_labels=False) > 1:
        raise GraphError(f"spanning_tree: {of} of {peers} peers is not connected")
    return made
