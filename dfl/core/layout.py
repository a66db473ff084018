"""Which peers ranks host, and blocks of coordinates that ranks sum up."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_S = TypeVar("_S", bound=np.generic)

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
        by_rank: (k,) positions in `ids` of the members of rank 0, then of rank 1, and so on, those
            of a rank ascending; None where this is the order of `ids`.
        mine: positions in `ids` of the members on this rank.
    """

    ids: NDArray[np.int64]
    here: NDArray[np.int64]
    counts: list[int]
    owners: NDArray[np.int64]
    by_rank: NDArray[np.int64] | None
    mine: slice | NDArray[np.int64]

    def ascending(self, rows: NDArray[_S]) -> NDArray[_S]:
        """Return rows of all members (k, ...), given rank by rank, in the order of `ids`."""
        return put_back(rows, self.by_rank)


@dataclass(frozen=True, eq=False)
class Layout:
    """P peers on R ranks: rank r hosts those at positions range(P*r//R, P*(r+1)//R) of `order`.

    Attributes:
        peers: P.
        ranks: R.
        order: (P,), all peers, those of one rank ascending; None for 0 to P - 1.
    """

    peers: int
    ranks: int
    order: NDArray[np.int64] | None = None

    @cached_property
    def starts(self) -> list[int]:
        """R + 1 numbers, the position of the first peer of every rank and then P."""
        return [self.peers * r // self.ranks for r in range(self.ranks + 1)]

    @cached_property
    def counts(self) -> list[int]:
        """The number of peers on every rank; 0 on some where ranks outnumber peers."""
        return [b - a for a, b in pairwise(self.starts)]

    def hosted(self, rank: int) -> NDArray[np.int64]:
        """Return the p peers that `rank` hosts, ascending."""
        first, end = self.starts[rank], self.starts[rank + 1]
        return np.arange(first, end) if self.order is None else self.order[first:end]

    @property
    def widest(self) -> int:
        """The largest number of peers on a rank."""
        return max(self.counts)

    def ranks_of(self, peers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the ranks (k,) that host `peers` (k,)."""
        if self._hosts is not None:
            return self._hosts[peers]
        return np.searchsorted(np.asarray(self.starts), peers, side="right").astype(np.int64) - 1

    def group(self, ids: NDArray[np.int64], rank: int) -> Group:
        """Return the group of some peers, given in any order, as it lies on `rank`."""
        ids = np.sort(ids)
        counts, by_rank, mine = self.members(ids, rank)
        return Group(ids, np.searchsorted(self.hosted(rank), ids[mine]), counts, ids, by_rank, mine)

    def subset(self, group: Group, kept: NDArray[np.bool_], rank: int) -> Group:
        """Return the members of a group, as it lies on `rank`, for which `kept` (k,) is true."""
        owners = group.owners[kept]
        counts, by_rank, mine = self.members(owners, rank)
        here = group.here[kept[group.mine]]
        return Group(group.ids[kept], here, counts, owners, by_rank, mine)

    def members(
        self, owners: NDArray[np.int64], rank: int
    ) -> tuple[list[int], NDArray[np.int64] | None, slice | NDArray[np.int64]]:
        """Return `counts`, `by_rank` and `mine` of a group.

        Args:
            owners: (k,), the peer of each member, ascending.
            rank: the rank on which `mine` are.
        """
        ranks = self.ranks_of(owners)
        counts = np.bincount(ranks, minlength=self.ranks)
        first = int(counts[:rank].sum())
        span = slice(first, first + int(counts[rank]))
        if self.order is None:
            return counts.tolist(), None, span
        by_rank = np.argsort(ranks, kind="stable")
        return counts.tolist(), by_rank, by_rank[span]

    def ascending(self, rows: NDArray[_S]) -> NDArray[_S]:
        """Return rows of all peers (P, ...), given rank by rank, by ascending peer."""
        return put_back(rows, self.order)

    def by_rank(self, rows: NDArray[_S]) -> NDArray[_S]:
        """Return rows of all peers (P, ...), given by ascending peer, rank by rank."""
        return rows if self.order is None else rows[self.order]

    @cached_property
    def _hosts(self) -> NDArray[np.int64] | None:
        """The rank of every peer, (P,); None where peers are in ascending order."""
        if self.order is None:
            return None
        hosts = np.empty(self.peers, np.int64)
        hosts[self.order] = np.repeat(np.arange(self.ranks), self.counts)
        return hosts


def put_back(rows: NDArray[_S], order: NDArray[np.int64] | None) -> NDArray[_S]:
    """Return rows (k, ...) of which row i is put at order[i]; as they are if it is None."""
    if order is None:
        return rows
    found = np.empty_like(rows)
    found[order] = rows
    return found


def columns(d: int, ranks: int) -> list[range]:
    """Return the coordinates that each rank sums up: whole blocks of `BLOCK`, ascending."""
    blocks = -(-d // BLOCK)
    edges = [min(d, BLOCK * (blocks * r // ranks)) for r in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(edges)]


def blocks(d: int) -> list[slice]:
    """Return the blocks of `BLOCK` coordinates that d are cut into; the last one may be shorter."""
    return [slice(a, min(a + BLOCK, d)) for a in range(0, d, BLOCK)]
