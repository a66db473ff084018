"""DFedAvgM: local heavy-ball steps, then an average over the neighbours (Sun, Li, Wang 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@dataclass(frozen=True)
class State:
    """The models.

    Attributes:
        x: (p, m), the models of the peers; or (1, m), the one model of all.
    """

    x: Tensor


@ALGORITHMS.register("dfedavgm")
@dataclass(frozen=True, kw_only=True)
class DFedAvgM(Algorithm[State]):
    """Decentralized federated averaging with momentum (arXiv 2104.11375, Algorithm 1).

        z_i = K heavy-ball steps from x_i,   x_i <- sum_j w_ij z_j

    The run gives K, η, θ and the batch size. `dfl.training.sgd` takes the steps; the momentum of a
    peer is 0 before the first step of each round. An aggregator other than the mean takes the place
    of the sum over the closed neighbourhood. With one local step and no momentum it is D-PSGD (Lian
    et al. 2017) in adapt-then-combine order.
    """

    applies: ClassVar[tuple[str, ...]] = ("aggregator",)

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, then average with the neighbours."""
        z = task.train(state.x, net.t)
        return State(net.exchange(z, start=state.x).aggregate(net.aggregator))
