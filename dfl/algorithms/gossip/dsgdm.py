"""DSGDm: D-PSGD whose momentum is kept between rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfl.algorithms.base import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@dataclass(frozen=True)
class State:
    """Models and their momentum.

    Attributes:
        x: (p, m), the models.
        m: (p, m), the momentum, in the unit of a gradient.
    """

    x: Tensor
    m: Tensor


@ALGORITHMS.register("dsgdm")
@dataclass(frozen=True, kw_only=True)
class DSGDm(Algorithm[State]):
    """Decentralized SGD with local momentum β (as in Lin et al. 2021, arXiv 2102.04761, section 3).

        m_i <- β m_i + g_i,   z_i = x_i - η m_i   (K times),   x_i <- sum_j w_ij z_j

    The momentum is not sent. DFedAvgM begins every round with m_i = 0; without momentum both are
    the same.
    """

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no momentum."""
        return State(x, x.new_zeros(x.shape))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train with the momentum of the last round, then average the models."""
        z, m = task.train_with_momentum(state.x, state.m, net.t)
        return State(net.exchange(z, start=state.x).average(), m)
