"""Graphs of peers: one function per graph, under its own name in `TOPOLOGIES`.

A topology is called as `f(peers, rng, **options)`; its options are its keyword-only parameters. It
returns a `Graph`, in one of four forms:

- a (P, P) bool matrix: entry (i, j) is set where peer i receives from peer j. A rule of `MIXINGS`
  then sets the weights;
- a list of such matrices: entry t mod length is the graph of round t;
- `Drawn`: every round draws a new one;
- a (P, P) float matrix, in place of any of these: the weights themselves, and no rule is applied.

A topology that is decorated with `needs_labels` is called as `f(peers, rng, labels, **options)`:
labels are the training examples of every label at every peer, (P, L).
"""

from collections.abc import Callable, Sequence
from itertools import count
from math import isqrt, log
from typing import Any, TypeAlias, TypeVar

import networkx as nx
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from topologies.errors import GraphError
from topologies.sequences import Drawn

Graph: TypeAlias = csr_array | Sequence[csr_array] | Drawn
Topology = TypeVar("Topology", bound=Callable[..., Any])

TOPOLOGIES: dict[str, Callable[..., Graph]] = {}

MAX_EDGES = 20_000_000
"""The most directed edges of a graph: 240 MB of weights; the complete graph of 4,472 peers."""

TRIES = 100
"""The most draws of a random graph, one of which must be connected."""


def topology(function: Topology) -> Topology:
    """Add a graph to `TOPOLOGIES` under the function's name."""
    TOPOLOGIES[function.__name__] = function
    return function


def needs_labels(function: Topology) -> Topology:
    """State of a graph that it depends on the labels of the peers' examples."""
    setattr(function, "needs_labels", True)  # noqa: B010  a function's type has no such attribute
    return function


def pattern(graph: nx.Graph) -> csr_array:
    """Return the adjacency matrix of an undirected networkx graph, (P, P) bool, without self-loops.

    Peer i is node i in the order of the graph.
    """
    adjacency = nx.to_scipy_sparse_array(graph, dtype=bool, format="coo")
    others = adjacency.row != adjacency.col
    rows = adjacency.row[others]
    cols = adjacency.col[others]
    return csr_array((np.ones(len(rows), dtype=bool), (rows, cols)), shape=adjacency.shape)


@topology
def ring(peers: int, rng: Generator) -> csr_array:
    """A circle: each peer has two neighbours."""
    return pattern(nx.cycle_graph(peers))


@topology
def path(peers: int, rng: Generator) -> csr_array:
    """A line: the ring with one edge cut."""
    return pattern(nx.path_graph(peers))


@topology
def star(peers: int, rng: Generator) -> csr_array:
    """Peer 0 in the middle, and every other peer linked to it only."""
    return pattern(nx.star_graph(peers - 1))


@topology
def complete(peers: int, rng: Generator) -> csr_array:
    """All peers are neighbours."""
    _affordable("complete", peers, peers * (peers - 1))
    return csr_array(~np.eye(peers, dtype=bool))


@topology
def grid(peers: int, rng: Generator) -> csr_array:
    """Rows and columns, as square as the number of peers allows."""
    return pattern(nx.grid_2d_graph(*_sides("grid", peers, least=2)))


@topology
def torus(peers: int, rng: Generator) -> csr_array:
    """A grid whose opposite borders touch: 4 neighbours each."""
    return pattern(nx.grid_2d_graph(*_sides("torus", peers, least=3), periodic=True))


@topology
def hypercube(peers: int, rng: Generator) -> csr_array:
    """Peers whose binary numbers differ in one bit: log2 P neighbours each."""
    bits = peers.bit_length() - 1
    if peers != 1 << bits:
        raise GraphError(
            f"hypercube needs a power of two peers, such as {1 << bits} or {2 << bits}, not {peers}"
        )
    return _from_senders(np.arange(peers)[:, None] ^ (1 << np.arange(bits)))


@topology
def regular(peers: int, rng: Generator, *, k: int = 4) -> csr_array:
    """A random graph in which every peer has k neighbours."""
    if not 1 <= k < peers or k * peers % 2:
        raise GraphError(f"regular needs 1 <= k < peers and k*peers even: k={k}, peers={peers}")
    _affordable("regular", peers, k * peers)

    def draw(seed: int) -> nx.Graph:
        if 2 * k < peers:
            return nx.random_regular_graph(k, peers, seed)
        # For large k, rejection is slow.
        return nx.complement(nx.random_regular_graph(peers - 1 - k, peers, seed))

    return _connected(
        draw, rng, f"regular:k={k} of {peers} peers", "k of 3 or more likely connects"
    )


