"""FLTrust: a server trusts peers as far as they agree with what its own few examples teach (Cao et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.fedavg import FedAvg
from dfl.core.options import Count, Share
from dfl.datasets.server_data import root_examples
from dfl.training.sgd import sgd

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.fedavg import State
    from dfl.algorithms.protocols import Net
    from dfl.datasets.server_data import ServerDataRule
    from dfl.training.task import Task


@ALGORITHMS.register("fltrust")
@dataclass(frozen=True, kw_only=True)
class FLTrust(FedAvg):
    """Byzantine-robust federated learning via trust bootstrapping (Cao, Fang, Liu, Gong, NDSS 2021, Algorithm 2).

    The server has examples of its own, set aside before the peers get theirs, and trains on them as long as a peer
    does: g_0. The aggregator weighs the steps of the peers by ReLU(cos(g_k, g_0)) and gives them all the length of g_0.

    Attributes:
        root: the server's examples.
        bias: share of them that is of label 1, the others being spread alike; 1 / classes, none, where not given.
    """

    root: Count = 100
    bias: Share | None = None

    splits: ClassVar[bool] = False
    rule: ClassVar[str] = "fltrust"

    @property
    def server_data_rule(self) -> ServerDataRule:
        """Which examples the server has."""
        return partial(root_examples, size=self.root, bias=self.bias)

    def trusted(self, state: State, task: Task, net: Net) -> Tensor:
        """g_0, the server's step from w."""
        return net.at_server(lambda: sgd(state.w, task.of_server, net.t) - state.w, state.w)

    def observe(self, state: State) -> dict[str, Tensor]:
        """How far each peer was trusted in the last round."""
        return {"trust": state.scores}
