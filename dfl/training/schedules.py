"""Learning-rate schedules, by name."""

from __future__ import annotations

import math
from collections.abc import Callable

from dfl.core.errors import InputError
from dfl.core.registry import Registry

SCHEDULES: Registry[Callable[..., float]] = Registry("lr_schedule", "dfl.schedules")
"""Name -> f(t, rounds, *, options) -> factor on the learning rate in round t of `rounds`."""


@SCHEDULES.register("constant")
def constant(t: int, rounds: int) -> float:
    """The same learning rate in every round."""
    return 1.0


@SCHEDULES.register("exponential")
def exponential(t: int, rounds: int, *, decay: float = 0.99) -> float:
    """Multiply by `decay` every round (McMahan et al. 2017 used 0.99 on CIFAR-10)."""
    _check("exponential: decay", decay, 0 < decay <= 1, "in (0, 1]")
    return decay**t


@SCHEDULES.register("step")
def step(t: int, rounds: int, *, every: int = 50, factor: float = 0.1) -> float:
    """Multiply by `factor` every `every` rounds."""
    _check("step: every", every, every >= 1, "at least 1")
    _check("step: factor", factor, 0 < factor <= 1, "in (0, 1]")
    return factor ** (t // every)


@SCHEDULES.register("cosine")
def cosine(t: int, rounds: int, *, floor: float = 0.0) -> float:
    """Half a cosine from 1 to `floor` over the run (Loshchilov and Hutter 2017, eq. 5, without restarts)."""
    _check("cosine: floor", floor, 0 <= floor <= 1, "in [0, 1]")
    return floor + (1 - floor) * (1 + math.cos(math.pi * t / max(rounds, 1))) / 2


def _check(name: str, value: float, good: bool, accepted: str) -> None:
    if not good:
        raise InputError(f"--lr-schedule {name} must be {accepted}, not {value}")
