"""D-PSGD: a local step and an average over the neighbours, in either order (Lian et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.dfedavgm import State

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@ALGORITHMS.register("dpsgd")
@dataclass(frozen=True, kw_only=True)
class DPSGD(Algorithm[State]):
    """Decentralized parallel SGD (arXiv 1705.09056), where z_i are K local steps from x_i.

        atc:  x_i <- sum_j w_ij z_j
        cta:  x_i <- sum_j w_ij x_j + (z_i - x_i)       Algorithm 1

    The published form has one step without momentum, x_i <- sum_j w_ij x_j - η g_i(x_i), whose
    gradient is that of the model before the average. With more steps, or with the run's momentum in
    them, atc is DFedAvgM, bit for bit.

    Attributes:
        order: atc (adapt, then combine) or cta (combine, then adapt).
    """

    order: Literal["atc", "cta"] = "atc"

    @property
    def averages(self) -> bool:
        """True, except where the local change is added to a mean of other models."""
        return self.order == "atc"

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, and average what is sent: models after the local steps, or before them."""
        z = task.train(state.x, net.t)
        if self.order == "atc":
            return State(net.exchange(z, start=state.x).average())
        return State(net.exchange(state.x).average() + (z - state.x))
