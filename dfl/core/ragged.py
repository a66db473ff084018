"""Arrays of several lengths in one: the examples of every peer, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Ragged(Sequence[Ints]):
    """A sequence of P arrays of whole numbers, of which entry i is a view.

    Attributes:
        values: (n,), one array after the other.
        sizes: (P,), their lengths.
    """

    def __init__(self, values: Ints, sizes: Ints) -> None:
        self.values = values
        self.sizes = sizes

    @classmethod
    def of(cls, parts: Sequence[Ints]) -> Ragged:
        """Return some arrays as one."""
        if isinstance(parts, Ragged):
            return parts
        values = np.concatenate(parts) if len(parts) else np.zeros(0)
        sizes = np.array([len(part) for part in parts], np.int64)
        return cls(values.astype(np.int64, copy=False), sizes)

    @cached_property
    def ends(self) -> Ints:
        """(P + 1,): array i is values[ends[i] : ends[i + 1]]."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    @property
    def owners(self) -> Ints:
        """(n,), the number of the array that each value is in."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def block(self, some: range) -> Ints:
        """Return the values of some consecutive arrays, one after the other."""
        return self.values[self.ends[some.start] : self.ends[max(some.start, some.stop)]]

    def some(self, which: Ints) -> Ragged:
        """Return the arrays at some positions, in their order."""
        sizes = self.sizes[which]
        moved = self.ends[which] - (np.cumsum(sizes) - sizes)
        return Ragged(self.values[np.repeat(moved, sizes) + np.arange(sizes.sum())], sizes)

    def sorted(self) -> Ragged:
        """Return the arrays, each in ascending order, of values from 0 up."""
        above = int(self.values.max(initial=0)) + 1
        return Ragged(np.sort(self.owners * above + self.values) % above, self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, i: int) -> Ints: ...

    @overload
    def __getitem__(self, i: slice) -> Ragged: ...

    def __getitem__(self, i: int | slice) -> Ints | Ragged:
        if isinstance(i, slice):
            some = range(*i.indices(len(self)))
            if some.step == 1:
                return Ragged(self.block(some), self.sizes[i])
            return Ragged.of([self[k] for k in some])
        k = range(len(self))[i]
        return self.values[self.ends[k] : self.ends[k + 1]]
