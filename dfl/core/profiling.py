"""Seconds of a rank by named phase of its rounds, for `--profile`.

A phase is a part of the code with a name: `with phase("encode"): ...`, or a function that is
decorated by `@in_phase("encode")`. Where phases nest, the time of the inner one is not counted for
the outer one. Nothing is measured unless a `Profile` is active.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
P = ParamSpec("P")

PHASES = (
    "batches", "forward and backward", "update", "encode", "send", "decode", "mix", "wait",
    "evaluate", "write", "other",
)  # fmt: skip
"""The phases, in the order in which tables list them.

`send` is the time until messages have moved between ranks. Over a graph it includes waiting for
ranks that train longer. `wait` is the time in which a rank waits for the others elsewhere, with a
server, and no attack on messages, for those that train longer, and `other` the time outside of all
phases.
"""
MOST_EVENTS = 100_000
"""The events that a profile keeps for a trace; those after them are counted in the table alone."""

_NOTHING = nullcontext()
_active: Profile | None = None


class Profiles(NamedTuple):
    """What all ranks have spent in each phase.

    Attributes:
        table: (ranks, phases, 2), how often each phase was entered, and the nanoseconds in it.
        events: (events, 4), rank, phase, begin and end of each event in nanoseconds since the
            rank's profile began; at most `MOST_EVENTS` of each rank.
    """

    table: NDArray[np.int64]
    events: NDArray[np.int64]


class Profile:
    """What a rank has spent in each phase since the profile was made.

    Args:
        synchronize: waits until the device has done what it was given, at both ends of a phase;
            None where computation ends with its call.

    Attributes:
        calls: (phases,), how often each phase was entered.
        nanoseconds: (phases,), the time in each, without the phases inside it.
    """

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self.calls = np.zeros(len(PHASES), np.int64)
        self.nanoseconds = np.zeros(len(PHASES), np.int64)
        self._synchronize = synchronize
        self._begun = time.perf_counter_ns()
        self._inside: list[int] = []  # the time of inner phases, for each phase that is open
        self._events: list[tuple[int, int, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what happens inside as a phase."""
        number = PHASES.index(name)
        begun = self._now()
        self._inside.append(0)
        try:
            yield
        finally:
            ended = self._now()
            self.calls[number] += 1
            self.nanoseconds[number] += ended - begun - self._inside.pop()
            if self._inside:
                self._inside[-1] += ended - begun
            if len(self._events) < MOST_EVENTS:
                self._events.append((number, begun - self._begun, ended - self._begun))

    def table(self) -> NDArray[np.int64]:
        """Return calls and nanoseconds of each phase, (phases, 2); `other` has the rest of the
        time.
        """
        found = np.stack([self.calls, self.nanoseconds], axis=1)
        found[-1] = 1, max(0, self._now() - self._begun - int(self.nanoseconds.sum()))
        return found

    def events(self) -> NDArray[np.int64]:
        """Return phase, begin and end of each event, (events, 3), in nanoseconds."""
        return np.array(self._events, np.int64).reshape(-1, 3)

    def _now(self) -> int:
        if self._synchronize is not None:
            self._synchronize()
        return time.perf_counter_ns()


def active() -> Profile | None:
    """Return the profile that measures, if any does."""
    return _active


def phase(name: str) -> AbstractContextManager[None]:
    """Return a context that measures a phase, one of `PHASES`, if a profile is active."""
    return _NOTHING if _active is None else _active.phase(name)


def in_phase(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of functions whose calls are a phase."""

    def decorator(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def measured(*args: P.args, **kwargs: P.kwargs) -> T:
            with phase(name):
                return function(*args, **kwargs)

        return measured

    return decorator


def each(name: str, items: Iterable[T]) -> Iterable[T]:
    """Return items, the computation of which is a phase."""
    return items if _active is None else _measured(name, iter(items), _active)


def _measured(name: str, items: Iterator[T], profile: Profile) -> Iterator[T]:
    while True:
        with profile.phase(name):
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextmanager
def profiled(profile: Profile | None) -> Iterator[None]:
    """Measure the phases of what happens inside by a profile, if there is one."""
    global _active
    before, _active = _active, profile
    try:
        yield
    finally:
        _active = before
