"""The task of a rank: the problem of its peers, their personal parameters and the server's task."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from dfl.models.sharing import merge_shared, split_shared
from dfl.training.problem import Problem
from dfl.training.sgd import sgd, sgd_with_momentum
from dfl.training.statistics import recompute

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Task(Problem):
    """The problem of this rank's peers, and their personal parameters.

    A row of d parameters consists of m shared ones, which methods see and send, followed by d - m
    personal ones, which stay here. `train` merges the two and splits them again.

    Attributes:
        personal: (p, d - m), the personal parameters of all peers of this rank; `train` updates
            them in place.
        rows: (a,), the rows of `personal` that belong to this task's peers, where these are only
            some of the rank's; None where they are all.
        server: on rank 0, the server's own task, where it has examples of its own; None else.
        recomputes: whether running statistics are computed anew after mixing.
    """

    personal: Tensor = field(kw_only=True)
    rows: Ints | None = None
    server: Task | None = None
    recomputes: bool = False

    @property
    def of_server(self) -> Task:
        """The server's own task, on rank 0."""
        assert self.server is not None, "the method has no server_data_rule"
        return self.server

    @property
    def sizes(self) -> Ints:
        """(p,), the training examples of each peer."""
        return self.examples.sizes

    @property
    def local_work(self) -> int:
        """Local epochs of a round, or local steps where the run counts steps."""
        return int(np.max(self.solver.steps) or np.max(self.solver.epochs))

    def split(self, models: Tensor, shared: int) -> tuple[Self, Tensor]:
        """Split models into shared and personal parameters.

        Args:
            models: (p, d), one for each peer; or (1, d), the same for all.
            shared: m, the number of shared coordinates, which come first.

        Returns:
            The task with the personal parameters, of which each peer has its own copy; and the
            shared parameters, (p, m) or (1, m).
        """
        x, personal = split_shared(models, shared)
        if len(personal) == 1:
            personal = personal.expand(len(self.peers), -1)
        server = self.server
        if server:
            server, _ = server.split(models[:1, : server.parameter_layout.d], shared)
        task = replace(
            self,
            parameter_layout=replace(self.parameter_layout, shared=shared),
            personal=personal.clone(memory_format=torch.contiguous_format),
            server=server,
        )
        return task, x

    def models(self, x: Tensor) -> Tensor:
        """Return whole models: (p, d); or (1, d) if all share one x and nothing is personal.

        Args:
            x: (p, m), the shared parameters of each peer; or (1, m), those of all peers.
        """
        return merge_shared(x, self.personal)

    def only(self, here: Ints, work: Ints | None = None) -> Self:
        """Return the task of some of the peers; they keep their rows of `personal`."""
        rows = here if self.rows is None else self.rows[here]
        return replace(super().only(here, work), rows=rows)

    def rate(self, t: int) -> float:
        """Return η, the learning rate of round t."""
        return self.solver.lr(t)

    def reach(self, t: int, momentum: float = 0.0) -> Tensor:
        """Return how far each peer moves in round t by a constant gradient of 1, (p, 1).

        It is η sum_{k=1}^K (1 - θ^k) / (1 - θ), which is K η without momentum. A peer that is down
        has that of one step.

        Args:
            t: the round.
            momentum: θ, which begins at zero.
        """
        k = np.arange(1, max(1, self.steps.max(initial=1)) + 1)
        moved = np.cumsum(np.cumsum(momentum ** (k - 1)))
        found = self.rate(t) * moved[np.maximum(self.steps, 1) - 1]
        return torch.from_numpy(found)[:, None].to(self.device, self.dtype)

    @property
    def momentum(self) -> float:
        """The run's momentum, of the local steps or of the method."""
        return self.solver.momentum or self.solver.outer_momentum

    def train(self, x: Tensor, t: int, correction: Tensor | None = None) -> Tensor:
        """Train the model of each peer by local steps, and store its personal parameters.

        Args:
            x: (p, m), the shared parameters where each peer starts; or (1, m), where all do.
            t: the round.
            correction: (p, m), added to every gradient of the shared parameters; None for 0.

        Returns:
            (p, m), the shared parameters after the last local step.
        """
        x = x.expand(len(self.peers), -1)
        if not self.personal.shape[1]:
            return sgd(x, self, t, correction)
        return self._stored(sgd(self._whole(x), self, t, self._extended(correction)), x.shape[1])

    def train_with_momentum(
        self, x: Tensor, momentum: Tensor, t: int, correction: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Train as `train` does, from a momentum that is kept between rounds.

        Personal parameters have a fresh momentum in every round.

        Args:
            x: (p, m), the shared parameters where each peer starts.
            momentum: (p, m), their momentum, in the unit of a gradient.
            t: the round.
            correction: (p, m), added to every gradient of the shared parameters; None for 0.

        Returns:
            (p, m), the shared parameters after the last local step; and (p, m), their momentum.
        """
        if not self.personal.shape[1]:
            return sgd_with_momentum(x, momentum, self, t, correction)
        m, c = self._extended(momentum), self._extended(correction)
        assert m is not None
        z, m = sgd_with_momentum(self._whole(x), m, self, t, c)
        return self._stored(z, x.shape[1]), m[:, : x.shape[1]].contiguous()

    def recompute_statistics(self, x: Tensor) -> None:
        """Compute running statistics anew on each peer's own examples, where the run does so.

        Args:
            x: (p, m), the shared parameters after mixing; or (1, m), those of all peers.
        """
        if self.recomputes and len(self.peers):
            models = self.models(x)
            recompute(models, self)
            self._stored(models, x.shape[1])

    @property
    def _rows(self) -> slice | Tensor:
        """The rows of `personal` that belong to this task's peers."""
        if self.rows is None:
            return slice(None)
        return torch.from_numpy(self.rows).to(self.personal.device)

    def _whole(self, x: Tensor) -> Tensor:
        """Return whole models (p, d) of this task's peers, with shared parameters x (p, m)."""
        return merge_shared(x, self.personal[self._rows])

    def _extended(self, values: Tensor | None) -> Tensor | None:
        """Return values (p, m) with zeros for the personal parameters, (p, d)."""
        if values is None:
            return None
        return torch.cat([values, values.new_zeros(len(values), self.personal.shape[1])], dim=1)

    def _stored(self, z: Tensor, shared: int) -> Tensor:
        """Store the personal parameters of models z (p, d), and return the m shared ones."""
        z, own = split_shared(z, shared)
        self.personal[self._rows] = own
        return z
