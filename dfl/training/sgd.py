"""How does a peer train alone? Heavy-ball SGD on its own examples, for all peers of a rank."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from dfl.core.errors import InputError
from dfl.training.batches import Batch, batches, groups
from dfl.training.gradients import Parameters, accelerate
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch

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

        y^{k+1} = y^k - η (∇f(y^k) + λ y^k + μ (y^k - x)) + θ (y^k - y^{k-1}),   y^0 = y^{-1} = x

    (Sun, Li, Wang 2023, Algorithm 1; the same as torch's SGD with a new buffer and no dampening. The term of μ is
    that of FedProx, Li et al. 2020, eq. 2; it holds on to what is shared.)

    Args:
        x: (p, d), where each peer starts.
        task: the problem; its solver says η, θ, λ, μ, batch size and K.
        t: the round, which addresses the order of the examples.

    Returns:
        (p, d), z = y^K; x is left as it was.
    """
    if task.kinds:
        return _by_kind(x, task, t)
    z, rate = torch.empty_like(x), task.solver.lr(t)
    for lanes in groups(task):
        begun = time.perf_counter()
        whole = y = task.spec.take(x, lanes)
        v = {name: torch.zeros_like(value) for name, value in y.items()}
        start = task.spec.take(x, lanes) if task.solver.pull else {}
        origin = {name: value for name, value in start.items() if name in task.spec.common}
        for batch in batches(task, t, lanes):
            y, v, origin = (_first(len(batch.index), values) for values in (y, v, origin))
            _step((v, y, origin), task, batch, rate)
        task.spec.put(whole, z, lanes)
        if task.spent is not None:
            _note(task.spent, task, lanes, begun)
    return z


def _note(spent: NDArray[np.float64], task: Task, lanes: NDArray[np.int64], begun: float) -> None:
    """Share the seconds since `begun` among the peers that trained together."""
    if task.device.type == "cuda":
        torch.cuda.synchronize(task.device)
    who = np.unique(task.peers[lanes])
    spent[who] += (time.perf_counter() - begun) / len(who)


def _by_kind(x: Tensor, task: Task, t: int) -> Tensor:
    """`sgd` for models of several kinds; what is behind a shorter one stays zero."""
    z = torch.zeros_like(x)
    for here, part in task.parts():
        z[here, : part.spec.d] = sgd(x[here, : part.spec.d], part, t)
    return z


def _step(
    held: tuple[Parameters, Parameters, Parameters], task: Task, batch: Batch, rate: float
) -> None:
    """Move velocities and models, turn by turn; what does not move in a turn keeps its velocity, too."""
    v, y, origin = held
    for names in task.turns:
        moving = {name: v[name] for name in names}
        accelerate(moving, y, task, batch, rate)
        _pull(moving, y, origin, rate * task.solver.pull)
        _move(y, moving)


def _pull(v: Parameters, y: Parameters, origin: Parameters, factor: float) -> None:
    """v <- v - η μ (y - x), where there is something to hold on to."""
    for name in v.keys() & origin.keys():
        v[name].sub_((y[name] - origin[name]) * factor)


def _move(y: Parameters, v: Parameters) -> None:
    for name, velocity in v.items():
        y[name].add_(velocity)


def _first(a: int, values: Parameters) -> Parameters:
    """The first a peers of a group: the others have done their steps."""
    return {name: value if len(value) == a else value[:a] for name, value in values.items()}


def _check(name: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise InputError(f"--lr-schedule {name} must be {accepted}, not {value}")
