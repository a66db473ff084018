"""Sparse messages: some coordinates, as floats, and where they are.

A message of m coordinates keeps k = max(1, round(share m)) of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Interval

from dfl.compression import packing
from dfl.compression.base import COMPRESSORS, Draw, as_bytes, floats, tiles
from dfl.core import randomness
from dfl.core.registry import example_with

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

Kept = Annotated[float, Interval(gt=0, le=1)]
"""The share of the coordinates that a message keeps."""


@COMPRESSORS.register("top_k")
@example_with("--algorithm qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class TopK:
    """The k coordinates of largest absolute value; of equal ones, those of lowest index.

    Biased; it contracts: ||Q(x) - x||^2 <= (1 - k/m) ||x||^2.

    The bytes are the k floats in ascending index, then the indices, in ceil(log2 m) bits each or as
    a bitmap of m bits, whichever is shorter; no indices where k = m. NaN counts as the largest.

    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (arXiv 1809.07599).

    Attributes:
        share: k/m, before rounding.
    """

    share: Kept

    unbiased: ClassVar[bool] = False

    def bound(self, m: int) -> float:
        """Return 1 - k/m."""
        return 1 - kept(self.share, m) / max(1, m)

    def encode(self, messages: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return messages (q, m) as bytes (q, B)."""
        q, m = messages.shape
        k = kept(self.share, m)
        head = k * messages.element_size()
        length = head + _index_bytes(k, m)
        encoded = messages.new_empty((q, length), dtype=torch.uint8)
        for rows, _ in tiles(q, m, m):
            part = messages[rows]
            chosen = largest(_sizes(part), k)
            places = _places(chosen, k)
            encoded[rows, :head] = as_bytes(part.gather(1, places))
            _pack(places, chosen, encoded[rows, head:])
        return encoded

    def decode(self, encoded: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the messages (q, m) that bytes (q, B) hold."""
        k = kept(self.share, m)
        head = k * dtype.itemsize
        places = _unpack(encoded[:, head:], k, m)
        values = floats(encoded[:, :head], dtype)
        return values.new_zeros((len(encoded), m)).scatter_(1, places, values)


@COMPRESSORS.register("random_k")
@example_with("--algorithm qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class RandomK:
    """k coordinates drawn uniformly without replacement.

    As they are, biased; contracts: E ||Q(x) - x||^2 = (1 - k/m) ||x||^2. Scaled, each value times
    m/k, unbiased: E ||Q(x) - x||^2 = (m/k - 1) ||x||^2, which contracts for k > m/2 only.

    The bytes are the k floats in ascending index, then 4 bytes of random bits, from which both ends
    draw the indices; none where m = 0.

    Source: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory" (arXiv 1809.07599).

    Attributes:
        share: k/m, before rounding.
        scaled: whether values are multiplied by m/k.
    """

    share: Kept
    scaled: bool = False

    @property
    def unbiased(self) -> bool:
        """Whether the mean of Q(x) is x."""
        return self.scaled

    def bound(self, m: int) -> float:
        """Return m/k - 1 for scaled values, else 1 - k/m."""
        ratio = kept(self.share, m) / max(1, m)
        return 1 / ratio - 1 if self.scaled else 1 - ratio

    def encode(self, messages: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return messages (q, m) as bytes (q, B); `draw` is called for one number per row."""
        q, m = messages.shape
        k = kept(self.share, m)
        length = k * messages.element_size() + 4 if m else 0
        encoded = messages.new_empty((q, length), dtype=torch.uint8)
        for rows, _ in tiles(q, m, m):
            key = draw(rows, slice(0, 1)).to(messages.device)
            values = messages[rows].gather(1, _drawn(key, k, m))
            encoded[rows, :-4] = as_bytes(values * (m / k) if self.scaled else values)
            encoded[rows, -4:] = key.view(torch.uint8)
        return encoded

    def decode(self, encoded: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the messages (q, m) that bytes (q, B) hold."""
        q, k = len(encoded), kept(self.share, m)
        values = floats(encoded[:, :-4], dtype)
        keys = floats(encoded[:, -4:], torch.int32)
        messages = values.new_zeros((q, m))
        for rows, _ in tiles(q, m, m):
            messages[rows].scatter_(1, _drawn(keys[rows], k, m), values[rows])
        return messages


def kept(share: float, m: int) -> int:
    """Return how many of m coordinates a message keeps, at least 1 where there is one."""
    return min(m, max(1, round(share * m)))


def largest(keys: torch.Tensor, k: int) -> torch.Tensor:
    """Return which k integers of each row are the largest, (q, m) bool; of equal ones the first.

    Integers are compared exactly, so the result does not depend on other rows or on the device.

    Args:
        keys: (q, m) integers.
        k: how many, at most m.
    """
    if k == 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    smallest = keys.topk(k, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = keys >= smallest
    excess = chosen.sum(1, keepdim=True) - k
    if excess.any():
        equal = keys == smallest
        chosen &= ~equal | (equal.cumsum(1) <= equal.sum(1, keepdim=True) - excess)
    return chosen


def _sizes(x: torch.Tensor) -> torch.Tensor:
    """Return integers in the order of |x|: the bits of a float without its sign; NaN is last."""
    return x.abs().view(torch.int32 if x.dtype == torch.float32 else torch.int64)


def _places(chosen: torch.Tensor, k: int) -> torch.Tensor:
    """Return where k entries of each row are true, (q, k), ascending."""
    return chosen.nonzero()[:, 1].view(len(chosen), k)


def _drawn(keys: torch.Tensor, k: int, m: int) -> torch.Tensor:
    """Return k of m places for every key (q, 1) of 32 random bits, (q, k), ascending."""
    ids = keys[:, 0].cpu().numpy().view("uint32")
    numbers = randomness.bits(0, "random_k", ids, n=m, device=keys.device)
    return _places(largest(numbers, k), k)


def _index_bits(k: int, m: int) -> int:
    """Return the bits of an index; 0 where a bitmap is shorter, or where all are kept."""
    bits = (m - 1).bit_length()
    return bits if k < m and packing.length(k, bits) < packing.length(m, 1) else 0


def _index_bytes(k: int, m: int) -> int:
    """Return the bytes of the k indices of a message."""
    bits = _index_bits(k, m)
    return packing.length(k, bits) if bits else packing.length(m, 1) * (k < m)


def _pack(places: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> None:
    """Write places (q, k), which are those where chosen (q, m) is true, into bytes."""
    if bits := _index_bits(places.shape[1], chosen.shape[1]):
        packing.pack(places, bits, out)
    elif out.shape[1]:
        packing.pack(chosen, 1, out)


def _unpack(packed: torch.Tensor, k: int, m: int) -> torch.Tensor:
    """Return the places (q, k) that bytes hold."""
    if bits := _index_bits(k, m):
        return packing.unpack(packed, bits, k).long()
    if k < m:
        return _places(packing.unpack(packed, 1, m), k)
    return torch.arange(m, device=packed.device).expand(len(packed), m)
