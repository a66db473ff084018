"""Methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge

from dfl.algorithms import Algorithm
from dfl.algorithms.gossip.dfedavgm import State

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class CombineThenAdapt(Algorithm[State]):
    """D-PSGD in its combine-then-adapt order, with K local steps (Lian et al. 2017).

        x_i <- K heavy-ball steps from sum_j w_ij x_j

    Attributes:
        silent: rounds at the beginning in which peers send nothing.
    """

    silent: Annotated[int, Ge(0)] = 0

    def init(self, x: Tensor, copies: Tensor, net: Any) -> State:
        """Start at x."""
        return State(x)

    def round(self, state: State, task: Any, net: Any) -> State:
        """Average, then train."""
        x = state.x if net.t < self.silent else net.exchange(state.x, state.x).average()
        return State(task.train(x, net.t))
