"""Quantized DFedAvgM: DFedAvgM with messages of b bits per coordinate (Sun, Li, Wang 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Interval

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.replicas import Replicas, State, average_replicas, initial_replicas
from dfl.core.errors import InputError
from dfl.core.options import Positive

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@ALGORITHMS.register("qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class QDFedAvgM(Algorithm[State]):
    """Quantized DFedAvgM (arXiv 2104.11375, Algorithm 2), in a form in which peers reach consensus.

    exchange=replica (default): each peer has a public copy y of its model, which its neighbours
    replicate, the recursion of CHOCO-SGD (`choco`). Both ends add the message to it, so that models
    are averaged and not only updates:

        q_i = Q(z_i - y_i),   y_i <- y_i + q_i,   x_i <- z_i + γ (sum_j w_ij y_j - y_i)

    On a time-varying graph, or with link or peer faults, copies are kept per directed edge
    (`average_replicas`). With Q the identity and γ = 1 it is DFedAvgM.

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
    columns: ClassVar[tuple[str, ...]] = ("relative_squared_error",)
    incoming: ClassVar[tuple[str, ...]] = ("received",)

    def __post_init__(self) -> None:
        idle = "alpha" if self.exchange == "replica" else "gamma"
        if getattr(self, idle) != 1:
            raise InputError(
                f"--algorithm qdfedavgm: {idle} has no part in exchange={self.exchange}: "
                "leave it out"
            )

    @property
    def averages(self) -> bool:
        """True, except in the published form, which averages changes."""
        return self.exchange == "replica"

    @property
    def averaging_step(self) -> float | None:
        """γ of the replica form."""
        return self.gamma if self.exchange == "replica" else None

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at x, with public copies `copies`."""
        if self.exchange == "paper":
            return State(x, torch.zeros(len(x), dtype=torch.float64))
        return initial_replicas(x, copies, net)

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train, and exchange by public copies or by the published form."""
        z = task.train(state.x, net.t)
        if isinstance(state, Replicas):
            return average_replicas(state, z, net, self.gamma)
        received = net.exchange(z - state.x)  # Q(z_j - x_j)
        return State(state.x + self.alpha * received.average(), received.error)

    def observe(self, state: State) -> dict[str, Tensor]:
        """Return the relative errors of the last messages."""
        return {"relative_squared_error": state.error}

    def notes(self, smallest: float) -> tuple[str, ...]:
        """Warn of the published form on a matrix with a negative eigenvalue."""
        if self.exchange == "replica" or not smallest < 0:
            return ()
        return (
            "exchange=paper averages updates, not models: with lambda_min(W) = "
            f"{smallest:.3f} < 0 the consensus distance grows (use exchange=replica, or --mixing "
            "lazy to slow it down)",
        )
