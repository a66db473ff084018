"""Low-rank messages: what they keep, and their bytes."""

from __future__ import annotations

import pytest
import torch

from dfl.comm.exchange import Net
from dfl.compression import LowRank, fitted
from dfl.compression.matrices import matrices
from tests.compression.test_compressors import chance, normal, through
from tests.support.quadratic import digits

SHAPES = ((7,), (12, 20), (5,), (4, 3, 3, 2), (2, 2))
M = 7 + 240 + 5 + 72 + 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_and_vectors_are_sent(dtype: torch.dtype) -> None:
    """Of rank 2: 2 (12 + 20) numbers of the first matrix, 2 (4 + 18) of the second; others are
    sent as they are.
    """
    compressor = fitted(LowRank(rank=2), SHAPES)
    x = normal(3, M, dtype)
    encoded = compressor.encode(x, chance)
    assert encoded.shape == (3, (7 + 64 + 5 + 44 + 4) * x.element_size())
    decoded = through(compressor, x)
    for part in (slice(0, 7), slice(247, 252), slice(324, 328)):
        assert torch.equal(decoded[:, part], x[:, part])
    for part, shape in ((slice(7, 247), (12, 20)), (slice(252, 324), (4, 18))):
        error = (x - decoded)[:, part].unflatten(1, shape)
        kept = decoded[:, part].unflatten(1, shape)
        assert torch.linalg.matrix_rank(kept, rtol=1e-5).tolist() == [2] * 3
        assert (error.mT @ kept).abs().max() < 100 * torch.finfo(dtype).eps


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_matrices_of_its_rank_are_exact(rank: int) -> None:
    left, right = normal(5, 12 * rank, torch.float64), normal(5, 20 * rank, torch.float64)
    x = torch.bmm(left.unflatten(1, (12, rank)), right.unflatten(1, (rank, 20))).flatten(1)
    decoded = through(fitted(LowRank(rank=rank), ((12, 20),)), x)
    assert torch.allclose(decoded, x, rtol=0, atol=1e-12)


def test_factors_of_very_large_messages_are_finite() -> None:
    x = 1e35 * normal(2, 64 * 64) / 3
    assert through(fitted(LowRank(rank=2), ((64, 64),)), x).isfinite().all()


def test_a_part_of_a_model_has_the_first_matrices() -> None:
    assert [(each.places.start, each.rows) for each in matrices(SHAPES, M)] == [
        (7, 12),
        (252, 4),
        (324, 2),
    ]
    assert [each.rows for each in matrices(SHAPES, 252)] == [12]
    x = normal(2, 252)
    assert fitted(LowRank(rank=2), SHAPES).encode(x, chance).shape == (2, 4 * (7 + 64 + 5))


def test_a_run_binds_the_shapes_of_its_model() -> None:
    """64-8-10 of rank 1: factors of 8 + 64 and of 10 + 8 numbers, and 18 biases."""
    setting = digits(algorithm="choco", compressor="low_rank:rank=1")
    x = torch.randn(6, 610)
    Net(setting.network, 0).exchange(x)
    assert setting.network.traffic.payload.tolist() == [2 * 4 * (72 + 18 + 18)] * 6
