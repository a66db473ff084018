"""Who sends which rows to whom in a round? Worked out once per mixing matrix, on every rank for itself.

w_ij != 0 with i != j means that j speaks to i. A word is said either once by a peer, and crosses to a rank once
however many peers there want it, or once per directed edge.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, hstack

from dfl.core.layout import Layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One round of words, each said by a peer or over an edge.

    Attributes:
        ids: (q,) what addresses the random numbers of each word said here: the peer, or owner * P + other.
        send: positions of the words that leave this rank, by receiving rank.
        sends, receives: rows to and from every other rank, ascending.
        copies: (p,) edges over which one row of a peer goes; the edges on which it speaks.
        lost: how many of them lose what is said.
    """

    ids: Ints
    send: Ints
    sends: dict[int, int]
    receives: dict[int, int]
    copies: Ints
    lost: int = 0

    @cached_property
    def runs(self) -> Ints | None:
        """The first word for every receiving rank if the words for each lie one behind the other, so that nothing
        need be put together before it is sent.
        """
        ends = np.cumsum([0, *self.sends.values()])
        parts = [self.send[a:b] for a, b in pairwise(ends)]
        return (
            np.array([part[0] for part in parts], np.int64)
            if all((np.diff(p) == 1).all() for p in parts)
            else None
        )


@dataclass(frozen=True, kw_only=True)
class PeerPlan(Plan):
    """Updates said once by every peer.

    Attributes:
        speakers: whose words these weights are on, ascending, r1 + p + r2 peers.
        weights: rows of W in three parts: on the peers heard from ranks before this one, (p, r1), on this rank's own,
            (p, p), and on those heard from ranks behind it, (p, r2). The entries of a row come in ascending peer id.
    """

    kind: ClassVar[str] = "peers"

    speakers: Ints
    weights: tuple[csr_array, csr_array, csr_array]

    @cached_property
    def near(self) -> csr_array:
        """The three parts in one, (p, r1 + p + r2)."""
        return csr_array(hstack(self.weights))


@dataclass(frozen=True, kw_only=True)
class EdgePlan(Plan):
    """Updates said once per directed edge that speaks in this round.

    Attributes:
        owner: (a,) position on this rank of the peer that speaks, for the a edges that speak.
        out: (a,) positions of these edges among the e outgoing edges of the union graph.
        into: (b,) positions of the edges heard among the incoming edges of the union graph.
        heard: (b,) their numbers, as `ids` has them.
        arrange: (b,) where each word heard lies: among the a said here, then those received.
        push: (p, e) weights of the reversed averaging on outgoing edges i -> k: w_ki pi_k / pi_i, pi being the weights
            of the average that W keeps. They are w_ki where W is doubly stochastic, and w_ik where pi_i w_ij =
            pi_j w_ji, as with every mixing rule on an undirected graph. A peer's add up to those of its pull.
        pull: (p, e') weights w_ij on incoming edges j -> i.
        near: (p, b + p) weights of the closed neighbourhood in ascending peer id: on the b words heard, and behind them
            on the peers' own.
        arrives: (a,) and (b,), which of the words said, and which of those heard, arrive; None where all do.
    """

    kind: ClassVar[str] = "edges"

    owner: Ints
    out: Ints
    into: Ints
    heard: Ints
    arrange: Ints
    push: csr_array
    pull: csr_array
    near: csr_array
    arrives: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None


class Arcs(NamedTuple):
    """Directed edges of a matrix without its diagonal: `sender` speaks to `receiver` with `weight`."""

    sender: Ints
    receiver: Ints
    weight: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: csr_array) -> Arcs:
        """Read them off w_ij, ordered by receiver, then sender."""
        pairs = matrix.tocoo()
        off = (pairs.row != pairs.col) & (pairs.data != 0)
        return cls(
            pairs.col[off].astype(np.int64), pairs.row[off].astype(np.int64), pairs.data[off]
        )


def all_edges(matrices: Sequence[csr_array], peers: int) -> Ints:
    """Return sender * P + receiver of every edge of some mixing matrices, ascending."""
    arcs = [Arcs.of(matrix) for matrix in matrices]
    return np.unique(np.concatenate([each.sender * peers + each.receiver for each in arcs]))


