"""Facts of every compressor: what it states of its errors, of rows, and of their bytes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dfl.compression import COMPRESSORS, Draw, fitted
from dfl.core import randomness
from dfl.core.registry import choose

SPECS = (
    "none",
    "quantize:bits=1",
    "quantize:bits=1,block=0",
    "quantize:bits=2",
    "quantize:bits=3",
    "quantize:bits=2,rounding=stochastic",
    "quantize:bits=4",
    "quantize:bits=11",
    "top_k:share=0.01",
    "top_k:share=0.3",
    "top_k:share=1",
    "random_k:share=0.01",
    "random_k:share=0.3",
    "random_k:share=0.3,scaled=true",
    "random_k:share=0.8,scaled=true",
    "random_k:share=1,scaled=true",
    "low_rank:rank=1",
    "low_rank:rank=3",
)


def chance(rows: slice, places: slice) -> torch.Tensor:
    """Random bits of rows by their number."""
    return randomness.bits(3, "rows", range(10**6)[rows], 0, "x", n=places)


def refuse(rows: slice, places: slice) -> torch.Tensor:
    """Refuse random bits to a compressor that should need none."""
    raise AssertionError("random bits were drawn")


def made(spec: str, m: int) -> Any:
    """The compressor of messages of a nearly square matrix and a vector."""
    side = math.isqrt(m)
    compressor = choose("--compressor", spec, COMPRESSORS)()
    return fitted(compressor, ((side, m // side),)) if side else compressor


@pytest.mark.parametrize("spec", SPECS)
def test_a_rank_without_messages_sends_none(spec: str) -> None:
    """Where more ranks than peers, or no edge of a round, leave a rank without a message."""
    compressor = made(spec, 40)
    empty, one = torch.zeros(0, 40), torch.zeros(1, 40)
    encoded = compressor.encode(empty, randomness.draws(3, "rounding", range(0)))
    assert encoded.shape == (0, compressor.encode(one, chance).shape[1])
    assert compressor.decode(encoded, 40, torch.float32).shape == (0, 40)


def through(compressor: Any, x: torch.Tensor, draw: Draw = chance) -> torch.Tensor:
    decoded = compressor.decode(compressor.encode(x, draw), x.shape[1], x.dtype)
    assert decoded.shape == x.shape
    assert decoded.dtype == x.dtype
    return torch.as_tensor(decoded)


def normal(q: int, m: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(q, m, generator=torch.Generator().manual_seed(m), dtype=dtype)


def kinds(m: int) -> dict[str, torch.Tensor]:
    """Messages (m,): normal numbers, some of them zero, one of them large; equal numbers."""
    x = normal(1, m, torch.float64)[0]
    sparse = torch.where(torch.arange(m) % 9 == 0, x, 0.0)
    heavy = x.clone()
    heavy[m // 2] = 50.0
    return {"normal": x, "sparse": sparse, "heavy": heavy, "equal": torch.full_like(x, -0.7)}


def test_every_compressor_is_tested() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == set(COMPRESSORS)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("m", [1, 40, 300])
def test_errors_are_as_stated(spec: str, m: int) -> None:
    """The mean over 4,000 draws is x if it is unbiased, and the error is within the bound."""
    compressor = made(spec, m)
    n = 4000
    for kind, x in kinds(m).items():
        error = through(compressor, x.expand(n, m)) - x
        ratios = error.square().sum(1) / x.square().sum()
        noise = 5 * float(ratios.std()) / n**0.5 + 1e-6
        assert float(ratios.mean()) <= compressor.bound(m) + noise, kind
        bias, lost = float(error.mean(0).square().sum()), float(error.square().sum(1).mean())
        if compressor.unbiased:
            assert bias <= 25 * lost / n + 1e-9 * float(x.square().sum()), kind
        elif kind == "normal" and lost:
            assert bias > 25 * lost / n


@pytest.mark.parametrize(
    ("spec", "x"),
    [
        ("top_k:share=0.3", torch.ones(49)),
        ("random_k:share=0.3", torch.ones(49)),
        ("random_k:share=0.3,scaled=true", torch.ones(49)),
        ("low_rank:rank=3", torch.eye(7).flatten()),
        ("quantize:bits=1", torch.eye(49)[0]),
        ("quantize:bits=2", torch.eye(49)[0]),
    ],
)
def test_a_bound_is_the_error_of_the_worst_message(spec: str, x: torch.Tensor) -> None:
    compressor = made(spec, 49)
    error = through(compressor, x[None]) - x
    assert float(error.square().sum() / x.square().sum()) == pytest.approx(compressor.bound(49))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("m", [1, 2, 31, 700, 4097])
def test_bytes_of_a_row_do_not_depend_on_other_rows(spec: str, m: int, dtype: torch.dtype) -> None:
    compressor, q = made(spec, m), 130
    messages = normal(q, m + 3, dtype)[:, :m]  # a view, as where a part of a model is sent
    encoded = compressor.encode(messages, chance)
    decoded = compressor.decode(encoded, m, dtype)
    assert encoded.dtype == torch.uint8
    for first, last in ((0, 1), (1, 4), (4, q)):
        part = messages[first:last].contiguous()

        def shifted(rows: slice, places: slice, first: int = first) -> torch.Tensor:
            return chance(slice(rows.start + first, rows.stop + first), places)

        alone = compressor.encode(part, shifted)
        assert torch.equal(alone, encoded[first:last])
        assert torch.equal(compressor.decode(alone, m, dtype), decoded[first:last])


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0), (2, 1)])
def test_no_rows_and_few_coordinates(spec: str, shape: tuple[int, int]) -> None:
    assert not through(made(spec, shape[1]), torch.zeros(shape)).any()


@pytest.mark.parametrize("spec", SPECS)
def test_a_message_without_coordinates_has_no_bytes(spec: str) -> None:
    compressor = made(spec, 0)
    encoded = compressor.encode(torch.zeros(3, 0), chance)
    assert encoded.shape == (3, 0)
    assert compressor.decode(encoded, 0, torch.float32).shape == (3, 0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_leave_others_as_they_are(spec: str, value: float) -> None:
    compressor, x = made(spec, 50), normal(3, 50)
    expected = through(compressor, x)
    x[1, 7] = value
    decoded = through(compressor, x)
    assert torch.equal(decoded[[0, 2]], expected[[0, 2]])
