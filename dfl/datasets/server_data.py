"""Which training examples does the server have of its own? Ways to choose them, for algorithms that
need some.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError

Ints = NDArray[np.int64]

ServerDataRule = Callable[[Ints, int, np.random.Generator], Ints]
"""f(labels (n,), classes, rng) -> ascending places of the examples that are the server's and no
peer's.
"""

BIASED = 1
"""The label of which there are more or fewer than of the others."""


def root_examples(
    labels: Ints,
    classes: int,
    rng: np.random.Generator,
    *,
    size: int = 100,
    bias: float | None = None,
) -> Ints:
    """A small root data set: a share `bias` of its examples has label 1, the others are spread
    equally.

    Whole numbers come by the largest remainder, ties going to the lower label. A bias of 1 /
    classes, the default, is none.

    Args:
        labels: (n,) the labels of the examples to choose from.
        classes: how many labels there are.
        rng: draws the examples of every label.
        size: examples in all.
        bias: share of label 1, from 0 to 1.

    Raises:
        InputError: too few labels, or too few examples of one.

    Source:
        FLTrust (Cao et al., NDSS 2021), experimental setup, "root dataset's bias probability".
    """
    bias = 1 / max(classes, 1) if bias is None else bias
    wanted = _counts(classes, size, bias)
    chosen = [np.empty(0, np.int64)]
    for label, count in enumerate(wanted):
        places = np.flatnonzero(labels == label)
        if count > len(places):
            raise InputError(
                f"--algorithm fltrust: root={size} with bias={bias:g} needs {count} examples of label {label}, "
                f"there are {len(places)}"
            )
        chosen.append(rng.choice(places, count, replace=False))
    return np.sort(np.concatenate(chosen))


def everything(labels: Ints, classes: int, rng: np.random.Generator) -> Ints:
    """All examples: the server learns from a copy of all that the peers learn from, and they keep
    theirs.
    """
    return np.arange(len(labels))


def _counts(classes: int, size: int, bias: float) -> Ints:
    if classes < 2:
        raise InputError(
            f"--algorithm fltrust: root examples need two labels at least, these have {classes}"
        )
    shares = np.full(classes, (1 - bias) / (classes - 1))
    shares[BIASED] = bias
    exact = size * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.round(exact - counts, 9)  # so that what is equal on paper is
    counts[np.argsort(-rest, kind="stable")[: size - counts.sum()]] += 1
    return counts
