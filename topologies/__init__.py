"""Graphs of peers, and the mixing matrices by which neighbours average.

>>> import numpy as np
>>> from topologies import MIXINGS, TOPOLOGIES, build
>>> graph = build(TOPOLOGIES["ring"], MIXINGS["metropolis"], 16, np.random.default_rng(0))
>>> round(graph.spectrum.gap, 4)
0.0507

`graphs`, `hops`, `random_graphs`, `trees`, `clusters`, `base_k_graphs` and `epidemic` have the
graphs, `files` graphs from a user's file, `mixings` and `optimal` the rules for weights, `spectra`
their spectra. A new graph or rule is one function with the decorator `topology` or `mixing`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray
from scipy.sparse import csr_array, issparse
from scipy.sparse.csgraph import connected_components

# These register their topologies and rules.
from topologies import base_k_graphs as base_k_graphs
from topologies import clusters as clusters
from topologies import epidemic as epidemic
from topologies import files as files
from topologies import hops as hops
from topologies import optimal as optimal
from topologies import random_graphs as random_graphs
from topologies import trees as trees
from topologies.errors import GraphError
from topologies.graphs import (
    MAX_EDGES,
    TOPOLOGIES,
    Clustered,
    Graph,
    in_order,
    pattern,
    takes_labels,
    topology,
)
from topologies.mixings import MIXINGS, Mixing, mixing, uniform
from topologies.sequences import ENDLESS, SAMPLED, Drawn, EveryRound, entries, is_endless
from topologies.spectra import (
    TOLERANCE,
    Spectrum,
    spectrum,
    spectrum_of_draws,
    stationary,
)

__all__ = [
    "MIXINGS",
    "TOPOLOGIES",
    "Clustered",
    "Graph",
    "GraphError",
    "Mixing",
    "Spectrum",
    "WeightedGraph",
    "build",
    "mixing",
    "pattern",
    "spectrum",
    "topology",
]


@dataclass(frozen=True)
class WeightedGraph:
    """A connected graph with its mixing matrices.

    Attributes:
        weights: (P, P) float64, rows or columns summing to 1, canonical and sorted; entry t mod
            length is for round t. Where every round draws a new graph, the length is `ENDLESS`.
        degrees: (P,) the number of other peers that a peer sends to in any round; in round 0 where
            every round draws a new graph.
        own_weights: whether the graph came with weights (a matrix from a file), so that no mixing
            rule was applied.
        possible: (P, P) bool, every edge that a round may have, where every round draws a new
            graph; None where it may be any.
        clusters: (P,), the number of the cluster of each peer; None for a graph without clusters.
        active: (n, n) the weights of a round among the n peers whose models are used again, which
            have the spectrum of the graph; None where the models of all are used.
        one_way: whether a round may have an edge over which no way leads back, as its topology
            states where every round draws a new graph.
    """

    weights: Sequence[csr_array]
    degrees: NDArray[np.int64]
    own_weights: bool = False
    possible: csr_array | None = None
    clusters: NDArray[np.int64] | None = None
    active: csr_array | None = None
    one_way: bool = False

    @property
    def endless(self) -> bool:
        """Whether every round draws a new graph."""
        return len(self.weights) == ENDLESS

    @cached_property
    def examples(self) -> Sequence[csr_array]:
        """All matrices; the first `SAMPLED` where every round draws a new graph."""
        return self.weights[:SAMPLED] if self.endless else self.weights

    @cached_property
    def directed(self) -> bool:
        """Whether in some round a peer receives from one that does not receive from it."""
        patterns = (matrix.astype(bool) for matrix in self.examples)
        return any((each != each.T).nnz > 0 for each in patterns)

    @property
    def edges(self) -> int:
        """The edges that `degrees` counts, undirected, or directed if `directed`."""
        return int(self.degrees.sum()) // (1 if self.directed else 2)

    @cached_property
    def rows_sum(self) -> bool:
        """Whether the rows of all matrices sum to 1, so that peers that agree go on agreeing."""
        return all(_sum_to_one(matrix, axis=1) for matrix in self.examples)

    @cached_property
    def columns_sum(self) -> bool:
        """Whether the columns of all matrices sum to 1, so that the mean over peers is kept."""
        return all(_sum_to_one(matrix, axis=0) for matrix in self.examples)

    @cached_property
    def spectrum(self) -> Spectrum:
        """The spectrum of the weights, computed at its first use."""
        if self.active is not None:
            return spectrum([self.active])
        return spectrum_of_draws(self.examples) if self.endless else spectrum(self.weights)

    @cached_property
    def stationary(self) -> Sequence[NDArray[np.float64] | None]:
        """For every matrix pi (P,) with pi W = pi; see `spectra.stationary`."""
        if self.endless:
            return EveryRound(lambda t: stationary(self.weights[t]))
        return tuple(stationary(matrix) for matrix in self.weights)

    @cached_property
    def within(self) -> csr_array | None:
        """(P, P) equal weights of a peer and of its neighbours in its cluster; the mean over a
        cluster where that is a clique. None for a graph without clusters.
        """
        if self.clusters is None:
            return None
        edges = _pattern_of(self.weights[0]).tocoo()
        inside = self.clusters[edges.row] == self.clusters[edges.col]
        pairs = edges.row[inside], edges.col[inside]
        return _canonical(uniform(csr_array((edges.data[inside], pairs), shape=edges.shape)))

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the user, one line each. Computes the spectrum."""
        mixed = self.spectrum
        notes = []
        if not self.columns_sum:
            notes.append(
                "the weights are not doubly stochastic on this graph, so some peers count more "
                "than others: averaging keeps a weighted average of the peers, not the mean"
            )
        if np.isnan(mixed.gap):
            notes.append(
                f"the spectrum of such weights is not computed for {len(self.degrees):,} peers"
            )
        elif mixed.gap == 0:
            notes.append(
                "plain averaging with these weights never settles (lambda_min is "
                f"{mixed.smallest:.4g}); peers that keep some weight on themselves settle: "
                "metropolis, lazy"
            )
        elif mixed.smallest < -0.99:
            notes.append(
                f"lambda_min is {mixed.smallest:.6g}, very close to -1: disagreement changes sign "
                "every round and hardly shrinks; lazy weights have no negative eigenvalue"
            )
        return tuple(notes)


