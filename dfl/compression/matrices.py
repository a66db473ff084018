"""Parameters of a row as matrices, and products of stacks of matrices.

The bits of a result for one matrix do not depend on how many others are in the stack.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


class Matrix(NamedTuple):
    """A parameter of a row, as a matrix of its first axis by all others.

    Attributes:
        places: its coordinates.
        rows, columns: u and v.
    """

    places: slice
    rows: int
    columns: int

    def of(self, x: Tensor) -> Tensor:
        """Return this parameter of rows x (q, m), (q, u, v)."""
        matrix: Tensor = x[:, self.places].unflatten(1, (self.rows, self.columns))
        return matrix


def matrices(shapes: Sequence[tuple[int, ...]], m: int) -> Iterator[Matrix]:
    """Yield those of the parameters in m coordinates that have two axes or more.

    Args:
        shapes: the shapes of the parameters of a model, in their order; the first of them are those
            in the m coordinates.
        m: coordinates.
    """
    start = 0
    for shape in shapes:
        stop = start + math.prod(shape)
        if stop > m:
            return
        if len(shape) > 1 and stop > start:
            yield Matrix(slice(start, stop), shape[0], math.prod(shape[1:]))
        start = stop


def product(one: Tensor, other: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products of matrices (q, u, v) and (q, v, w), (q, u, w).

    A lone one is computed as one of two: libraries compute it by another kernel. With v = 1 nothing
    is added up, and libraries take ten times as long as an outer product needs.

    Args:
        one, other: the matrices.
        out: (q, u, w), of any strides, to write to; None for a new tensor.
    """
    if one.shape[2] == 1:
        return torch.mul(one, other, out=out)
    if len(one) == 1:
        found = torch.bmm(one.expand(2, -1, -1), other.expand(2, -1, -1))[:1]
    else:
        found = torch.bmm(one, other)
    return found if out is None else out.copy_(found)


def orthonormal(columns: Tensor) -> Tensor:
    """Return orthonormal columns (q, u, r) that span those given; completed where these do not have
    rank r.
    """
    spanning: Tensor = torch.linalg.qr(columns).Q
    return spanning
