"""Some rows of a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


def rows_at(rows: Tensor, positions: NDArray[np.int64]) -> Tensor:
    """Return the rows (a, ...) at some positions (a,); five times as fast as rows[positions]."""
    return rows.index_select(0, torch.from_numpy(positions).to(rows.device))


def filled(rows: Tensor, size: int) -> Tensor:
    """Return rows (a, ...) followed by duplicates of the first, so many in all."""
    if len(rows) in (1, size):
        return rows.expand(size, *rows.shape[1:])
    return torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])