def build(
    graph: Callable[..., Graph],
    mixing: Mixing,
    peers: int,
    rng: Generator,
    labels: NDArray[np.int64] | None = None,
    examine: bool = True,
) -> WeightedGraph:
    """Return a graph of P peers with its weights.

    Args:
        graph: a function of `TOPOLOGIES` with its options bound. If it returns weights, they are
            used as they are.
        mixing: a rule of `MIXINGS`.
        peers: the number of peers P.
        rng: draws random graphs; the same state gives the same graph.
        labels: (P, L), the training examples of every label at every peer, for a graph that
            `needs_labels`.
        examine: whether the weights are checked in all rounds, the first `SAMPLED` of a graph that
            every round draws anew; False where another process has checked them.

    Raises:
        GraphError: the graph fails, or does not accept its options or the number of peers, it is
            no matrix (P, P), it is not connected, it needs labels and there are none, or the
            weights are negative, not finite, or sum to 1 neither in every row nor in every column.
    """
    if not 1 <= peers <= MAX_EDGES:
        raise GraphError(f"peers must be between 1 and {MAX_EDGES:,}, not {peers:,}")
    further = _labels(graph, labels)
    try:
        made: Any = graph(peers, rng, *further)
    except GraphError:
        raise
    except Exception as error:
        raise GraphError(_one_line(error)) from error
    if is_endless(made):
        made = Drawn(made)
    if isinstance(made, Drawn):
        built = _endless(made, mixing, peers)
    elif isinstance(made, Clustered):
        weighted = _periodic(made.graph, mixing, peers)
        built = replace(weighted, clusters=_clusters(made.clusters, peers))
    else:
        built = _periodic(made, mixing, peers)
    if examine and not (built.rows_sum or built.columns_sum):
        raise GraphError(
            "in some rounds only rows sum to 1, and in others only columns: it must be the same in "
            "every round"
        )
    return built


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _clusters(given: ArrayLike, peers: int) -> NDArray[np.int64]:
    """Return the number of the cluster of each peer, (P,).

    Raises:
        GraphError: they are no such numbers.
    """
    clusters = np.asarray(given)
    if clusters.shape != (peers,) or not np.issubdtype(clusters.dtype, np.integer):
        raise GraphError(
            f"clusters must be a whole number for each of the {peers:,} peers, not an array of "
            f"{clusters.dtype} of shape {clusters.shape}"
        )
    return clusters.astype(np.int64)


