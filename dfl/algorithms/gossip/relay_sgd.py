"""RelaySGD: sums that are relayed along the edges of trees (Vogels et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import MESSAGES_ARRIVE, PEERS_STAY, TREES, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core.rows import rows_at

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
        relayed: (e, m), m_(k->i) by (i, k); zeros where the tree of a coordinate has no such edge.
        counts: (e, T, 1), c_(k->i) on each tree, of how many peers it is the sum.
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

    Of a sequence of T trees all are used in every round, tree k for the coordinates k, k + T, k +
    2T, ..., so that a message has a T-th of the model.
    """

    numbers: ClassVar[int] = 1
    on_every_graph: ClassVar[bool] = True
    default_topology: ClassVar[str] = "tree"
    requires: ClassVar[Mapping[Assumption, str]] = {
        TREES: "on another graph the sums hold steps of a peer several times, or not at all",
        MESSAGES_ARRIVE: "a lost sum is that of all peers behind the edge",
        PEERS_STAY: "no sum passes a peer that is down",
    }

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, before any message."""
        edges = len(net.union.into_owner)
        return State(x, x, x.new_zeros(edges, x.shape[1]), x.new_zeros(edges, len(net.graphs), 1))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, and let every tree relay and average its coordinates."""
        z, T = task.train(state.x, net.t), len(net.graphs)
        x, relayed, counts = [], [], []
        for k, tree in enumerate(net.graphs):
            before = torch.column_stack([state.relayed[:, k::T], state.counts[:, k]])
            after, total = _relay(z[:, k::T], before, tree, slot=f"tree {k}" if k else "x")
            missing = net.peers - total[:, -1:]
            x.append((total[:, :-1] + missing * state.start[:, k::T]) / net.peers)
            relayed.append(after[:, :-1])
            counts.append(after[:, -1:])
        return State(_merged(x), state.start, _merged(relayed), torch.stack(counts, 1))


def _relay(z: Tensor, before: Tensor, tree: Net, slot: str) -> tuple[Tensor, Tensor]:
    """Relay the sums of the round before on a tree, each with its count in the last column.

    Args:
        z: (p, m), what peers add.
        before: (e, m + 1), m_(k->i) by (i, k) of the round before.
        tree: the network on the tree.
        slot: names this exchange.

    Returns:
        m_(k->i) of this round, (e, m + 1), and z_i + sum_k m_(k->i), (p, m + 1).
    """
    z, edges = torch.column_stack([z, z.new_ones(len(z))]), tree.edges
    alone = len(edges.out) == len(before)  # no other tree has an edge that this one has not
    sent = before if alone else rows_at(before, edges.out)
    sums = rows_at(z + tree.sum_incoming(before), edges.owner) - sent  # by (i, j)
    after = tree.exchange(sums, per_edge=True, slot=slot).messages
    if not alone:
        places = torch.from_numpy(edges.into).to(before.device)
        after = torch.zeros_like(before).index_copy_(0, places, after)
    return after, z + tree.sum_incoming(after)


def _merged(parts: list[Tensor]) -> Tensor:
    """Return the columns of T parts, those of part k as the columns k, k + T, k + 2T, ..."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(len(parts[0]), sum(part.shape[1] for part in parts))
    for k, part in enumerate(parts):
        whole[:, k :: len(parts)] = part
    return whole
