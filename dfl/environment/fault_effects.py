"""What do the faults of a run do to one of its rounds: to its peers, to their work, and to the plan of who hears whom?

A peer that is down neither trains nor speaks nor hears. A link that loses words loses them after they were said: they
are counted and sent, and whom they were for does not get them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array, diags_array

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.environment.faults import Fault, RoundKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


LEVEL = 1e-6
"""A difference of two sums of weights that is rounding, also of weights that were written in single precision."""


@dataclass(frozen=True)
class FaultEffects:
    """A round in which some faults are at work. Every rank knows it of all peers and links."""

    faults: tuple[Fault, ...]
    round_key: RoundKey

    @cached_property
    def up(self) -> Bools:
        """Who is up, (P,)."""
        down: Bools = np.any([each.down(self.round_key) for each in self.faults], axis=0)
        return ~down

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Share of its local steps that every peer does, (P,): 0 for those who are down."""
        share: NDArray[np.float64] = np.min(
            [each.pace(self.round_key) for each in self.faults], axis=0
        )
        return share * self.up

    def arrive(self, sender: Ints | int, receiver: Ints | int) -> Bools:
        """Which words arrive that are said over links sender -> receiver, (n,) or one for all; number P is a server."""
        links = np.atleast_1d(sender * (self.round_key.peers + 1) + np.asarray(receiver, np.int64))
        lost: Bools = np.any([each.loses(links, self.round_key) for each in self.faults], axis=0)
        return ~lost

    def on_edges(self, plan: EdgePlan) -> EdgePlan:
        """What becomes of the plan of one word per edge.

        Edges with a down end do not speak, and are left out at both ends. Where that leaves the weights of a peer's
        push and pull with different sums, which takes a directed graph, the larger is scaled down to the smaller, so
        that peers that agree go on agreeing. In `near` the weight of what did not arrive goes to the peer itself.
        """
        (speak, arrive), here = self._fate(plan.ids), plan.arrange < len(plan.ids)
        hear, come = np.empty((2, len(plan.heard)), bool)
        hear[here], come[here] = speak[plan.arrange[here]], arrive[plan.arrange[here]]
        hear[~here], come[~here] = self._fate(plan.heard[~here])
        push, pull = _level(_some(plan.push, speak), _some(plan.pull, hear))
        return replace(
            plan,
            copies=np.bincount(plan.owner[speak], minlength=len(plan.copies)),
            lost=int(np.count_nonzero(speak & ~arrive)),
            arrives=(arrive, come),
            push=push,
            pull=pull,
            near=_given_back(plan.near, come),
        )

    def on_peers(self, plan: PeerPlan, edges: EdgePlan) -> PeerPlan:
        """What becomes of the plan of one word per peer, read off what became of the edges."""
        speaker = np.concatenate([edges.heard // self.round_key.peers, plan.ids])
        kept = _some(edges.near, edges.near.data != 0)
        column = np.searchsorted(plan.speakers, speaker[kept.indices])
        around = csr_array(
            (kept.data, column, kept.indptr), shape=(len(plan.ids), len(plan.speakers))
        )
        cuts = pairwise(np.cumsum([0, *(part.shape[1] for part in plan.weights)]))
        below, own, above = (around[:, a:b] for a, b in cuts)
        return replace(plan, copies=edges.copies, lost=edges.lost, weights=(below, own, above))

    def _fate(self, edges: Ints) -> tuple[Bools, Bools]:
        """Which edges, sender * P + receiver, speak, and which of their words arrive."""
        sender, receiver = np.divmod(edges, self.round_key.peers)
        speak = self.up[sender] & self.up[receiver]
        return speak, speak & self.arrive(sender, receiver)


@lru_cache(maxsize=1)
def fault_effects(faults: tuple[Fault, ...], round_key: RoundKey) -> FaultEffects:
    """The weather of a round, kept until another round is asked for."""
    return FaultEffects(faults, round_key)


def _given_back(near: csr_array, come: Bools) -> csr_array:
    """Weights of closed neighbourhoods, as `EdgePlan.near`, where not all words come; rows still add up to 1."""
    own = near.indices >= len(come)
    arrived = np.concatenate([come, np.ones(near.shape[0], bool)])[near.indices]
    row = np.repeat(np.arange(near.shape[0]), np.diff(near.indptr))
    others, missed = arrived & ~own, np.bincount(row[~arrived], minlength=near.shape[0])
    rest = 1 - np.bincount(row[others], near.data[others], minlength=near.shape[0])
    given = np.where(own & (missed > 0)[row], rest[row], near.data)
    return _some(csr_array((given, near.indices, near.indptr), shape=near.shape), arrived)


def _level(one: csr_array, other: csr_array) -> tuple[csr_array, csr_array]:
    """Return two matrices of weights whose rows have the same sums: each row scaled to the smaller of its two sums."""
    sums = [each.sum(axis=1) for each in (one, other)]
    less = np.minimum(*sums)
    if all((whole - less <= LEVEL).all() for whole in sums):
        return one, other
    factors = [
        np.divide(less, whole, out=np.ones_like(less), where=whole - less > LEVEL) for whole in sums
    ]
    first, second = (diags_array(f) @ w for f, w in zip(factors, (one, other), strict=True))
    return csr_array(first), csr_array(second)


def _some(weights: csr_array, which: Bools) -> csr_array:
    """Some of the stored entries, in their order."""
    ends = np.concatenate([[0], np.cumsum(which)])[weights.indptr]
    return csr_array((weights.data[which], weights.indices[which], ends), shape=weights.shape)
