"""Packing: b-bit integers in bytes, with no bit wasted.

A row of n codes of b bits takes ceil(b n / 8) bytes. The fewest codes that fill whole bytes are C =
8 / gcd(b, 8) codes in D = b / gcd(b, 8) bytes. The first C g codes of a row, g = floor(n / C), are
cut into C planes of g codes each; codes k, k + g, k + 2g, … form a string of bits, least
significant first, whose byte i is byte k of byte plane i of D. So every shift is one operation on
contiguous memory, for any b. The remaining codes, fewer than C, are packed the same way with g = 1,
and the bytes that hold none of them are left out. Of a code wider than a byte the low byte is
stored as it is, and the rest is packed behind all low bytes, in the same way.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch


def length(n: int, bits: int) -> int:
    """Return the bytes that n codes of `bits` bits take."""
    return -(-n * bits // 8)


def pack(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Write codes into bytes.

    Args:
        codes: (q, n) integers in 0 … 2^bits - 1.
        bits: b, from 1 to 31.
        out: (q, length(n, bits)) uint8, overwritten.
    """
    n = codes.shape[1]
    if bits >= 8:
        out[:, :n] = codes  # conversion to uint8 keeps the low byte
    if bits > 8:
        pack(codes >> 8, bits - 8, out[:, n:])
    if bits < 8:
        narrow = codes.to(torch.uint8)
        c, d = _group(bits)
        q = len(codes)
        g = n // c
        _pack_planes(narrow[:, : c * g].view(q, c, g), bits, out[:, : d * g].view(q, d, g))
        if c * g < n:
            rest = _padded(narrow[:, c * g :], c)
            full = rest.new_empty((q, d, 1))
            _pack_planes(rest, bits, full)
            out[:, d * g :] = full[:, : out.shape[1] - d * g, 0]


def unpack(packed: torch.Tensor, bits: int, n: int) -> torch.Tensor:
    """Read back what `pack` wrote.

    Args:
        packed: (q, length(n, bits)) uint8.
        bits: b, from 1 to 31.
        n: codes per row.

    Returns:
        (q, n) codes in 0 … 2^bits - 1, uint8 for up to 8 bits, else int32.
    """
    if bits == 8:
        return packed
    if bits > 8:
        high = unpack(packed[:, n:], bits - 8, n).to(torch.int32)
        return high.bitwise_left_shift_(8).bitwise_or_(packed[:, :n])
    c, d = _group(bits)
    q = len(packed)
    g = n // c
    codes = packed.new_empty((q, n))
    _unpack_planes(packed[:, : d * g].view(q, d, g), bits, codes[:, : c * g].view(q, c, g))
    if c * g < n:
        rest = _padded(packed[:, d * g :], d)
        full = rest.new_empty((q, c, 1))
        _unpack_planes(rest, bits, full)
        codes[:, c * g :] = full[:, : n - c * g, 0]
    return codes.bitwise_and_((1 << bits) - 1)


def _pack_planes(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Pack codes (q, C, g) into bytes (q, D, g).

    Shifts drop the bits that belong to a neighbouring byte.
    """
    for i, byte in enumerate(out.unbind(1)):
        with_bits_here = range(8 * i // bits, (8 * i + 7) // bits + 1)
        first, *others = with_bits_here
        byte.copy_(_shift(codes[:, first], first * bits - 8 * i))
        for j in others:
            byte.bitwise_or_(_shift(codes[:, j], j * bits - 8 * i))


def _unpack_planes(packed: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Unpack bytes (q, D, g) into codes (q, C, g).

    Bits of other codes remain above a code's own, and the caller masks them off.
    """
    for j, code in enumerate(out.unbind(1)):
        with_bits_of_code = range(j * bits // 8, (j * bits + bits - 1) // 8 + 1)
        first, *others = with_bits_of_code
        code.copy_(_shift(packed[:, first], 8 * first - j * bits))
        for i in others:
            code.bitwise_or_(_shift(packed[:, i], 8 * i - j * bits))


def _group(bits: int) -> tuple[int, int]:
    """Return the fewest codes C that fill whole bytes, and the number D of these bytes."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x (q, fewer than size) as (q, size, 1), with zeros behind."""
    padded = x.new_zeros((len(x), size, 1))
    padded[:, : x.shape[1], 0] = x
    return padded


def _shift(x: torch.Tensor, places: int) -> torch.Tensor:
    """Return x shifted to the left, or to the right where `places` is negative."""
    if places == 0:
        return x
    return x << places if places > 0 else x >> -places
