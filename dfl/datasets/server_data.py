"""Rules that choose the server's own training examples, for algorithms that need some."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError

Ints = NDArray[np.int64]

ServerDataRule = Callable[[Ints, int, np.random.Generator], Ints]
"""f(labels (n,), classes, rng) -> ascending indices of the server's examples, which no peer gets.

A rule states as an attribute `peers_keep = True` that the server learns from copies: it chooses
among the examples that the peers learn from, and the peers keep theirs. Labels of sequences, which
only such a rule is given, are (n, *places).
"""

BIASED_LABEL = 1
"""The label whose share the bias sets."""


def peers_keep(rule: ServerDataRule | None) -> bool:
    """Return whether a rule states that the peers keep the examples that it chooses.

    Args:
        rule: a rule, its options bound or not; None for a server without examples.
    """
    return any(getattr(each, "peers_keep", False) for each in (rule, getattr(rule, "func", None)))


def biased_sample(
    labels: Ints,
    classes: int,
    rng: np.random.Generator,
    *,
    size: int = 100,
    bias: float | None = None,
) -> Ints:
    """Draw a small data set: a share `bias` of its examples has label 1, the others are spread
    equally over the other labels.

    Counts are rounded by the largest remainder, ties going to the lower label. The default bias, 1
    / classes, gives every label the same share.

    Args:
        labels: (n,) the labels of the examples to choose from.
        classes: how many labels there are.
        rng: draws the examples of every label.
        size: examples in all.
        bias: share of label 1, from 0 to 1.

    Raises:
        InputError: fewer than two labels, or too few examples of one.

    Source:
        FLTrust (Cao et al., NDSS 2021), experimental setup, "root dataset's bias probability".
    """
    bias = 1 / max(classes, 1) if bias is None else bias
    chosen = [np.empty(0, np.int64)]
    for label, count in enumerate(_counts(classes, size, bias)):
        indices = np.flatnonzero(labels == label)
        if count > len(indices):
            raise InputError(
                f"the server's own examples: {size} with bias={bias:g} need {count} of label "
                f"{label}, there are {len(indices)}: change the options of --algorithm"
            )
        chosen.append(rng.choice(indices, count, replace=False))
    return np.sort(np.concatenate(chosen))


def all_examples(labels: Ints, classes: int, rng: np.random.Generator) -> Ints:
    """Return all examples: the server learns from a copy of all that the peers learn from."""
    return np.arange(len(labels))


setattr(all_examples, "peers_keep", True)  # noqa: B010  a function's type has no such attribute


def _counts(classes: int, size: int, bias: float) -> Ints:
    """Return the number of examples of every label, (classes,)."""
    if classes < 2:
        raise InputError(
            "the server's own examples need two labels at least, and those of --dataset have "
            f"{classes}"
        )
    shares = np.full(classes, (1 - bias) / (classes - 1))
    shares[BIASED_LABEL] = bias
    exact = size * shares
    counts = np.floor(exact + 1e-9).astype(np.int64)
    rest = np.round(exact - counts, 9)  # remainders that are equal on paper become equal
    counts[np.argsort(-rest, kind="stable")[: size - counts.sum()]] += 1
    return counts
