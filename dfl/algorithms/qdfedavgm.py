"""Quantized DFedAvgM: DFedAvgM with messages of b bits per coordinate (Sun, Li, Wang 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Interval

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core.errors import InputError
from dfl.core.options import Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The state of the published form, which keeps no public copies.

    Attributes:
        x: (p, m), the models.
        error: (p,) float64, ||Q(q) - q||^2 / ||q||^2 of the last message q, the worst of a peer's
            edges; NaN in rounds that are not evaluated.
    """

    x: Tensor
    error: Tensor


@dataclass(frozen=True)
class Replicas(State):
    """The models, and the public copies of them that neighbours hold as well.

    Attributes:
        sent: copies of this rank's peers: y_i (p, m), or y_(i->k) per outgoing edge (e, m).
        received: of the copies of the neighbours, sum_j w_ij y_j (p, m) on a graph that does not
            change; else y_(j->i) per incoming edge (e', m).
    """

    sent: Tensor
    received: Tensor


@ALGORITHMS.register("qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class QDFedAvgM(Algorithm[State]):
    """Quantized DFedAvgM (arXiv 2104.11375, Algorithm 2), in a form in which peers reach consensus.

    exchange=replica (default): each peer has a public copy y of its model, which its neighbours
    replicate, as in CHOCO-SGD (Koloskova, Stich, Jaggi 2019). Both ends add the message to it, so
    that models are averaged and not only updates:

        q_i = Q(z_i - y_i),   y_i <- y_i + q_i,   x_i <- z_i + γ (sum_j w_ij y_j - y_i)

    On a time-varying graph, or with link or peer faults, copies are kept per directed edge and
    change only when that edge delivers its message:

        x_i <- z_i + γ (sum_j w_ij y_(j->i) - sum_k v_ik y_(i->k))   over j, k != i
        v_ik = w_ki π_k / π_i   with   π W = π

    v is W reversed in time: w_ki where W is doubly stochastic, and w_ik for every mixing rule on an
    undirected graph.

    - sum_k v_ik = sum_j w_ij = 1 - w_ii, so consensus is a fixed point, and if no message is lost
      this is the first form, for any W. With Q the identity and γ = 1 both are then DFedAvgM.
    - π_i v_ik = π_k w_ki, so edge i -> k adds to sum_i π_i x_i at one end what it subtracts at the
      other: that sum equals the one of the z_i, for any losses and any Q. It is the mean where W is
      doubly stochastic. It is not preserved where a directed graph loses peers
      (`FaultEffects.on_edges`).

    exchange=paper: the published form, x_i <- x_i + α sum_j w_ij Q(z_j - x_j), which never averages
    the x_j: if W has an eigenvalue λ < 0, the consensus distance grows without bound.

    Attributes:
        exchange: replica or paper.
        alpha: α of the published form.
        gamma: γ of the replica form.
    """

    exchange: Literal["replica", "paper"] = "replica"
    alpha: Positive = 1.0
    gamma: Annotated[float, Interval(gt=0, le=1)] = 1.0

    applies: ClassVar[tuple[str, ...]] = ("compressor",)
    columns: ClassVar[tuple[str, ...]] = ("quantization_error",)

    def __post_init__(self) -> None:
        idle = "alpha" if self.exchange == "replica" else "gamma"
        if getattr(self, idle) != 1:
            raise InputError(
                f"--algorithm qdfedavgm: {idle} has no part in exchange={self.exchange}: "
                "leave it out"
            )

    @property
    def averaging_step(self) -> float | None:
        """γ of the replica form."""
        return self.gamma if self.exchange == "replica" else None

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with public copies `copies`."""
        error = torch.zeros(len(x), dtype=torch.float64)
        if self.exchange == "paper":
            return State(x, error)
        if net.fixed:
            return Replicas(x, error, copies, copies)
        return Replicas(x, error, copies[net.union.out_owner], copies[net.union.into_owner])

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, send the difference to the public copy, and average the public copies."""
        z = task.train(state.x, net.t)
        if not isinstance(state, Replicas):
            return self._updates(state, z, net)
        return self._replicas(state, z, net) if net.fixed else self._edges(state, z, net)

    def _updates(self, state: State, z: Tensor, net: Net) -> State:
        received = net.exchange(z - state.x)  # Q(z_j - x_j)
        return State(state.x + self.alpha * received.average(), received.error)

    def _replicas(self, state: Replicas, z: Tensor, net: Net) -> State:
        received = net.exchange(z - state.sent)
        y = state.sent + received.own  # y_i <- y_i + q_i
        mean = state.received + received.average()  # sum_j w_ij y_j
        return Replicas(z + self.gamma * (mean - y), received.error, y, mean)

    def _edges(self, state: Replicas, z: Tensor, net: Net) -> State:
        edges = net.edges
        received = net.exchange(z[edges.owner] - state.sent[edges.out], per_edge=True)
        out, into = (torch.from_numpy(places).to(z.device) for places in (edges.out, edges.into))
        sent = state.sent.index_add(0, out, received.own)
        copies = state.received.index_add(0, into, received.messages)
        x = z + self.gamma * (net.pull(copies) - net.push(sent))
        return Replicas(x, received.error, sent, copies)

    def observe(self, state: State) -> dict[str, Tensor]:
        """Return the relative errors of the last messages."""
        return {"quantization_error": state.error}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """Warn of the published form on a matrix with a negative eigenvalue."""
        if self.exchange == "replica" or not smallest < 0:
            return ()
        return (
            "exchange=paper averages updates, not models: with lambda_min(W) = "
            f"{smallest:.3f} < 0 the consensus distance grows (use exchange=replica, or --mixing "
            "lazy to slow it down)",
        )
