"""What text data sets share: frequent words, a split in time, and rows of equal length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from dfl.datasets.data import IGNORED

Ints = NDArray[np.int64]
Steps = Annotated[int, Interval(ge=1, le=10_000)]
"""The length of a row; a short text is padded to it."""

TEST_PART = 5
"""One in so many lines of a role is for testing, rounded up."""


def most_frequent(values: Iterable[str], most: int) -> list[str]:
    """Return the most frequent values; those of equal counts in alphabetical order."""
    counts = Counter(values)
    return sorted(counts, key=lambda value: (-counts[value], value))[:most]


def split_in_time(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the first 80 % of the lines, for training, and the last 20 %, at least one."""
    last = -(-len(lines) // TEST_PART)
    return lines[: len(lines) - last], lines[len(lines) - last :]


class Rows(NamedTuple):
    """Rows of several groups: inputs and labels (n, steps), and the group of each, (n,)."""

    inputs: NDArray[np.int16]
    labels: Ints
    groups: Ints


def rows_joined(texts: Sequence[tuple[Ints, Ints]], groups: Sequence[int] | None = None) -> Rows:
    """Return the rows of several texts, inputs in 16 bits.

    Args:
        texts: the inputs and labels of each.
        groups: the group of each text; None where every text is one.
    """
    every = np.arange(len(texts)) if groups is None else np.asarray(groups, np.int64)
    return Rows(
        np.concatenate([inputs for inputs, _ in texts]).astype(np.int16),
        np.concatenate([labels for _, labels in texts]),
        np.repeat(every, [len(labels) for _, labels in texts]),
    )


def rows_of(tokens: Ints, steps: int, begin: int, padding: int) -> tuple[Ints, Ints]:
    """Return inputs and labels (n, steps), which predict every token from those before it.

    Args:
        tokens: (m,), a text.
        steps: the length of a row; the last row is padded.
        begin: the input before the first token.
        padding: the input at padded places, whose label is `IGNORED`.
    """
    n = -(-len(tokens) // steps)
    inputs, labels = np.full(n * steps, padding), np.full(n * steps, IGNORED)
    labels[: len(tokens)] = tokens
    inputs[: len(tokens)] = np.concatenate([[begin], tokens[:-1]])
    return inputs.reshape(n, steps), labels.reshape(n, steps)
