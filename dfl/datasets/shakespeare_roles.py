"""Shakespeare by role, with the next character at every place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from annotated_types import Interval

from dfl.core.errors import InputError
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.shakespeare import FILE, left_out, plays, read
from dfl.datasets.text import Ints, Steps, rows_joined, rows_of, split_in_time

BEGIN, PADDING = 256, 257
"""Characters besides the 256 bytes: before the first one of a text, and at padded places."""


@DATASETS.register("shakespeare")
@example_with("--model char_lstm --partition natural")
def shakespeare(
    directory: Path | None,
    *,
    min_lines: Annotated[int, Interval(ge=2, le=1_000_000)] = 3,
    steps: Steps = 80,
    rows: Literal["text", "lines"] = "text",
) -> Data:
    """Shakespeare as McMahan et al. have it: the next character at every place of rows of 80, in
    258 characters, by role of a play.

    The lines of a role, in their order, are joined by line breaks. The first 80 % of them are for
    training, the last 20 %, at least one, for testing. A text is cut into rows; the last row is
    padded. Characters are bytes; two more stand before the first one and at padded places. There
    are 1,145 roles, with 3,467,528 characters for training and 876,432 for testing.

    The paper has 1,146 roles, of "at least two lines". The preprocessing that its authors released
    with LEAF leaves out roles of two lines, too, as here by default; with `min_lines=2` there are
    1,202. It joins a name in capital letters and the same name in small ones, which it states not
    to have done at first: as roles of their own they would make 1,147.

    With `rows=lines` every line is a text of its own, which ends with a line break. The steps that
    the paper counts per round, u = E n / (K B) = 37.1, 7.4 and 1.5 (Table 2), are those of lines: a
    role has 73.7 of them for training, which gives 36.8, 7.4 and 1.5, and 38.4 rows of 80.

    Args:
        directory: holds shakespeare/ or t8.shakespeare.txt, compressed (.gz, .xz) or not. Nothing
            is downloaded.
        min_lines: the fewest lines of a role; roles with fewer, or whose lines are empty, are left
            out.
        steps: the length of a row.
        rows: text, a role's lines are one text; or lines, each is one.

    Raises:
        InputError: the file is missing or damaged.

    Source:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        AISTATS 2017, section 3; preprocess_shakespeare.py of LEAF.
    """
    path, raw, notes = read(directory)
    roles = [role for play in plays(raw.decode("latin-1")) for role in play]
    texts = [
        tuple("\n".join(line.strip() for line in half).strip() for half in split_in_time(lines))
        for lines in roles
        if len(lines) >= min_lines
    ]
    halves = [[_rows(_cut(half, rows), steps) for half in text] for text in texts if all(text)]
    notes += left_out(path, len(texts) - len(halves), "have no text in one half of their lines")
    if not halves:
        raise InputError(f"{path}: found no role of {min_lines} lines, expected plays as in {FILE}")
    train, test = (rows_joined([one[k] for one in halves]) for k in range(2))
    return Data(
        train.inputs,
        train.labels,
        test.inputs,
        test.labels,
        classes=PADDING + 1,
        train_groups=train.groups,
        test_groups=test.groups,
        notes=notes,
    )


def _cut(text: str, rows: str) -> list[str]:
    """Return a text, or its lines that are not empty, each with its line break."""
    return [text] if rows == "text" else [f"{line}\n" for line in text.split("\n") if line]


def _rows(texts: Sequence[str], steps: int) -> tuple[Ints, Ints]:
    """Return the rows (n, steps) of texts, and their labels."""
    characters = (
        np.frombuffer(text.encode("latin-1"), np.uint8).astype(np.int64) for text in texts
    )
    inputs, labels = zip(
        *(rows_of(each, steps, BEGIN, PADDING) for each in characters), strict=True
    )
    return np.concatenate(inputs), np.concatenate(labels)