@topology
def erdos_renyi(peers: int, rng: Generator, *, p: float) -> csr_array:
    """A random graph: each pair is linked with probability p, independently."""
    _probability(p)
    _affordable("erdos_renyi", peers, round(p * peers * (peers - 1)))
    drawn = p if 1.0 - p < 1.0 else 0.0  # networkx divides by log(1 - p)
    enough = min(1.0, 2 * log(peers) / peers)  # twice the threshold of Erdős and Rényi (1960)
    return _connected(
        lambda seed: nx.fast_gnp_random_graph(peers, drawn, seed),
        rng,
        f"erdos_renyi:p={p:g} of {peers} peers",
        f"p of {enough:.2g} or more likely connects",
    )


@topology
def small_world(peers: int, rng: Generator, *, k: int = 4, p: float = 0.1) -> csr_array:
    """A ring of k neighbours each, every edge then moved to a random peer with probability p
    (Watts, Strogatz 1998).
    """
    if not 2 <= k < peers or k % 2:
        raise GraphError(f"small_world needs an even k with 2 <= k < peers: k={k}, peers={peers}")
    _probability(p)
    _affordable("small_world", peers, k * peers)
    return _connected(
        lambda seed: nx.watts_strogatz_graph(peers, k, p, seed),
        rng,
        f"small_world:k={k},p={p:g} of {peers} peers",
        "k of 4 or more, or a smaller p, likely connects",
    )


@topology
def barabasi_albert(peers: int, rng: Generator, *, m: int = 2) -> csr_array:
    """A random graph with hubs: each new peer links to m peers, by their degree (Barabási, Albert
    1999).
    """
    if not 1 <= m < peers:
        raise GraphError(f"barabasi_albert needs 1 <= m < peers: m={m}, peers={peers}")
    _affordable("barabasi_albert", peers, 2 * m * peers)
    return pattern(nx.barabasi_albert_graph(peers, m, seed=_seed(rng)))


@topology
def exponential(peers: int, rng: Generator) -> csr_array:
    """Directed: peer i sends to i + 1, i + 2, i + 4, … (mod P) every round (Ying et al. 2021)."""
    hops = _powers(peers)
    _affordable("exponential", peers, peers * len(hops))
    return _from_senders((np.arange(peers)[:, None] - hops) % peers)


@topology
def one_peer_exponential(peers: int, rng: Generator) -> list[csr_array]:
    """Directed, time-varying: in round t peer i sends only to i + 2^(t mod ceil(log2 P)) (mod P)
    (Ying et al. 2021).

    With weights 1/2, 1/2 and P a power of two, log2 P rounds average exactly.
    """
    hops = _powers(peers)
    _affordable("one_peer_exponential", peers, peers * len(hops))
    rounds = [_from_senders((np.arange(peers)[:, None] - [hop]) % peers) for hop in hops]
    return rounds or [csr_array((1, 1), dtype=bool)]


def from_pairs(peers: int, i: NDArray[np.int64], j: NDArray[np.int64]) -> csr_array:
    """Return the undirected graph, (P, P) bool, with an edge between i[k] and j[k] for every k."""
    rows, cols = np.append(i, j), np.append(j, i)
    return csr_array((np.ones(len(rows), dtype=bool), (rows, cols)), shape=(peers, peers))


def _powers(peers: int) -> NDArray[np.int64]:
    """Return the hops 1, 2, 4, … below the number of peers: ceil(log2 P) of them."""
    return 1 << np.arange((peers - 1).bit_length(), dtype=np.int64)


def _from_senders(table: NDArray[np.int64]) -> csr_array:
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


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise GraphError(f"p must be between 0 and 1, not {p:g}")


def _affordable(name: str, peers: int, edges: int) -> None:
    """Raise an error for more than `MAX_EDGES` directed edges."""
    if edges > MAX_EDGES:
        raise GraphError(
            f"{name} of {peers:,} peers has {edges:,} directed edges; at most {MAX_EDGES:,} are "
            "accepted: choose fewer peers or a sparser graph"
        )


def _seed(rng: Generator) -> int:
    return int(rng.integers(2**31))


def _connected(
    draw: Callable[[int], nx.Graph], rng: Generator, name: str, advice: str
) -> csr_array:
    """Return the first connected graph among `TRIES` draws."""
    for _ in range(TRIES):
        adjacency = pattern(draw(_seed(rng)))
        if connected_components(adjacency, directed=False, return_labels=False) == 1:
            return adjacency
    raise GraphError(f"{name}: none of {TRIES} random graphs was connected; {advice}")
