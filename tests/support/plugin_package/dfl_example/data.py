"""Data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
from annotated_types import Gt, Interval

from dfl.datasets import Data


def xor(
    directory: Path | None,
    *,
    examples: Annotated[int, Interval(ge=2, le=10**6)] = 200,
    noise: Annotated[float, Gt(0)] = 0.1,
) -> Data:
    """Return points around the corners of a square, whose label is whether their signs differ."""
    rng = np.random.default_rng(0)
    corners = rng.choice([-1.0, 1.0], (2 * examples, 2))
    points = (corners + noise * rng.standard_normal(corners.shape)).astype(np.float32)
    labels = (corners[:, 0] != corners[:, 1]).astype(np.int64)
    return Data(points[:examples], labels[:examples], points[examples:], labels[examples:], 2)
