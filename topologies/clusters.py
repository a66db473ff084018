"""Graphs of clusters: peers with many edges inside a cluster, and few between clusters."""

from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from topologies.errors import GraphError
from topologies.graphs import Clustered, affordable, from_pairs, needs_labels, pattern, topology
from topologies.random_graphs import chance, connected

if TYPE_CHECKING:
    import networkx as nx
else:
    from topologies.lazy import nx

Ints = NDArray[np.int64]

MOST_STEPS = 100_000
"""The most attempts to swap peers of D-Cliques; the paper makes 1,000."""

MOST_CLUSTERS = 1000
"""The most clusters of a random graph, every two of which are drawn by themselves."""


@topology
def caveman(peers: int, rng: Generator, *, size: int = 4) -> Clustered:
    """Cliques of about `size` peers on a ring: the last peer of each is linked to the first of the
    next (Watts 1999).
    """
    cliques = _cliques("caveman", peers, np.arange(peers), size)
    last, first = (np.array([clique[end] for clique in cliques]) for end in (-1, 0))
    return _with_cliques(peers, cliques, np.stack([last, np.roll(first, -1)], axis=1))


@topology
def clustered(
    peers: int, rng: Generator, *, clusters: int = 4, inside: float = 0.8, between: float = 0.05
) -> Clustered:
    """A random graph of clusters of equal size: a pair is linked with probability `inside` or
    `between` (the stochastic block model; Holland, Laskey, Leinhardt 1983).
    """
    if not 1 <= clusters <= min(peers, MOST_CLUSTERS):
        raise GraphError(
            f"clustered needs 1 <= clusters <= {min(peers, MOST_CLUSTERS):,}: clusters={clusters}"
        )
    for name, p in (("inside", inside), ("between", between)):
        if not 0 <= p <= 1:
            raise GraphError(f"clustered: {name} must be between 0 and 1, not {p:g}")
    affordable("clustered", peers, round(max(between, inside / clusters) * peers**2))
    sizes = [len(part) for part in np.array_split(np.arange(peers), clusters)]
    table = np.where(np.eye(clusters, dtype=bool), chance(inside), chance(between))
    graph = connected(
        lambda seed: pattern(nx.stochastic_block_model(sizes, table, seed=seed)),
        rng,
        f"clustered:clusters={clusters},inside={inside:g},between={between:g} of {peers} peers",
        "a larger p between clusters likely connects",
    )
    return Clustered(graph, np.repeat(np.arange(clusters), sizes))


@topology
@needs_labels
def d_cliques(
    peers: int,
    rng: Generator,
    labels: Ints,
    *,
    size: int = 10,
    steps: int = 1000,
    between: Literal["ring", "fractal", "small_world", "complete"] = "ring",
) -> Clustered:
    """D-Cliques (Bellet, Kermarrec, Lavoie 2022): cliques whose labels are distributed as all
    peers' are, with few edges between them.

    Random cliques of about `size` peers; then, `steps` times, two cliques at random swap a pair of
    peers at random among those whose swap lowers the sum of both cliques' skews, sum_y |p_C(y) -
    p(y)|. An edge between cliques goes to the peers with the fewest such edges so far.

    Args:
        peers, rng, labels: as of every topology that needs labels.
        size: peers of a clique.
        steps: attempts to swap.
        between: the graph of the cliques. fractal: each of `size` cliques is linked to each, then
            each of `size` such groups, and so on; small_world: for 2^k below their number, clique c
            is linked to those 2^k and 2^k + 1 after it and before it on a ring.
    """
    if not 0 <= steps <= MOST_STEPS:
        raise GraphError(f"d_cliques: steps must be between 0 and {MOST_STEPS:,}, not {steps}")
    cliques = _cliques("d_cliques", peers, rng.permutation(peers), size)
    counts = np.asarray(labels, dtype=np.float64)
    for _ in range(steps if len(cliques) > 1 else 0):
        one, other = (cliques[c] for c in rng.choice(len(cliques), 2, replace=False))
        _swap(one, other, counts, rng)
    if between == "complete":
        affordable("d_cliques", peers, min(size, peers) * peers + len(cliques) ** 2)
    used = np.zeros(peers, dtype=np.int64)
    edges = []

    @cache
    def members(group: range) -> Ints:
        return np.sort(np.concatenate([cliques[c] for c in group]))

    for groups in _linked(len(cliques), between, size):
        # the lowest of the peers with the fewest edges
        ends = [own[np.argmin(used[own])] for own in map(members, groups)]
        used[ends] += 1
        edges.append(ends)
    return _with_cliques(peers, cliques, np.array(edges, dtype=np.int64).reshape(-1, 2))


