"""Packing codes of b bits, and the exact format: nothing is lost, and no byte is wasted."""

from __future__ import annotations

import math

import pytest
import torch

from dfl.compression import Exact, packing


@pytest.mark.parametrize("bits", range(1, 32))
def test_codes_survive_packing_into_the_fewest_bytes(bits: int) -> None:
    for n in (0, *range(1, 41), 1000, 4097):
        codes = torch.randint(0, 2**bits, (4, n), generator=torch.Generator().manual_seed(n))
        packed = torch.zeros(4, math.ceil(bits * n / 8), dtype=torch.uint8)
        packing.pack(codes, bits, packed)
        assert packing.length(n, bits) == packed.shape[1]
        assert torch.equal(packing.unpack(packed, bits, n).long(), codes)


@pytest.mark.parametrize("bits", range(1, 17))
def test_the_bytes_of_a_row_do_not_depend_on_other_rows(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (5, 77), generator=torch.Generator().manual_seed(bits))
    together = torch.zeros(5, packing.length(77, bits), dtype=torch.uint8)
    packing.pack(codes, bits, together)
    for row in range(5):
        alone = torch.zeros(1, together.shape[1], dtype=torch.uint8)
        packing.pack(codes[row : row + 1], bits, alone)
        assert torch.equal(alone[0], together[row])


def test_codes_are_laid_out_as_documented() -> None:
    """Five codes of 3 bits are 15 bits, least significant first; four of 4 bits are two planes."""
    odd = torch.zeros(1, 2, dtype=torch.uint8)
    packing.pack(torch.tensor([[1, 2, 3, 4, 5]]), 3, odd)
    assert int.from_bytes(bytes(odd[0].tolist()), "little") == 1 + (2 << 3) + (3 << 6) + (
        4 << 9
    ) + (5 << 12)
    even = torch.zeros(1, 2, dtype=torch.uint8)
    packing.pack(torch.tensor([[1, 2, 3, 4]]), 4, even)
    assert even.tolist() == [[0x31, 0x42]]


def refuse(rows: slice, places: slice) -> torch.Tensor:
    raise AssertionError("the exact format drew random bits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [0, 1, 13])
def test_exact_does_not_copy(dtype: torch.dtype, m: int) -> None:
    messages = torch.arange(3 * m, dtype=dtype).view(3, m)
    encoded = Exact().encode(messages, refuse)
    assert encoded.shape == (3, m * messages.element_size())
    assert encoded.data_ptr() == messages.data_ptr()
    assert torch.equal(Exact().decode(encoded, m, dtype), messages)


def test_exact_decodes_bytes_from_the_middle_of_a_buffer() -> None:
    messages = torch.arange(15.0).view(3, 5)
    buffer = torch.zeros(2 + 60, dtype=torch.uint8)
    buffer[2:] = Exact().encode(messages, refuse).flatten()
    assert torch.equal(Exact().decode(buffer[2:].view(3, 20), 5, torch.float32), messages)
