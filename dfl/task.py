"""What does this rank train on: its peers' examples, the model, the loss, and which examples make a batch?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfl import keys

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.models import Spec
else:
    from dfl.lazy import torch

Loss = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True)
class Solver:
    """How a peer trains between two exchanges.

    Attributes:
        lr: round t -> learning rate η.
        momentum: θ of the heavy ball.
        weight_decay: λ, added to the gradient as λx.
        batch_size: examples per step; 0 is all that a peer has.
        epochs: passes over a peer's own data per round, E.
        steps: steps per round, the same for every peer, in place of epochs; 0 counts epochs.
        batched: train this rank's peers together (vmap) or one after the other.
    """

    lr: Callable[[int], float]
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 10
    epochs: int = 1
    steps: int = 0
    batched: bool = True


@dataclass(frozen=True)
class Examples:
    """Examples of this rank's peers, one peer after the other.

    Attributes:
        inputs: (n, *shape) in the dtype of the files.
        labels: (n, ...).
        sizes: (p,) int64, examples per peer.
    """

    inputs: Tensor
    labels: Tensor
    sizes: Tensor

    @property
    def starts(self) -> Tensor:
        """(p,) int64, where each peer's examples begin."""
        return torch.cumsum(self.sizes, 0) - self.sizes


@dataclass(frozen=True)
class Batch:
    """One local step of the a peers that still have one to do.

    Attributes:
        index: (a, b) int64 into the rank's examples; places behind a peer's count are padding.
        counts: (a,) int64, real examples of each peer's batch.
    """

    index: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Task:
    """A learning problem as one rank sees it.

    Attributes:
        module: the model; its parameters are never read, a peer's row stands in for them.
        spec: where each parameter lies in a row.
        loss: (outputs, labels) -> (n,), the loss of every example.
        peers: global ids of this rank's peers, ascending.
        train: their training examples.
        widest: the largest batch of any peer anywhere, so that padding does not depend on the ranks.
        scale, shift: float(x) * scale + shift is what the model sees.
        solver: how a peer trains.
        seed: the run's seed.
    """

    module: Module
    spec: Spec
    loss: Loss
    peers: range
    train: Examples
    widest: int
    scale: Tensor
    shift: Tensor
    solver: Solver
    seed: int

    def inputs(self, raw: Tensor) -> Tensor:
        """What the model sees of raw examples: float(x) * scale + shift."""
        return raw.to(self.scale.dtype).mul(self.scale).add_(self.shift)

    def outputs(self, parameters: dict[str, Tensor], inputs: Tensor, each: bool = True) -> Tensor:
        """What models say.

        A lone model is computed twice in a batch of its own: batched products of one matrix and of several round
        differently, and a peer's numbers must not depend on who shares its rank.

        Args:
            parameters: name -> (a, *shape), one model per row.
            inputs: (a, n, *shape), each model's own; or (n, *shape), the same for all.
            each: whether inputs are each model's own.

        Returns:
            (a, n, ...).
        """
        a = len(next(iter(parameters.values())))
        if not self.solver.batched:
            rows = ({name: value[i] for name, value in parameters.items()} for i in range(a))
            return torch.stack([self._call(row, inputs[i] if each else inputs) for i, row in enumerate(rows)])
        if a == 1:
            parameters = {name: value.expand(2, *value.shape[1:]) for name, value in parameters.items()}
            inputs = inputs.expand(2, *inputs.shape[1:]) if each else inputs
        out: Tensor = torch.func.vmap(self._call, in_dims=(0, 0 if each else None))(parameters, inputs)
        return out[:a]

    def _call(self, parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(self.module, parameters, (inputs,))
        return out

    @property
    def steps(self) -> Tensor:
        """(p,) int64, the local steps of a round: K_i = E * ceil(n_i / b), or the solver's fixed number."""
        solver = self.solver
        return torch.full_like(self.train.sizes, solver.steps) if solver.steps else solver.epochs * self.per_epoch

    @property
    def width(self) -> Tensor:
        """(p,) int64, examples in a peer's full batch."""
        sizes = self.train.sizes
        return torch.full_like(sizes, self.solver.batch_size) if self.solver.batch_size else sizes

    @property
    def per_epoch(self) -> Tensor:
        """(p,) int64, batches in one pass over a peer's own data."""
        return -(-self.train.sizes // self.width)


def batches(task: Task, t: int, lanes: Tensor) -> Iterator[Batch]:
    """The batches of some peers in round t, step by step.

    Every epoch of every peer goes through its own examples in a random order of its own address; the last batch
    of an epoch holds what is left. Peers that have done their steps leave the batch from behind.

    Args:
        task: the problem.
        t: the round.
        lanes: (a,) positions of the peers on this rank, by falling number of steps.
    """
    sizes, width, per_epoch, steps = (
        each[lanes] for each in (task.train.sizes, task.width, task.per_epoch, task.steps)
    )
    starts, places = task.train.starts[lanes], torch.arange(task.widest)
    peers = [task.peers[lane] for lane in lanes.tolist()]
    orders: list[Tensor] = []
    for k in range(int(steps[0])):
        a = int((steps > k).sum())
        epoch, slot = k // per_epoch[:a], k % per_epoch[:a]
        while len(orders) <= int(epoch.max()):
            orders.append(keys.permutations(task.seed, "order", peers, t, len(orders), sizes=sizes))
        first = slot * width[:a]
        counts = torch.minimum(sizes[:a] - first, width[:a])
        columns = (first[:, None] + places).clamp_(max=orders[0].shape[1] - 1)
        own = _pick(orders, epoch, columns) * (places < counts[:, None])
        yield Batch(starts[:a, None] + own, counts)


def _pick(orders: list[Tensor], epoch: Tensor, columns: Tensor) -> Tensor:
    """orders[epoch[i]][i, columns[i]] for every lane i, (a, b)."""
    if int(epoch.min()) == int(epoch.max()):
        return orders[int(epoch[0])][: len(epoch)].gather(1, columns)
    return torch.stack([orders[e][i, columns[i]] for i, e in enumerate(epoch.tolist())])
