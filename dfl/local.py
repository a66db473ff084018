"""How does a peer train alone? Heavy-ball SGD on its own examples, for all peers of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dfl.errors import InputError
from dfl.task import Batch, Task, batches

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.lazy import torch

LANES = 2**22
"""Parameters, or numbers of a batch, per batched call; bounds its memory to a few times 16 MiB."""

SCHEDULES: dict[str, Callable[..., float]] = {}
"""Name -> f(t, rounds, *, options) -> factor on the learning rate in round t of `rounds`."""


def schedule(name: str) -> Callable[[Callable[..., float]], Callable[..., float]]:
    """Register a learning-rate schedule under `name`."""

    def register(factor: Callable[..., float]) -> Callable[..., float]:
        SCHEDULES[name] = factor
        return factor

    return register


@schedule("constant")
def constant(t: int, rounds: int) -> float:
    """The same learning rate in every round."""
    return 1.0


@schedule("exponential")
def exponential(t: int, rounds: int, *, decay: float = 0.99) -> float:
    """Multiply by `decay` every round (McMahan et al. 2017 used 0.99 on CIFAR-10)."""
    _check("exponential: decay", decay, 0 < decay <= 1, "in (0, 1]")
    return decay**t


@schedule("step")
def step(t: int, rounds: int, *, every: int = 50, factor: float = 0.1) -> float:
    """Multiply by `factor` every `every` rounds."""
    _check("step: every", every, every >= 1, "at least 1")
    _check("step: factor", factor, 0 < factor <= 1, "in (0, 1]")
    return factor ** (t // every)


@schedule("cosine")
def cosine(t: int, rounds: int, *, floor: float = 0.0) -> float:
    """Half a cosine from 1 to `floor` over the run (Loshchilov and Hutter 2017, eq. 5, without restarts)."""
    _check("cosine: floor", floor, 0 <= floor <= 1, "in [0, 1]")
    return floor + (1 - floor) * (1 + math.cos(math.pi * t / max(rounds, 1))) / 2


def sgd(x: Tensor, task: Task, t: int) -> Tensor:
    """K_i local steps of heavy-ball SGD from x, with a fresh momentum in every round.

        y^{k+1} = y^k - η (∇f(y^k) + λ y^k) + θ (y^k - y^{k-1}),   y^0 = y^{-1} = x

    (Sun, Li, Wang 2023, Algorithm 1; the same as torch's SGD with a new buffer and no dampening.)

    Args:
        x: (p, d), where each peer starts.
        task: the problem; its solver says η, θ, λ, batch size and K.
        t: the round, which addresses the order of the examples.

    Returns:
        (p, d), z = y^K; x is left as it was.
    """
    z = torch.empty_like(x)
    for lanes in _groups(task, x.shape[1]):
        z[lanes] = _heavy_ball(x[lanes], lanes, task, t)
    return z


def _groups(task: Task, d: int) -> Iterator[Tensor]:
    """Peers that train together: all by falling K_i in chunks that bound memory, or each alone."""
    order = torch.argsort(task.steps, descending=True, stable=True)
    if len(order):  # a rank may host no peers
        wide = max(d, task.widest * task.train.inputs[:1].numel())
        yield from order.split(max(2, LANES // wide) if task.solver.batched else 1)


def _heavy_ball(y: Tensor, lanes: Tensor, task: Task, t: int) -> Tensor:
    """The recursion of `sgd` on y (a, d), in place."""
    solver, velocity, rate = task.solver, torch.zeros_like(y), task.solver.lr(t)
    for batch in batches(task, t, lanes):
        a = len(batch.counts)
        g = _gradients(y[:a], task, batch)
        if solver.weight_decay:
            g.add_(y[:a] * solver.weight_decay)
        # One rounding per operation: a fused multiply-add may differ between the body and the tail of a row.
        y[:a].add_(velocity[:a].mul_(solver.momentum).add_(g.mul_(-rate)))
    return y


def _gradients(y: Tensor, task: Task, batch: Batch) -> Tensor:
    """∇f_i(y_i) of the mean loss over each peer's own batch, (a, d)."""
    counts = batch.counts[:, None]
    index = batch.index if task.solver.batched else batch.index[:, : int(counts[0])]
    weight = (torch.arange(index.shape[1]) < counts).to(y.dtype).div_(counts)
    parameters = {name: view.requires_grad_() for name, view in task.spec.views(y.detach()).items()}
    out = task.outputs(parameters, task.inputs(task.train.inputs[index]))
    losses = task.loss(out.flatten(0, 1), task.train.labels[index].flatten(0, 1))
    # A peer's loss depends on its own parameters only, so the gradient of the sum holds the gradient of each.
    parts = torch.autograd.grad((losses.view(weight.shape) * weight).sum(), list(parameters.values()))
    return torch.cat([part.flatten(1) for part in parts], dim=1)


def _check(name: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise InputError(f"--lr-schedule {name} must be {accepted}, not {value}")
