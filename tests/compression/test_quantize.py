"""Quantization: the bytes of a message, the values that are decoded, and their errors."""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfl.compression import Draw, Quantize, packing
from dfl.compression.quantize import Rounding
from dfl.core import randomness
from dfl.core.errors import InputError
from tests.compression.test_compressors import refuse, through

ODD_BLOCK = 7
SIZES = (*range(1, 41), 1000, 4097)
ROUNDINGS: tuple[Rounding, ...] = ("stochastic", "nearest", "midrise", "sign")
COMBINATIONS = [
    (bits, rounding)
    for bits in range(1, 17)
    for rounding in ROUNDINGS
    if (rounding == "sign") == (bits == 1) or (rounding == "midrise" and bits == 1)
]


def chance(peers: range = range(10**6), t: int = 0, slot: str = "x") -> Draw:
    """Return the random bits of these peers in this round and slot."""
    return lambda rows, places: randomness.bits(5, "quantize", peers[rows], t, slot, n=places)


def normal(q: int, m: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(q, m, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def expected_length(bits: int, block: int, m: int) -> int:
    return 4 * (1 if block == 0 else math.ceil(m / block)) + math.ceil(bits * m / 8)


def on_the_grid(compressor: Quantize, q: int, m: int, block: int) -> torch.Tensor:
    """Return messages of (half-)integers times a power of two that differs from block to block."""
    half = 2 ** (compressor.bits - 1)
    between = compressor.rounding in ("midrise", "sign")
    generator = torch.Generator().manual_seed(m)
    level = (
        torch.randint(-half if between else 1 - half, half, (q, m), generator=generator).double()
        + 0.5 * between
    )
    level[:, :: block or m] = half - 1 + 0.5 * between  # the largest, at the start of every block
    exponent = torch.arange(m) // (block or m) % 9 - 4
    return level * 2.0**exponent


def test_options_are_checked_without_torch() -> None:
    code = "import sys, dfl.compression as c; c.Quantize(bits=4); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
def test_values_on_the_grid_are_exact_and_the_payload_has_its_length(
    bits: int, rounding: Rounding
) -> None:
    for m in SIZES:
        for block in (0, ODD_BLOCK, 256) if m > 256 else (0, ODD_BLOCK):
            compressor = Quantize(bits=bits, rounding=rounding, block=block)
            messages = on_the_grid(compressor, 2, m, block)
            encoded = compressor.encode(messages, chance())
            assert encoded.shape == (2, expected_length(bits, block, m))
            decoded = compressor.decode(encoded, m, torch.float64)
            # The largest of a block lies half a step above mid-rise's highest level, so its grid
            # shrinks by that much.
            expected = messages * (1 - 2.0**-bits) if rounding == "midrise" else messages
            assert torch.equal(decoded, expected)


@pytest.mark.parametrize("bits", range(1, 17))
def test_the_default_payload_has_its_length(bits: int) -> None:
    block = 256 if bits <= 3 else 0
    for m in (1, 255, 256, 257, 199210):
        encoded = Quantize(bits=bits).encode(normal(1, m), chance())
        assert encoded.shape == (1, expected_length(bits, block, m))


def paper(x: np.ndarray, bits: int, rounding: Rounding, random: list[int]) -> list[float]:
    """Return one block by the paper, coordinate by coordinate, in exact fractions of a/s."""
    half = 2 ** (bits - 1)
    largest = np.abs(x).max()
    s = np.float32(
        {"sign": 2 * np.abs(x).astype(np.float64).mean(), "midrise": largest / half}.get(
            rounding, 0
        )
    )
    if rounding in ("stochastic", "nearest"):
        s = np.float32(float(largest) / (half - 1))
        s = s if float(s) * (half - 1) >= float(largest) else np.nextafter(s, np.float32(np.inf))
    values = []
    for a, r in zip(x, random, strict=True):
        quotient = Fraction(float(a / s))
        v = math.floor(quotient)
        if rounding == "stochastic":
            v += quotient - v >= 1 - Fraction(r + 2**15, 2**16)
        if rounding == "nearest":
            v += quotient - v >= Fraction(1, 2)
        v = min(max(v, -half), half - 1)
        values.append(float((v + x.dtype.type(0.5 * (rounding in ("midrise", "sign")))) * s))
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
def test_decoded_messages_are_those_of_the_paper(
    bits: int, rounding: Rounding, dtype: torch.dtype
) -> None:
    m = 333
    block = 100
    messages = normal(1, m, seed=bits, dtype=dtype)
    messages[0, 3] = -1e-20
    messages[0, 7] = messages[0].abs().max()
    messages[0, 100:110] = 0.0
    decoded = through(Quantize(bits=bits, rounding=rounding, block=block), messages, chance())[0]
    numbers = randomness.bits(5, "quantize", [0], 0, "x", n=(m + 1) // 2)
    random = numbers.view(torch.int16)[0, :m].tolist()  # a number serves two coordinates
    for start in range(0, m, block):
        part = slice(start, start + block)
        assert decoded[part].tolist() == paper(
            messages[0, part].numpy(), bits, rounding, random[part]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", range(2, 17))
def test_stochastic_is_unbiased_with_at_most_a_quarter_of_variance(
    bits: int, dtype: torch.dtype
) -> None:
    draws = 20_000
    most = 2 ** (bits - 1) - 1
    step = 0.3
    levels = [
        0.0,
        0.01,
        0.5,
        0.99,
        1 / 3,
        most,
        -most,
        most - 0.01,
        0.01 - most,
        most - 0.5,
        0.7 - most,
        -0.01,
    ]
    x = torch.tensor(levels, dtype=dtype) * step
    decoded = through(
        Quantize(bits=bits, rounding="stochastic", block=0), x.expand(draws, len(x)), chance()
    )
    level = x.double() / step
    fraction = level - level.floor()
    sigma = step * (fraction * (1 - fraction)).sqrt()
    rounding_error = 4 * torch.finfo(torch.float32).eps * x.abs().max()
    assert ((decoded.double().mean(0) - x).abs() <= 5 * sigma / draws**0.5 + rounding_error).all()
    assert (decoded.double().var(0) <= step**2 / 4 * (1 + 5 / draws**0.5)).all()


@pytest.mark.parametrize("bits", range(2, 17))
def test_the_mean_over_all_random_bits_is_the_coordinate_to_the_stated_bound(bits: int) -> None:
    """The mean of v over the 2^16 chances of a coordinate is a/s to 2^-16."""
    most = 2 ** (bits - 1) - 1
    levels = [
        most,
        0.0,
        2.0**-18,
        1 / 3,
        0.7,
        1 - 2.0**-18,
        -1 / 3,
        -1e-20,
        0.37 - most,
        most - 0.6,
    ]
    x = torch.tensor([levels], dtype=torch.float32 if bits <= 8 else torch.float64)

    def every(rows: slice, places: slice) -> torch.Tensor:
        one = torch.arange(rows.start, rows.stop, dtype=torch.int64)
        both = (one << 16 | one).to(torch.int32)
        return both[:, None].expand(-1, places.stop - places.start).contiguous()

    encoded = Quantize(bits=bits, rounding="stochastic", block=0).encode(x.expand(2**16, -1), every)
    v = packing.unpack(encoded[:, 4:], bits, len(levels)).double() - (most + 1)
    rounded = torch.finfo(x.dtype).eps * x[0].abs()
    error = (v.mean(0) - x[0].double()).abs()
    assert (error <= 2.0**-16 + rounded).all()
    assert not error[x[0] == x[0].round()].any()


def test_the_largest_float64_does_not_saturate() -> None:
    messages = (
        normal(200, 1, dtype=torch.float64).abs() + 1.0
    )  # float32 rounds half of the steps down
    for bits in (2, 3, 4, 7, 8):
        compressor = Quantize(bits=bits, rounding="stochastic", block=0)
        steps = compressor.encode(messages, chance())[:, :4].clone().view(torch.float32).double()
        assert (steps * (2 ** (bits - 1) - 1) >= messages).all()


def test_the_bytes_are_a_function_of_message_and_address() -> None:
    messages = normal(1, 500).expand(2, 500)
    compressor = Quantize(bits=4)
    encoded = compressor.encode(messages, chance())
    assert torch.equal(encoded, compressor.encode(messages, chance()))
    assert not torch.equal(encoded[0], encoded[1])
    assert not torch.equal(encoded, compressor.encode(messages, chance(t=1)))
    assert not torch.equal(encoded, compressor.encode(messages, chance(slot="y")))
    assert torch.equal(encoded[1:], compressor.encode(messages[1:], chance(range(1, 2))))


@pytest.mark.parametrize(
    ("bits", "block"), [(1, 0), (1, 256), (2, 256), (3, 7), (4, 0), (5, 1000), (8, 0), (13, 33)]
)
@pytest.mark.parametrize("m", [1, 2, 5, 31, 650, 4097, 300_000])
def test_the_bytes_of_a_row_do_not_depend_on_other_rows(bits: int, block: int, m: int) -> None:
    q = 5 if m > 4097 else 130
    compressor = Quantize(bits=bits, block=block)
    wide = normal(q, m + 3)
    messages = wide[:, :m]  # a view, as where a part of a model is sent
    encoded = compressor.encode(messages, chance(range(q)))
    decoded = compressor.decode(encoded, m, torch.float32)
    for first, last in ((0, 1), (1, 4), (4, q)):
        alone = compressor.encode(messages[first:last].contiguous(), chance(range(first, last)))
        assert torch.equal(alone, encoded[first:last])
        assert torch.equal(compressor.decode(alone, m, torch.float32), decoded[first:last])


@pytest.mark.parametrize(
    ("bits", "rounding"), [(1, "sign"), (2, "midrise"), (2, "nearest"), (8, "stochastic")]
)
@pytest.mark.parametrize("block", [0, 1, 8])
@pytest.mark.parametrize("q", [1, 5, 16, 17, 40])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_bytes_of_zeros_do_not_depend_on_other_rows(
    bits: int, rounding: Rounding, block: int, q: int, zero: float
) -> None:
    compressor, messages = (
        Quantize(bits=bits, rounding=rounding, block=block),
        torch.full((q, 47), zero),
    )
    alone = [compressor.encode(messages[i : i + 1], chance(range(i, i + 1))) for i in range(q)]
    encoded = compressor.encode(messages, chance(range(q)))
    assert torch.equal(encoded, torch.cat(alone))
    assert not encoded[:, : 4 * -(-47 // (block or 47))].any()


def test_a_row_of_several_tiles_is_rounded_block_by_block() -> None:
    messages = normal(1, 300_000)
    compressor = Quantize(bits=3, block=ODD_BLOCK)
    start = 40_000 * ODD_BLOCK
    assert torch.equal(
        through(compressor, messages)[:, start:], through(compressor, messages[:, start:])
    )


def test_only_stochastic_rounding_draws() -> None:
    for bits, rounding in COMBINATIONS:
        if rounding != "stochastic":
            Quantize(bits=bits, rounding=rounding).encode(normal(2, 50), refuse)


floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False).map(
    lambda a: a if abs(a) > 1e-30 else 0.0
)
rows = st.lists(floats, min_size=1, max_size=80).map(
    lambda row: torch.tensor([row], dtype=torch.float32)
)


def squares(x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return ‖y - x‖² and ‖x‖²."""
    return float((y.double() - x.double()).square().sum()), float(x.double().square().sum())


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(2, 16), st.sampled_from([0, 7, 256]))
def test_nearest_contracts_everywhere(x: torch.Tensor, bits: int, block: int) -> None:
    error, norm = squares(
        x, through(Quantize(bits=bits, rounding="nearest", block=block), x, refuse)
    )
    assert error < norm or norm == 0.0 == error


@settings(max_examples=200, deadline=None)
@given(rows)
def test_sign_contracts_by_the_mean(x: torch.Tensor) -> None:
    error, norm = squares(x, through(Quantize(bits=1, rounding="sign", block=0), x, refuse))
    mean = float(x.double().abs().mean())
    assert error == pytest.approx(norm - x.shape[1] * mean**2, rel=1e-6, abs=1e-6 * norm)
    assert error < norm or norm == 0.0 == error


@settings(max_examples=200, deadline=None)
@given(rows, st.integers(1, 16))
def test_midrise_errs_by_half_a_step(x: torch.Tensor, bits: int) -> None:
    decoded = through(Quantize(bits=bits, rounding="midrise", block=0), x, refuse)
    half_step = float(x.abs().max()) / 2**bits
    assert float((decoded.double() - x.double()).abs().max()) <= half_step * (1 + 1e-6 * 2**bits)
    error, norm = squares(x, decoded)
    assert error < norm or norm <= x.shape[1] * half_step**2 * 1.001


def test_midrise_does_not_contract_a_block_with_one_nonzero_entry() -> None:
    x = torch.zeros(1, 256)
    x[0, 9] = 1.0
    error, norm = squares(x, through(Quantize(bits=2), x))
    assert error > norm


@pytest.mark.parametrize("m", [650, 199210])
@pytest.mark.parametrize("bits", range(1, 17))
def test_default_options_contract(bits: int, m: int) -> None:
    x = normal(1, m) * 1e-3
    error, norm = squares(x, through(Quantize(bits=bits), x))
    assert error < (0.4 if bits <= 2 else 0.15) * norm


@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
def test_zeros_stay_zeros(bits: int, rounding: Rounding) -> None:
    messages = torch.zeros(2, 40)
    messages[1, 25:] = 1.0
    decoded = through(Quantize(bits=bits, rounding=rounding, block=ODD_BLOCK), messages)
    zeros = torch.cat([decoded[0], decoded[1, :21]])
    assert (zeros == 0).all()
    # A step of zero is not divided by: the codes are those of zero, not of 0/0.
    assert not zeros.signbit().any()


@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
def test_tiny_and_huge_messages_stay_finite_and_within_their_largest(
    bits: int, rounding: Rounding
) -> None:
    scale = torch.tensor([[1e-45], [3e-45], [1e-40], [1e-38], [1e-30], [1e30], [1e38]])
    messages = scale * torch.tensor([1.0, -1.0, 0.5, -0.25, 0.0])
    decoded = through(Quantize(bits=bits, rounding=rounding), messages)
    assert decoded.isfinite().all()
    assert (
        (decoded.double() - messages.double()).abs()
        <= messages.double().amax(1, keepdim=True) * (1 + 1e-6)
    ).all()


@pytest.mark.parametrize(
    ("options", "option", "value"),
    [
        ({"bits": 0}, "bits", "0"),
        ({"bits": 17}, "bits", "17"),
        ({"rounding": "down"}, "rounding", "'down'"),
        ({"bits": 1, "rounding": "stochastic"}, "rounding", "'stochastic'"),
        ({"bits": 1, "rounding": "nearest"}, "rounding", "'nearest'"),
        ({"bits": 2, "rounding": "sign"}, "rounding", "'sign'"),
        ({"block": -1}, "block", "-1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], option: str, value: str) -> None:
    with pytest.raises(InputError) as caught:
        Quantize(**options)
    line = str(caught.value)
    assert line.startswith(f"--compressor quantize: {option} must ")
    assert line.endswith(value)
    assert "\n" not in line


LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149


@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
@pytest.mark.parametrize("block", [0, ODD_BLOCK])
def test_finite_numbers_stay_finite_to_the_end_of_the_range(
    bits: int, rounding: Rounding, block: int
) -> None:
    """Zeros stay zeros there, and rounding that contracts still does."""
    compressor = Quantize(bits=bits, rounding=rounding, block=block)
    signs = torch.ones(1, 60)
    signs[0, ::3] = -1
    sizes = torch.tensor([LARGEST, LARGEST * 0.75, 1.0, 2.0**-126, 2.0**-140, SMALLEST, 0.0])[
        :, None
    ]
    for messages in (sizes * signs, sizes.expand(-1, 60), -sizes.expand(-1, 60)):
        decoded = through(compressor, messages.contiguous())
        assert decoded.isfinite().all()
        assert not decoded[-1].any()
        if rounding in ("nearest", "sign"):
            error = ((decoded - messages)[:3].double() / sizes[:3]).norm(dim=1)
            norm = (messages[:3].double() / sizes[:3]).norm(dim=1)
            assert (error < 0.51 * norm).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(("bits", "rounding"), COMBINATIONS)
def test_a_row_that_is_not_finite_decodes_to_one_that_is_not(
    bits: int, rounding: Rounding, value: float
) -> None:
    messages = torch.ones(2, 20)
    messages[1, 3] = value
    decoded = through(Quantize(bits=bits, rounding=rounding, block=0), messages)
    assert decoded[0].isfinite().all()
    assert not decoded[1].isfinite().all()
