"""Rules for the weights of a graph: one function per rule, under its own name in `MIXINGS`.

A rule takes an adjacency matrix, (P, P) bool without a diagonal, and returns the mixing matrix W,
(P, P) float64: peer i replaces x_i by sum_j w_ij x_j. Rows sum to 1, or columns, as push-sum needs
(`out_degree`). d_i is the number of peers that send to peer i. Rows and columns sum to 1, so that
the mean over peers is kept, for the first three rules on undirected graphs, and for all where every
peer sends to d peers and receives from d.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, eye_array
from scipy.sparse.csgraph import connected_components

from topologies.errors import GraphError, refuse_clash

SCALINGS = 20_000
"""The most rounds of Sinkhorn's scaling."""
SCALED = 1e-13
"""The distance of row sums from 1 at which the scaling ends."""

Mixing = Callable[[csr_array], csr_array]

MIXINGS: dict[str, Mixing] = {}


def mixing(function: Mixing) -> Mixing:
    """Add a rule to `MIXINGS` under the function's name.

    Raises:
        GraphError: another rule has that name.
    """
    refuse_clash("mixing", MIXINGS, function)
    MIXINGS[function.__name__] = function
    return function


def needs_ways_back(function: Mixing) -> Mixing:
    """State of a rule that it refuses a graph with an edge over which no way leads back."""
    setattr(function, "needs_ways_back", True)  # noqa: B010  as of `needs_labels`
    return function


@mixing
def metropolis(adjacency: csr_array) -> csr_array:
    """w_ij = 1 / (1 + max(d_i, d_j)), the rest on w_ii (Xiao, Boyd, Lall 2005)."""
    degrees, rows, cols = _entries(adjacency)
    return _keeping_rest(adjacency, 1 / (1 + np.maximum(degrees[rows], degrees[cols])))


@mixing
def max_degree(adjacency: csr_array) -> csr_array:
    """w_ij = 1 / (1 + max_k d_k), the rest on w_ii."""
    degrees, rows, _ = _entries(adjacency)
    return _keeping_rest(adjacency, np.full(len(rows), 1 / (1 + degrees.max())))


@mixing
def lazy(adjacency: csr_array) -> csr_array:
    """(I + metropolis) / 2: slower, and no eigenvalue is negative on an undirected graph."""
    return (eye_array(adjacency.shape[0], format="csr") + metropolis(adjacency)) / 2


@mixing
def uniform(adjacency: csr_array) -> csr_array:
    """w_ij = 1 / (d_i + 1), also for j = i."""
    degrees, rows, _ = _entries(adjacency)
    return _keeping_rest(adjacency, 1 / (1 + degrees[rows]))


@mixing
def neighbors(adjacency: csr_array) -> csr_array:
    """w_ij = 1 / d_i, and w_ii = 0. On a bipartite graph -1 is an eigenvalue: plain averaging never
    settles.
    """
    degrees, rows, _ = _entries(adjacency)
    isolated = diags_array((degrees == 0).astype(np.float64), format="csr")
    return _with(adjacency, 1 / degrees[rows]) + isolated


@mixing
def out_degree(adjacency: csr_array) -> csr_array:
    """w_ij = 1 / (o_j + 1), also for i = j, where j sends to o_j peers. Columns sum to 1, for
    push-sum (Assran et al. 2019).
    """
    return csr_array(uniform(csr_array(adjacency.T)).T)


@mixing
@needs_ways_back
def sinkhorn(adjacency: csr_array) -> csr_array:
    """w_ij = a_i b_j, also for i = j, with rows and columns that sum to 1, on any graph, also
    directed, whose edges lie on cycles (Sinkhorn, Knopp 1967).
    """
    _, labels = connected_components(adjacency, directed=True, connection="strong")
    edges = adjacency.tocoo()
    one_way = labels[edges.row] != labels[edges.col]
    if one_way.any():
        k = int(np.argmax(one_way))
        raise GraphError(
            f"sinkhorn: no way leads back over the edge from peer {edges.col[k]} to peer "
            f"{edges.row[k]}, so doubly stochastic weights do not use it: choose another --mixing"
        )
    both = adjacency.astype(np.float64) + eye_array(adjacency.shape[0], format="csr")
    rows = columns = np.ones(both.shape[0])
    for _ in range(SCALINGS):
        rows = 1 / (both @ columns)
        columns = 1 / (both.T @ rows)
        if abs(rows * (both @ columns) - 1).max() < SCALED:
            break
    return csr_array(diags_array(rows) @ both @ diags_array(columns))


def _entries(
    adjacency: csr_array,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return the degrees d (P,), then the row and the column of every entry."""
    degrees = np.diff(adjacency.indptr).astype(np.int64)
    return degrees, np.repeat(np.arange(len(degrees)), degrees), adjacency.indices


def _with(adjacency: csr_array, values: NDArray[np.float64]) -> csr_array:
    return csr_array((values, adjacency.indices, adjacency.indptr), shape=adjacency.shape)


def _keeping_rest(adjacency: csr_array, values: NDArray[np.float64]) -> csr_array:
    """Return weights off the diagonal, and on it what is missing from 1."""
    weights = _with(adjacency, values)
    return weights + diags_array(1 - weights.sum(axis=1), format="csr")
