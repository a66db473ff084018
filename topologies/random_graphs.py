"""Graphs that are drawn at random: once, or anew in every round."""

from collections.abc import Callable
from math import log, pi, sqrt
from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array, eye_array
from scipy.sparse.csgraph import connected_components

from topologies import drawn_by_arrays
from topologies.errors import GraphError
from topologies.graphs import TRIES, Graph, affordable, from_pairs, pattern, topology
from topologies.sequences import Drawn, EveryRound, drawn, generators

if TYPE_CHECKING:
    import networkx as nx
else:
    from topologies.lazy import nx


@topology
def regular(peers: int, rng: Generator, *, k: int = 4) -> csr_array:
    """A random graph in which every peer has k neighbours."""
    if not 1 <= k < peers or k * peers % 2:
        raise GraphError(f"regular needs 1 <= k < peers and k*peers even: k={k}, peers={peers}")
    affordable("regular", peers, k * peers)

    def draw(seed: int) -> csr_array:
        if 2 * k < peers:
            return drawn_by_arrays.random_regular(peers, k, seed)
        # For large k, rejection is slow.
        others = drawn_by_arrays.random_regular(peers, peers - 1 - k, seed)
        return from_pairs(peers, *np.nonzero(np.triu(~others.toarray(), 1)))

    return connected(draw, rng, f"regular:k={k} of {peers} peers", "k of 3 or more likely connects")


@topology
def erdos_renyi(peers: int, rng: Generator, *, p: float) -> csr_array:
    """A random graph: each pair is linked with probability p, independently."""
    _probability(p)
    affordable("erdos_renyi", peers, round(p * peers * (peers - 1)))
    enough = min(1.0, 2 * log(peers) / peers)  # twice the threshold of Erdős and Rényi (1960)
    return connected(
        lambda seed: drawn_by_arrays.erdos_renyi(peers, chance(p), seed),
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
    affordable("small_world", peers, k * peers)
    return connected(
        lambda seed: drawn_by_arrays.watts_strogatz(peers, k, p, seed),
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
    affordable("barabasi_albert", peers, 2 * m * peers)
    return pattern(nx.barabasi_albert_graph(peers, m, seed=_seed(rng)))


@topology
def geometric(peers: int, rng: Generator, *, radius: float | None = None) -> csr_array:
    """A random graph in the unit square: peers at a distance of at most `radius` are linked
    (Gilbert 1961).

    Args:
        peers, rng: as of every topology.
        radius: by default sqrt(2 log P / (pi P)), the square root of two times what connects most
            graphs (Penrose 1997).
    """
    reach = sqrt(2 * log(peers) / (pi * peers)) if radius is None else radius
    if not reach >= 0:
        raise GraphError(f"geometric needs a radius of at least 0, not {reach:g}")
    reach = min(reach, 2.0)  # beyond the diagonal of the square all pairs are linked
    affordable("geometric", peers, round(min(1.0, pi * reach**2) * peers**2))
    return connected(
        lambda seed: pattern(nx.random_geometric_graph(peers, reach, seed=seed)),
        rng,
        f"geometric:radius={reach:.3g} of {peers} peers",
        "a larger radius likely connects",
    )


@topology
def directed_random(peers: int, rng: Generator, *, k: int = 2, redraw: bool = False) -> Graph:
    """Directed: every peer sends to the next on a random circle and to k - 1 others at random,
    drawn once, or anew in every round (`redraw`).

    Peers receive from different numbers of others: with --mixing out_degree columns sum to 1.
    """
    if not 1 <= k < max(2, peers):
        raise GraphError(f"directed_random needs 1 <= k < peers: k={k}, peers={peers}")
    affordable("directed_random", peers, k * peers)

    def draw(rng: Generator) -> csr_array:
        circle = rng.permutation(peers)
        others = max(1, peers - 2)
        hops = [[1, *(2 + rng.choice(others, k - 1, replace=False))] for _ in range(peers)]
        receivers = circle[(np.arange(peers)[:, None] + np.array(hops)) % peers]
        ones = np.ones(k * peers, dtype=bool)
        return csr_array((ones, (receivers.ravel(), np.repeat(circle, k))), shape=(peers, peers))

    if peers == 1:
        return csr_array((1, 1), dtype=bool)
    return drawn(draw, rng) if redraw else draw(rng)


@topology
def random_matching(peers: int, rng: Generator) -> Drawn:
    """Time-varying: in every round the peers form pairs at random; with P odd, one is alone."""

    def draw(rng: Generator) -> csr_array:
        order = rng.permutation(peers)[: peers // 2 * 2].reshape(-1, 2)
        return from_pairs(peers, order[:, 0], order[:, 1])

    return drawn(draw, rng)


@topology
def teleportation(peers: int, rng: Generator, *, active: int = 4) -> Drawn:
    """Time-varying: in every round `active` peers, drawn at random, average on a ring, and the
    active peers of the next round take over their models (Takezawa, Stich 2025).

    It comes with its weights: 1/3 for each neighbour on the ring, 1 for what is taken over. A model
    of a peer that is not active is not used again; the mean over peers is not kept. The spectral
    gap is that of the ring.
    """
    if not 1 <= active <= peers:
        raise GraphError(f"teleportation needs 1 <= active <= peers, not {active} of {peers}")
    affordable("teleportation", peers, peers + 2 * active)
    of_round = generators(rng)
    near = csr_array(pattern(nx.cycle_graph(active)) + eye_array(active, dtype=bool, format="csr"))
    near.sort_indices()
    taking, giving = near.tocoo().coords
    values = 1 / near.sum(axis=1)[taking]
    ring = csr_array((values, (taking, giving)), shape=near.shape)

    def chosen(t: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return of_round(t).permutation(peers)[:active]

    def make(t: int) -> csr_array:
        now, then = chosen(t), chosen(t + 1)
        others = np.setdiff1d(np.arange(peers), then)
        rows, cols = (np.concatenate([ends, others]) for ends in (then[taking], now[giving]))
        data = np.concatenate([values, np.ones(len(others))])
        return csr_array((data, (rows, cols)), shape=(peers, peers))

    return Drawn(EveryRound(make), active=ring, one_way=active < peers)


def chance(p: float) -> float:
    """Return a probability, and 0 where 1 - p rounds to 1: edges are drawn by 1 / log(1 - p)."""
    return p if 1.0 - p < 1.0 else 0.0


def _probability(p: float) -> None:
    if not 0 <= p <= 1:
        raise GraphError(f"p must be between 0 and 1, not {p:g}")


def _seed(rng: Generator) -> int:
    return int(rng.integers(2**31))


def connected(
    draw: Callable[[int], csr_array], rng: Generator, name: str, advice: str
) -> csr_array:
    """Return the first connected graph among `TRIES` draws."""
    for _ in range(TRIES):
        adjacency = draw(_seed(rng))
        if connected_components(adjacency, directed=False, return_labels=False) == 1:
            return adjacency
    raise GraphError(f"{name}: none of {TRIES} random graphs was connected; {advice}")
