"""Quantized DFedAvgM: the same, in messages of b bits (Sun, Li, Wang 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Interval

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.core.errors import InputError
from dfl.core.options import Positive
from dfl.models.sharing import merge_shared, split_shared
from dfl.training.sgd import sgd

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, which is all that the published form remembers.

    Attributes:
        x: (p, d), the models.
        error: (p,) float64, ||Q(q) - q||^2 / ||q||^2 of the last message, the worst of a peer's edges; NaN where
            nobody looks at it.
        one: there is a model for every peer.
    """

    x: Tensor
    error: Tensor
    is_global: ClassVar[bool] = False
    replicated: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> tuple[Tensor]:
        """The models."""
        return (self.x,)


@dataclass(frozen=True)
class Replicas(State):
    """The models and what is publicly known of them.

    Attributes:
        said: public copies of this rank's peers: y_i (p, s), or y_(i->k) per outgoing edge (e, s).
        heard: what is known of the neighbours: sum_j w_ij y_j (p, s), or y_(j->i) per incoming edge (e', s).
    """

    said: Tensor
    heard: Tensor


@ALGORITHMS.register("qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class QDFedAvgM(Algorithm):
    """Quantized DFedAvgM (arXiv 2104.11375, Algorithm 2), in a form that brings the peers together.

    exchange=replica (default): neighbours hold a public copy y of each peer, which both ends move by what was
    said, so that models are averaged and not only their updates:

        q_i = Q(z_i - y_i),   y_i <- y_i + q_i,   x_i <- z_i + γ (sum_j w_ij y_j - y_i)

    Where the graph changes, or faults take messages or peers away, copies are kept per directed edge and move when
    that edge delivers:

        x_i <- z_i + γ (sum_j w_ij y_(j->i) - sum_k v_ik y_(i->k)),   v_ik = w_ki π_k / π_i   (j, k != i)

    with π W = π. v is W reversed in time: w_ki where W is doubly stochastic, and w_ik with every mixing rule on an
    undirected graph.

    - sum_k v_ik = sum_j w_ij = 1 - w_ii, so peers that agree go on agreeing, and where everything arrives this is the
      first form, for any W. With Q the identity and γ = 1 both are then DFedAvgM.
    - π_i v_ik = π_k w_ki, so what edge i -> k adds to sum_i π_i x_i at one end it takes away at the other: that sum is
      the one of the z_i, whatever is lost and whatever Q does. It is the mean where W is doubly stochastic. Only
      where a directed graph loses peers (`Weather.on_edges`) it is not kept.

    Where peers share a part of their models, all of this is about that part, and the rest of z_i stays.

    exchange=paper: the published form, x_i <- x_i + α sum_j w_ij Q(z_j - x_j), which never averages the x_j:
    an eigenvalue λ < 0 of W makes the peers drift apart.

    Attributes:
        exchange: replica or paper.
        alpha: α of the published form.
        gamma: γ of the replica form, in (0, 1].
    """

    exchange: Literal["replica", "paper"] = "replica"
    alpha: Positive = 1.0
    gamma: Annotated[float, Interval(gt=0, le=1)] = 1.0

    takes: ClassVar[tuple[str, ...]] = ("compressor",)
    columns: ClassVar[tuple[str, ...]] = ("quantization_error",)

    def __post_init__(self) -> None:
        idle = "alpha" if self.exchange == "replica" else "gamma"
        if getattr(self, idle) != 1:
            raise InputError(
                f"--algorithm qdfedavgm: {idle} has no part in exchange={self.exchange}: leave it out"
            )

    @property
    def step(self) -> float | None:
        """γ of the replica form."""
        return self.gamma if self.exchange == "replica" else None

    def init(self, x: Tensor, known: Tensor, net: Net) -> State:
        """Start at x, with public copies at what is known before anyone has spoken (the same for all)."""
        error = torch.zeros(len(x), dtype=torch.float64)
        if self.exchange == "paper":
            return State(x, error)
        if net.fixed:
            return Replicas(x, error, known, known)
        return Replicas(x, error, known[net.union.out_owner], known[net.union.into_owner])

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, say what changed of what is shared, and move that towards the neighbours' public copies."""
        z, own = split_shared(sgd(state.x, task, net.t), task.parameter_layout.shared)
        if not isinstance(state, Replicas):
            new = self._updates(state, z, net)
        else:
            new = self._replicas(state, z, net) if net.fixed else self._edges(state, z, net)
        return replace(new, x=merge_shared(new.x, own))

    def part(self, state: State, shared: int) -> State:
        """Forget what was said of the rest."""
        if not isinstance(state, Replicas):
            return state
        return replace(
            state,
            said=split_shared(state.said, shared)[0],
            heard=split_shared(state.heard, shared)[0],
        )

    def _updates(self, state: State, z: Tensor, net: Net) -> State:
        x = state.x[:, : z.shape[1]]
        heard = net.exchange(z - x)
        return State(x + self.alpha * heard.average(), heard.error)

    def _replicas(self, state: Replicas, z: Tensor, net: Net) -> State:
        heard = net.exchange(z - state.said)
        y = state.said + heard.own  # y_i <- y_i + q_i
        around = state.heard + heard.average()  # sum_j w_ij y_j
        return Replicas(z + self.gamma * (around - y), heard.error, y, around)

    def _edges(self, state: Replicas, z: Tensor, net: Net) -> State:
        edges = net.edges
        heard = net.exchange(z[edges.owner] - state.said[edges.out], edges=edges)
        out, into = (torch.from_numpy(places).to(z.device) for places in (edges.out, edges.into))
        said = state.said.index_add(0, out, heard.own)
        around = state.heard.index_add(0, into, heard.messages)
        x = z + self.gamma * (net.pull(around) - net.push(said))
        return Replicas(x, heard.error, said, around)

    def observe(self, state: State) -> dict[str, Tensor]:
        """The error of the last messages."""
        return {"quantization_error": state.error}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """Warn of the published form on a matrix with a negative eigenvalue."""
        if self.exchange == "replica" or not smallest < 0:
            return ()
        return (
            f"exchange=paper mixes updates, not models: with lambda_min(W) = {smallest:.3f} < 0 the peers drift "
            "apart (use exchange=replica, or --mixing lazy to slow the drift)",
        )