def skew(own: NDArray[np.float64], everyone: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return sum_y |p_C(y) - p(y)| of label counts (..., L), against those of all (L,)."""
    shares = own / np.maximum(own.sum(axis=-1, keepdims=True), 1)
    return np.asarray(np.abs(shares - everyone / everyone.sum()).sum(axis=-1))


def _swap(one: Ints, other: Ints, counts: NDArray[np.float64], rng: Generator) -> None:
    """Swap a random pair of peers of two cliques, in place, if one lowers the sum of the skews."""
    everyone = counts.sum(axis=0)
    totals = [counts[clique].sum(axis=0) for clique in (one, other)]
    moved = counts[other][None, :] - counts[one][:, None]  # (a, b, L), what a swap brings to `one`
    after = skew(totals[0] + moved, everyone) + skew(totals[1] - moved, everyone)
    before = skew(totals[0], everyone) + skew(totals[1], everyone)
    better = np.argwhere(after < before - 1e-12)
    if len(better):
        a, b = better[rng.integers(len(better))]
        one[a], other[b] = other[b], one[a]


def _linked(cliques: int, between: str, size: int) -> Iterator[tuple[range, range]]:
    """Yield the pairs of groups of cliques with an edge between them."""
    single = [range(c, c + 1) for c in range(cliques)]
    if between == "complete":
        yield from combinations(single, 2)
    elif between == "fractal":
        width = 1
        while width < cliques:
            for begin in range(0, cliques, width * max(2, size)):
                ends = range(begin, min(begin + width * max(2, size), cliques), width)
                yield from combinations([range(c, min(c + width, cliques)) for c in ends], 2)
            width *= max(2, size)
    elif between == "small_world":
        hops = [2**k + more for k in range((cliques - 1).bit_length()) for more in (0, 1)]
        for c, hop, sign in product(range(cliques), hops, (-1, 1)):
            if hop % cliques:
                yield single[c], single[(c + sign * hop) % cliques]
    elif cliques > 1:
        for c in range(cliques if cliques > 2 else 1):
            yield single[c], single[(c + 1) % cliques]


def _cliques(name: str, peers: int, order: Ints, size: int) -> list[Ints]:
    """Return peers in cliques of `size`, or, where it does not divide P, of nearly that size."""
    if size < 1:
        raise GraphError(f"{name} needs a size of at least 1, not {size}")
    affordable(name, peers, min(size, peers) * peers)
    return [part.copy() for part in np.array_split(order, max(1, round(peers / size)))]


def _with_cliques(peers: int, cliques: list[Ints], edges: Ints) -> Clustered:
    """Return the graph of cliques, which are its clusters, and of edges (n, 2) between them."""
    clusters = np.empty(peers, dtype=np.int64)
    for number, clique in enumerate(cliques):
        clusters[clique] = number
    inside = [np.stack(np.triu_indices(len(c), 1), axis=1) for c in cliques]
    pairs = np.concatenate([*(c[each] for c, each in zip(cliques, inside, strict=True)), edges])
    pairs = pairs[pairs[:, 0] != pairs[:, 1]]
    return Clustered(from_pairs(peers, pairs[:, 0], pairs[:, 1]), clusters)
