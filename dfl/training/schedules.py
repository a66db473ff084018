"""Learning-rate schedules, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

from annotated_types import Interval

from dfl.core.options import Count, Share
from dfl.core.registry import Registry

SCHEDULES: Registry[Callable[..., float]] = Registry("lr_schedule", "dfl.schedules")
"""Name -> f(t, rounds, *, options) -> factor on the learning rate in round t of `rounds`."""

Factor = Annotated[float, Interval(gt=0, le=1)]


@SCHEDULES.register("constant")
def constant(t: int, rounds: int) -> float:
    """The same learning rate in every round."""
    return 1.0


@SCHEDULES.register("exponential")
def exponential(t: int, rounds: int, *, decay: Factor = 0.99) -> float:
    """Multiply by `decay` every round (McMahan et al. 2017 used 0.99 on CIFAR-10)."""
    return decay**t


@SCHEDULES.register("step")
def step(t: int, rounds: int, *, every: Count = 50, factor: Factor = 0.1) -> float:
    """Multiply by `factor` every `every` rounds."""
    return factor ** (t // every)


@SCHEDULES.register("cosine")
def cosine(t: int, rounds: int, *, floor: Share = 0.0) -> float:
    """Half a cosine from 1 to `floor` over the run (Loshchilov and Hutter 2017, eq. 5, without
    restarts).
    """
    return floor + (1 - floor) * (1 + math.cos(math.pi * t / max(rounds, 1))) / 2
