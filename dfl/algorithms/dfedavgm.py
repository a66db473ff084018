"""DFedAvgM: local heavy-ball steps, then an average over the neighbours (Sun, Li, Wang 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.models.sharing import merge_shared, split_shared
from dfl.training.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net
    from dfl.training.task import Task


@dataclass(frozen=True)
class State:
    """x: (p, d), the models; (1, d) if it is `one` for all."""

    x: Tensor
    is_global: bool = False

    @property
    def replicated(self) -> tuple[str, ...]:
        """The one for all."""
        return ("x",) if self.is_global else ()

    @property
    def parts(self) -> tuple[Tensor]:
        """The models."""
        return (self.x,)


@ALGORITHMS.register("dfedavgm")
@dataclass(frozen=True, kw_only=True)
class DFedAvgM(Algorithm):
    """Decentralized federated averaging with momentum (arXiv 2104.11375, Algorithm 1).

        z_i = K heavy-ball steps from x_i,   x_i <- sum_j w_ij z_j

    Where peers share a part of their models, the sum is over that part, and the rest of z_i stays.

    An aggregator other than the mean takes the place of the sum over the closed neighbourhood. One local step without
    momentum is D-PSGD (Lian et al. 2017) in its adapt-then-combine order.
    """

    takes: ClassVar[tuple[str, ...]] = ("aggregator",)

    def init(self, x: Tensor, known: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, then average what is shared."""
        shared = task.parameter_layout.shared
        z, own = split_shared(sgd(state.x, task, net.t), shared)
        return State(merge_shared(net.exchange(z, state.x[:, :shared]).combine(net.rule), own))
