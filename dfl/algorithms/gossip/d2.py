"""D2: the difference of two rounds takes out the peers' own gradients (Tang et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import (
    ABOVE_MINUS_THIRD,
    FULL_WORK,
    MESSAGES_ARRIVE,
    NORMAL_RATE,
    PEERS_STAY,
    STATIC,
    SYMMETRIC,
    Assumption,
)
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.gradient_tracking import State

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@ALGORITHMS.register("d2")
@dataclass(frozen=True, kw_only=True)
class D2(Algorithm[State]):
    """D2, decentralized training over decentralized data (arXiv 1803.07068, Algorithm 1).

        x_i' = sum_j w_ij (z_j + η c_j),   c_i <- (x_i' - z_i) / η

    where z_i are K local steps from x_i. With one step, z_i = x_i - η g_i, it is the published form
    x'' = W (2 x' - x - η g' + η g). With more, the peers agree where their local steps cancel out,
    which is the minimum if they have the same curvature.

    c is in the unit of a gradient. The published memory x' - z is not, and a schedule that changes
    η from one round to the next would leave a part of the peers' own gradients in it.
    """

    requires: ClassVar[Mapping[Assumption, str]] = {
        MESSAGES_ARRIVE: "what a lost message held would stay in the memory",
        PEERS_STAY: "a peer that is down would move by its memory",
        NORMAL_RATE: "the difference of two models is divided by it",
    }
    expects: ClassVar[Mapping[Assumption, str]] = {
        STATIC: "the memory is of another graph, and models may diverge",
        SYMMETRIC: "with complex eigenvalues models may diverge",
        ABOVE_MINUS_THIRD: "below it models diverge, and at it they are about to; choose "
        "--mixing lazy or --algorithm exact_diffusion",
        FULL_WORK: "steps that are missing in one round are taken back in the next",
    }

    @property
    def averages(self) -> bool:
        """False: the memory continues the last change."""
        return False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no memory."""
        return State(x, x.new_zeros(x.shape))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, average the models moved by the memory, and remember what that changed."""
        z, rate = task.train(state.x, net.t), task.rate(net.t)
        x = self.mixed(z + rate * state.c, state.x, net)
        return State(x, (x - z) / rate)

    def mixed(self, sent: Tensor, start: Tensor, net: Net) -> Tensor:
        """Return sum_j w_ij sent_j."""
        return net.exchange(sent, start=start).average()
