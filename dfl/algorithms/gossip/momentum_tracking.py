"""Momentum tracking: gradient tracking of the momentum (Takezawa et al. 2023)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.gradient_tracking import GradientTracking

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@dataclass(frozen=True)
class State:
    """Models, momentum and corrections.

    Attributes:
        x: (p, m), the models.
        u: (p, m), the momentum, in the unit of a gradient.
        c: (p, m), the part of a peer's momentum that is its own; its sum over all peers is 0.
    """

    x: Tensor
    u: Tensor
    c: Tensor


@ALGORITHMS.register("momentum_tracking")
@dataclass(frozen=True, kw_only=True)
class MomentumTracking(Algorithm[State]):
    """Momentum tracking (arXiv 2209.15505, Algorithm 1), with K local steps.

        u_i <- β u_i + g_i,   z_i = x_i - η (u_i - c_i)   (K times)
        x_i <- sum_j w_ij x_j + (z_i - x_i)
        c_i <- c_i + y_i - sum_j w_ij y_j   where   y_i = (x_i - z_i) / (K η)

    β is the run's momentum; without it this is gradient tracking with order=cta. With one step
    y_i = u_i - c_i, as published. Published code sets the first u and c by an average over all
    peers; here they are 0.

    v = u - c follows v <- β v + g - (1 - β) c, so the local steps begin with the momentum u - c and
    correct the gradients by -(1 - β) c.
    """

    messages: ClassVar[int] = GradientTracking.messages
    requires: ClassVar[Mapping[Assumption, str]] = GradientTracking.requires
    expects: ClassVar[Mapping[Assumption, str]] = GradientTracking.expects

    @property
    def averages(self) -> bool:
        """False: the change of the local steps is added to a mean of other models."""
        return False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no momentum and no correction."""
        return State(x, x.new_zeros(x.shape), x.new_zeros(x.shape))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train with corrected momentum, average the models, and average the momenta."""
        x, u, c = state.x, state.u, state.c
        z, v = task.train_with_momentum(x, u - c, net.t, correction=(task.momentum - 1) * c)
        step = z.sub_(x)
        y = step / -task.reach(net.t)
        tracked = net.exchange(y, slot="y").average()
        return State(net.exchange(x).average().add_(step), v.add_(c), y.add_(c).sub_(tracked))
