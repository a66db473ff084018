"""Clique averaging: gradients are averaged within cliques, models on the graph (D-Cliques)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import CLUSTERS, NORMAL_RATE, PEERS_STAY, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.gossip.dsgdm import State

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
    from dfl.training.solver import Solver


@ALGORITHMS.register("clique_averaging")
@dataclass(frozen=True, kw_only=True)
class CliqueAveraging(Algorithm[State]):
    """D-SGD with clique averaging (Bellet, Kermarrec, Lavoie 2022, arXiv 2104.07365, section 4).

        m_i <- β m_i + sum_{j in C_i} g_j / |C_i|,   x_i <- sum_j w_ij (x_j - η m_j)

    C_i are peer i and its neighbours in its cluster: its clique, whose labels are distributed as
    those of all peers in `d_cliques`. β is the run's momentum, and it is that of gradients without
    the peers' own bias. g_i = (x_i - z_i) / η, where z_i are K local steps from x_i without
    momentum; the paper has one, and then g_i is the gradient at x_i. m, which is not sent, begins
    at 0, and has neither dampening nor Nesterov's variant, as in the authors' simulator
    (elavoie/non-iid-topology-simulator, simulate/algorithm/d_sgd.py): the mean gradient of the
    clique, or of those of its peers that have an edge to i, is given to torch's SGD at every peer,
    and then the models are averaged.

    With one clique of all peers, which begin alike, it is SGD with momentum on the mean gradient.
    """

    within_clusters: ClassVar[bool] = True
    default_topology: ClassVar[str] = "d_cliques"
    requires: ClassVar[Mapping[Assumption, str]] = {
        CLUSTERS: "gradients are averaged within them; d_cliques, caveman and clustered have them",
        PEERS_STAY: "a peer that is down would move by its momentum",
        NORMAL_RATE: "the difference of two models is divided by it",
    }

    @property
    def averages(self) -> bool:
        """False: the momentum continues the last changes."""
        return False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with no momentum."""
        return State(x, x.new_zeros(x.shape))

    def solver(self, solver: Solver) -> Solver:
        """Leave the momentum to `round`."""
        return replace(solver, momentum=0.0, outer_momentum=solver.momentum)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, average the gradients within cliques, and the models on the whole graph."""
        graph, cliques = net.graphs
        rate = task.rate(net.t)
        g = (state.x - task.train(state.x, net.t)) / rate
        m = task.momentum * state.m + cliques.exchange(g, slot="g").average()
        return State(graph.exchange(state.x - rate * m, start=state.x).average(), m)
