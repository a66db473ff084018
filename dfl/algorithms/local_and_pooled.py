"""Two baselines without messages: local training only, and training on the pooled examples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.dfedavgm import State
from dfl.datasets.server_data import all_examples

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
    from dfl.datasets.server_data import ServerDataRule


@ALGORITHMS.register("local_only")
@dataclass(frozen=True, kw_only=True)
class LocalOnly(Algorithm[State]):
    """Every peer trains on its own examples and sends nothing.

    The gain of a peer from federation is measured against it.
    """

    gossips: ClassVar[bool] = False
    sends: ClassVar[bool] = False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x."""
        return State(x)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train."""
        return State(task.train(state.x, net.t))

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """Return zeros."""
        return 0, 0


@ALGORITHMS.register("pooled")
@dataclass(frozen=True, kw_only=True)
class Pooled(LocalOnly):
    """One model trains on the examples of all peers, E epochs per round.

    The loss of accuracy by federation is measured against it. The collection of the examples is not
    counted as traffic.
    """

    has_server: ClassVar[bool] = True
    peers_train: ClassVar[bool] = False
    replicated: ClassVar[tuple[str, ...]] = ("x",)

    @property
    def server_data_rule(self) -> ServerDataRule:
        """The server has the examples of all peers."""
        return all_examples

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train on all examples."""
        return State(net.at_server(lambda: task.of_server.train(state.x, net.t), state.x))
