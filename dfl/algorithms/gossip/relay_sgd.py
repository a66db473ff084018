"""RelaySGD: sums that are relayed along the edges of trees (Vogels et al. 2021)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dfl.algorithms.assumptions import MESSAGES_ARRIVE, PEERS_STAY, TREES, Assumption
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core.rows import rows_at

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, the last message over each edge, and their sums at each peer.

    Attributes:
        x: (p, m), the models.
        start: (p, m), x⁰, the models before round 0.
        relayed: (e', m), m_(k->i) by (i, k); zeros where the tree of a coordinate has no such edge.
        counts: (e', T, 1), c_(k->i) on each tree, of how many peers it is the sum.
        sums: (p, m), sum_k m_(k->i).
        reached: (p, T, 1), sum_k c_(k->i) on each tree, of how many other peers it is the sum.
    """

    x: Tensor
    start: Tensor
    relayed: Tensor
    counts: Tensor
    sums: Tensor
    reached: Tensor


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

    extra_numbers: ClassVar[int] = 1
    mixes: ClassVar[bool] = False
    on_every_graph: ClassVar[bool] = True
    incoming: ClassVar[tuple[str, ...]] = ("relayed", "counts")
    default_topology: ClassVar[str] = "tree"
    requires: ClassVar[Mapping[Assumption, str]] = {
        TREES: "on another graph the sums hold steps of a peer several times, or not at all",
        MESSAGES_ARRIVE: "a lost sum is that of all peers behind the edge",
        PEERS_STAY: "no sum passes a peer that is down",
    }

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, before any message."""
        T, edges = len(net.graphs), len(net.union.into_owner)
        relayed, sums = x.new_zeros(edges, x.shape[1]), x.new_zeros(x.shape)
        return State(x, x, relayed, x.new_zeros(edges, T, 1), sums, x.new_zeros(len(x), T, 1))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, and let every tree relay and average its coordinates."""
        z, T = task.train(state.x, net.t), len(net.graphs)
        x, relayed, counts, sums, reached = [], [], [], [], []
        for k, tree in enumerate(net.graphs):
            own, begin, before = (rows[:, k::T] for rows in (z, state.start, state.sums))
            known = torch.column_stack([own + before, 1 + state.reached[:, k]])
            messages = rows_at(known, tree.edges.owner)  # by (i, j)
            # The edges of a tree go both ways, so j -> i has the place among the incoming edges
            # that i -> j has among the outgoing ones.
            messages[:, :-1].sub_(_in_use(state.relayed, tree)[:, k::T])
            messages[:, -1:].sub_(_in_use(state.counts[:, k], tree))
            slot = f"tree {k}" if k else "x"
            after = tree.exchange(messages, per_edge=True, slot=slot).messages
            total = tree.sum_incoming(after)
            missing = net.peers - 1 - total[:, -1:]
            x.append((own + total[:, :-1]).add_(missing * begin).div_(net.peers))
            relayed.append(after[:, :-1])
            counts.append(after[:, -1:])
            sums.append(total[:, :-1])
            reached.append(total[:, -1:])
        edges = len(state.relayed), [tree.edges.into for tree in net.graphs]
        peers = len(z), [np.arange(len(z))] * T
        return State(
            _merged(x, *peers), state.start,
            _merged(relayed, *edges), _merged(counts, *edges)[:, :, None],
            _merged(sums, *peers), _merged(reached, *peers)[:, :, None],
        )  # fmt: skip


def _in_use(rows: Tensor, tree: Net) -> Tensor:
    """Return the rows (a', ...) of the incoming edges of a tree, given those of all (e', ...)."""
    alone = len(tree.edges.into) == len(rows)  # no other tree has an edge that this one has not
    return rows if alone else rows_at(rows, tree.edges.into)


def _merged(parts: list[Tensor], n: int, places: list[NDArray[np.int64]]) -> Tensor:
    """Return n rows with T parts, part k as the columns k, k + T, k + 2T, ... of its rows.

    Args:
        parts: (a, m_k) each.
        n: the rows.
        places: (a,) each, the rows of a part; zeros are in the others.
    """
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_zeros(n, sum(part.shape[1] for part in parts))
    for k, (part, rows) in enumerate(zip(parts, places, strict=True)):
        whole[torch.from_numpy(rows).to(whole.device), k :: len(parts)] = part
    return whole
