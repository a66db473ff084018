"""Sequences of graphs without a period: every round draws a new one, when it is asked for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar, overload

from numpy.random import Generator, Philox
from scipy.sparse import csr_array

T = TypeVar("T")

ENDLESS = 2**31 - 1
"""The length of a sequence without a period: as many rounds as a run can have."""
SAMPLED = 64
"""The rounds of a sequence without a period that are looked at before a run."""
KEPT = 2**28
"""The most bytes of these rounds that are kept."""


class EveryRound(Sequence[T], Generic[T]):
    """A sequence whose entry t is made when it is asked for; the last one made is kept.

    The first `SAMPLED`, at which several checks before a run look, are kept too, as many as fit
    into `KEPT` bytes. A slice makes no entry either.

    Args:
        make: t -> entry t; the same in every process and at every call.
        size: entry -> its bytes; without it only the last one made is kept.
        length: of the sequence.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        size: Callable[[T], int] | None = None,
        length: int = ENDLESS,
    ) -> None:
        self.__wrapped__ = make  # what a checksum of the sequence covers
        self._last = lru_cache(maxsize=1)(make)
        self._size = size
        self._length = length
        self._first: dict[int, T] = {}
        self._free = KEPT

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, t: int) -> T: ...
    @overload
    def __getitem__(self, t: slice) -> "EveryRound[T]": ...
    def __getitem__(self, t: int | slice) -> "T | EveryRound[T]":
        rounds = range(self._length)[t]
        if isinstance(rounds, range):
            return EveryRound(lambda k: self[rounds[k]], length=len(rounds))
        if rounds in self._first:
            return self._first[rounds]
        made = self._last(rounds)
        if self._size and rounds < SAMPLED and (size := self._size(made)) <= self._free:
            self._first[rounds] = made
            self._free -= size
        return made


def is_endless(value: object) -> bool:
    """Return whether a value is a sequence without a period, or such a sequence from a later round
    on.
    """
    return isinstance(value, EveryRound) and len(value) > ENDLESS // 2


@dataclass(frozen=True)
class Drawn:
    """A graph that is drawn anew in every round.

    Attributes:
        rounds: the graph of every round, or its weights, as a topology returns them.
        possible: (P, P) bool, every edge that a round may have; None where it may be any.
        active: (n, n) the weights of a round among the n peers whose models are used again, if the
            others' are not; None where those of all are.
        one_way: whether a round may have an edge over which no way leads back: it is on no cycle.
    """

    rounds: EveryRound[csr_array]
    possible: csr_array | None = None
    active: csr_array | None = None
    one_way: bool = False


def entries(value: Any) -> list[Any]:
    """Return the entries of a sequence, or of an array (T, ., .); [value] for anything else, and
    for an empty sequence.
    """
    several = isinstance(value, Sequence) or getattr(value, "ndim", 0) == 3
    return (list(value) if several else []) or [value]


def generators(rng: Generator) -> Callable[[int], Generator]:
    """Return t -> the generator of round t, addressed by t and by a key that `rng` draws."""
    key = int(rng.integers(2**63))
    return lambda t: Generator(Philox(key=(t << 64) | key))


def drawn(
    draw: Callable[[Generator], csr_array],
    rng: Generator,
    possible: csr_array | None = None,
    one_way: bool = False,
) -> Drawn:
    """Return a graph that is drawn anew in every round.

    Args:
        draw: generator of a round -> its graph.
        rng: draws the key of these generators.
        possible, one_way: as in `Drawn`.
    """
    of_round = generators(rng)
    return Drawn(EveryRound(lambda t: draw(of_round(t))), possible, one_way=one_way)
