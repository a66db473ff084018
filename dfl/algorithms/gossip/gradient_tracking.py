"""Gradient tracking: each local gradient is corrected towards the mean gradient of all peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dfl.algorithms.assumptions import (
    DOUBLY_STOCHASTIC,
    MESSAGES_ARRIVE,
    NORMAL_RATE,
    SYMMETRIC_OUTAGES,
    Assumption,
)
from dfl.algorithms.base import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@dataclass(frozen=True)
class State:
    """Models and corrections.

    Attributes:
        x: (p, m), the models.
        c: (p, m), the part of a peer's gradient that is its own; its sum over all peers is 0.
    """

    x: Tensor
    c: Tensor


@ALGORITHMS.register("gradient_tracking")
@dataclass(frozen=True, kw_only=True)
class GradientTracking(Algorithm[State]):
    """Gradient tracking (Di Lorenzo, Scutari 2016; Nedic, Olshevsky, Shi 2017), with K local steps
    as in K-GT (Liu, Lin, Koloskova, Stich 2024, arXiv 2301.01313).

        z_i = K steps from x_i with the gradients g_i - c_i,   y_i = (x_i - z_i) / η_K
        x_i <- sum_j w_ij z_j   (atc)   or   sum_j w_ij x_j + (z_i - x_i)   (cta)
        c_i <- c_i + y_i - sum_j w_ij y_j

    y_i is the mean of the corrected gradients, in the usual notation the tracker: with one step,
    y_i = g_i - c_i, and the last line is y_i <- sum_j w_ij y_j + g_i(x_i') - g_i(x_i). η_K is how
    far the K steps move by a gradient of 1: K η, and more with the run's momentum, which begins at
    zero in every round. Corrections are gradients, so a change of η does not rescale them.

    Peers that are down take no part and keep their own weight. A symmetric W stays doubly
    stochastic then, and the corrections go on adding up to 0.

    Attributes:
        order: atc (adapt, then combine) or cta (combine, then adapt), which averages the models
            before the steps.
    """

    order: Literal["atc", "cta"] = "atc"

    messages: ClassVar[int] = 2
    requires: ClassVar[Mapping[Assumption, str]] = {
        MESSAGES_ARRIVE: "the corrections would no longer add up to 0, and the models drift away",
        SYMMETRIC_OUTAGES: "the corrections would no longer add up to 0, and the models drift away",
        NORMAL_RATE: "the difference of two models is divided by it",
    }
    expects: ClassVar[Mapping[Assumption, str]] = {
        DOUBLY_STOCHASTIC: "the minimum that is found weights the peers unequally"
    }

    @property
    def averages(self) -> bool:
        """True, except where the local change is added to a mean of other models."""
        return self.order == "atc"

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no correction."""
        return State(x, x.new_zeros(x.shape))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train with corrected gradients, average the models, and average the gradients."""
        z = task.train(state.x, net.t, correction=-state.c)
        step = z - state.x
        y = step / -task.reach(net.t, task.momentum)
        tracked = net.exchange(y, slot="y").average()
        c = y.add_(state.c).sub_(tracked)
        if self.order == "atc":
            return State(net.exchange(z, start=state.x).average(), c)
        return State(net.exchange(state.x).average().add_(step), c)
