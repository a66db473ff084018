"""The words of Shakespeare by role or by play."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from dfl.core.errors import InputError
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, IGNORED, Data
from dfl.datasets.shakespeare import FILE, left_out, plays, read
from dfl.datasets.text import (
    Ints,
    Steps,
    most_frequent,
    rows_joined,
    rows_of,
    split_in_time,
)

WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[.,;:!?]")
OTHERS = 3
"""The tokens besides words, the last of the vocabulary: unknown words, the beginning of a text, and
padded places.
"""


@DATASETS.register("words")
@example_with("--model word_lstm --partition natural")
def words(
    directory: Path | None,
    *,
    by: Literal["role", "play"] = "role",
    vocabulary: Annotated[int, Interval(ge=OTHERS + 1, le=30_000)] = 10_000,
    min_lines: Annotated[int, Interval(ge=2, le=1_000_000)] = 2,
    steps: Steps = 10,
) -> Data:
    """The words of Shakespeare's plays: the next word at every place of rows of 10, by role or by
    play.

    Words are in small letters, and marks are words. The vocabulary has the most frequent words of
    the training texts, ties in the order of the alphabet, and three other tokens: an unknown word,
    the beginning of a text, and padding. Unknown words and padded places are no labels: loss,
    perplexity and accuracy, the top-1 recall, are over known words. The lines of a role are split
    in time as those of `shakespeare`: 757,347 known words of 1,202 roles in 36 plays for training,
    and 191,733 for testing.

    Args:
        directory: holds shakespeare/ or t8.shakespeare.txt, compressed (.gz, .xz) or not. Nothing
            is downloaded.
        by: what `--partition natural` gives to one peer.
        vocabulary: the number of tokens.
        min_lines: the fewest lines of a role; roles with fewer, or without a known word in both
            halves, are left out.
        steps: the length of a row.

    Raises:
        InputError: the file is missing or damaged.

    Source:
        McMahan et al. (2017), section 3, "Large-scale LSTM experiments", for the task.
    """
    path, raw, notes = read(directory)
    roles = [
        (group, _words_of(train), _words_of(test))
        for group, play in enumerate(plays(raw.decode("latin-1")))
        for train, test in (split_in_time(lines) for lines in play if len(lines) >= min_lines)
    ]
    known = most_frequent((word for _, train, _ in roles for word in train), vocabulary - OTHERS)
    places = {word: k for k, word in enumerate(known)}
    every = [
        (group, _rows(train, places, vocabulary, steps), _rows(test, places, vocabulary, steps))
        for group, train, test in roles
    ]
    rows = [each for each in every if len(each[1][1]) and len(each[2][1])]
    notes += left_out(path, len(every) - len(rows), "have no known word in one half of their lines")
    if known and not rows:
        raise InputError(
            f"{path}: found no role with one of {len(known)} known words in both halves: choose a "
            f"vocabulary of more than {vocabulary}"
        )
    if not rows:
        raise InputError(f"{path}: found no role of {min_lines} lines, expected plays as in {FILE}")
    numbers: Sequence[int] = range(len(rows))
    if by == "play":
        _, found = np.unique([group for group, _, _ in rows], return_inverse=True)
        numbers = found.tolist()
    train = rows_joined([each for _, each, _ in rows], numbers)
    test = rows_joined([each for _, _, each in rows], numbers)
    return Data(
        train.inputs,
        train.labels,
        test.inputs,
        test.labels,
        classes=vocabulary,
        train_groups=train.groups,
        test_groups=test.groups,
        notes=notes,
    )


def _words_of(lines: Sequence[str]) -> list[str]:
    return WORD.findall(" ".join(lines).lower())


def _rows(
    text: Sequence[str], places: Mapping[str, int], vocabulary: int, steps: int
) -> tuple[Ints, Ints]:
    """Return the rows (n, steps) of a text and their labels; rows without a label are left out."""
    unknown, begin, padding = range(vocabulary - OTHERS, vocabulary)
    tokens = np.array([places.get(word, unknown) for word in text], np.int64)
    inputs, labels = rows_of(tokens, steps, begin, padding)
    labels[labels == unknown] = IGNORED
    some = (labels != IGNORED).any(1)
    return inputs[some], labels[some]
