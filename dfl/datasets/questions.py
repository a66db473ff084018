"""Questions as bags of words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dfl.datasets.text import most_frequent


def words_of(question: str) -> list[str]:
    """Return the words of a question, in small letters: runs of letters, digits and '."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)*", question.lower())


def vocabulary(questions: Iterable[str], most: int) -> list[str]:
    """Return the most frequent words of questions; those of equal counts in alphabetical order."""
    return most_frequent((word for question in questions for word in words_of(question)), most)


def bags(questions: Sequence[str], known: Sequence[str]) -> NDArray[np.uint8]:
    """Return how often each known word is in each question, (n, words), at most 255 times."""
    place = {word: k for k, word in enumerate(known)}
    counts = np.zeros((len(questions), len(known)), np.uint8)
    for row, question in zip(counts, questions, strict=True):
        for word, count in Counter(words_of(question)).items():
            if word in place:
                row[place[word]] = min(count, 255)
    return counts
