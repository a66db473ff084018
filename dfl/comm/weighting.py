"""Weighted sums of rows, in an order that does not depend on ranks or devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

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


class Piece(NamedTuple):
    """Some entries of a matrix of weights, all on the rows of one tensor.

    Attributes:
        part: the number of the tensor.
        entries: (p, rows of the tensor), the entries.
    """

    part: int
    entries: csr_array


def pieces_of(weights: csr_array, sizes: Sequence[int]) -> list[Piece]:
    """Return weights (p, q) on the rows of several tensors as pieces, to be added one by one.

    Every row is then added in the order of its stored weights: a new piece begins where the next
    weight of a row is on an earlier tensor.

    Args:
        weights: the weights; the stored order of a row need not be ascending.
        sizes: the rows of each tensor, q in all.
    """
    held = [k for k, size in enumerate(sizes) if size]
    if len(held) < 2:
        return [Piece(held[0] if held else 0, weights)]
    if not weights.nnz:
        return [Piece(0, csr_array((weights.shape[0], sizes[0])))]
    ends = np.cumsum([0, *sizes])
    part = np.searchsorted(ends, weights.indices, side="right") - 1
    row = np.repeat(np.arange(weights.shape[0]), np.diff(weights.indptr))
    back = np.zeros(len(part), bool)  # whether an entry is on an earlier tensor than the one before
    back[1:] = (part[1:] < part[:-1]) & (row[1:] == row[:-1])
    cycles = np.cumsum(back)
    turn = (cycles - cycles[weights.indptr[:-1][row]]) * len(sizes) + part
    order = np.argsort(turn, kind="stable")
    found = []
    for which in np.split(order, np.flatnonzero(np.diff(turn[order])) + 1):
        k = int(part[which[0]])
        stops = np.cumsum(np.bincount(row[which] + 1, minlength=weights.shape[0] + 1))
        entries = (weights.data[which], weights.indices[which] - ends[k], stops)
        found.append(Piece(k, csr_array(entries, shape=(weights.shape[0], sizes[k]))))
    return found


@in_phase("mix")
def weighted_sum(weights: csr_array, *rows: Tensor, pieces: Sequence[Piece] = ()) -> Tensor:
    """Return weights (p, q) times rows (q, m).

    Each row of the result is added up in the order of its stored weights, with one rounding for
    every product and every sum (scipy's x86 builds fuse none). So the bits are the same on every
    device and for every layout of peers on ranks.

    Args:
        weights: (p, q); the stored order of a row need not be ascending.
        rows: (q, m) in one part or in several, which are stacked; all on one device, of one dtype.
        pieces: `pieces_of` weights and the sizes of the parts, where they are known.

    Returns:
        (p, m).
    """
    if rows[0].device.type == "cpu":
        sizes = [len(part) for part in rows]
        if (n := sum(sizes)) != weights.shape[1]:
            raise ValueError(f"{n} rows for weights of {weights.shape[1]}")
        known = pieces or pieces_of(weights, sizes)
        return torch.from_numpy(_on_processor(known, [part.numpy() for part in rows]))
    parts = [part for part in rows if len(part)] or [*rows[:1]]
    stacked = parts[0] if len(parts) == 1 else torch.cat(parts)
    total = stacked.new_zeros((weights.shape[0], stacked.shape[1]))
    for into, column, weight in _slots(weights):
        at, of = (torch.from_numpy(each).to(stacked.device) for each in (into, column))
        total.index_add_(0, at, stacked[of] * torch.from_numpy(weight).to(stacked)[:, None])
    return total


def _on_processor(pieces: Sequence[Piece], parts: Sequence[np.ndarray]) -> np.ndarray:
    # What @ does, without its checks, and one piece after the other: rows are not copied together.
    total = np.zeros((pieces[0].entries.shape[0], parts[0].shape[1]), parts[0].dtype)
    for k, entries in pieces:
        own = (entries.indptr, entries.indices, entries.data.astype(total.dtype))
        csr_matvecs(*entries.shape, total.shape[1], *own, parts[k].ravel(), total.ravel())
    return total


def _slots(weights: csr_array) -> Iterator[tuple[Ints, Ints, NDArray[np.float64]]]:
    """Yield rows, columns and weights of the first stored entry of all rows, then of the second."""
    lengths = np.diff(weights.indptr)
    for k in range(int(lengths.max(initial=0))):
        rows = np.flatnonzero(lengths > k)
        places = weights.indptr[rows] + k
        yield rows, weights.indices[places].astype(np.int64), weights.data[places]
