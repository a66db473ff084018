"""What text data sets share: a split in time, and rows of equal length with padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dfl.datasets.data import IGNORED

Ints = NDArray[np.int64]

TEST_PART = 5
"""One in so many lines of a role is for testing, rounded up."""


def split_in_time(lines: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the first 80 % of the lines, for training, and the last 20 %, at least one."""
    last = -(-len(lines) // TEST_PART)
    return lines[: len(lines) - last], lines[len(lines) - last :]


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
