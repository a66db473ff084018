"""Sequences of graphs without a period: every round draws a new one, and only that one is kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar, overload

from numpy.random import Generator, Philox
from scipy.sparse import csr_array

T = TypeVar("T")

ENDLESS = 2**31 - 1
"""The length of a sequence without a period: as many rounds as a run can have."""
SAMPLED = 64
"""The rounds of a sequence without a period that are looked at before a run."""


class EveryRound(Sequence[T], Generic[T]):
    """A sequence whose entry t is made when it is asked for; the last one made is kept.

    Args:
        make: t -> entry t; the same in every process and at every call.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = lru_cache(maxsize=1)(make)

    def __len__(self) -> int:
        return ENDLESS

    @overload
    def __getitem__(self, t: int) -> T: ...
    @overload
    def __getitem__(self, t: slice) -> list[T]: ...
    def __getitem__(self, t: int | slice) -> T | list[T]:
        rounds = range(ENDLESS)[t]
        return self._make(rounds) if isinstance(rounds, int) else [self._make(k) for k in rounds]


@dataclass(frozen=True)
class Drawn:
    """A graph that is drawn anew in every round.

    Attributes:
        rounds: the graph of every round, or its weights, as a topology returns them.
        possible: (P, P) bool, every edge that a round may have; None where it may be any.
    """

    rounds: EveryRound[csr_array]
    possible: csr_array | None = None


def drawn(
    draw: Callable[[Generator], csr_array], rng: Generator, possible: csr_array | None = None
) -> Drawn:
    """Return a graph that is drawn anew in every round.

    Args:
        draw: generator -> the graph of a round. Round t has a generator of its own, addressed by a
            key from `rng` and t.
        rng: draws the key.
        possible: as in `Drawn`.
    """
    key = int(rng.integers(2**63))
    return Drawn(EveryRound(lambda t: draw(Generator(Philox(key=(t << 64) | key)))), possible)
