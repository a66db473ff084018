"""Quantization: integers of b bits and a step size per block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from annotated_types import Interval

from dfl.compression import packing
from dfl.compression.base import COMPRESSORS, TILE, Draw, floats, tiles
from dfl.core.options import Index, require
from dfl.core.registry import example_with

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

Rounding = Literal["auto", "stochastic", "nearest", "midrise", "sign"]
_BETWEEN = ("midrise", "sign")
"""The roundings whose levels lie halfway between the multiples of s."""


@COMPRESSORS.register("quantize")
@example_with("--algorithm qdfedavgm")
@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Integers of b bits, and one step size s per block: every coordinate becomes a multiple of s.

    v is from {-2^(b-1), …, 2^(b-1) - 1}; the largest and the mean are those of |a| in a block. A
    coordinate a becomes, by rounding:

        stochastic  vs with probability 1 - (a - vs)/s, else (v+1)s, where vs ≤ a < (v+1)s;
                    s = largest/(2^(b-1) - 1)
        nearest     vs, the closest to a;               s = largest/(2^(b-1) - 1)
        midrise     (v + 1/2)s, the closest to a;       s = largest/2^(b-1)
        sign        (v + 1/2)s = ± mean, the sign of a; s = 2 mean, b = 1

    Stochastic is unbiased, as nothing saturates, with a variance of at most s²/4 per coordinate.
    Its probability is a multiple of 2^-16, as a coordinate has 16 random bits, so that |E Q(a) - a|
    ≤ s 2^-16 to the rounding of floats, and E Q(a) ≤ a; multiples of s stay as they are.
    Nearest and sign contract, ‖Q(x) - x‖ < ‖x‖ for x ≠ 0; for sign ‖Q(x) - x‖² = ‖x‖² - m mean².
    Midrise has no zero: its error of at most s/2 per coordinate contracts where the root mean
    square of a block exceeds s/2, not on a block with few nonzero entries. A block of zeros becomes
    zeros under every rounding. This holds where steps are normal float32 numbers, not subnormal.

    The bytes are the steps, float32 in memory order, then the codes v + 2^(b-1), packed: 4 bytes
    per block and ceil(b m / 8). With one block these are the 32 + b d bits of the paper.

    Source: Sun, Li, Wang, "Decentralized federated averaging" (arXiv 2104.11375), the quantizer of
        quantized DFedAvgM; sign times the mean: Karimireddy et al., "Error feedback fixes SignSGD"
        (arXiv 1901.09847).

    Attributes:
        bits: b, from 1 to 16.
        rounding: auto is sign for 1 bit, midrise for 2, nearest for 3, stochastic from 4 on.
        block: coordinates that share a step; 0 is the whole message; None is 256 up to 3 bits, the
            whole message from 4 on.

    Raises:
        InputError: an option, or a combination of options, that is none of the above.
    """

    bits: Annotated[int, Interval(ge=1, le=16)] = 8
    rounding: Rounding = "auto"
    block: Index | None = None

    def __post_init__(self) -> None:
        one_bit = ("auto", "midrise", "sign")
        several = ("auto", "stochastic", "nearest", "midrise")
        choices = one_bit if self.bits == 1 else several
        accepted = f"{', '.join(choices[:-1])} or {choices[-1]} with bits={self.bits}"
        good = self.rounding in choices
        require(good, "--compressor quantize: rounding", accepted, self.rounding)

    def encode(self, messages: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Return messages (q, m) as bytes (q, B).

        Only stochastic rounding calls `draw`, for one number per two coordinates.
        """
        q, m = messages.shape
        steps = self._steps(messages)
        head = 4 * steps.shape[1]
        encoded = messages.new_empty((q, head + packing.length(m, self.bits)), dtype=torch.uint8)
        encoded[:, :head] = steps.view(torch.uint8)
        divisors = torch.where(steps > 0, steps, 1.0)
        for rows, places in tiles(q, m, self._tile(m)):
            chance = self._chance(draw, rows, places) if self.unbiased else None
            divisor = self._spread(divisors[rows], m, places)
            codes = self._codes(messages[rows, places] / divisor, chance)
            packing.pack(codes, self.bits, encoded[rows, self._bytes(head, places)])
        return encoded

    def decode(self, encoded: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the messages (q, m) that bytes (q, B) hold."""
        q = len(encoded)
        head = 4 * -(-m // self._block(m))
        steps = floats(encoded[:, :head], torch.float32)
        messages = encoded.new_empty((q, m), dtype=dtype)
        lowest = (0.5 if self._rounding in _BETWEEN else 0.0) - 2 ** (self.bits - 1)
        for rows, places in tiles(q, m, self._tile(m)):
            packed = encoded[rows, self._bytes(head, places)]
            codes = packing.unpack(packed, self.bits, places.stop - places.start)
            spread = self._spread(steps[rows], m, places)
            messages[rows, places].copy_(codes).add_(lowest).mul_(spread)
        return messages

    @property
    def unbiased(self) -> bool:
        """Whether the mean of Q(x) is x: rounding is stochastic."""
        return self._rounding == "stochastic"

    def bound(self, m: int) -> float:
        """Return the largest E ||Q(x) - x||^2 / ||x||^2, from the error of one block.

        With n coordinates in a block, of which the largest is rounded exactly, it is n s^2/4 over
        largest^2, and where Q(x) contracts at most 1 - 1/n.
        """
        n = self._block(m)
        if self._rounding == "sign":
            return 1 - 1 / n
        if self._rounding == "midrise":
            return n / 4.0**self.bits
        coarse = n / (2.0**self.bits - 2) ** 2
        return coarse if self.unbiased else min(coarse, 1 - 1 / n)

    @property
    def _rounding(self) -> str:
        if self.rounding != "auto":
            return self.rounding
        return {1: "sign", 2: "midrise", 3: "nearest"}.get(self.bits, "stochastic")

    def _block(self, m: int) -> int:
        """Return the coordinates per block; with one block that is all of them."""
        chosen = self.block if self.block is not None else 256 * (self.bits <= 3)
        return max(1, min(chosen or m, m))

    def _tile(self, m: int) -> int:
        """Return the coordinates of a row per tile.

        A tile has whole bytes and, unless there is only one block, whole blocks. Those of a row
        are of about one size.
        """
        block = self._block(m)
        unit = 8 if block == m else math.lcm(8, block)
        return unit * max(1, -(-m // (unit * max(1, -(-m // TILE)))))

    def _bytes(self, head: int, places: slice) -> slice:
        """Return where in an encoded row the codes of a tile are."""
        return slice(
            head + packing.length(places.start, self.bits),
            head + packing.length(places.stop, self.bits),
        )

    def _spread(self, steps: torch.Tensor, m: int, places: slice) -> torch.Tensor:
        """Return the step of every coordinate of a tile, (q, places), or (q, 1) for one block.

        Args:
            steps: (q, blocks).
            m: coordinates of a message.
            places: the coordinates of the tile.
        """
        if steps.shape[1] <= 1:
            return steps
        block = self._block(m)
        own = steps[:, places.start // block : -(-places.stop // block)]
        return own.repeat_interleave(block, dim=1)[:, : places.stop - places.start]

    def _chance(self, draw: Draw, rows: slice, places: slice) -> torch.Tensor:
        """Return 16 random bits for every coordinate of a tile, int16.

        The number at place k of `draw` serves coordinates 2k and 2k + 1.
        """
        numbers = draw(rows, slice(places.start // 2, -(-places.stop // 2)))
        return numbers.view(torch.int16)[:, : places.stop - places.start]

    def _steps(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the step of every block of messages (q, m), (q, blocks) float32."""
        q, m = messages.shape
        block = self._block(m)
        whole = m // block
        size = _mean_of_absolutes if self._rounding == "sign" else _largest
        dtype = torch.float64 if self._rounding == "sign" else messages.dtype
        sizes = messages.new_empty((q, -(-m // block)), dtype=dtype)
        for rows, _ in tiles(q, m, m):
            full = messages[rows, : whole * block]
            rest = messages[rows, whole * block :]
            sizes[rows, :whole] = size(full.view(len(full), whole, block))
            if rest.shape[1]:
                sizes[rows, whole] = size(rest)
        return self._step(sizes)

    def _step(self, size: torch.Tensor) -> torch.Tensor:
        """Return the steps of blocks by their size: the mean or the largest of absolute values."""
        if self._rounding == "sign":
            return _capped(2 * size.float(), size, 0.5)
        if self._rounding == "midrise":
            step = size.div(2 ** (self.bits - 1)).float()
            return _capped(step, size, 2 ** (self.bits - 1) - 0.5)
        most = 2 ** (self.bits - 1) - 1
        step = (size.double() / most).float()
        higher = torch.nextafter(step, step.new_full((), math.inf))
        # Rounded up, so that the largest does not saturate.
        step = torch.where(step.double() * most < size, higher, step)
        return _capped(step, size, most)

    def _codes(self, level: torch.Tensor, chance: torch.Tensor | None) -> torch.Tensor:
        """Return v + 2^(b-1) for every coordinate, integers.

        Stochastic rounding truncates level + u, u uniform on the multiples of 2^-16 in [0, 1). A
        level that is an integer stays: its sum with u has b + 16 bits, which float32 holds up to
        b = 8; beyond, u is added to what is after the point alone.

        Args:
            level: a/s of every coordinate, overwritten.
            chance: 16 random bits for each; None where rounding is not stochastic.
        """
        half = 2 ** (self.bits - 1)
        level.clamp_(-half if self._rounding in _BETWEEN else 1 - half, half - 1)
        if chance is not None and self.bits <= 8:
            level.add_(chance, alpha=2.0**-16).add_(half + 0.5)
        elif chance is not None:
            below = level.floor()
            level.sub_(below).add_(chance, alpha=2.0**-16).add_(0.5).floor_().add_(below).add_(half)
        else:
            level.add_(0.5 if self._rounding == "nearest" else 0.0).floor_().add_(half)
        narrow = torch.int8 if self.bits < 8 else torch.int16
        return level.to(narrow if self.bits <= 8 else torch.int32)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value along the last axis."""
    # The maximum of 0 and -0 is either, by the shape of the tensor.
    return torch.maximum(x.amax(-1), -x.amin(-1)).abs_()


def _capped(step: torch.Tensor, size: torch.Tensor, most: float) -> torch.Tensor:
    """Return steps of which `most`, the largest level, are a finite float32.

    Steps of blocks that are not finite stay.

    Args:
        step: float32.
        size: the numbers that the steps were computed from, finite or not.
        most: how many steps the largest level is.
    """
    return torch.where(size.isfinite(), step.clamp_max(_cap(most)), step)


@cache
def _cap(most: float) -> float:
    """Return the largest step, a float32, of which `most` are finite."""
    largest = torch.finfo(torch.float32).max
    cap = np.float32(min(largest / most, largest))
    return float(cap if float(cap) * most <= largest else np.nextafter(cap, np.float32(0)))


def _mean_of_absolutes(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of |x| along the last axis, float64, by folding the axis in halves.

    The order of a library's sum depends on the tensor's shape, and so on how many peers a rank has;
    this order does not.
    """
    total = x.abs().double()
    while (n := total.shape[-1]) > 1:
        total[..., : n // 2] += total[..., n - n // 2 :]
        total = total[..., : n - n // 2]
    return total[..., 0] / x.shape[-1]
