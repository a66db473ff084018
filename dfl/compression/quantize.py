"""Quantization: integers of b bits and a step size per block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Interval

from dfl.compression import packing
from dfl.compression.base import COMPRESSORS, TILE, Draw, floats, tiles
from dfl.core.options import Index, require

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

Rounding = Literal["auto", "stochastic", "nearest", "midrise", "sign"]
_BETWEEN = ("midrise", "sign")
"""The roundings whose levels lie halfway between the multiples of s."""


@COMPRESSORS.register("quantize")
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
    Nearest and sign contract, ‖Q(x) - x‖ < ‖x‖ for x ≠ 0; for sign ‖Q(x) - x‖² = ‖x‖² - m mean².
    Midrise has no zero: its error of at most s/2 per coordinate contracts where the root mean
    square of a block exceeds s/2, not on a block with few nonzero entries. A block of zeros becomes
    zeros under every rounding.

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

        Only stochastic rounding calls `draw`, once for every coordinate.
        """
        q, m = messages.shape
        steps = self._steps(messages)
        head = 4 * steps.shape[1]
        encoded = messages.new_empty((q, head + packing.length(m, self.bits)), dtype=torch.uint8)
        encoded[:, :head] = steps.view(torch.uint8)
        for rows, places in tiles(q, m, self._tile(m)):
            chance = draw(rows, places) if self._rounding == "stochastic" else None
            spread = self._spread(steps[rows], m, places)
            codes = self._codes(messages[rows, places], spread, chance)
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

        A tile has whole bytes and, unless there is only one block, whole blocks.
        """
        block = self._block(m)
        unit = 8 if block == m else math.lcm(8, block)
        return unit * max(1, TILE // unit)

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

    def _steps(self, messages: torch.Tensor) -> torch.Tensor:
        """Return the step of every block of messages (q, m), (q, blocks) float32."""
        q, m = messages.shape
        block = self._block(m)
        steps = messages.new_empty((q, -(-m // block)), dtype=torch.float32)
        whole = m // block
        for rows, _ in tiles(q, m, m):
            full = messages[rows, : whole * block]
            rest = messages[rows, whole * block :]
            steps[rows, :whole] = self._step(full.view(len(full), whole, block))
            if rest.shape[1]:
                steps[rows, whole] = self._step(rest)
        return steps

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        """Return the step of the numbers along the last axis."""
        if self._rounding == "sign":
            mean = _mean_of_absolutes(x)
            return _capped(2 * mean.float(), mean, 0.5)
        largest = torch.maximum(x.amax(-1), -x.amin(-1))
        if self._rounding == "midrise":
            step = largest.div(2 ** (self.bits - 1)).float()
            return _capped(step, largest, 2 ** (self.bits - 1) - 0.5)
        most = 2 ** (self.bits - 1) - 1
        step = (largest.double() / most).float()
        higher = torch.nextafter(step, step.new_full((), math.inf))
        # Rounded up, so that the largest does not saturate.
        step = torch.where(step.double() * most < largest, higher, step)
        return _capped(step, largest, most)

    def _codes(
        self, x: torch.Tensor, step: torch.Tensor, chance: torch.Tensor | None
    ) -> torch.Tensor:
        """Return v + 2^(b-1) for every coordinate, int32.

        The arithmetic is in fixed point, with b bits before the point and 32 - b after it. Adding
        uniform bits after the point and truncating rounds up with the probability of the paper, to
        2^-(32-b) of a step; adding one half rounds to the nearest.

        Args:
            x: coordinates.
            step: their steps, of a shape that broadcasts to theirs.
            chance: random bits of the shape of x; None where rounding is not stochastic.
        """
        half = 2 ** (self.bits - 1)
        after = 32 - self.bits
        lowest = -half if self._rounding in _BETWEEN else 1 - half
        level = x / torch.where(step > 0, step, 1.0)
        fixed = level.clamp_(lowest, half - 1).mul_(2.0**after).floor_().to(torch.int32)
        if chance is not None:
            fixed += chance & ((1 << after) - 1)
        elif self._rounding == "nearest":
            fixed += 1 << (after - 1)
        return (fixed >> after).add_(half)


def _capped(step: torch.Tensor, size: torch.Tensor, most: float) -> torch.Tensor:
    """Return steps of which `most`, the largest level, are a finite float32.

    Steps of blocks that are not finite stay.

    Args:
        step: float32.
        size: the numbers that the steps were computed from, finite or not.
        most: how many steps the largest level is.
    """
    largest = torch.finfo(torch.float32).max
    cap = torch.tensor(largest / most, dtype=torch.float64).clamp_max(largest).float()
    if cap.item() * most > largest:
        cap = torch.nextafter(cap, torch.zeros(()))
    return torch.where(size.isfinite(), step.clamp_max(cap.item()), step)


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
