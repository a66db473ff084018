"""Which peers live on which rank, and which rank adds up which coordinates?"""

from __future__ import annotations

from bisect import bisect_right
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
    """Some of those who speak, peers or edges.

    Attributes:
        ids: (m,) their numbers, ascending.
        here: (a,) the positions of those that are on this rank.
        counts: how many of them each rank hosts.
        owners: (m,) the peer whose word each says.
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
        """The first peer of every rank, and P behind the last; R + 1 numbers."""
        return [self.peers * r // self.ranks for r in range(self.ranks + 1)]

    def block(self, rank: int) -> range:
        """The p peers that `rank` hosts; empty where ranks outnumber peers."""
        return range(self.starts[rank], self.starts[rank + 1])

    @property
    def widest(self) -> int:
        """Peers on the fullest rank."""
        return max(b - a for a, b in pairwise(self.starts))

    def rank_of(self, peer: int) -> int:
        """The rank that hosts `peer`."""
        return bisect_right(self.starts, peer) - 1

    def ranks_of(self, peers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The ranks that host `peers`, one each."""
        return np.searchsorted(np.asarray(self.starts), peers, side="right").astype(np.int64) - 1

    def group(self, ids: NDArray[np.int64], rank: int) -> Group:
        """Some peers, in any order, as `rank` sees them."""
        ids = np.sort(ids)
        edges = np.searchsorted(ids, self.starts)
        here = ids[edges[rank] : edges[rank + 1]] - self.starts[rank]
        return Group(ids, here, np.diff(edges).tolist(), ids)


def columns(d: int, ranks: int) -> list[range]:
    """The coordinates that each rank adds up: whole blocks of `BLOCK`, in ascending order."""
    blocks = -(-d // BLOCK)
    edges = [min(d, BLOCK * (blocks * r // ranks)) for r in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def blocks(d: int) -> list[slice]:
    """Cut d coordinates into blocks of `BLOCK`, the last one shorter."""
    return [slice(a, min(a + BLOCK, d)) for a in range(0, d, BLOCK)]
