"""Push-sum, stochastic gradient push: averaging on directed graphs (Assran et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dfl.algorithms.base import ALGORITHMS, Algorithm

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms.protocols import Net, Task
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True)
class State:
    """The models, and the two sums of which they are the quotients.

    Attributes:
        x: (p, m), z_i = s_i / w_i, the models.
        sums: (p, m), s_i; they add up to P times the mean.
        weights: (p,), w_i; they add up to P.
    """

    x: Tensor
    sums: Tensor
    weights: Tensor


@ALGORITHMS.register("push_sum")
@dataclass(frozen=True, kw_only=True)
class PushSum(Algorithm[State]):
    """Stochastic gradient push (Assran, Loizou, Ballas, Rabbat, ICML 2019, Algorithm 1).

        s_i <- sum_j w_ij (s_j + z_j' - z_j),   w_i <- sum_j w_ij w_j,   z_i = s_i / w_i

    z_j' are K local heavy-ball steps from z_j; the paper has one, z_j' - z_j = -η g(z_j). Columns
    of W sum to 1, so the sums of s and of w over the peers are kept, and z_i goes to the mean on
    any strongly connected directed graph. Where W is doubly stochastic, w_i = 1 and this is D-PSGD.

    w travels as a further number of each message, uncompressed. A sender learns which of its
    messages arrive, and keeps the weight of the others, so that both sums are kept under all
    faults.
    """

    mixing_sums: ClassVar[Literal["rows", "columns"]] = "columns"
    default_mixing: ClassVar[str] = "out_degree"
    extra_numbers: ClassVar[int] = 1

    @property
    def averages(self) -> bool:
        """False: the change of the local steps is added to a sum of another weight."""
        return False

    def init(self, x: Tensor, copies: Tensor, net: Net) -> State:
        """Start at s = x and w = 1."""
        return State(x, x, x.new_ones(len(x)))

    def round(self, state: State, task: Task, net: Net) -> State:
        """Train from z, add the steps to s, and push s and w."""
        before = torch.column_stack([state.sums, state.weights])
        step = task.train(state.x, net.t) - state.x
        half = torch.column_stack([state.sums + step, state.weights])
        received = net.exchange(half, start=before).total()
        s, w = received[:, :-1], received[:, -1]
        return State(s / w[:, None], s, w)
