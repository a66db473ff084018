"""RelaySGD: sums that are relayed along the edges of a tree (Vogels et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import MESSAGES_ARRIVE, PEERS_STAY, TREE, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, and the last message over each edge.

    Attributes:
        x: (p, m), the models.
        start: (p, m), x⁰, the models before round 0.
        relayed: (e, m), m_(k->i) by (i, k).
        counts: (e,), c_(k->i), of how many peers it is the sum.
    """

    x: Tensor
    start: Tensor
    relayed: Tensor
    counts: Tensor


@ALGORITHMS.register("relay_sgd")
@dataclass(frozen=True, kw_only=True)
class RelaySGD(Algorithm[State]):
    """RelaySGD (Vogels et al., NeurIPS 2021, Algorithm 1), on a tree.

        m_(i->j) <- z_i + sum_{k != j} m_(k->i),   c_(i->j) <- 1 + sum_{k != j} c_(k->i)
        x_i <- (z_i + sum_k m_(k->i) + (P - 1 - sum_k c_(k->i)) x⁰_i) / P

    z_i are K local heavy-ball steps from x_i, and messages on the right of the first line are those
    of the round before. Once every count is complete, x_i is the plain mean of the z of all peers,
    each as old as it is far away. So the fixed point is x* whatever the data of the peers, and the
    mixing matrix has no part. The count is a further number of each message.
    """

    numbers: ClassVar[int] = 1
    default_topology: ClassVar[str] = "tree"
    requires: ClassVar[dict[Assumption, str]] = {
        TREE: "on another graph the sums hold steps of a peer several times, or not at all",
        MESSAGES_ARRIVE: "a lost sum is that of all peers behind the edge",
        PEERS_STAY: "no sum passes a peer that is down",
    }

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, before any message."""
        edges = len(net.union.into_owner)
        return State(x, x, x.new_zeros(edges, x.shape[1]), x.new_zeros(edges))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, relay the sums of the round before, and average what has come."""
        z = torch.column_stack([task.train(state.x, net.t), state.x.new_ones(net.hosted)])
        relayed = torch.column_stack([state.relayed, state.counts])
        sums = (z + net.gather(relayed))[net.union.out_owner] - relayed  # by (i, j)
        relayed = net.exchange(sums, per_edge=True).messages
        total = z + net.gather(relayed)
        missing = net.peers - total[:, -1:]
        x = (total[:, :-1] + missing * state.start) / net.peers
        return State(x, state.start, relayed[:, :-1], relayed[:, -1])
