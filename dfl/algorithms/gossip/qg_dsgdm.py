"""QG-DSGDm: momentum that follows the average of the neighbourhood (Lin et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import NORMAL_RATE, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.dsgdm import State
from dfl.core.options import Share

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@ALGORITHMS.register("qg_dsgdm")
@dataclass(frozen=True, kw_only=True)
class QGDSGDm(Algorithm[State]):
    """Quasi-global momentum (arXiv 2102.04761, Algorithm 1), without Nesterov's variant.

        z_i = K heavy-ball steps from x_i that begin with the momentum m_i   (K = 1: β m_i + g_i)
        x_i' = sum_j w_ij z_j,   m_i <- (1 - μ) m_i + μ (x_i - x_i') / (K η)

    β is the run's momentum, and μ is an option: the paper sets μ = 1 - β. Published code also
    divides the step by 1 + β; this does not. With μ = 1 and β = 0 it is D-PSGD.

    x_i - x_i' is divided by the learning rate of the round in which it arose, so the gradients in
    m_i keep their unit when a schedule changes η. Its other part, the disagreement of the
    neighbours, is not proportional to η and grows in m_i as η falls. A peer that is down keeps m_i.

    Attributes:
        mu: μ.
    """

    mu: Share = 0.1

    requires: ClassVar[Mapping[Assumption, str]] = {
        NORMAL_RATE: "the difference of two models is divided by it"
    }

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no momentum."""
        return State(x, x.new_zeros(x.shape))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train from the momentum, average, and add the change of the model to the momentum."""
        z, _ = task.train_with_momentum(state.x, state.m, net.t)
        x = net.exchange(z, start=state.x).average()
        change = (state.x - x) * (self.mu / task.reach(net.t))
        m = (1 - self.mu) * state.m + change
        present = net.present(net.everyone.ids)
        if len(present) < net.peers:
            up = torch.from_numpy(net.group(present).here).to(m.device)
            m = state.m.index_copy(0, up, m[up])
        return State(x, m)
