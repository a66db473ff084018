"""Weighted sums of rows, in an order that does not depend on ranks or devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse._sparsetools import csr_matvecs

from dfl.core.profiling import in_phase

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Ints = NDArray[np.int64]
else:
    from dfl.core.lazy import torch


@in_phase("mix")
def weighted_sum(weights: csr_array, *rows: Tensor) -> Tensor:
    """Return weights (p, q) times rows (q, m).

    Each row of the result is added up in the order of its stored weights, with one rounding for
    every product and every sum (scipy's x86 builds fuse none). So the bits are the same on every
    device and for every layout of peers on ranks.

    Args:
        weights: (p, q); the stored order of a row need not be ascending.
        rows: (q, m) in one part or in several, which are stacked; all on one device, of one dtype.

    Returns:
        (p, m).
    """
    parts = [part for part in rows if len(part)] or [*rows[:1]]
    if parts[0].device.type == "cpu":
        return torch.from_numpy(_on_processor(weights, [part.numpy() for part in parts]))
    stacked = parts[0] if len(parts) == 1 else torch.cat(parts)
    total = stacked.new_zeros((weights.shape[0], stacked.shape[1]))
    for into, column, weight in _slots(weights):
        at, of = (torch.from_numpy(each).to(stacked.device) for each in (into, column))
        total.index_add_(0, at, stacked[of] * torch.from_numpy(weight).to(stacked)[:, None])
    return total


def _on_processor(weights: csr_array, parts: Sequence[np.ndarray]) -> np.ndarray:
    if (n := sum(map(len, parts))) != weights.shape[1]:
        raise ValueError(f"{n} rows for weights of {weights.shape[1]}")
    if len(parts) > 1 and not weights.has_sorted_indices:
        parts = [np.concatenate(parts)]
    # What @ does, without its checks, and one part after the other: together they would be copied.
    total = np.zeros((weights.shape[0], parts[0].shape[1]), parts[0].dtype)
    first = 0
    for part in parts:
        some = weights if len(parts) == 1 else weights[:, first : first + len(part)]
        own = (some.indptr, some.indices, some.data.astype(part.dtype))
        csr_matvecs(*some.shape, total.shape[1], *own, part.ravel(), total.ravel())
        first += len(part)
    return total


def _slots(weights: csr_array) -> Iterator[tuple[Ints, Ints, NDArray[np.float64]]]:
    """Yield rows, columns and weights of the first stored entry of all rows, then of the second."""
    lengths = np.diff(weights.indptr)
    for k in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > k)
        places = weights.indptr[rows] + k
        yield rows, weights.indices[places].astype(np.int64), weights.data[places]
