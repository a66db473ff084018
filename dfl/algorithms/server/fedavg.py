"""FedAvg: a server sends its model to some peers and averages their updates (McMahan et al.
2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core import randomness
from dfl.core.options import BelowOne, Positive, Share, require

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
    from dfl.core.layout import Group
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The state of the server, the same on every rank, and its scores of this rank's peers.

    Attributes:
        x: (1, m), w, the server's model.
        velocity: (1, m), v.
        scores: (p,), the aggregator's score of each peer in the last round; NaN for a peer without
            one.
    """

    x: Tensor
    velocity: Tensor
    scores: Tensor


@ALGORITHMS.register("fedavg")
@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm[State]):
    """Federated averaging (McMahan et al. 2017, Algorithm 1; weights over S_t only, as its
    arXiv version 4 corrects).

    C is 1 by default; the run gives B, E and η, and `dfl.training.sgd` takes the local steps.

        S_t = max(round(C P), 1) peers (halves to even),   z_k = local steps from w for k in S_t
        v <- β v + sum_{k in S_t} n_k (z_k - w) / sum_{k in S_t} n_k,   w <- w + η_s v

    An aggregator other than the mean takes the place of the sum. With β > 0 it is FedAvgM (Hsu, Qi,
    Brown 2019). Where w is a part of the model and the rest stays with each peer, it is LG-FedAvg
    (Liang et al. 2020, Algorithm 1).

    The stragglers here are drawn from the clients of a round, and are dropped or do fewer epochs;
    those of `--faults stragglers` are drawn independently of them, from all peers and with any
    method. They do a given share of their steps, and the server waits for them.

    Attributes:
        fraction: C, the fraction of the peers that take part in a round, drawn in every round from
            those that are up.
        weighting: examples, the weights n_k above, where a sequence is one example; uniform, equal
            weights; or gradient, ||z_k - w||^2 in place of n_k, since the update is η times the sum
            of the gradients (LG-FedAvg, section 2.2). An attacker's weight is that of its honest
            update.
        broadcast_to: chosen, the server sends its model to the peers of S_t; or everyone, to all
            peers, as the published LG-FedAvg does and counts. The resulting models are the same.
        server_lr: η_s.
        server_momentum: β.
        stragglers: the fraction of S_t that is too slow for the round, drawn with S_t; at least one
            peer is on time.
        straggler_policy: drop, the server does not wait for updates of stragglers; or fewer, they
            train for fewer epochs (or steps, where the run counts steps), drawn uniformly from 1 to
            the run's number (Li et al. 2020, section 5.2). A single epoch is done in full.
    """

    fraction: Share = 1.0
    weighting: Literal["examples", "uniform", "gradient"] = "examples"
    broadcast_to: Literal["chosen", "everyone"] = "chosen"
    server_lr: Positive = 1.0
    server_momentum: BelowOne = 0.0
    stragglers: BelowOne = 0.0
    straggler_policy: Literal["drop", "fewer"] = "drop"

    has_server: ClassVar[bool] = True
    gossips: ClassVar[bool] = False
    applies: ClassVar[tuple[str, ...]] = ("compressor", "aggregator")
    replicated: ClassVar[tuple[str, ...]] = ("x", "velocity")

    @property
    def averages(self) -> bool:
        """True, unless the server continues or enlarges the mean of the changes."""
        return self.server_momentum == 0 and self.server_lr <= 1

    @property
    def weighting_option(self) -> str | None:
        """The weighting, unless it is by examples."""
        return None if self.weighting == "examples" else f"weighting={self.weighting}"

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with zero velocity."""
        scores = torch.full((net.hosted,), float("nan"), dtype=torch.float64)
        return State(x, x.new_zeros(x.shape), scores)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Send the model to some peers, let them train, and add the mean of their updates."""
        chosen, senders, work = self._draw(task, net)
        w = net.broadcast(state.x, net.everyone if self.broadcast_to == "everyone" else chosen)
        updates = task.only(senders.here, work).train(w, net.t) - w
        weights = self._weights(updates, task, senders)
        mean = net.aggregate(updates, senders, weights, self.reference(state, task, net))
        v = self.server_momentum * state.velocity + mean.row
        return State(w + self.server_lr * v, v, mean.scores)

    def _weights(self, updates: Tensor, task: Task, senders: Group) -> NDArray[np.float64]:
        """Return the weights (a,) of the updates (a, m) of the senders on this rank."""
        if self.weighting == "examples":
            return task.sizes[senders.here].astype(np.float64)
        if self.weighting == "uniform":
            return np.ones(len(updates))
        squares: NDArray[np.float64] = np.square(updates.cpu().numpy(), dtype=np.float64).sum(1)
        return squares + 1e-300  # equal weights if all updates are zero

    def reference(self, state: State, task: Task, net: Net) -> Tensor:
        """Return the update that the server expects, (1, m): the running mean (1 - β) v of its
        aggregates.

        By the definition of v, (1 - β) v <- β (1 - β) v + (1 - β) aggregate; without momentum it is
        the last aggregate, which is the centre of Karimireddy, He, Jaggi (ICML 2021). v itself
        would be fed back with a gain above 1 (up to 1 + β), and the last aggregate lags behind a
        server with momentum, which then oscillates where most updates are clipped.
        """
        return (1 - self.server_momentum) * state.velocity

    def training_peers(self, peers: int) -> int:
        """Return the number of peers that are chosen, without stragglers that are dropped."""
        clients, slow = self._client_counts(peers)
        return clients - slow if self.straggler_policy == "drop" else clients

    def traffic(self, peers: int, edges: float) -> tuple[float, int]:
        """Return a message for each peer that is on time, and a row for each that is chosen."""
        clients, _ = self._client_counts(peers)
        rows = peers if self.broadcast_to == "everyone" else clients
        return self.training_peers(peers), rows

    def _client_counts(self, peers: int) -> tuple[int, int]:
        """Return the number of peers that are chosen, and the number of stragglers among them.

        Raises:
            InputError: `stragglers` is not 0 and makes none of several chosen peers a straggler.
        """
        clients = max(round(self.fraction * peers), 1)
        slow = round(self.stragglers * clients)
        fits = not self.stragglers or slow > 0 or clients == 1
        accepted = f"0 or enough for one of {clients} clients"
        require(fits, f"--algorithm {self.name}: stragglers", accepted, self.stragglers)
        return clients, min(slow, clients - 1)

    def _draw(self, task: Task, net: Net) -> tuple[Group, Group, NDArray[np.int64] | None]:
        """Draw the peers of a round.

        Returns:
            The peers that receive the model; those that send an update; and the local epochs or
            steps (a,) of the latter on this rank, or None for those of the run.
        """
        clients, slow = self._client_counts(net.peers)
        drawn = randomness.generator(task.seed, "clients", net.t).permutation(net.peers)
        order = net.present(drawn)[:clients]
        chosen = net.group(order)
        slow = max(min(slow, len(order) - 1), 0)
        if self.straggler_policy == "drop" or not slow:
            return chosen, net.reached(net.group(order[slow:])), None
        most = task.local_work
        work = np.full(net.peers, most)
        generator = randomness.generator(task.seed, "work of slow clients", net.t)
        work[order[:slow]] = generator.integers(1, most + 1, slow)
        senders = net.reached(chosen)
        return chosen, senders, work[task.peers[senders.here]]
