"""Do floats come back from their own bytes, and b-bit codes from the fewest bytes that can hold
them?
"""

from __future__ import annotations

import math

import pytest
import torch

from dfl.compression import packing
from dfl.compression.compressors import Exact


@pytest.mark.parametrize("bits", range(1, 17))
def test_packing_wastes_no_bit_and_loses_none(bits: int) -> None:
    for n in (0, *range(1, 41), 1000, 4097):
        codes = torch.randint(0, 2**bits, (4, n), generator=torch.Generator().manual_seed(n))
        packed = torch.zeros(4, math.ceil(bits * n / 8), dtype=torch.uint8)
        packing.pack(codes, bits, packed)
        assert packing.length(n, bits) == packed.shape[1]
        assert torch.equal(packing.unpack(packed, bits, n).long(), codes)


@pytest.mark.parametrize("bits", range(1, 17))
def test_a_row_is_packed_as_if_alone(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 77), generator=torch.Generator().manual_seed(bits))
    together = torch.zeros(5, packing.length(77, bits), dtype=torch.uint8)
    packing.pack(codes, bits, together)
    for row in range(5):
        alone = torch.zeros(1, together.shape[1], dtype=torch.uint8)
        packing.pack(codes[row : row + 1], bits, alone)
        assert torch.equal(alone[0], together[row])


def test_the_layout_is_the_documented_one() -> None:
    """Five 3-bit codes are 15 bits, least significant first; four of 4 bits are two planes of
    two.
    """
    odd = torch.zeros(1, 2, dtype=torch.uint8)
    packing.pack(torch.tensor([[1, 2, 3, 4, 5]]), 3, odd)
    assert int.from_bytes(bytes(odd[0].tolist()), "little") == 1 + (2 << 3) + (3 << 6) + (
        4 << 9
    ) + (5 << 12)
    even = torch.zeros(1, 2, dtype=torch.uint8)
    packing.pack(torch.tensor([[1, 2, 3, 4]]), 4, even)
    assert even.tolist() == [[0x31, 0x42]]


def refuse(rows: slice, places: slice) -> torch.Tensor:
    raise AssertionError("the exact format asked for random bits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [0, 1, 13])
def test_exact_is_a_view(dtype: torch.dtype, m: int) -> None:
    words = torch.arange(3 * m, dtype=dtype).view(3, m)
    message = Exact().encode(words, refuse)
    assert message.shape == (3, m * words.element_size())
    assert message.data_ptr() == words.data_ptr()
    assert torch.equal(Exact().decode(message, m, dtype), words)


def test_exact_reads_a_message_from_the_middle_of_a_buffer() -> None:
    words = torch.arange(15.0).view(3, 5)
    buffer = torch.zeros(2 + 60, dtype=torch.uint8)
    buffer[2:] = Exact().encode(words, refuse).flatten()
    assert torch.equal(Exact().decode(buffer[2:].view(3, 20), 5, torch.float32), words)
