"""The two ends of federated learning: nobody talks at all, and all examples are in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.dfedavgm import State
from dfl.datasets.server_data import everything
from dfl.training.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net
    from dfl.datasets.server_data import ServerDataRule
    from dfl.training.task import Task


@ALGORITHMS.register("local_only")
@dataclass(frozen=True, kw_only=True)
class LocalOnly(Algorithm):
    """Every peer trains on its own examples and says nothing: what a peer gains by joining is measured against it."""

    gossips: ClassVar[bool] = False
    splits: ClassVar[bool] = False

    def init(self, x: Tensor, known: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x, is_global=self.serves)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train."""
        return State(sgd(state.x, task, net.t))

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """Nothing."""
        return 0, 0


@ALGORITHMS.register("pooled")
@dataclass(frozen=True, kw_only=True)
class Pooled(LocalOnly):
    """One model trains on the examples of all peers in one place, E passes a round: what federation costs in learning.

    How they got there is not counted.
    """

    serves: ClassVar[bool] = True

    @property
    def server_data_rule(self) -> ServerDataRule:
        """The server has what the peers have."""
        return everything

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train on everything."""
        x = net.at_server(lambda: sgd(state.x, task.of_server, net.t), state.x)
        return State(x, is_global=True)
