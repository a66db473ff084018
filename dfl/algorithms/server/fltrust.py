"""FLTrust: a server weights updates by their similarity to its own (Cao et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.server.fedavg import FedAvg
from dfl.core.options import Count, Index, Share
from dfl.datasets.server_data import biased_sample

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
    from dfl.algorithms.server.fedavg import State
    from dfl.datasets.server_data import ServerDataRule
    from dfl.training.solver import Solver


@ALGORITHMS.register("fltrust")
@dataclass(frozen=True, kw_only=True)
class FLTrust(FedAvg):
    """Byzantine-robust federated learning via trust bootstrapping (Cao, Fang, Liu, Gong, NDSS 2021,
    Algorithm 2).

    The server has a root dataset, set aside before the training data are partitioned. It trains on
    it for as many steps as the peer with the most steps; its update is g_0. The aggregator weights
    the updates g_k of the peers by ReLU(cos(g_k, g_0)) and scales each to the norm of g_0.

    Attributes:
        root: the number of examples of the root dataset.
        bias: the fraction of them that has label 1; the other labels have equal fractions. If None,
            1 / classes, which is no bias.
        batch: the examples of a step of the server; 0 for the whole root dataset, as in the
            released code. If None, the batch size of the peers, as in the paper.
    """

    root: Count = 100
    bias: Share | None = None
    batch: Index | None = None

    default_aggregator: ClassVar[str] = "fltrust"

    @property
    def server_data_rule(self) -> ServerDataRule:
        """The rule that draws the root dataset."""
        return partial(biased_sample, size=self.root, bias=self.bias)

    @property
    def averages(self) -> bool:
        """False: updates are scaled to the norm of that of the server."""
        return False

    def server_solver(self, solver: Solver) -> Solver:
        """Return the solver of the peers, with the server's own batch size if it has one."""
        return solver if self.batch is None else replace(solver, batch_size=self.batch)

    def reference(self, state: State, task: Task, net: Net) -> Tensor:
        """Return g_0, the server's own update."""
        return net.at_server(lambda: task.of_server.train(state.x, net.t) - state.x, state.x)

    def observe(self, state: State) -> dict[str, Tensor]:
        """Return the trust score of each peer in the last round."""
        return {"trust": state.scores}
