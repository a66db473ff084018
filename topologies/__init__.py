"""Which graph, and which weights? Graphs of peers and the matrices with which neighbours average.

>>> import numpy as np
>>> from topologies import MIXINGS, TOPOLOGIES, build
>>> network = build(TOPOLOGIES["ring"], MIXINGS["metropolis"], 16, np.random.default_rng(0))
>>> round(network.spectrum.gap, 4)
0.0507

`graphs` has the graphs, `files` those that a user brings, `mixings` the weights, `spectra` how fast
they mix. A new graph or rule is one function under the decorator `topology` or `mixing`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from topologies import files as files  # registers its topology
from topologies.errors import GraphError
from topologies.graphs import MAX_EDGES, TOPOLOGIES, Graph, pattern, topology
from topologies.mixings import MIXINGS, Mixing, mixing
from topologies.spectra import TOLERANCE, Spectrum, spectrum, stationary

__all__ = [
    "MIXINGS",
    "TOPOLOGIES",
    "Graph",
    "GraphError",
    "Mixing",
    "Network",
    "Spectrum",
    "build",
    "mixing",
    "pattern",
    "spectrum",
    "topology",
]


@dataclass(frozen=True)
class Network:
    """A connected graph with its weights.

    weights: (P, P) float64, rows summing to 1, canonical and sorted; entry t mod length is for
        round t.
    edges: edges of the union over rounds, undirected, or directed if `directed`.
    directed: in some round a peer hears one that does not hear it.
    degrees: (P,) how many others a peer speaks to, in the union.
    brought: the graph brought its weights along (a matrix from a file), so no mixing rule was
        applied.
    """

    weights: Sequence[csr_array]
    edges: int
    directed: bool
    degrees: NDArray[np.int64]
    brought: bool = False

    @cached_property
    def spectrum(self) -> Spectrum:
        """How fast the weights mix. Computed when first asked for."""
        return spectrum(self.weights)

    @cached_property
    def stationary(self) -> tuple[NDArray[np.float64] | None, ...]:
        """pi (P,) with pi W = pi for every matrix; see `spectra.stationary`."""
        return tuple(stationary(matrix) for matrix in self.weights)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What the user should be warned of, one line each. Asks for the spectrum."""
        mixed, notes = self.spectrum, []
        if any(abs(w.sum(axis=0) - 1).max() > TOLERANCE for w in self.weights):
            notes.append(
                "the weights are not doubly stochastic on this graph, so some peers count more than others: what "
                "averaging keeps is a weighted average of the peers, not the mean"
            )
        if self.brought:
            notes.append("the weights are those of the file, and no mixing rule is applied to them")
        if np.isnan(mixed.gap):
            notes.append(
                f"the spectrum of such weights is not computed for {len(self.degrees):,} peers"
            )
        elif mixed.gap == 0:
            notes.append(
                f"plain averaging with these weights never settles (lambda_min is {mixed.smallest:.4g}); peers that "
                "keep some weight on themselves settle: metropolis, lazy"
            )
        elif mixed.smallest < -0.99:
            notes.append(
                f"lambda_min is {mixed.smallest:.6g}, very close to -1: disagreement changes sign every round and "
                "hardly shrinks; lazy weights have no negative eigenvalue"
            )
        return tuple(notes)


def build(
    graph: Callable[[int, Generator], Graph], mixing: Mixing, peers: int, rng: Generator
) -> Network:
    """The network of P peers: a graph of `TOPOLOGIES`, its options bound, with the weights of a
    rule of `MIXINGS`.

    The same rng state gives the same network. A graph that brings its own weights keeps them.
    Errors: `GraphError` for options or a number of peers that the graph refuses, for a graph in
    pieces, and for weights that do not average.
    """
    if not 1 <= peers <= MAX_EDGES:
        raise GraphError(f"peers must be between 1 and {MAX_EDGES:,}, not {peers:,}")
    drawn = graph(peers, rng)
    rounds = [drawn] if isinstance(drawn, csr_array) else drawn
    weights = tuple(_canonical(r if r.dtype.kind == "f" else mixing(r)) for r in rounds)
    for matrix in weights:
        _check_averages(matrix)
    hears = [_pattern_of(matrix) for matrix in weights]
    union = csr_array(sum(hears[1:], start=hears[0]))
    _check_connected(union)
    directed = any((heard != heard.T).nnz > 0 for heard in hears)
    degrees = np.bincount(union.indices, minlength=peers).astype(np.int64)
    brought = any(r.dtype.kind == "f" for r in rounds)
    return Network(
        weights, int(union.nnz) // (1 if directed else 2), bool(directed), degrees, brought
    )


def _canonical(matrix: csr_array) -> csr_array:
    """A float64 copy without duplicates or stored zeros, columns ascending in each row."""
    matrix = csr_array(matrix, dtype=np.float64, copy=True)
    matrix.sum_duplicates()
    matrix.eliminate_zeros()
    return matrix


def _pattern_of(weights: csr_array) -> csr_array:
    """Who hears whom but oneself, (P, P) bool."""
    entries = weights.tocoo()
    apart = entries.row != entries.col
    return csr_array(
        (np.ones(apart.sum(), dtype=bool), (entries.row[apart], entries.col[apart])),
        shape=weights.shape,
    )


def _check_averages(weights: csr_array) -> None:
    """Finite, not negative, rows summing to 1."""
    bad = np.flatnonzero(~(np.isfinite(weights.data) & (weights.data >= 0)))
    if bad.size:
        i = int(np.searchsorted(weights.indptr, bad[0], side="right")) - 1
        j, value = weights.indices[bad[0]], weights.data[bad[0]]
        raise GraphError(
            f"the weight of peer {i} for peer {j} is {value:g}; weights must be finite and not negative"
        )
    sums = weights.sum(axis=1)
    worst = int(np.argmax(abs(sums - 1)))
    if abs(sums[worst] - 1) > TOLERANCE:
        raise GraphError(
            f"the weights of peer {worst} sum to {sums[worst]:.9g}; each row must sum to 1"
        )


def _check_connected(union: csr_array) -> None:
    pieces, labels = connected_components(union, directed=True, connection="strong")
    if pieces > 1:
        largest = np.bincount(labels).max()
        raise GraphError(
            f"the graph is not connected: {pieces} pieces, the largest of {largest} of {len(labels)} peers; "
            "every peer must be reachable from every other"
        )