def peer_plan(matrix: csr_array, layout: Layout, rank: int) -> PeerPlan:
    """Plan one word per peer on the mixing matrix (P, P), for the peers of `rank`."""
    mine, P, arcs = layout.block(rank), layout.peers, Arcs.of(matrix)
    here, there = layout.ranks_of(arcs.sender), layout.ranks_of(arcs.receiver)
    leaving = np.unique((there * P + arcs.sender)[(here == rank) & (there != rank)])
    heard = np.unique(arcs.sender[(there == rank) & (here != rank)])
    near = np.union1d(heard, np.arange(mine.start, mine.stop))
    rows = matrix[mine.start : mine.stop]
    around = csr_array(
        (rows.data, np.searchsorted(near, rows.indices), rows.indptr), shape=(len(mine), len(near))
    )
    around.sort_indices()
    below = int(np.searchsorted(heard, mine.start))
    cuts = pairwise((0, below, below + len(mine), len(near)))
    return PeerPlan(
        ids=np.arange(mine.start, mine.stop),
        send=leaving % P - mine.start,
        sends=_count(leaving // P),
        receives=_count(layout.ranks_of(heard)),
        copies=np.bincount(arcs.sender[here == rank] - mine.start, minlength=len(mine)),
        speakers=near,
        weights=tuple(around[:, a:b] for a, b in cuts),
    )


@dataclass(frozen=True)
class Union:
    """Every directed edge that any round uses, as this rank's peers see it; numbers are owner * P + other.

    Attributes:
        out: (e,) edges owner -> other, sorted.
        into: (e',) edges other -> owner, sorted.
        peers: this rank's peers.
        P: peers in all.
    """

    out: Ints
    into: Ints
    peers: range
    P: int

    @classmethod
    def of(cls, matrices: Sequence[csr_array], layout: Layout, rank: int) -> Union:
        """Collect the edges of a sequence of mixing matrices."""
        mine = layout.block(rank)
        arcs = [Arcs.of(matrix) for matrix in matrices]
        out = [_within(a.sender, a.receiver, mine, layout.peers) for a in arcs]
        into = [_within(a.receiver, a.sender, mine, layout.peers) for a in arcs]
        return cls(
            np.unique(np.concatenate(out)), np.unique(np.concatenate(into)), mine, layout.peers
        )

    @property
    def out_owner(self) -> Ints:
        """(e,) position on this rank of each outgoing edge's owner."""
        return self.out // self.P - self.peers.start

    @property
    def into_owner(self) -> Ints:
        """(e',) position on this rank of each incoming edge's owner."""
        return self.into // self.P - self.peers.start


def edge_plan(
    matrix: csr_array, layout: Layout, rank: int, union: Union, stationary: Floats | None = None
) -> EdgePlan:
    """Plan one message per directed edge of the mixing matrix W (P, P), for the peers of `rank`.

    Args:
        matrix: W.
        layout, rank: which peers are on which rank, and on which rank this is.
        union: the edges of all rounds.
        stationary: (P,) pi with pi W = pi; all alike where not given.
    """
    mine, P, arcs = union.peers, union.P, Arcs.of(matrix)
    here, there = layout.ranks_of(arcs.sender), layout.ranks_of(arcs.receiver)
    said, heard = _sorted(arcs, here == rank), _sorted(arcs, there == rank, by_receiver=True)
    ids = said.sender * P + said.receiver
    out, into = (
        np.searchsorted(union.out, ids),
        np.searchsorted(union.into, heard.receiver * P + heard.sender),
    )
    target = layout.ranks_of(said.receiver)
    send = np.flatnonzero(target != rank)
    send = send[np.argsort(target[send], kind="stable")]
    arrange = np.searchsorted(ids, heard.sender * P + heard.receiver)
    far = np.flatnonzero(layout.ranks_of(heard.sender) != rank)
    far = far[np.lexsort((heard.receiver[far], heard.sender[far]))]  # as the senders order them
    arrange[far] = len(ids) + np.arange(len(far))
    owner = said.sender - mine.start
    kept = np.ones(P) if stationary is None else stationary
    back = said.weight * (kept[said.receiver] / kept[said.sender])
    return EdgePlan(
        ids=ids,
        send=send,
        sends=_count(target[send]),
        receives=_count(layout.ranks_of(heard.sender[far])),
        copies=np.bincount(owner, minlength=len(mine)),
        owner=owner,
        out=out,
        into=into,
        heard=heard.sender * P + heard.receiver,
        arrange=arrange,
        push=csr_array((back, (owner, out)), shape=(len(mine), len(union.out))),
        pull=csr_array(
            (heard.weight, (heard.receiver - mine.start, into)), shape=(len(mine), len(union.into))
        ),
        near=_closed(heard, matrix.diagonal()[mine.start : mine.stop], mine),
    )


def _closed(heard: Arcs, own: NDArray[np.float64], mine: range) -> csr_array:
    """`EdgePlan.near`."""
    receiver, sender = (np.concatenate([of, mine]) for of in (heard.receiver, heard.sender))
    order = np.lexsort((sender, receiver))
    ends = np.searchsorted(receiver[order], [*mine, mine.stop])
    return csr_array(
        (np.concatenate([heard.weight, own])[order], order, ends), shape=(len(mine), len(order))
    )


def _sorted(arcs: Arcs, which: NDArray[np.bool_], by_receiver: bool = False) -> Arcs:
    """Some arcs, sorted by (sender, receiver) or by (receiver, sender)."""
    chosen = np.flatnonzero(which)
    sender, receiver = arcs.sender[chosen], arcs.receiver[chosen]
    order = chosen[np.lexsort((sender, receiver) if by_receiver else (receiver, sender))]
    return Arcs(arcs.sender[order], arcs.receiver[order], arcs.weight[order])


def _within(owner: Ints, other: Ints, mine: range, peers: int) -> Ints:
    inside = (owner >= mine.start) & (owner < mine.stop)
    return (owner * peers + other)[inside]


def _count(ranks: Ints) -> dict[int, int]:
    """Rows per rank, ascending."""
    return {
        int(rank): int(n) for rank, n in zip(*np.unique(ranks, return_counts=True), strict=True)
    }
