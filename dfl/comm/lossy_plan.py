"""Plans of a round in which faults take peers or messages away.

`dfl.environment.faults` decides which; here is what becomes of the weights of lost messages.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.sparse import csr_array, diags_array

from dfl.comm.plan import ROUNDING, EdgePlan, PeerPlan, places_of
from dfl.environment.fault_effects import FaultEffects

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bools = NDArray[np.bool_]


class _Left(NamedTuple):
    """What faults leave of a round.

    Attributes:
        copies: (p,) edges over which a peer sends.
        lost: how many of them lose the message.
        used, used_in: (a,) and (a',), which outgoing and which incoming edges are used.
        arrives, arrives_in: (a,) and (a',), over which of them a message arrives.
    """

    copies: NDArray[np.int64]
    lost: int
    used: Bools
    used_in: Bools
    arrives: Bools
    arrives_in: Bools


def lossy_edge_plan(plan: EdgePlan, effects: FaultEffects) -> EdgePlan:
    """Return a plan of one message per edge without the edges and messages that faults take away.

    Edges with an end that is down are not used, and are left out at both ends. If that leaves the
    weights of a peer's push and pull with different sums, which takes a directed graph, the larger
    is scaled down to the smaller, so that peers that agree go on agreeing. In `near` the weight of
    a message that does not arrive goes to the peer itself.
    """
    left = _left(plan, effects)
    push, pull = plan.push, _some(plan.pull, left.used_in)
    if push is not None:
        push, pull = _level(_some(push, left.used), pull)
    return replace(
        plan,
        copies=left.copies,
        lost=left.lost,
        arrives=(left.arrives, left.arrives_in),
        push=push,
        pull=pull,
        near=_given_back(plan.near, left.arrives_in),
    )


def lossy_peer_plan(plan: PeerPlan, edges: EdgePlan, effects: FaultEffects, peers: int) -> PeerPlan:
    """Return a plan of one message per peer without what faults take away.

    Args:
        plan: the plan of all peers and messages.
        edges: the same for one message per edge.
        effects: those of the faults on the round.
        peers: P.
    """
    left = _left(edges, effects)
    sender = np.concatenate([edges.received // peers, plan.ids])

    def on_senders(weights: csr_array) -> csr_array:
        used = _some(weights, weights.data != 0)
        column = places_of(sender[used.indices], plan.senders)
        shape = len(plan.ids), len(plan.senders)
        return csr_array((used.data, column, used.indptr), shape=shape)

    return replace(
        plan,
        copies=left.copies,
        lost=left.lost,
        near=on_senders(_given_back(edges.near, left.arrives_in)),
        kept=lambda: on_senders(_kept(edges, left.arrives, left.arrives_in)),
    )


def _left(plan: EdgePlan, effects: FaultEffects) -> _Left:
    """Return what faults leave of a plan."""
    used, arrives = effects.on_edges(plan.ids)
    here = plan.arrange < len(plan.ids)
    used_in, arrives_in = np.empty((2, len(plan.received)), bool)
    used_in[here] = used[plan.arrange[here]]
    arrives_in[here] = arrives[plan.arrange[here]]
    used_in[~here], arrives_in[~here] = effects.on_edges(plan.received[~here])
    copies = np.bincount(plan.owner[used], minlength=len(plan.copies))
    lost = int(np.count_nonzero(used & ~arrives))
    return _Left(copies, lost, used, used_in, arrives, arrives_in)


def _given_back(near: csr_array, arrives: Bools) -> csr_array:
    """Return `EdgePlan.near` where some messages do not arrive; rows still add up to 1."""
    own = near.indices >= len(arrives)
    arrived = np.concatenate([arrives, np.ones(near.shape[0], bool)])[near.indices]
    row = np.repeat(np.arange(near.shape[0]), np.diff(near.indptr))
    others = arrived & ~own
    missed = np.bincount(row[~arrived], minlength=near.shape[0])
    rest = 1 - np.bincount(row[others], near.data[others], minlength=near.shape[0])
    weights = np.where(own & (missed > 0)[row], rest[row], near.data)
    return _some(csr_array((weights, near.indices, near.indptr), shape=near.shape), arrived)


def _kept(plan: EdgePlan, sent: Bools, received: Bools) -> csr_array:
    """Return `EdgePlan.near` where a sender keeps the weights of messages that do not arrive.

    Args:
        plan: the plan of all edges and messages.
        sent, received: (a,) and (a',), which messages arrive.
    """
    near = plan.near
    own = near.indices >= len(received)
    arrived = np.concatenate([received, np.ones(near.shape[0], bool)])[near.indices]
    rest = np.bincount(plan.owner[~sent], plan.weights[~sent], minlength=near.shape[0])
    weights = near.data.copy()
    weights[own] += rest
    return _some(csr_array((weights, near.indices, near.indptr), shape=near.shape), arrived)


def _level(one: csr_array, other: csr_array) -> tuple[csr_array, csr_array]:
    """Return two matrices of weights, each row scaled to the smaller of its two sums."""
    sums = [each.sum(axis=1) for each in (one, other)]
    less = np.minimum(*sums)
    if all((whole - less <= ROUNDING).all() for whole in sums):
        return one, other
    factors = [
        np.divide(less, whole, out=np.ones_like(less), where=whole - less > ROUNDING)
        for whole in sums
    ]
    first, second = (diags_array(f) @ w for f, w in zip(factors, (one, other), strict=True))
    return csr_array(first), csr_array(second)


def _some(weights: csr_array, which: Bools) -> csr_array:
    """Return some of the stored entries, in their order."""
    ends = np.concatenate([[0], np.cumsum(which)])[weights.indptr]
    return csr_array((weights.data[which], weights.indices[which], ends), shape=weights.shape)
