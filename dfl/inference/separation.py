"""Whether covariates separate the outcomes of a site, so that a likelihood has no maximum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.inference.models import Cox, Logistic, Model, Poisson

Floats = NDArray[np.float64]

MOST_PAIRS = 100_000
"""The most pairs of an event and one at risk in which a column that orders times is looked for."""


def separated(model: Model, arrays: Mapping[str, NDArray[Any]], names: Sequence[str]) -> str | None:
    """Return the column that separates the outcomes, or has most part in it; None where none does.

    A direction b in which the likelihood of no example falls, and that of some rises, for ever, is
    found by a linear program (Konis 2007): maximize sum_i D_i b over D_i b >= 0 for all i and
    |b_k| <= 1, with the rows D_i of `_rows`. The columns of z are tried alone first, then each of x
    with them.

    Args:
        model: the model; outcomes of others than `_rows` names are not separated.
        arrays: the examples of a site.
        names: the columns of (x, z).
    """
    found = _rows(model, arrays)
    if found is None:
        return None
    rows, fixed = found
    p, d = int(arrays["x"].shape[1]), rows.shape[1]
    spread = np.ptp(_scaled(arrays), axis=0)

    def weights(columns: Sequence[int]) -> Floats | None:
        each = list(columns)
        return _weights(rows[:, each], fixed[:, each], spread[each])

    own = range(p, d)
    if (alone := weights(own)) is not None:
        return names[p + int(np.argmax(alone))]
    for k in range(p):
        if weights([k, *own]) is not None:
            return names[k]
    together = weights(range(d))
    return None if together is None else names[int(np.argmax(together))]


def _rows(model: Model, arrays: Mapping[str, NDArray[Any]]) -> tuple[Floats, Floats] | None:
    """Return the rows D_i of directions that separate, and rows that are 0 in them; None where the
    outcomes of the model are never separated.

    Of (x, z): for logistic regression with the sign of the outcome; for counts those of outcome 0,
    with a minus, as those of other outcomes are 0; for times the differences between an event and
    those at risk at its time, of the same `stratum` where there are several.
    """
    design, y = _scaled(arrays), arrays["y"]
    if isinstance(model, Logistic):
        return (2 * y - 1)[:, None] * design, design[:0]
    if isinstance(model, Poisson):
        return -design[y == 0], design[y > 0]
    if isinstance(model, Cox):
        stratum = arrays.get("stratum", np.zeros(len(y)))
        rows: list[Floats] = []
        for i in np.flatnonzero(arrays["event"]):
            rows.extend(design[i] - design[(y >= y[i]) & (stratum == stratum[i])])
            if len(rows) > MOST_PAIRS:
                return None
        return np.array(rows).reshape(len(rows), design.shape[1]), design[:0]
    return None


def _scaled(arrays: Mapping[str, NDArray[Any]]) -> Floats:
    """Return the columns of (x, z), each in units of its largest value."""
    design = np.concatenate([arrays["x"], arrays["z"]], 1)
    size = np.abs(design).max(0)
    scaled: Floats = design / np.where(size > 0, size, 1)
    return scaled


def _weights(rows: Floats, fixed: Floats, spread: Floats) -> Floats | None:
    """Return the size of each column's part in a direction that separates; None without one.

    Args:
        rows, fixed: as of `_rows`.
        spread: of each column, which is 0 for an intercept.
    """
    from scipy.optimize import linprog

    if not rows.size:
        return None
    equal = (fixed, np.zeros(len(fixed))) if len(fixed) else (None, None)
    found = linprog(-rows.sum(0), -rows, np.zeros(len(rows)), *equal, bounds=(-1, 1))
    if found.status != 0 or found.fun > -1e-9:
        return None
    sizes: Floats = np.abs(found.x) * spread
    return sizes
