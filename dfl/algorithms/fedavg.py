"""FedAvg: a server sends its model to some peers, who train, and adds up what they learned (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core import randomness
from dfl.core.options import BelowOne, Positive, Share
from dfl.models.sharing import merge_shared, split_shared
from dfl.training.sgd import sgd

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.algorithms.protocols import Net
    from dfl.core.layout import Group
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """What the server has, the same on every rank, and what each of this rank's peers keeps to itself.

    Attributes:
        w: (1, s), the server's model.
        v: (1, s), its velocity.
        scores: (p,), what its rule thought of this rank's peers in the last round; NaN where it thought nothing.
        own: (p, d - s), the rest of the peers' models; a round overwrites the rows of those who train.
    """

    w: Tensor
    v: Tensor
    scores: Tensor
    own: Tensor
    replicated: ClassVar[tuple[str, ...]] = ("w", "v")

    @property
    def x(self) -> Tensor:
        """(p, d), w beside what every peer keeps; (1, d), w itself, where they keep nothing."""
        return merge_shared(self.w, self.own)

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """What is shared, and what is not."""
        return self.w, self.own

    @property
    def is_global(self) -> bool:
        """Whether the server's model is everybody's."""
        return not self.own.shape[1]


@ALGORITHMS.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    """Federated averaging (McMahan et al. 2017, Algorithm 1, with erratum 4), for C = 1, and B and E as the run says.

        S_t = max(round(C P), 1) peers (halves to even),   z_k = local steps from w for k in S_t
        v <- β v + sum_{k in S_t} n_k (z_k - w) / sum_{k in S_t} n_k,   w <- w + η_s v

    An aggregator other than the mean takes the place of the sum. With β > 0 it is FedAvgM (Hsu, Qi, Brown 2019).

    Where peers share a part of their models it is LG-FedAvg (Liang et al. 2020, Algorithm 1): w is that part, the
    rest of z_k stays with peer k, and who is not in S_t keeps what it had.

    Attributes:
        fraction: C, the share of the peers that take part in a round, drawn for every round of those who are up.
        weighting: examples, n_k as above; uniform, every peer of S_t alike; or gradient, ||z_k - w||^2 in place of n_k,
            since the step is η times the sum of the gradients (LG-FedAvg, section 2.2): of the step as it was meant,
            so that a liar gains no weight by its lie.
        broadcast_to: whom the server tells in a round: chosen, the peers of S_t; or everyone, as the published LG-FedAvg does
            and counts. Learning is the same: who needs w later is told it then.
        server_lr: η_s.
        server_momentum: β, in [0, 1).
        stragglers: share of S_t that is too slow for the round, drawn with it; one peer at least is not.
        straggler_policy: drop, what stragglers learned is not waited for; or fewer, they train for fewer epochs, or steps where the
            run counts steps, as many as a uniform draw from 1 to what the run says (Li et al. 2020, section 5.2); so of
            one epoch they do all.
    """

    fraction: Share = 1.0
    weighting: Literal["examples", "uniform", "gradient"] = "examples"
    broadcast_to: Literal["chosen", "everyone"] = "chosen"
    server_lr: Positive = 1.0
    server_momentum: BelowOne = 0.0
    stragglers: BelowOne = 0.0
    straggler_policy: Literal["drop", "fewer"] = "drop"

    serves: ClassVar[bool] = True
    gossips: ClassVar[bool] = False
    takes: ClassVar[tuple[str, ...]] = ("compressor", "aggregator")

    def init(self, x: Tensor, known: Tensor, net: Net) -> State:
        """Start at x: the shared part is the server's, the rest everybody's own."""
        (w, own), nobody = (
            split_shared(x, known.shape[1]),
            torch.full((net.hosted,), float("nan"), dtype=torch.float64),
        )
        return State(
            w[:1],
            torch.zeros_like(w[:1]),
            nobody,
            own.repeat(net.hosted // len(x) or 1, 1)[: net.hosted],
        )

    def part(self, state: State, shared: int) -> State:
        """Leave to every peer a copy of what is no longer shared."""
        (w, own), (v, _) = split_shared(state.w, shared), split_shared(state.v, shared)
        return replace(state, w=w, v=v, own=own.repeat(len(state.own), 1))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Send the model out, let some peers train, and follow what they learned."""
        chosen, group, work = self._draw(task, net)
        w = net.broadcast(state.w, net.everyone if self.broadcast_to == "everyone" else chosen)
        x = merge_shared(w.expand(len(group.here), -1), state.own[group.here])
        z, own = split_shared(sgd(x, task.only(group.here, work), net.t), w.shape[1])
        heard = net.aggregate(
            z - w, group, self._counts(z - w, task, group), self.trusted(state, task, net)
        )
        v = self.server_momentum * state.v + heard.row
        state.own.index_copy_(0, torch.from_numpy(group.here).to(own.device), own)
        return State(w + self.server_lr * v, v, heard.scores, state.own)

    def _counts(self, steps: Tensor, task: Task, group: Group) -> NDArray[np.float64]:
        """How much the steps (a, s) of the members of a group that are here count."""
        if self.weighting == "examples":
            return task.examples.sizes[group.here].astype(np.float64)
        if self.weighting == "uniform":
            return np.ones(len(steps))
        squares: NDArray[np.float64] = np.square(steps.cpu().numpy(), dtype=np.float64).sum(1)
        return squares + 1e-300  # where nobody moves, all count alike

    def trusted(self, state: State, task: Task, net: Net) -> Tensor:
        """Return what the server expects of a round's steps, (1, s): the running mean (1 - β) v of its aggregates.

        By the definition of v, (1 - β) v <- β (1 - β) v + (1 - β) aggregate; without momentum it is the last aggregate,
        which is the centre of Karimireddy, He, Jaggi (ICML 2021). v itself would be fed back with a gain above 1 (up
        to 1 + β), and the last aggregate lags behind a server with momentum, which then oscillates where most updates
        are clipped.
        """
        return (1 - self.server_momentum) * state.v

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """One message from everyone who is on time, one row to everyone who is chosen."""
        m, slow = self._sizes(peers)
        return m - slow * (
            self.straggler_policy == "drop"
        ), peers if self.broadcast_to == "everyone" else m

    def _sizes(self, peers: int) -> tuple[int, int]:
        """How many of the peers are chosen, and how many of these are slow."""
        m = max(round(self.fraction * peers), 1)
        return m, min(round(self.stragglers * m), m - 1)

    def _draw(self, task: Task, net: Net) -> tuple[Group, Group, NDArray[np.int64] | None]:
        """Who is sent the model, who says something, and how long each of them that is here trains, if not as asked."""
        m, slow = self._sizes(net.peers)
        order = net.present(
            randomness.generator(task.seed, "clients", net.t).permutation(net.peers)
        )[:m]
        chosen, slow = net.group(order), max(min(slow, len(order) - 1), 0)
        if self.straggler_policy == "drop" or not slow:
            return chosen, net.reached(net.group(order[slow:])), None
        most = int(np.max(task.solver.steps) or np.max(task.solver.epochs))
        work = np.full(net.peers, most)
        work[order[:slow]] = randomness.generator(
            task.seed, "work of slow clients", net.t
        ).integers(1, most + 1, slow)
        group = net.reached(chosen)
        return chosen, group, work[task.peers[group.here]]
