"""CHOCO-SGD: gossip of compressed differences to public copies (Koloskova, Stich, Jaggi 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Interval

from dfl.algorithms.base import ALGORITHMS, Algorithm
from dfl.algorithms.replicas import Replicas, average_replicas, initial_replicas

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task


@ALGORITHMS.register("choco")
@dataclass(frozen=True, kw_only=True)
class Choco(Algorithm[Replicas]):
    """CHOCO-SGD (arXiv 1902.00340, Algorithm 2), with local steps in place of one.

        x½_i = local steps from x_i
        q_i = Q(x½_i - x̂_i),   x̂_i <- x̂_i + q_i   at i and at its neighbours
        x_i <- x½_i + γ sum_j w_ij (x̂_j - x̂_i)

    With Q the identity and γ = 1 it is D-PSGD. Public copies x̂ start at x where all peers start at
    the same point, else at zero, as in the paper. On a time-varying graph, or with link or peer
    faults, they are kept per directed edge (`average_replicas`), which keeps the mean.

    Attributes:
        gamma: γ; the coarser Q, the smaller it must be.
    """

    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.1

    applies: ClassVar[tuple[str, ...]] = ("compressor",)
    columns: ClassVar[tuple[str, ...]] = ("relative_squared_error",)
    incoming: ClassVar[tuple[str, ...]] = ("received",)

    @property
    def averaging_step(self) -> float:
        """γ."""
        return self.gamma

    def init(self, x: Tensor, copies: Tensor, net: Net) -> Replicas:
        """Start at x, with public copies `copies`."""
        return initial_replicas(x, copies, net)

    def round(self, state: Replicas, task: Task, net: Net) -> Replicas:
        """Train, send the difference to the public copy, and average the public copies."""
        half = task.train(state.x, net.t)
        return average_replicas(state, half, net, self.gamma)

    def observe(self, state: Replicas) -> dict[str, Tensor]:
        """Return the relative errors of the last messages."""
        return {"relative_squared_error": state.error}
