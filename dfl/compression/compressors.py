"""How are m numbers said in B bytes?

`encode` turns words (q, m) into a message (q, B) of bytes and `decode` turns it back; q counts
whatever speaks, peers or directed edges. The bytes are what MPI sends, so what a round costs is
read off the buffer. A compressor is a frozen dataclass whose fields are its options; to add one,
decorate it with `@COMPRESSORS.register("name")`.

A row's message depends on that row and on its address alone, not on the other rows. The work is
done in tiles of some 262,144 numbers, whose temporaries are used again and stay in the cache: one
of the words' size costs more in page faults than all the arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from annotated_types import Interval

from dfl.compression import packing
from dfl.core.options import Index, require
from dfl.core.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

Draw = Callable[[slice, slice], "torch.Tensor"]
"""draw(rows, places) -> (rows, places) int32: the random bits of some places of some rows, made by
`keys.bits`.
"""

Rounding = Literal["auto", "stochastic", "nearest", "midrise", "sign"]
_BETWEEN = ("midrise", "sign")  # the roundings whose levels lie halfway between the multiples of s
_TILE = (
    1 << 18
)  # coordinates that are worked on at a time; it is also the unit of packing, so part of the format


class Compressor(Protocol):
    """What the network asks of a message format."""

    def encode(self, words: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Updates (q, m) of float32 or float64 to a message (q, B) uint8; `draw` is asked only if
        chance is needed.
        """
        ...

    def decode(self, message: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """A message (q, B) uint8 to words (q, m) of the given dtype."""
        ...


COMPRESSORS: Registry[type[Compressor]] = Registry("compressor", "dfl.compressors")


@COMPRESSORS.register("none")
@dataclass(frozen=True, kw_only=True)
class Exact:
    """The floats' own bytes: B = 4m for float32, 8m for float64. Neither direction copies
    contiguous memory.
    """

    def encode(self, words: torch.Tensor, draw: Draw) -> torch.Tensor:
        """View words (q, m) as bytes (q, B)."""
        flat = words.reshape(-1).view(
            torch.uint8
        )  # flat first: torch cannot view the rows of a rank without peers
        return flat.view(len(words), words.shape[1] * words.element_size())

    def decode(self, message: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """View bytes (q, B) as words (q, m); `dtype` must be the one that was encoded."""
        return _floats(message, dtype)


@COMPRESSORS.register("quantize")
@dataclass(frozen=True, kw_only=True)
class Quantize:
    """Integers of b bits and one step size s per block: a coordinate a becomes one of 2^b multiples
    of s.

    With v from {-2^(b-1), …, 2^(b-1) - 1} and the largest and the mean taken over the |a| of a
    block:

        stochastic  vs ≤ a < (v+1)s becomes vs with probability 1 - (a - vs)/s, else (v+1)s;  s = largest/(2^(b-1) - 1)
        nearest     vs, the closest to a;                                                     s = largest/(2^(b-1) - 1)
        midrise     (v + 1/2)s, the closest to a;                                             s = largest/2^(b-1)
        sign        (v + 1/2)s = ± mean, the sign of a; b = 1;                                s = 2 mean

    Stochastic is unbiased, as nothing saturates, with a variance of at most s²/4 per coordinate.
    Nearest and sign contract, ‖Q(x) - x‖ < ‖x‖ for x ≠ 0; for sign ‖Q(x) - x‖² = ‖x‖² - m mean².
    Midrise has no zero: its error of at most s/2 per coordinate contracts where the root mean
    square of a block exceeds s/2, not on a block with few nonzero entries. A block of zeros becomes
    zeros under every rule.

    A message is the steps, float32 in memory order, then the codes v + 2^(b-1), packed: 4 bytes per
    block and ceil(b m / 8). With one block these are the 32 + b d bits of the paper.

    Source: Sun, Li, Wang, "Decentralized federated averaging" (arXiv 2104.11375), the quantizer of
        quantized DFedAvgM;
    sign times the mean: Karimireddy et al., "Error feedback fixes SignSGD" (arXiv 1901.09847).

    Raises:
        InputError: an option, or a combination of options, that is none of the above.
    """

    bits: Annotated[int, Interval(ge=1, le=16)] = 8
    """b, from 1 to 16."""
    rounding: Rounding = "auto"
    """auto is sign for 1 bit, midrise for 2, nearest for 3, stochastic from 4 on."""
    block: Index | None = None
    """Coordinates that share a step; 0 is the whole message; None is 256 up to 3 bits, the whole
    message from 4 on.
    """

    def __post_init__(self) -> None:
        one_bit = ("auto", "midrise", "sign")
        several = ("auto", "stochastic", "nearest", "midrise")
        choices = one_bit if self.bits == 1 else several
        accepted = f"{', '.join(choices[:-1])} or {choices[-1]} with bits={self.bits}"
        good = self.rounding in choices
        require(good, "--compressor quantize: rounding", accepted, self.rounding)

    def encode(self, words: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Updates (q, m) to a message (q, B); only stochastic rounding asks `draw`, once for every
        coordinate.
        """
        q, m = words.shape
        steps = self._steps(words)
        head = 4 * steps.shape[1]
        message = words.new_empty((q, head + packing.length(m, self.bits)), dtype=torch.uint8)
        message[:, :head] = steps.view(torch.uint8)
        for rows, places in _tiles(q, m, self._tile(m)):
            chance = draw(rows, places) if self._rounding == "stochastic" else None
            codes = self._codes(words[rows, places], self._spread(steps[rows], m, places), chance)
            packing.pack(codes, self.bits, message[rows, self._bytes(head, places)])
        return message

    def decode(self, message: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """A message (q, B) to words (q, m)."""
        q, head = len(message), 4 * -(-m // self._block(m))
        steps = _floats(message[:, :head], torch.float32)
        words = message.new_empty((q, m), dtype=dtype)
        lowest = (0.5 if self._rounding in _BETWEEN else 0.0) - 2 ** (self.bits - 1)
        for rows, places in _tiles(q, m, self._tile(m)):
            codes = packing.unpack(
                message[rows, self._bytes(head, places)], self.bits, places.stop - places.start
            )
            words[rows, places].copy_(codes).add_(lowest).mul_(self._spread(steps[rows], m, places))
        return words

    @property
    def _rounding(self) -> str:
        if self.rounding != "auto":
            return self.rounding
        return {1: "sign", 2: "midrise", 3: "nearest"}.get(self.bits, "stochastic")

    def _block(self, m: int) -> int:
        """Coordinates per block; with one block that is all of them."""
        asked = self.block if self.block is not None else 256 * (self.bits <= 3)
        return max(1, min(asked or m, m))

    def _tile(self, m: int) -> int:
        """Coordinates of a row per tile: whole bytes and, unless there is only one, whole
        blocks.
        """
        block = self._block(m)
        unit = 8 if block == m else math.lcm(8, block)
        return unit * max(1, _TILE // unit)

    def _bytes(self, head: int, places: slice) -> slice:
        """Where in a message the codes of a tile lie."""
        return slice(
            head + packing.length(places.start, self.bits),
            head + packing.length(places.stop, self.bits),
        )

    def _spread(self, steps: torch.Tensor, m: int, places: slice) -> torch.Tensor:
        """Repeat each row's steps (q, blocks) for the places of a tile: (q, places), or (q, 1) for
        one block.
        """
        if steps.shape[1] <= 1:
            return steps
        block = self._block(m)
        own = steps[:, places.start // block : -(-places.stop // block)]
        return own.repeat_interleave(block, dim=1)[:, : places.stop - places.start]

    def _steps(self, words: torch.Tensor) -> torch.Tensor:
        """The step of every block of the words (q, m): (q, blocks) float32."""
        q, m = words.shape
        block = self._block(m)
        steps = words.new_empty((q, -(-m // block)), dtype=torch.float32)
        whole = m // block
        for rows, _ in _tiles(q, m, m):
            full, rest = words[rows, : whole * block], words[rows, whole * block :]
            steps[rows, :whole] = self._step(full.view(len(full), whole, block))
            if rest.shape[1]:
                steps[rows, whole] = self._step(rest)
        return steps

    def _step(self, x: torch.Tensor) -> torch.Tensor:
        """The step of the numbers along the last axis."""
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
        step = torch.where(
            step.double() * most < largest, higher, step
        )  # rounded up: else the largest would saturate
        return _capped(step, largest, most)

    def _codes(
        self, x: torch.Tensor, step: torch.Tensor, chance: torch.Tensor | None
    ) -> torch.Tensor:
        """v + 2^(b-1) for every coordinate, int32, by fixed-point arithmetic: b bits before the
        point, 32 - b after.

        Adding uniform bits after the point and dropping what is there then goes up with the
        probability that the paper asks for, to 2^-(32-b) of a step; adding one half goes to the
        nearest.
        """
        half, after = 2 ** (self.bits - 1), 32 - self.bits
        lowest = -half if self._rounding in _BETWEEN else 1 - half
        level = x / torch.where(step > 0, step, 1.0)
        fixed = level.clamp_(lowest, half - 1).mul_(2.0**after).floor_().to(torch.int32)
        if chance is not None:
            fixed += chance & ((1 << after) - 1)
        elif self._rounding == "nearest":
            fixed += 1 << (after - 1)
        return (fixed >> after).add_(half)


def _tiles(q: int, m: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Cut (q, m) into rectangles at most `width` wide and of about _TILE numbers: (rows, places) of
    each.
    """
    height = max(1, _TILE // max(1, min(width, m)))
    for row in range(0, q, height):
        for place in range(0, m, max(1, width)):
            yield slice(row, min(row + height, q)), slice(place, min(place + width, m))


def _floats(message: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View bytes (q, B) as floats, or copy them where they have gaps or begin in the middle of a
    float.
    """
    flat = message.reshape(-1)
    if flat.storage_offset() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype).view(len(message), message.shape[1] // dtype.itemsize)


def _capped(step: torch.Tensor, size: torch.Tensor, most: float) -> torch.Tensor:
    """Return steps of which `most` are a finite float32, the largest level; those of blocks that
    are not finite stay.

    Args:
        step: float32.
        size: what it was made from, finite or not.
        most: steps that the largest level has.
    """
    largest = torch.finfo(torch.float32).max
    cap = torch.tensor(largest / most, dtype=torch.float64).clamp_max(largest).float()
    if cap.item() * most > largest:
        cap = torch.nextafter(cap, torch.zeros(()))
    return torch.where(size.isfinite(), step.clamp_max(cap.item()), step)


def _mean_of_absolutes(x: torch.Tensor) -> torch.Tensor:
    """The mean of |x| along the last axis, float64, by folding the axis in halves.

    The order of a library sum depends on the tensor's shape, and so on how many peers a rank has;
    this order does not.
    """
    total = x.abs().double()
    while (n := total.shape[-1]) > 1:
        total[..., : n // 2] += total[..., n - n // 2 :]
        total = total[..., : n - n // 2]
    return total[..., 0] / x.shape[-1]
