"""Exchange plans: which rows every rank sends and receives, made once per mixing matrix.

w_ij != 0 with i != j means that j sends to i. A message is sent either once by a peer, and crosses
to a rank once however many peers there receive it, or once per directed edge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.weighting import Piece, pieces_of
from dfl.core.layout import Layout

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

ROUNDING = 1e-6
"""Two sums of weights that differ by less are equal, also of weights given in single precision."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The messages of one round, each sent by a peer or over an edge.

    Attributes:
        ids: (q,) the address of the random numbers of each message sent here: the peer, or
            owner * P + other.
        send: positions of the messages that leave this rank, by receiving rank.
        sends, receives: rows to and from every other rank, ascending.
        copies: (p,) edges over which one row of a peer goes, or over which it sends.
        lost: how many of them lose the message.
    """

    ids: Ints
    send: Ints
    sends: dict[int, int]
    receives: dict[int, int]
    copies: Ints
    lost: int = 0

    @cached_property
    def most_runs(self) -> int:
        """The most runs that leave for another rank."""
        breaks = np.cumsum([0, *(np.diff(self.send) != 1)]) if len(self.send) else self.send
        ends = np.cumsum([0, *self.sends.values()])
        return max((int(breaks[b - 1] - breaks[a]) + 1 for a, b in pairwise(ends)), default=0)

    @cached_property
    def runs(self) -> list[list[range]]:
        """The runs of consecutive messages that leave for every other rank, ascending."""
        ends = np.cumsum([0, *self.sends.values()])
        parts = (self.send[a:b] for a, b in pairwise(ends))
        return [
            [range(run[0], run[-1] + 1) for run in np.split(part, breaks)]
            for part in parts
            for breaks in [np.flatnonzero(np.diff(part) != 1) + 1]
        ]


@dataclass(frozen=True, kw_only=True)
class PeerPlan(Plan):
    """Messages sent once by every peer.

    Attributes:
        senders: (q' + p,) peers whose messages the weights are on: those of ranks before this one,
            this rank's own, and those of ranks after it; those of a rank ascending.
        near: (p, q' + p) rows of W: weights of the closed neighbourhood. The entries of a row are
            in ascending peer id.
        before: how many of the senders are on ranks before this one.
        kept: returns (p, q' + p) `near` where a sender keeps the weights of messages that do
            not arrive, so that the columns of W keep their sums; None where all arrive.
    """

    kind: ClassVar[str] = "peers"

    senders: Ints
    near: csr_array
    before: int
    kept: Callable[[], csr_array] | None = None

    @cached_property
    def pieces(self) -> list[Piece]:
        """`near` on the messages of ranks before this one, of this one, and of ranks after it."""
        own, everyone = len(self.ids), len(self.senders)
        return pieces_of(self.near, [self.before, own, everyone - self.before - own])


@dataclass(frozen=True, kw_only=True)
class EdgePlan(Plan):
    """Messages sent once per directed edge that is used in this round.

    Attributes:
        owner: (a,) position on this rank of the sender, for the a outgoing edges in use.
        out: (a,) positions of these edges among the e outgoing edges of the union graph.
        into: (a',) positions of the a' incoming edges in use among those of the union graph.
        received: (a',) their numbers, sender * P + receiver, as in `ids`.
        arrange: (a',) position of each received message: among the a sent here, then those from
            other ranks.
        push: (p, e) weights of the reversed averaging on outgoing edges i -> k: w_ki pi_k / pi_i,
            pi being the weights of the average that W keeps. They are w_ki where W is doubly
            stochastic, and w_ik where pi_i w_ij = pi_j w_ji, as with every mixing rule on an
            undirected graph. A peer's add up to those of its pull. None where W keeps no weighted
            average of all peers.
        pull: (p, e') weights w_ij on incoming edges j -> i.
        near: (p, a' + p) weights of the closed neighbourhood in ascending peer id: on the a'
            received messages, then on the peers' own.
        weights: (a,) w_ki of each outgoing edge i -> k in use.
        arrives: (a,) and (a',), which of the sent and of the received messages arrive; None where
            all do.
    """

    kind: ClassVar[str] = "edges"

    owner: Ints
    out: Ints
    into: Ints
    received: Ints
    arrange: Ints
    push: csr_array | None
    pull: csr_array
    near: csr_array
    weights: Floats
    arrives: tuple[NDArray[np.bool_], NDArray[np.bool_]] | None = None

    @cached_property
    def sums(self) -> csr_array:
        """(p, a') ones on the messages that each peer receives."""
        pull = self.pull
        places = np.searchsorted(self.into, pull.indices)
        shape = (pull.shape[0], len(self.into))
        return csr_array((np.ones_like(pull.data), places, pull.indptr), shape=shape)


class Arcs(NamedTuple):
    """Directed edges of a mixing matrix, without its diagonal.

    Attributes:
        sender, receiver: (k,) the two ends of each edge.
        weight: (k,) w_ij of each edge j -> i.
    """

    sender: Ints
    receiver: Ints
    weight: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: csr_array) -> Arcs:
        """Return the edges of a matrix, ordered by receiver, then sender."""
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
    """Plan one message per peer on the mixing matrix (P, P), for the peers of `rank`."""
    mine, P = layout.hosted(rank), layout.peers
    arcs = Arcs.of(matrix)
    here = layout.ranks_of(arcs.sender)
    there = layout.ranks_of(arcs.receiver)
    leaving = np.unique((there * P + arcs.sender)[(here == rank) & (there != rank)])
    received = np.unique((here * P + arcs.sender)[(there == rank) & (here != rank)])
    before = int(np.searchsorted(received, rank * P))
    senders = np.concatenate([received[:before] % P, mine, received[before:] % P])
    rows = matrix[mine]
    rows.sort_indices()  # by ascending peer id, which stays the order of the sums
    around = csr_array(
        (rows.data, places_of(rows.indices, senders), rows.indptr), shape=(len(mine), len(senders))
    )
    return PeerPlan(
        ids=mine,
        send=np.searchsorted(mine, leaving % P),
        sends=_count(leaving // P),
        receives=_count(received // P),
        copies=np.bincount(np.searchsorted(mine, arcs.sender[here == rank]), minlength=len(mine)),
        senders=senders,
        near=around,
        before=before,
    )


def places_of(peers: Ints, among: Ints) -> Ints:
    """Return the place of each of some peers in an array of different peers."""
    order = np.argsort(among, kind="stable")
    places: Ints = order[np.searchsorted(among[order], peers)]
    return places


@dataclass(frozen=True)
class Union:
    """The directed edges that any round uses, as this rank's peers see them.

    An edge has the number owner * P + other.

    Attributes:
        out: (e,) edges owner -> other, sorted.
        into: (e',) edges other -> owner, sorted.
        peers: (p,), this rank's peers.
        P: peers in all.
    """

    out: Ints
    into: Ints
    peers: Ints
    P: int

    @classmethod
    def of(cls, matrices: Sequence[csr_array], layout: Layout, rank: int) -> Union:
        """Collect the edges of a sequence of mixing matrices."""
        P = layout.peers
        arcs = [Arcs.of(matrix) for matrix in matrices]
        pairs = [(a.sender, a.receiver) for a in arcs]
        out, into = (
            np.unique(
                np.concatenate([(i * P + j)[layout.ranks_of(i) == rank] for i, j in directed])
            )
            for directed in (pairs, [(j, i) for i, j in pairs])
        )
        return cls(out, into, layout.hosted(rank), P)

    @property
    def out_owner(self) -> Ints:
        """(e,) position on this rank of each outgoing edge's owner."""
        return np.searchsorted(self.peers, self.out // self.P)

    @property
    def into_owner(self) -> Ints:
        """(e',) position on this rank of each incoming edge's owner."""
        return np.searchsorted(self.peers, self.into // self.P)


def edge_plan(
    matrix: csr_array, layout: Layout, rank: int, union: Union, stationary: Floats | None = None
) -> EdgePlan:
    """Plan one message per directed edge of the mixing matrix W (P, P), for the peers of `rank`.

    Args:
        matrix: W.
        layout, rank: which peers are on which rank, and on which rank this is.
        union: the edges of all rounds.
        stationary: (P,) pi > 0 with pi W = pi. Where it is not given all entries are equal if W is
            doubly stochastic, and else there is none.
    """
    mine = union.peers
    P = union.P
    arcs = Arcs.of(matrix)
    here = layout.ranks_of(arcs.sender)
    there = layout.ranks_of(arcs.receiver)
    sent = _sorted(arcs, here == rank)
    received = _sorted(arcs, there == rank, by_receiver=True)
    ids = sent.sender * P + sent.receiver
    out = np.searchsorted(union.out, ids)
    into = np.searchsorted(union.into, received.receiver * P + received.sender)
    target = layout.ranks_of(sent.receiver)
    send = np.flatnonzero(target != rank)
    send = send[np.argsort(target[send], kind="stable")]
    arrange = np.searchsorted(ids, received.sender * P + received.receiver)
    source = layout.ranks_of(received.sender)
    far = np.flatnonzero(source != rank)
    far = far[  # as the ranks of the senders order them
        np.lexsort((received.receiver[far], received.sender[far], source[far]))
    ]
    arrange[far] = len(ids) + np.arange(len(far))
    owner = np.searchsorted(mine, sent.sender)
    if stationary is None and abs(matrix.sum(axis=0) - 1).max() <= ROUNDING:
        stationary = np.ones(P)
    push = None
    if stationary is not None:
        back = sent.weight * (stationary[sent.receiver] / stationary[sent.sender])
        push = csr_array((back, (owner, out)), shape=(len(mine), len(union.out)))
    return EdgePlan(
        ids=ids,
        send=send,
        sends=_count(target[send]),
        receives=_count(source[far]),
        copies=np.bincount(owner, minlength=len(mine)),
        owner=owner,
        out=out,
        into=into,
        received=received.sender * P + received.receiver,
        arrange=arrange,
        push=push,
        pull=csr_array(
            (received.weight, (np.searchsorted(mine, received.receiver), into)),
            shape=(len(mine), len(union.into)),
        ),
        near=_closed(received, matrix.diagonal()[mine], mine),
        weights=sent.weight,
    )


def _closed(received: Arcs, own: NDArray[np.float64], mine: Ints) -> csr_array:
    """Return `EdgePlan.near`."""
    receiver, sender = (np.concatenate([of, mine]) for of in (received.receiver, received.sender))
    order = np.lexsort((sender, receiver))
    ends = np.append(np.searchsorted(receiver[order], mine), len(order))
    return csr_array(
        (np.concatenate([received.weight, own])[order], order, ends), shape=(len(mine), len(order))
    )


def _sorted(arcs: Arcs, which: NDArray[np.bool_], by_receiver: bool = False) -> Arcs:
    """Return some edges, sorted by (sender, receiver) or by (receiver, sender)."""
    chosen = np.flatnonzero(which)
    sender, receiver = arcs.sender[chosen], arcs.receiver[chosen]
    order = chosen[np.lexsort((sender, receiver) if by_receiver else (receiver, sender))]
    return Arcs(arcs.sender[order], arcs.receiver[order], arcs.weight[order])


def _count(ranks: Ints) -> dict[int, int]:
    """Return the rows per rank, ascending."""
    return {
        int(rank): int(n) for rank, n in zip(*np.unique(ranks, return_counts=True), strict=True)
    }
