"""The messages that an exchange brings, averaged by the mixing matrix or aggregated by a rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.comm.weighting import weighted_sum
from dfl.core.profiling import in_phase
from dfl.core.rows import rows_at, slices
from dfl.robust.aggregators import Aggregate, Updates, mean

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class Received:
    """The messages of one `exchange`.

    Attributes:
        own: this rank's messages as their senders keep them: (p, m), or (a, m) where a method sends
            over edges. They are what receivers decode, zeros where an edge lost it; attackers keep
            what they would have sent if they were honest. The memory is the method's to overwrite
            once it has taken its sums.
        sent: this rank's messages as receivers decode them, falsified ones included: (p, m), or
            (a, m) over the a edges in use; it is `own` itself where nothing is falsified.
        far: (q', m), messages from other ranks.
        plan: the senders and receivers of the messages.
        error: (p,) float64, ||Q(x) - x||^2 / ||x||^2 of a peer's message, the worst over its edges;
            0 for a message of zeros, NaN in a round that is not measured.
        start: (p, m), the models from which the peers moved; None where messages are differences.
    """

    own: Tensor
    sent: Tensor
    far: Tensor
    plan: PeerPlan | EdgePlan
    error: Tensor
    start: Tensor | None

    @property
    def messages(self) -> Tensor:
        """(a', m), received over each edge, in the order of `EdgePlan.into`; zeros if lost."""
        assert isinstance(self.plan, EdgePlan)
        everything = torch.cat([self.sent, self.far]) if len(self.far) else self.sent
        messages = rows_at(everything, self.plan.arrange)
        if self.plan.arrives is None:
            return messages
        return without_lost(messages, self.plan.arrives[1])

    def average(self) -> Tensor:
        """Return sum_j w_ij message_j over closed neighbourhoods, (p, m), in ascending peer id."""
        assert isinstance(self.plan, PeerPlan), "the method itself weighs messages over edges"
        return self._weighted(self.plan, self.plan.near)

    def total(self) -> Tensor:
        """Return the same sum, where a sender keeps the weight of a message that does not arrive.

        `average` leaves it to the receiver, so that the rows of W keep their sums; here the columns
        do.
        """
        assert isinstance(self.plan, PeerPlan), "the method itself weighs messages over edges"
        kept = self.plan.kept
        return self._weighted(self.plan, self.plan.near if kept is None else kept())

    @in_phase("mix")
    def aggregate(self, rule: partial[Aggregate]) -> Tensor:
        """Return what a rule makes of every closed neighbourhood, (p, m); the mean is `average`.

        `Updates` states what a rule is given.

        Args:
            rule: one of `AGGREGATORS` with its options bound.
        """
        # One product for all peers is much faster than a call for each. A rule of the caller's own
        # that computes the mean differs from it in rounding only: it works on steps, in float64.
        if rule.func is mean and isinstance(self.plan, PeerPlan):
            return self.average()
        rows = torch.empty_like(self.own)
        starts = torch.zeros_like(self.own) if self.start is None else self.start
        for i, (weights, messages) in enumerate(self._neighbourhoods()):
            start = starts[i].cpu().numpy()
            own = self.own[i].cpu().numpy()
            updates = Updates(messages.cpu().numpy() - start, weights, own - start)
            rows[i] = torch.from_numpy(start + rule(updates).row)
        return rows

    def _weighted(self, plan: PeerPlan, weights: csr_array) -> Tensor:
        pieces = plan.pieces if weights is plan.near else ()
        total = weighted_sum(weights, *self._in_order(plan), pieces=pieces)
        if self.sent is self.own:
            return total
        itself = torch.from_numpy(weights.diagonal(plan.before)).to(total)
        return total + itself[:, None] * (self.own - self.sent)  # an attacker averages its own

    def _in_order(self, plan: PeerPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return the messages of the senders before, on and after this rank, (..., m) each."""
        return self.far[: plan.before], self.sent, self.far[plan.before :]

    def _neighbourhoods(self) -> Iterator[tuple[NDArray[np.float64], Tensor]]:
        """Yield weights and messages of every closed neighbourhood, in ascending peer id.

        A message of weight 0 is left out.
        """
        if isinstance(self.plan, EdgePlan):
            first = len(self.plan.arrange)
            everything = torch.cat([self.messages, self.own])
        else:
            first = self.plan.before
            everything = torch.cat(self._in_order(self.plan)) if len(self.far) else self.sent
        near = self.plan.near
        for i, (begin, end) in enumerate(pairwise(near.indptr.tolist())):
            weights = near.data[begin:end]
            used = weights != 0
            at = near.indices[begin:end][used].astype(np.int64)
            messages = everything[at]
            messages[np.flatnonzero(at == first + i)] = self.own[i]
            yield weights[used], messages


def without_lost(messages: Tensor, arrives: NDArray[np.bool_]) -> Tensor:
    """Return messages (a, m) with zeros in place of those that do not arrive."""
    return messages.masked_fill(torch.from_numpy(~arrives).to(messages.device)[:, None], 0)


def error(messages: Tensor, decoded: Tensor, plan: PeerPlan | EdgePlan) -> Tensor:
    """Return ||Q(x) - x||^2 / ||x||^2, the worst of each peer's messages, (p,)."""
    if decoded.data_ptr() == messages.data_ptr():  # sent as they are
        return torch.zeros(len(plan.copies), dtype=torch.float64)
    worst = np.zeros(len(plan.copies))
    owner = plan.owner if isinstance(plan, EdgePlan) else np.arange(len(messages))
    for rows in slices(messages):
        lost = _squares(decoded[rows] - messages[rows])
        whole = _squares(messages[rows])
        with np.errstate(invalid="ignore"):  # of a peer that diverged
            np.maximum.at(worst, owner[rows], lost / np.maximum(whole, 1e-300))
    return torch.from_numpy(worst)


def _squares(messages: Tensor) -> NDArray[np.float64]:
    """Return ||x||^2 of every row.

    numpy computes it, because torch splits a lone row among its threads and rounds differently.
    """
    values: NDArray[np.float64] = np.square(messages.cpu().numpy(), dtype=np.float64).sum(1)
    return values