def _labels(
    graph: Callable[..., Graph], labels: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], ...]:
    """Return the labels as a further argument of a graph that needs them, else nothing."""
    if not takes_labels(graph):
        return ()
    if labels is None or not labels.shape[1]:
        raise GraphError("it depends on the labels of the peers' examples, and there are none")
    return (labels,)


def _periodic(made: Any, mixing: Mixing, peers: int) -> WeightedGraph:
    """Return the graph of one matrix, or of one for every round of a period."""
    given = list(entries(made))
    nodes = _nodes(given[0])
    rounds = [_matrix(_same_nodes(each, nodes, t), peers) for t, each in enumerate(given)]
    weights = tuple(_weighted(each, mixing) for each in rounds)
    patterns = [_pattern_of(matrix) for matrix in weights]
    union = csr_array(sum(patterns[1:], start=patterns[0]))
    _check_connected(union)
    own = any(each.dtype.kind == "f" for each in rounds)
    return WeightedGraph(weights, _degrees(union), own)


def _endless(made: Drawn, mixing: Mixing, peers: int) -> WeightedGraph:
    """Return a graph whose every round is drawn, and given its weights, when it is asked for."""

    def graph(t: int) -> Any:
        try:
            return made.rounds[t]
        except Exception as error:
            raise GraphError(f"round {t} fails: {_one_line(error)}") from error

    nodes = _nodes(graph(0))

    def drawn(t: int) -> csr_array:
        return _matrix(_same_nodes(graph(t), nodes, t), peers)

    def weighted(t: int) -> csr_array:
        matrix = _weighted(drawn(t), mixing)
        if possible is not None and (beyond := _pattern_of(matrix) > possible).nnz:
            i, j = (int(each[0]) for each in beyond.nonzero())
            raise GraphError(f"{i} receives from {j}, which is no edge of `possible`")
        return matrix

    possible = None
    if made.possible is not None:
        possible = _pattern_of(_canonical(_matrix(made.possible, peers)))
        _check_connected(possible)
    weights = EveryRound(weighted, _bytes)
    own = drawn(0).dtype.kind == "f"
    degrees = _degrees(_pattern_of(weights[0]))
    return WeightedGraph(weights, degrees, own, possible, active=made.active, one_way=made.one_way)


def _nodes(graph: Any) -> list[object] | None:
    """Return the nodes of a networkx graph in the order of the peers; None for another graph."""
    return in_order(graph) if hasattr(graph, "number_of_nodes") else None


def _same_nodes(graph: Any, first: list[object] | None, t: int) -> Any:
    """Return the graph of round t.

    Args:
        graph: a matrix or a networkx graph.
        first: the nodes of that of round 0, where it is a networkx graph.

    Raises:
        GraphError: its nodes are not the same peers.
    """
    nodes = _nodes(graph)
    if nodes is not None and first is not None and nodes != first:
        raise GraphError(
            f"the nodes of the graph of round {t} are not those of round 0 in their order: number "
            "them, or add them in one order"
        )
    return graph


