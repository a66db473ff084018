"""What did a peer hear, and what does it make of it? An average by the mixing matrix, or whatever a rule makes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.comm.weighting import weighted_sum
from dfl.robust.aggregators import Aggregate, Updates, mean

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class Received:
    """What one `share` brought.

    Attributes:
        own: this rank's words as those who said them keep them: (p, m), or (a, m) where a method speaks over edges. It
            is what those who hear them decode, zeros where an edge lost it, but that liars keep what they would have
            said if they were honest.
        said: this rank's words as those who hear them decode them, lies included: (p, m), or (a, m) over the a edges
            that speak; it is `own` itself where nobody lies.
        far: (r, m), words from other ranks.
        plan: who said what to whom.
        error: (p,) float64, ||Q(x) - x||^2 / ||x||^2 of a peer's word, the worst of those over its edges; 0 for a word
            of zeros, NaN in a round that nobody looks at.
        origin: (p, m), where the peers stood before the round, if the words are steps away from there.
    """

    own: Tensor
    said: Tensor
    far: Tensor
    plan: PeerPlan | EdgePlan
    error: Tensor
    origin: Tensor | None

    @property
    def words(self) -> Tensor:
        """(b, m), what was heard over each edge, in the order of `EdgePlan.into`; zeros where nothing was."""
        assert isinstance(self.plan, EdgePlan)
        words = (torch.cat([self.said, self.far]) if len(self.far) else self.said)[
            self.plan.arrange
        ]
        return words if self.plan.arrives is None else silenced(words, self.plan.arrives[1])

    def average(self) -> Tensor:
        """sum_j w_ij word_j over the closed neighbourhood, (p, m), added up in ascending peer id."""
        assert isinstance(self.plan, PeerPlan), "words over edges are weighed by the method itself"
        below, own, above = self.plan.weights
        cut = below.shape[1]
        total = weighted_sum((below, self.far[:cut]), (own, self.said), (above, self.far[cut:]))
        if self.said is self.own:
            return total
        itself = torch.from_numpy(own.diagonal()).to(total)
        return total + itself[:, None] * (self.own - self.said)  # to itself a liar says the truth

    def combine(self, rule: partial[Aggregate]) -> Tensor:
        """What a rule makes of the words in every closed neighbourhood, (p, m); the mean is `average`.

        A rule sees words as steps away from where the peer that hears them stood, and trusts the peer's own step.

        Args:
            rule: one of `AGGREGATORS` with its options bound.
        """
        if rule.func is mean and isinstance(self.plan, PeerPlan):
            return self.average()
        rows, origin = (
            torch.empty_like(self.own),
            torch.zeros_like(self.own) if self.origin is None else self.origin,
        )
        for i, (weights, words) in enumerate(self._around()):
            start, own = (of[i].cpu().numpy() for of in (origin, self.own))
            rows[i] = torch.from_numpy(
                start + rule(Updates(words.cpu().numpy() - start, weights, own - start)).row
            )
        return rows

    def _around(self) -> Iterator[tuple[NDArray[np.float64], Tensor]]:
        """For every peer the weights and the words of its closed neighbourhood, in ascending peer id."""
        if isinstance(self.plan, EdgePlan):
            spoken, first = torch.cat([self.words, self.own]), len(self.plan.arrange)
        else:
            first = self.plan.weights[0].shape[1]
            spoken = (
                torch.cat([self.far[:first], self.said, self.far[first:]])
                if len(self.far)
                else self.said
            )
        near = self.plan.near
        for i, (begin, end) in enumerate(pairwise(near.indptr.tolist())):
            at = near.indices[begin:end].astype(np.int64)
            words = spoken[at]
            words[np.flatnonzero(at == first + i)] = self.own[i]
            yield near.data[begin:end], words


def silenced(words: Tensor, arrive: NDArray[np.bool_]) -> Tensor:
    """Updates (a, m) with zeros in the place of those that do not arrive."""
    return words.masked_fill(torch.from_numpy(~arrive).to(words.device)[:, None], 0)


def error(said: Tensor, own: Tensor, plan: PeerPlan | EdgePlan) -> Tensor:
    """||Q(x) - x||^2 / ||x||^2, the worst of each peer's words, (p,)."""
    if own.data_ptr() == said.data_ptr():  # said as they are
        return torch.zeros(len(plan.copies), dtype=torch.float64)
    worst, owner = (
        np.zeros(len(plan.copies)),
        plan.owner if isinstance(plan, EdgePlan) else np.arange(len(said)),
    )
    few = max(1, 2**18 // max(1, said.shape[1]))
    for first in range(0, len(said), few):
        rows = slice(first, first + few)
        lost, whole = _squares(own[rows] - said[rows]), _squares(said[rows])
        with np.errstate(invalid="ignore"):  # of a peer that diverged
            np.maximum.at(worst, owner[rows], lost / np.maximum(whole, 1e-300))
    return torch.from_numpy(worst)


def _squares(words: Tensor) -> NDArray[np.float64]:
    """||word||^2 of every row, by numpy: torch splits a lone row among its threads, and rounds otherwise."""
    values: NDArray[np.float64] = np.square(words.cpu().numpy(), dtype=np.float64).sum(1)
    return values
