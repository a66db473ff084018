"""PowerGossip: low-rank differences of neighbours by warm power iterations (Vogels et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dfl.algorithms.assumptions import (
    HONEST_MESSAGES,
    MESSAGES_ARRIVE,
    PEERS_STAY,
    STATIC,
    SYMMETRIC,
    UNDIRECTED,
    Assumption,
)
from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.factors import Bases, numbers, parts_of
from dfl.core import randomness
from dfl.core.options import Count
from dfl.core.rows import rows_at

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, and what both ends of an edge remember of their difference.

    Attributes:
        x: (p, m), the models.
        factors: (e, r, ...), for edges i -> j: the left (u) and the right (v) factor of r columns
            of the difference of the higher to the lower of i and j, one matrix after the other.
    """

    x: Tensor
    factors: Tensor


@ALGORITHMS.register("power_gossip")
@dataclass(frozen=True, kw_only=True)
class PowerGossip(Algorithm[State]):
    """PowerGossip (arXiv 2008.01425), one step of a power iteration per round.

    Each parameter matrix X, and each edge, has a factor V that both ends know. z are K local steps.

        V <- orthonormal columns of V,   S_ij = Z_j V - Z_i V   of what i and j send each other
        X_i <- Z_i + sum_j w_ij S_ij V^T,   V <- S   for the transposed matrices in the next round

    S V^T is the difference of the two models, projected on r directions, which the rounds turn
    towards those of its largest singular values. The steps at the two ends cancel, so the mean is
    kept where W is symmetric. Vectors, and matrices with r >= min(u, v), are sent as they are: at
    full rank it is DFedAvgM. A parameter of more than two axes is a matrix of its first axis by all
    others.

    Attributes:
        rank: r.
    """

    rank: Count = 1

    requires: ClassVar[Mapping[Assumption, str]] = {
        STATIC: "both ends of an edge remember a factor of their last difference",
        UNDIRECTED: "both ends of an edge send what the other needs",
        MESSAGES_ARRIVE: "the ends of an edge would remember different factors",
        PEERS_STAY: "the ends of an edge would remember different factors",
        HONEST_MESSAGES: "the ends of an edge would remember different factors",
    }
    expects: ClassVar[Mapping[Assumption, str]] = {SYMMETRIC: "the mean of the models is not kept"}

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with random factors that both ends of an edge draw alike."""
        n = numbers(parts_of(x.shape[1], net.shapes, self.rank))
        low, high = np.sort(np.divmod(net.union.out, net.peers), axis=0)
        ids = low * net.peers + high
        factors = randomness.uniform(net.seed, "power gossip", ids, n=self.rank * n) - 0.5
        return State(x, factors.to(x).unflatten(1, (self.rank, n)))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, and send every neighbour the products with the basis of the edge."""
        z = task.train(state.x, net.t)
        V = Bases(state.factors, parts_of(z.shape[1], net.shapes, self.rank), net.t)
        received = net.exchange(V.products(rows_at(z, net.union.out_owner)), per_edge=True)
        # Edges go both ways, so j -> i has the place among the incoming edges that i -> j has among
        # the outgoing ones.
        S = received.messages - received.own  # Z_j V - Z_i V
        x = z + net.pull(V.projections(S))  # sum_j w_ij S_ij V^T
        owner, other = np.divmod(net.union.out, net.peers)
        upwards = torch.from_numpy(np.where(owner < other, 1.0, -1.0)).to(S)[:, None]
        return State(x, V.next(upwards * S))  # alike at both ends

    def lengths(self, m: int, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """Return the numbers of a message in an even and in an odd round."""
        parts = parts_of(m, shapes, self.rank)
        return tuple(sum(part.length(self.rank, t) for part in parts) for t in (0, 1))
