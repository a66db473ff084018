"""DecentLaM: the momentum is that of the averaged models (Yuan et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import NORMAL_RATE, PEERS_STAY, SYMMETRIC, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.dsgdm import State

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
    from dfl.training.solver import Solver


@ALGORITHMS.register("decentlam")
@dataclass(frozen=True, kw_only=True)
class DecentLaM(Algorithm[State]):
    """DecentLaM (arXiv 2104.11981, Algorithm 2), which removes the bias that momentum adds.

        g~_i = (x_i - sum_j w_ij z_j) / η,   m_i <- β m_i + g~_i,   x_i <- x_i - η m_i

    where z_i are K local steps from x_i, x_i - η g_i as published. β is the run's momentum, and the
    local steps have none. Without momentum it is D-PSGD.

    m_i is in the unit of a gradient, by the learning rate of its round. The disagreement of the
    neighbours in it is not proportional to η and grows as η falls.
    """

    requires: ClassVar[Mapping[Assumption, str]] = {
        PEERS_STAY: "a peer that is down would move by its momentum",
        NORMAL_RATE: "the difference of two models is divided by it",
    }
    expects: ClassVar[Mapping[Assumption, str]] = {
        SYMMETRIC: "with momentum, modes of complex eigenvalues may diverge"
    }

    @property
    def averages(self) -> bool:
        """False: the momentum continues the last changes."""
        return False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no momentum."""
        return State(x, x.new_zeros(x.shape))

    def solver(self, solver: Solver) -> Solver:
        """Leave the momentum to `round`."""
        return replace(solver, momentum=0.0, outer_momentum=solver.momentum)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, average, and move by the momentum of the change that both make."""
        z, rate = task.train(state.x, net.t), task.rate(net.t)
        change = state.x - net.exchange(z, start=state.x).average()
        m = task.momentum * state.m + change / rate
        return State(state.x - rate * m, m)
