"""Blocks of peers that ranks host, and blocks of coordinates that ranks sum up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Coordinates per block of a reduction over peers. Fixed, so that sums do not depend on the number
of ranks.
"""


@dataclass(frozen=True)
class Group:
    """A subset of the senders of a round, peers or directed edges.

    Attributes:
        ids: (k,) peer or edge ids, ascending.
        here: (a,) the positions, among this rank's peers or edges, of those in the subset.
        counts: the number of them on each rank, (R,).
        owners: (k,) the peer that sends each message.
    """

    ids: NDArray[np.int64]
    here: NDArray[np.int64]
    counts: list[int]
    owners: NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """P peers on R ranks, in ascending blocks: rank r hosts range(P*r//R, P*(r+1)//R)."""

    peers: int
    ranks: int

    @cached_property
    def starts(self) -> list[int]:
        """R + 1 numbers, the first peer of every rank and then P."""
        return [self.peers * r // self.ranks for r in range(self.ranks + 1)]

    def block(self, rank: int) -> range:
        """Return the p peers that `rank` hosts; none on some ranks where ranks outnumber peers."""
        return range(self.starts[rank], self.starts[rank + 1])

    @property
    def widest(self) -> int:
        """The largest number of peers on a rank."""
        return max(b - a for a, b in pairwise(self.starts))

    def ranks_of(self, peers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ranks (n,) that host `peers` (n,)."""
        return np.searchsorted(np.asarray(self.starts), peers, side="right").astype(np.int64) - 1

    def group(self, ids: NDArray[np.int64], rank: int) -> Group:
        """Return the group of some peers, given in any order, as it lies on `rank`."""
        ids = np.sort(ids)
        edges = np.searchsorted(ids, self.starts)
        here = ids[edges[rank] : edges[rank + 1]] - self.starts[rank]
        return Group(ids, here, np.diff(edges).tolist(), ids)


def columns(d: int, ranks: int) -> list[range]:
    """Return the coordinates that each rank sums up: whole blocks of `BLOCK`, ascending."""
    blocks = -(-d // BLOCK)
    edges = [min(d, BLOCK * (blocks * r // ranks)) for r in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def blocks(d: int) -> list[slice]:
    """Return the blocks of `BLOCK` coordinates that d are cut into; the last one may be shorter."""
    return [slice(a, min(a + BLOCK, d)) for a in range(0, d, BLOCK)]
