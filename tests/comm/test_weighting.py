"""Weighted sums have the same bits whether rows are in one part or in several."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_array, random_array

from dfl.comm.weighting import weighted_sum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    p=st.integers(1, 9),
    seed=st.integers(0, 99),
    ascending=st.booleans(),
)
def test_parts_give_the_bits_of_the_whole(
    sizes: list[int], p: int, seed: int, ascending: bool, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(seed)
    weights = csr_array(random_array((p, sum(sizes)), density=0.7, rng=rng))
    weights.sort_indices()
    if not ascending:  # the order of a sum is that in which entries are stored
        for a, b in zip(weights.indptr[:-1], weights.indptr[1:], strict=True):
            weights.indices[a:b] = rng.permutation(weights.indices[a:b])
        weights = csr_array((weights.data, weights.indices, weights.indptr), shape=weights.shape)
    rows = torch.from_numpy(rng.standard_normal((sum(sizes), 5))).to(dtype)
    parts = torch.split(rows, sizes)
    assert torch.equal(weighted_sum(weights, *parts), weighted_sum(weights, rows))


def test_the_whole_is_the_product() -> None:
    rng = np.random.default_rng(0)
    weights = csr_array(random_array((6, 8), density=0.5, rng=rng))
    rows = torch.from_numpy(rng.standard_normal((8, 3)))
    wanted = torch.from_numpy(weights.toarray()) @ rows
    torch.testing.assert_close(weighted_sum(weights, rows[:2], rows[2:]), wanted)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_sum_has_the_bits_of_scipy_s_product(dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(1)
    weights = csr_array(random_array((7, 9), density=0.6, rng=rng)).astype(dtype)
    rows = rng.standard_normal((9, 33)).astype(dtype)
    found = weighted_sum(weights, torch.from_numpy(rows)).numpy()
    np.testing.assert_array_equal(found, weights @ rows)


@pytest.mark.parametrize("rows", [7, 9])
def test_rows_that_are_not_those_of_the_weights_are_refused(rows: int) -> None:
    with pytest.raises(ValueError, match=f"{rows} rows for weights of 8"):
        weighted_sum(csr_array(np.ones((2, 8))), torch.ones(rows, 3))