def _weighted(graph: csr_array, mixing: Mixing) -> csr_array:
    """Return the weights of the graph of one round."""
    if graph.dtype.kind != "f":
        edges = _pattern_of(_canonical(graph)) if graph.diagonal().any() else graph
        graph = _matrix(mixing(edges), graph.shape[0], "mixing rule")
    matrix = _canonical(graph)
    _check_averages(matrix)
    return matrix


def _matrix(made: Any, peers: int, of: str = "topology") -> csr_array:
    """Return a matrix of a graph or of weights, (P, P), or that of a networkx graph.

    Raises:
        GraphError: it is none.
    """
    graph = made
    if hasattr(made, "number_of_nodes"):  # row j of the matrix is what j receives
        graph = pattern(made.reverse() if made.is_directed() else made, in_order(made))
    if not (issparse(graph) or isinstance(graph, np.ndarray)) or graph.dtype.kind not in "buif":
        also = ", a networkx graph, or a list or tuple of these" if of == "topology" else ""
        raise GraphError(
            f"the {of} must return a matrix of bool or of float{also}, not a value of type "
            f"{type(made).__name__}"
        )
    if graph.shape != (peers, peers):
        raise GraphError(f"the {of} must return a matrix {(peers, peers)}, not {graph.shape}")
    if isinstance(graph, np.ndarray) and graph.dtype.kind == "f":
        graph = graph.astype(np.float64)  # float16, too, which SciPy lacks
    return graph if isinstance(graph, csr_array) else csr_array(graph)


def _canonical(matrix: csr_array) -> csr_array:
    """Return a float64 copy without duplicates or stored zeros, columns ascending in each row."""
    matrix = csr_array(matrix, dtype=np.float64, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


def _pattern_of(weights: csr_array) -> csr_array:
    """Return the pattern of the weights off the diagonal, (P, P) bool."""
    entries = weights.tocoo()
    others = entries.row != entries.col
    return csr_array(
        (np.ones(others.sum(), dtype=bool), (entries.row[others], entries.col[others])),
        shape=weights.shape,
    )


def _degrees(pattern: csr_array) -> NDArray[np.int64]:
    """Return the number of peers that a peer sends to, (P,)."""
    return np.bincount(pattern.indices, minlength=pattern.shape[0]).astype(np.int64)


def _bytes(matrix: csr_array) -> int:
    return int(matrix.data.nbytes + matrix.indices.nbytes + matrix.indptr.nbytes)


def _sum_to_one(weights: csr_array, axis: int) -> bool:
    return bool(abs(weights.sum(axis=axis) - 1).max() <= TOLERANCE)


def _check_averages(weights: csr_array) -> None:
    """Raise an error unless weights are finite and not negative and rows or columns sum to 1."""
    bad = np.flatnonzero(~(np.isfinite(weights.data) & (weights.data >= 0)))
    if bad.size:
        i = int(np.searchsorted(weights.indptr, bad[0], side="right")) - 1
        j = weights.indices[bad[0]]
        value = weights.data[bad[0]]
        raise GraphError(
            f"the weight of peer {i} for peer {j} is {value:g}; weights must be finite and not "
            "negative"
        )
    sums = weights.sum(axis=1)
    worst = int(np.argmax(abs(sums - 1)))
    if abs(sums[worst] - 1) > TOLERANCE and not _sum_to_one(weights, axis=0):
        raise GraphError(
            f"the weights of peer {worst} sum to {sums[worst]:.9g}; each row must sum to 1, or "
            "each column"
        )


def _check_connected(union: csr_array) -> None:
    pieces, labels = connected_components(union, directed=True, connection="strong")
    if pieces > 1:
        largest = np.bincount(labels).max()
        raise GraphError(
            f"the graph is not connected: {pieces} pieces, the largest of {largest} of "
            f"{len(labels)} peers; every peer must be reachable from every other"
        )
