"""Weighted sums of rows, in an order that does not depend on ranks or devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse._sparsetools import csr_matvecs  # what `@` calls, but it adds to what is there

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


def weighted_sum(*terms: tuple[csr_array, Tensor]) -> Tensor:
    """Return weights (p, q) times rows (q, m), summed over the terms.

    Each row of the result is added up term after term, in the order of its stored weights, with one
    rounding for every product and every sum (scipy's x86 builds fuse none). So the bits are the
    same on every device and for every layout of peers on ranks.

    Args:
        terms: weights and rows; the rows of all on one device, of one dtype.

    Returns:
        (p, m).
    """
    (first, rows), *_ = terms
    if rows.device.type == "cpu":
        return _on_processor(terms, np.zeros((first.shape[0], rows.shape[1]), rows.numpy().dtype))
    total = rows.new_zeros((first.shape[0], rows.shape[1]))
    for weights, rows in terms:
        for into, column, weight in _slots(weights):
            at, of = (torch.from_numpy(each).to(rows.device) for each in (into, column))
            total.index_add_(0, at, rows[of] * torch.from_numpy(weight).to(rows)[:, None])
    return total


def _on_processor(terms: tuple[tuple[csr_array, Tensor], ...], total: np.ndarray) -> Tensor:
    for weights, rows in terms:
        # weights.astype(...) would sort the columns, and the order of a sum would depend on ranks.
        values = weights.data.astype(total.dtype)
        flat = np.ascontiguousarray(rows.numpy()).reshape(-1)
        csr_matvecs(
            *weights.shape,
            total.shape[1],
            weights.indptr,
            weights.indices,
            values,
            flat,
            total.reshape(-1),
        )
    return torch.from_numpy(total)


def _slots(weights: csr_array) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Yield rows, columns and weights of the first stored entry of all rows, then of the second."""
    lengths = np.diff(weights.indptr)
    for k in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > k)
        places = weights.indptr[rows] + k
        yield rows, weights.indices[places].astype(np.int64), weights.data[places]
