"""Sparse messages: which coordinates are kept, their bytes, and options."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dfl.compression import RandomK, TopK
from dfl.core.errors import InputError
from tests.compression.test_compressors import chance, normal, refuse, through


def expected_bytes(k: int, m: int, itemsize: int) -> int:
    """k floats, and the shorter of packed indices and a bitmap."""
    indices = min(math.ceil(k * math.ceil(math.log2(m)) / 8), math.ceil(m / 8)) if k < m else 0
    return k * itemsize + indices


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("m", [1, 2, 3, 64, 65, 1000, 70_000, 300_001])
@pytest.mark.parametrize("share", [1e-9, 0.001, 0.01, 0.1, 0.6, 1.0])
def test_top_k_keeps_the_largest_and_has_its_length(
    m: int, share: float, dtype: torch.dtype
) -> None:
    k = max(1, round(share * m))
    x = normal(2, m, dtype)
    encoded = TopK(share=share).encode(x, refuse)
    assert encoded.shape == (2, expected_bytes(k, m, x.element_size()))
    decoded = through(TopK(share=share), x, refuse)
    order = x.abs().sort(dim=1, descending=True, stable=True).indices[:, :k]
    expected = torch.zeros_like(x).scatter_(1, order, x.gather(1, order))
    assert torch.equal(decoded, expected)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, math.inf, math.nan]), min_size=1),
    st.floats(0.01, 1.0),
)
def test_of_equal_sizes_the_first_are_kept(row: list[float], share: float) -> None:
    x = torch.tensor([row, row[::-1]])
    k = max(1, round(share * len(row)))
    decoded = through(TopK(share=share), x, refuse)
    sizes = torch.where(x.isnan(), 2.0, x.abs().clamp_max(3.0))
    sizes[x.isnan()] = 4.0
    order = sizes.sort(dim=1, descending=True, stable=True).indices[:, :k]
    expected = torch.zeros_like(x).scatter_(1, order, x.gather(1, order))
    assert torch.equal(decoded.nan_to_num(9.0, 8.0, 7.0), expected.nan_to_num(9.0, 8.0, 7.0))


@pytest.mark.parametrize("m", [1, 64, 1000])
@pytest.mark.parametrize("share", [1e-9, 0.1, 1.0])
def test_random_k_sends_its_values_and_four_bytes(m: int, share: float) -> None:
    k = max(1, round(share * m))
    x = normal(3, m)
    assert RandomK(share=share).encode(x, chance).shape == (3, 4 * k + 4)
    decoded = through(RandomK(share=share), x)
    assert (decoded != 0).sum(1).tolist() == [k] * 3
    assert torch.equal(decoded, torch.where(decoded != 0, x, 0.0))
    scaled = through(RandomK(share=share, scaled=True), x)
    assert torch.equal(scaled, decoded * (m / k))


def test_every_coordinate_is_drawn_equally_often() -> None:
    n, m = 20_000, 10
    kept = through(RandomK(share=0.3), torch.ones(n, m)).mean(0)
    assert ((kept - 0.3).abs() < 5 * (0.3 * 0.7 / n) ** 0.5).all()


@pytest.mark.parametrize("kind", [TopK, RandomK])
@pytest.mark.parametrize("share", [0.0, -0.1, 1.5, math.nan])
def test_shares_out_of_range_are_refused(kind: type[TopK] | type[RandomK], share: float) -> None:
    with pytest.raises(InputError, match=r"share must .* not "):
        kind(share=share)
