"""Whether covariates separate the outcomes of a site, so that a likelihood has no maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.inference.models import Logistic, Model

Floats = NDArray[np.float64]


def separated(model: Model, arrays: Mapping[str, NDArray[Any]], names: Sequence[str]) -> str | None:
    """Return the column that separates the outcomes, or has most part in it; None where none does.

    A direction b with s_i D_i b >= 0 for all examples and > 0 for some, where s_i is 1 for y = 1
    and -1 for y = 0, is found by a linear program (Konis 2007): maximize sum_i s_i D_i b over
    |b_k| <= 1.

    Args:
        model: the model; only outcomes of two kinds are separated.
        arrays: the examples of a site.
        names: the columns of (x, z).
    """
    if not isinstance(model, Logistic):
        return None
    p = arrays["x"].shape[1]
    for k in range(p):
        if _weights(arrays["x"][:, k : k + 1], arrays["z"], arrays["y"]) is not None:
            return names[k]
    found = _weights(arrays["x"], arrays["z"], arrays["y"])
    return None if found is None else names[int(np.argmax(found))]


def _weights(x: Floats, z: Floats, y: Floats) -> Floats | None:
    """Return the size of each column's part in a direction that separates; None without one."""
    from scipy.optimize import linprog

    design = np.concatenate([x, z], 1)
    size = np.abs(design).max(0)
    signed = (2 * y - 1)[:, None] * design / np.where(size > 0, size, 1)
    found = linprog(-signed.sum(0), A_ub=-signed, b_ub=np.zeros(len(signed)), bounds=(-1, 1))
    if found.status != 0 or found.fun > -1e-9:
        return None
    sizes: Floats = np.abs(found.x) * np.ptp(np.abs(signed) * np.sign(design), axis=0)
    return sizes
