"""Bases V that both ends of an edge know, and products of parameter matrices with them.

PowerGossip multiplies its matrices from the right in even rounds and from the left, which is the
same of their transposes, in odd rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from dfl.compression.matrices import matrices, orthonormal, product

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


class Part(NamedTuple):
    """A part of a row: a matrix of which products are sent, or coordinates sent as they are.

    Coordinates sent as they are form a matrix of one column, which is multiplied by 1.

    Attributes:
        places: its coordinates.
        rows, columns: u and v.
        start: where among the factors its left one begins, before the right one; None without.
    """

    places: slice
    rows: int
    columns: int
    start: int | None = None

    def transposed(self, t: int) -> bool:
        """Return whether round t works on the transposed matrix."""
        return self.start is not None and t % 2 == 1

    def factor(self, t: int) -> slice:
        """Return where the factor is that multiplies in round t."""
        assert self.start is not None
        middle = self.start + self.rows
        return slice(self.start, middle) if t % 2 else slice(middle, middle + self.columns)

    def length(self, rank: int, t: int) -> int:
        """Return the numbers of a product in round t."""
        if self.start is None:
            return self.rows
        return rank * (self.columns if self.transposed(t) else self.rows)


def parts_of(m: int, shapes: Sequence[tuple[int, ...]], rank: int) -> list[Part]:
    """Return the parts of m coordinates, in order, at least one; matrices of more than `rank` rows
    and columns have factors.
    """
    parts: list[Part] = []
    end = start = 0
    for places, rows, columns in matrices(shapes, m):
        if rank < min(rows, columns):
            if end < places.start:
                parts.append(Part(slice(end, places.start), places.start - end, 1))
            parts.append(Part(places, rows, columns, start))
            end, start = places.stop, start + rows + columns
    return parts if parts and end == m else [*parts, Part(slice(end, m), m - end, 1)]


def numbers(parts: Sequence[Part]) -> int:
    """Return the numbers of the left and right factors of rank 1, the sum of u + v."""
    return sum(each.rows + each.columns for each in parts if each.start is not None)


@dataclass(frozen=True)
class Bases:
    """The bases V of a round, of every edge and part.

    Attributes:
        factors: (e, r, numbers(parts)), left and right factors of one matrix after the other.
        parts: the parts of a row.
        t: the round.
    """

    factors: Tensor
    parts: Sequence[Part]
    t: int

    def products(self, x: Tensor) -> Tensor:
        """Return X V for every part of rows x (e, m), one after the other, (e, length)."""
        found = [product(self._matrix(x, p), v).flatten(1) for p, v in self._pairs]
        return torch.cat(found, dim=1)

    def projections(self, products: Tensor) -> Tensor:
        """Return S V^T for every part, as coordinates (e, m), given all S (e, length)."""
        rows = products.new_empty(len(products), self.parts[-1].places.stop)
        for (part, v), s in zip(self._pairs, self._split(products), strict=True):
            product(s, v.mT, out=self._matrix(rows, part))
        return rows

    def next(self, products: Tensor) -> Tensor:
        """Return the factors with the products S (e, length) as those of the next round."""
        factors = self.factors.clone()
        for part, s in zip(self.parts, self._split(products), strict=True):
            if part.start is not None:
                factors[:, :, part.factor(self.t + 1)] = s.mT
        return factors

    @cached_property
    def _pairs(self) -> list[tuple[Part, Tensor]]:
        """The parts, each with the orthonormal columns of its factor."""
        one = self.factors.new_ones(len(self.factors), 1, 1)
        return [
            (p, one if p.start is None else orthonormal(self.factors[:, :, p.factor(self.t)].mT))
            for p in self.parts
        ]

    def _matrix(self, x: Tensor, part: Part) -> Tensor:
        """Return a part of rows x (e, m) as matrices, (e, u, v) or transposed; a view."""
        matrix: Tensor = x[:, part.places].unflatten(1, (part.rows, part.columns))
        return matrix.mT if part.transposed(self.t) else matrix

    def _split(self, products: Tensor) -> list[Tensor]:
        """Return products (e, length) by part, as matrices of as many columns as V."""
        rank = self.factors.shape[1]
        sizes = [part.length(rank, self.t) for part in self.parts]
        split = zip(products.split(sizes, dim=1), self._pairs, strict=True)
        return [s.unflatten(1, (-1, v.shape[2])) for s, (_, v) in split]
