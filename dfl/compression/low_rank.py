"""Low-rank messages: two factors for each matrix of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from dfl.compression.base import COMPRESSORS, Draw, as_bytes, floats
from dfl.compression.matrices import Matrix, matrices, orthonormal, product
from dfl.core.options import Count
from dfl.core.registry import example_with

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


@COMPRESSORS.register("low_rank")
@example_with("--algorithm qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class LowRank:
    """Projections of matrices M (u, v) on r columns P, by one step of a power iteration:

        P = orthonormal columns of M R,   N = M^T P,   Q(M) = P N^T

    R (v, r) is random, nearly normal. Biased; it contracts: Q(M) is an orthogonal projection, and
    E ||Q(M) - M||^2 <= (1 - r/min(u, v)) ||M||^2. Nothing of a matrix of rank r is lost.

    A parameter of more than two axes is a matrix of its first axis by all others. Vectors, and
    matrices whose factors are no smaller, r (u + v) >= u v, are sent as they are. The bytes are the
    floats of P and N, or of the parameter, in the order of the parameters.

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD" (arXiv 1905.13727), without warm start.

    Attributes:
        rank: r.
        shapes: those of the parameters in a message; coordinates beyond them are sent as they are.
    """

    rank: Count
    shapes: tuple[tuple[int, ...], ...] = field(default=(), init=False)

    unbiased: ClassVar[bool] = False

    def bound(self, m: int) -> float:
        """Return 1 - r/min(u, v) of the largest matrix."""
        ratios = (self.rank / min(each.rows, each.columns) for each in self._matrices(m))
        return 1 - min(ratios, default=1.0)

    def shaped(self, shapes: Sequence[tuple[int, ...]]) -> LowRank:
        """Return the compressor of messages of parameters of these shapes."""
        known = copy(self)
        object.__setattr__(known, "shapes", tuple(shapes))
        return known

    def encode(self, messages: Tensor, draw: Draw) -> Tensor:
        """Return messages (q, m) as bytes (q, B).

        `draw` is called for v r numbers of every matrix.
        """
        q, m = messages.shape
        parts, end, drawn = [], 0, 0
        for each in self._matrices(m):
            matrix, n = each.of(messages), each.columns * self.rank
            start = _normal(draw(slice(0, q), slice(drawn, drawn + n))).to(messages)
            left = orthonormal(product(matrix, start.unflatten(1, (each.columns, self.rank))))
            right = product(matrix.mT, left)
            parts += [messages[:, end : each.places.start], left.flatten(1), right.flatten(1)]
            end, drawn = each.places.stop, drawn + n
        return as_bytes(torch.cat([*parts, messages[:, end:]], dim=1))

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Return the messages (q, m) that bytes (q, B) hold."""
        rest, end = floats(encoded, dtype), 0
        messages = rest.new_empty((len(rest), m))
        for each in self._matrices(m):
            between, r = each.places.start - end, self.rank
            sizes = [between, each.rows * r, each.columns * r]
            sizes.append(rest.shape[1] - sum(sizes))
            messages[:, end : each.places.start], left, right, rest = rest.split(sizes, dim=1)
            factors = left.unflatten(1, (-1, r)), right.unflatten(1, (-1, r))
            product(factors[0], factors[1].mT, out=each.of(messages))
            end = each.places.stop
        messages[:, end:] = rest
        return messages

    def _matrices(self, m: int) -> list[Matrix]:
        """Return the matrices of a message that are sent as factors."""
        return [
            each
            for each in matrices(self.shapes, m)
            if self.rank * (each.rows + each.columns) < each.rows * each.columns
        ]


def _normal(bits: Tensor) -> Tensor:
    """Return nearly normal numbers from random bits (q, n), by the sums of their four bytes. They
    are small, so that products with messages up to about 1e37 remain finite.
    """
    # Flat first: an empty array has no stride with which it could be seen as bytes.
    flat = bits.reshape(-1).contiguous()
    four: Tensor = flat.view(torch.uint8).view(len(bits), bits.shape[1], 4)
    return (four.sum(2).float() - 510) * 2.0**-16
