"""Three random graphs of networkx as arrays.

They are the graphs that networkx draws with the same seed. A million peers have them in seconds,
without the objects of networkx, which take gigabytes.
"""

from collections import Counter
from math import log
from random import Random

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray
from scipy.sparse import csr_array

from topologies.graphs import from_pairs

Ints = NDArray[np.int64]

DRAWS = 2**20
"""The most random numbers at a time."""


def random_regular(peers: int, k: int, seed: int) -> csr_array:
    """Return a graph in which every peer has k neighbours, as `networkx.random_regular_graph`.

    Source:
        Steger, Wormald, "Generating random regular graphs quickly", Probability and Computing 8,
        1999.
    """
    rng = Random(seed)  # noqa: S311  that of networkx
    while True:
        edges = _regular(peers, k, rng)
        if edges is not None:
            return from_pairs(peers, edges // peers, edges % peers)


def _regular(peers: int, k: int, rng: Random) -> Ints | None:
    """Return edges low * P + high, ascending; None where the last peers find no partner.

    All k P half-edges are paired at random. Those of loops and of edges that exist are paired anew.
    """
    edges = np.array([peers * peers])  # above all edges, so that every search ends before it
    halves = list(range(peers)) * k
    while halves:
        rng.shuffle(halves)
        pairs = np.sort(np.array(halves).reshape(-1, 2), axis=1)
        keys = pairs[:, 0] * peers + pairs[:, 1]
        new = np.zeros(len(keys), dtype=bool)
        new[np.unique(keys, return_index=True)[1]] = True
        new &= (pairs[:, 0] != pairs[:, 1]) & (edges[np.searchsorted(edges, keys)] != keys)
        edges = np.sort(np.concatenate([edges, keys[new]]))
        left = Counter(pairs[~new].ravel().tolist())
        if left and not _suitable(peers, edges, list(left)):
            return None
        halves = list(left.elements())
    return edges[:-1]


def _suitable(peers: int, edges: Ints, left: list[int]) -> bool:
    """Return whether some two of the peers that are left have no edge yet.

    `first` may change in the inner loop: networkx looks at the same pairs.
    """
    for first in left:
        for second in left:
            if first == second:
                break
            first, second = min(first, second), max(first, second)
            key = first * peers + second
            if edges[np.searchsorted(edges, key)] != key:
                return True
    return False


def erdos_renyi(peers: int, p: float, seed: int) -> csr_array:
    """Return a graph of each pair with probability p, as `networkx.fast_gnp_random_graph`.

    Pairs (1, 0), (2, 0), (2, 1), (3, 0), … are numbered from 0; the numbers of pairs between two
    edges are geometrically distributed.

    Source:
        Batagelj, Brandes, "Efficient generation of large random networks", Physical Review E 71,
        2005.
    """
    pairs = peers * (peers - 1) // 2
    found = [np.arange(pairs if p >= 1 else 0)]
    rng = RandomState()
    state = Random(seed).getstate()[1]  # noqa: S311  the same numbers as those of Python
    rng.set_state({"bit_generator": "MT19937", "state": {"key": state[:-1], "pos": state[-1]}})
    last = -1 if 0 < p < 1 else pairs
    block = min(DRAWS, 16 + int(p * pairs), 2**62 // (pairs + 1))  # hops add up to less than 2^63
    while last < pairs:
        draws = rng.random_sample(block)
        logs = np.fromiter(map(log, (1 - draws).tolist()), np.float64, len(draws))
        hops = np.minimum(logs / log(1 - p), pairs).astype(np.int64)
        edges = last + np.cumsum(hops + 1)
        found.append(edges[edges < pairs])
        last = int(edges[-1])
    number = np.concatenate(found)
    high = ((1 + np.sqrt(1 + 8 * number.astype(np.float64))) / 2).astype(np.int64)
    high -= high * (high - 1) // 2 > number  # where the root was rounded
    high += high * (high + 1) // 2 <= number
    return from_pairs(peers, high, number - high * (high - 1) // 2)


def watts_strogatz(peers: int, k: int, p: float, seed: int) -> csr_array:
    """Return a ring of k < P neighbours each, k even, whose edges have been moved with probability
    p, as `networkx.watts_strogatz_graph`.
    """
    rng = Random(seed)  # noqa: S311  that of networkx
    moved: set[int] = set()
    gone: set[int] = set()
    degrees = [k] * peers
    everyone = range(peers)

    def key(i: int, j: int) -> int:
        return min(i, j) * peers + max(i, j)

    def linked(i: int, j: int) -> bool:
        near = min((i - j) % peers, (j - i) % peers) <= k // 2
        return key(i, j) in moved or (near and key(i, j) not in gone)

    for hop in range(1, k // 2 + 1):
        for i in everyone:
            if rng.random() >= p:
                continue
            other = rng.choice(everyone)
            while other == i or linked(i, other):
                other = rng.choice(everyone)
                if degrees[i] >= peers - 1:
                    break
            else:
                j = (i + hop) % peers
                gone.add(key(i, j))
                moved.add(key(i, other))
                degrees[j] -= 1
                degrees[other] += 1
    here = np.tile(np.arange(peers), k // 2)
    there = (here + np.repeat(np.arange(1, k // 2 + 1), peers)) % peers
    ring = np.minimum(here, there) * peers + np.maximum(here, there)
    kept = np.setdiff1d(ring, np.fromiter(gone, np.int64, len(gone)))
    edges = np.union1d(kept, np.fromiter(moved, np.int64, len(moved)))
    return from_pairs(peers, edges // peers, edges % peers)
