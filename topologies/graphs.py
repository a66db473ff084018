"""Graphs of peers: one function per graph, under its own name in `TOPOLOGIES`.

A topology is called as `f(peers, rng, **options)`; its options are its keyword-only parameters. It
returns a `Graph`, in one of five forms:

- a (P, P) bool matrix: entry (i, j) is set where peer i receives from peer j. A rule of `MIXINGS`
  then sets the weights;
- a list of such matrices: entry t mod length is the graph of round t;
- `Drawn`, or its `EveryRound`: every round draws a new one;
- `Clustered`: a matrix, and the cluster of every peer;
- a (P, P) float matrix, in place of any of these: the weights themselves, and no rule is applied.

A topology that is decorated with `needs_labels` is called as `f(peers, rng, labels, **options)`:
labels are the training examples of every label at every peer, (P, L).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import isqrt
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array

from topologies.errors import GraphError, refuse_clash
from topologies.sequences import Drawn

if TYPE_CHECKING:
    import networkx as nx
else:
    from topologies.lazy import nx


@dataclass(frozen=True)
class Clustered:
    """A graph whose peers form clusters.

    Attributes:
        graph: (P, P) bool.
        clusters: (P,), the number of the cluster of each peer.
    """

    graph: csr_array
    clusters: NDArray[np.int64]


Graph: TypeAlias = csr_array | Sequence[csr_array] | Drawn | Clustered
Topology = TypeVar("Topology", bound=Callable[..., Any])

TOPOLOGIES: dict[str, Callable[..., Graph]] = {}

MAX_EDGES = 20_000_000
"""The most directed edges of a graph: 240 MB of weights; the complete graph of 4,472 peers."""

TRIES = 100
"""The most draws of a random graph, one of which must be connected."""


def topology(function: Topology) -> Topology:
    """Add a graph to `TOPOLOGIES` under the function's name.

    Raises:
        GraphError: another graph has that name.
    """
    refuse_clash("topology", TOPOLOGIES, function)
    TOPOLOGIES[function.__name__] = function
    return function


def needs_labels(function: Topology) -> Topology:
    """State of a graph that it depends on the labels of the peers' examples."""
    setattr(function, "needs_labels", True)  # noqa: B010  a function's type has no such attribute
    return function


def takes_labels(function: Callable[..., Any]) -> bool:
    """Return whether a graph, its options bound, is one that `needs_labels`."""
    return getattr(getattr(function, "func", function), "needs_labels", False) is True


def pattern(graph: "nx.Graph", nodes: Sequence[object] | None = None) -> csr_array:
    """Return the adjacency matrix of an undirected networkx graph, (P, P) bool, without self-loops.

    Args:
        graph: the graph.
        nodes: its nodes in the order of the peers; by default the order of the graph.
    """
    adjacency = nx.to_scipy_sparse_array(graph, nodes, dtype=bool, format="coo")
    others = adjacency.row != adjacency.col
    rows = adjacency.row[others]
    cols = adjacency.col[others]
    return csr_array((np.ones(len(rows), dtype=bool), (rows, cols)), shape=adjacency.shape)


def in_order(graph: "nx.Graph") -> list[object]:
    """Return the nodes of a networkx graph in the order of the peers: nodes 0 to P - 1 are the
    peers of these numbers, others are in the order of the graph.
    """
    numbered = set(graph) == set(range(len(graph)))
    return sorted(graph) if numbered else list(graph)


@topology
def ring(peers: int, rng: Generator) -> csr_array:
    """A circle: each peer has two neighbours."""
    each = np.arange(peers if peers > 2 else peers - 1)
    return from_pairs(peers, each, (each + 1) % peers)


@topology
def chain(peers: int, rng: Generator) -> csr_array:
    """A line: the ring with one edge cut."""
    each = np.arange(peers - 1)
    return from_pairs(peers, each, each + 1)


@topology
def star(peers: int, rng: Generator) -> csr_array:
    """Peer 0 in the middle, and every other peer linked to it only."""
    others = np.arange(1, peers)
    return from_pairs(peers, np.zeros_like(others), others)


@topology
def complete(peers: int, rng: Generator) -> csr_array:
    """All peers are neighbours."""
    affordable("complete", peers, peers * (peers - 1))
    return csr_array(~np.eye(peers, dtype=bool))


@topology
def grid(peers: int, rng: Generator) -> csr_array:
    """Rows and columns, as square as the number of peers allows."""
    place = np.arange(peers).reshape(_sides("grid", peers, least=2))
    i = np.concatenate([place[:-1].ravel(), place[:, :-1].ravel()])
    j = np.concatenate([place[1:].ravel(), place[:, 1:].ravel()])
    return from_pairs(peers, i, j)


@topology
def torus(peers: int, rng: Generator) -> csr_array:
    """A grid whose opposite borders touch: 4 neighbours each."""
    place = np.arange(peers).reshape(_sides("torus", peers, least=3))
    near = [np.roll(place, step, axis).ravel() for axis in (0, 1) for step in (1, -1)]
    return from_senders(np.stack(near, axis=1))


def from_pairs(peers: int, i: NDArray[np.int64], j: NDArray[np.int64]) -> csr_array:
    """Return the undirected graph, (P, P) bool, with an edge between i[k] and j[k] for every k."""
    rows, cols = np.append(i, j), np.append(j, i)
    return csr_array((np.ones(len(rows), dtype=bool), (rows, cols)), shape=(peers, peers))


def from_senders(table: NDArray[np.int64]) -> csr_array:
    """Return the graph of a table (P, k) whose row i lists the peers that send to peer i."""
    peers, k = table.shape
    rows = np.repeat(np.arange(peers), k)
    return csr_array((np.ones(peers * k, dtype=bool), (rows, table.ravel())), shape=(peers, peers))


def _rows(peers: int) -> int:
    """Return the shorter side of the most square rectangle of that many peers."""
    return next(rows for rows in range(isqrt(peers), 0, -1) if peers % rows == 0)


def _sides(name: str, peers: int, least: int) -> tuple[int, int]:
    """Return both sides of the most square rectangle, which must be at least `least`."""
    rows = _rows(peers)
    if rows >= least:
        return rows, peers // rows
    above = next(other for other in count(peers + 1) if _rows(other) >= least)
    raise GraphError(
        f"{name} needs both sides to be at least {least}; {peers} peers can only be "
        f"{rows} x {peers // rows}; the next number that works is {above} "
        f"({_rows(above)} x {above // _rows(above)})"
    )


def affordable(name: str, peers: int, edges: int) -> None:
    """Raise an error for more than `MAX_EDGES` directed edges."""
    if edges > MAX_EDGES:
        raise GraphError(
            f"{name} of {peers:,} peers has {edges:,} directed edges; at most {MAX_EDGES:,} are "
            "accepted: choose fewer peers or a sparser graph"
        )
