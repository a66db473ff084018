"""Base-(k+1) graphs: sequences of degree at most k that average any number of peers exactly."""

from itertools import zip_longest
from math import ceil, log, prod

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array

from topologies.errors import GraphError
from topologies.graphs import affordable, topology

Ints = NDArray[np.int64]


class Round:
    """The weights of one round, of peers that average in groups and of single edges."""

    def __init__(self, peers: int) -> None:
        self.peers = peers
        self.i: list[Ints] = []
        self.j: list[Ints] = []
        self.weight: list[NDArray[np.float64]] = []

    def link(self, i: Ints, j: Ints, weight: float) -> None:
        """Add edges between i[n] and j[n], both ways."""
        self.i += [i, j]
        self.j += [j, i]
        self.weight.append(np.full(2 * len(i), weight))

    def average(self, groups: Ints) -> None:
        """Let each row of (g, f) peers average: weights 1/f."""
        size = groups.shape[1]
        for a in range(size):
            for b in range(a + 1, size):
                self.link(groups[:, a], groups[:, b], 1 / size)

    def matrix(self) -> csr_array:
        """Return the weights, (P, P); what is missing from 1 stays with the peer."""
        everyone = np.arange(self.peers)
        i, j = (np.concatenate([*ends, everyone]) for ends in (self.i, self.j))
        off = np.concatenate([*self.weight, np.zeros(0)])
        own = 1 - np.bincount(i[: len(off)], off, minlength=self.peers)
        return csr_array((np.concatenate([off, own]), (i, j)), shape=(self.peers, self.peers))


@topology
def base_graph(peers: int, rng: Generator, *, k: int = 1, simple: bool = False) -> list[csr_array]:
    """Time-varying: the Base-(k+1) graph of degree at most k, or its simple form, which averages
    exactly in at most 2 log_(k+1) P + 2 rounds for any P (Takezawa et al. 2023).

    It comes with its weights.
    """
    if k < 1:
        raise GraphError(f"base_graph needs k of at least 1, not {k}")
    k = min(k, max(1, peers - 1))  # all peers
    least = ceil(log(peers, k + 1) - 1e-9)  # rounds that any exact average of degree k takes
    affordable("base_graph", peers, k * peers * least)  # before the rounds take memory
    everyone = np.arange(peers)
    rounds = _simple(everyone, k) if simple else _base(everyone, k)
    affordable("base_graph", peers, k * peers * len(rounds))
    return [_joined(peers, parts).matrix() for parts in rounds] or [csr_array(np.eye(1))]


Step = tuple[Ints, Ints | None, float]
"""Groups (g, f) that average; or ends i, j of edges and their weight."""


def _joined(peers: int, steps: list[Step]) -> Round:
    joined = Round(peers)
    for first, second, weight in steps:
        if second is None:
            joined.average(first)
        else:
            joined.link(first, second, weight)
    return joined


def _together(*parts: list[list[Step]]) -> list[list[Step]]:
    """Return the rounds of several sequences of disjoint peers, side by side."""
    return [[step for steps in row for step in steps] for row in zip_longest(*parts, fillvalue=[])]


def _factors(n: int, k: int) -> list[int]:
    """Return factors from 2 to k + 1 of n, ascending; their product is n if it has no others."""
    found = []
    for factor in range(k + 1, 1, -1):
        while n % factor == 0:
            found.append(factor)
            n //= factor
    return found[::-1]


def _hypercube(nodes: Ints, k: int) -> list[list[Step]]:
    """Return the k-peer hyper-hypercube: round l averages along axis l of a box of peers."""
    factors = _factors(len(nodes), k)
    assert prod(factors) == len(nodes)
    rounds: list[list[Step]] = []
    stride = 1
    for factor in factors:
        box = nodes.reshape(-1, factor, stride)
        rounds.append([(box.transpose(0, 2, 1).reshape(-1, factor), None, 0.0)])
        stride *= factor
    return rounds


def _simple(nodes: Ints, k: int) -> list[list[Step]]:
    """Return the rounds of the simple Base-(k+1) graph.

    With n = sum_l a_l (k+1)^p_l, p_1 > p_2 > ..., the parts V_l of a_l (k+1)^p_l peers first
    average each by itself. Then, in turn, every peer after V_l is linked to one peer in each of the
    a_l pieces of V_l. The means of the pieces are then the mean of all peers, and so is that of the
    later ones. The pieces average.
    """
    n = len(nodes)
    if prod(_factors(n, k)) == n:
        return _hypercube(nodes, k)
    parts = _parts(nodes, k)
    opening = [_hypercube(part.ravel(), k) for part in parts]
    length = len(opening[0])
    rounds = _together(*(_repeated(each, length) for each in opening))
    sizes = np.array([part.size for part in parts])
    closing = [_together(*(_hypercube(piece, k) for piece in part)) for part in parts[:-1]]
    closing.append(opening[-1])
    for m in range(1 + len(closing[0])):
        rounds.append([])
        for done in range(min(m, len(parts))):
            steps = closing[done]
            rounds[-1] += steps[(m - done - 1) % len(steps)] if steps else []
        if m < len(parts) - 1:
            later = np.concatenate([part.ravel() for part in parts[m + 1 :]])
            rounds[-1] += _exchange(parts[m], later, sizes[m] / sizes[m:].sum(), k)
    return rounds


def _exchange(part: Ints, later: Ints, share: float, k: int) -> list[Step]:
    """Return the edges between a part (a, q) and all later peers, of weight share / a.

    The peers of the part that have none average in groups of up to k + 1.
    """
    pieces = len(part)
    steps: list[Step] = [(later, piece[: len(later)], share / pieces) for piece in part]
    free = part[:, len(later) :].ravel()
    whole = len(free) // (k + 1) * (k + 1)
    steps.append((free[:whole].reshape(-1, k + 1), None, 0.0))
    return [*steps, (free[whole:].reshape(1, -1), None, 0.0)]


def _parts(nodes: Ints, k: int) -> list[Ints]:
    """Return the peers as parts (a, (k+1)^p) for the digits a > 0 of their number in base k + 1."""
    parts, begin, size = [], 0, 1
    while size * (k + 1) <= len(nodes):
        size *= k + 1
    while begin < len(nodes):
        pieces = (len(nodes) - begin) // size
        if pieces:
            parts.append(nodes[begin : begin + pieces * size].reshape(pieces, size))
        begin += pieces * size
        size //= k + 1
    return parts


def _repeated(rounds: list[list[Step]], length: int) -> list[list[Step]]:
    return [rounds[m % len(rounds)] if rounds else [] for m in range(length)]


def _base(nodes: Ints, k: int) -> list[list[Step]]:
    """Return the rounds of the Base-(k+1) graph: with n = p q, where p has factors up to k + 1 only
    and q has none, p simple Base-(k+1) graphs of q peers, then q hyper-hypercubes of p; or the
    simple one, where that is shorter.
    """
    simple, p = _simple(nodes, k), prod(_factors(len(nodes), k))
    table = nodes.reshape(p, -1)
    rounds = _together(*(_simple(row, k) for row in table))
    rounds += _together(*(_hypercube(column, k) for column in table.T))
    return simple if len(simple) < len(rounds) else rounds
