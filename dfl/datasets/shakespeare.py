"""Shakespeare by role: the plays in the edition of 1994 of Project Gutenberg, as LEAF has them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.options import Count
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Source, content, differing, find, locate

FILE = "t8.shakespeare.txt"
SOURCE = Source(
    url="https://www.gutenberg.org/ebooks/100",
    files={},
    contents={FILE: "c5601d266987ac885ca96522b1b4e439feb7eca39f0fe1111f7342b63b6468f3"},
    others=(FILE,),
)
"""Complete works, etext 100 in the form of 1994; later forms have another indentation."""
MOST = 2**24
"""The most bytes of the file, as a bound on memory; it has 5.5 MB."""
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The characters of LEAF; a character is its place among them."""
WINDOW = 80
"""Characters from which the next one is predicted."""
TRAIN_PART = 0.8
"""The part of a role's windows, from its beginning, that is for training."""
AUTHOR = "by William Shakespeare"
LINES = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)")
GOES_ON = re.compile(r"    (.*)")
FLAT_PLAY = "THE COMEDY OF ERRORS"
"""The play whose lines have lost their indentation."""
FLAT_LINES = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)")
FLAT_GOES_ON = re.compile(r"(.*)")

Letters = NDArray[np.uint8]


@DATASETS.register("shakespeare_leaf")
@example_with("--model char_lstm --partition natural")
def shakespeare_leaf(directory: Path | None, *, min_lines: Count = 3) -> Data:
    """Shakespeare as LEAF has it: the next character after 80, (n, 80) uint8 in 80 characters, by
    role of a play.

    A role speaks from a line that begins with its name, and goes on over the indented lines. Its
    lines are joined, and runs of spaces are one. Every window of 80 characters is an example, whose
    label is the next character. A role's first 80 % of windows are for training; the 79 after them,
    which share characters with them, are left out, and the rest are for testing. Roles too short
    for a window are left out. An unknown character is read as a space. There are 1,130 roles, of
    which 331 are too short to have windows for testing.

    Args:
        directory: holds shakespeare/ or t8.shakespeare.txt, compressed (.gz, .xz) or not. Nothing
            is downloaded.
        min_lines: the fewest lines of a role.

    Raises:
        InputError: the file is missing or damaged.

    Source:
        S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097; McMahan et
        al. (2017), section 3.
    """
    path, raw, notes = read(directory)
    texts = [" ".join(lines) for lines in _roles(raw.decode("latin-1")) if len(lines) >= min_lines]
    roles = [_letters(re.sub("  +", " ", text)) for text in texts]
    unknown = sum(count for _, count in roles)
    halves = [_windows(letters) for letters, _ in roles if len(letters) > WINDOW]
    notes += left_out(path, len(roles) - len(halves), f"have no window of {WINDOW} characters")
    if not sum(len(test) for _, test in halves):
        raise InputError(
            f"{path}: found no role of {min_lines} lines and some {6 * WINDOW} characters, "
            f"expected plays as in {FILE}"
        )
    if unknown:
        notes += (f"{path}: {unknown} unknown characters are read as spaces",)
    train, test = zip(*halves, strict=True)
    return Data(
        *_inputs_and_labels(train),
        *_inputs_and_labels(test),
        classes=len(LETTERS),
        train_groups=np.repeat(np.arange(len(halves)), [*map(len, train)]),
        test_groups=np.repeat(np.arange(len(halves)), [*map(len, test)]),
        notes=notes,
    )


def read(directory: Path | None) -> tuple[Path, bytes, tuple[str, ...]]:
    """Return the path of the file, its content, and notes where it is not the official one.

    Raises:
        InputError: the file is missing or cannot be read.
    """
    path = find(locate("shakespeare", directory, SOURCE), FILE)
    raw = bytes(content(path, "text of Shakespeare", MOST))
    found = {FILE: (str(path), hashlib.sha256(raw).hexdigest())}
    return path, raw, differing("shakespeare", SOURCE, found)


def left_out(path: Path, n: int, why: str) -> tuple[str, ...]:
    """Return a note that n roles of a file are left out, if there are any."""
    return (f"{path}: roles that {why} are left out: {n}",) if n else ()


def _roles(text: str) -> list[list[str]]:
    """Return the lines of every role of every play."""
    return [role for play in plays(text) for role in play]


def plays(text: str) -> list[list[list[str]]]:
    """Return the lines of every role, by play; the sonnets before the first play are none."""
    lines = text.splitlines()
    starts = [k for k, line in enumerate(lines) if AUTHOR in line][1:]
    found: list[list[list[str]]] = []
    for start, end in pairwise([*starts, len(lines)]):
        flat = any(line.strip() == FLAT_PLAY for line in lines[max(0, start - 7) : start])
        roles = _lines_of_roles(lines[start + 1 : end], flat)
        found += [roles] if len(roles) > 1 else []
    return found


def _lines_of_roles(lines: Sequence[str], flat: bool) -> list[list[str]]:
    """Return the lines of every role of a play, in the order in which the roles begin.

    Args:
        lines: of the play.
        flat: whether its lines have no indentation.
    """
    begins, goes_on = (FLAT_LINES, FLAT_GOES_ON) if flat else (LINES, GOES_ON)
    roles: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in lines:
        if match := begins.match(line):
            heading = flat and match[1].upper().startswith("ACT ")
            current = None if heading else roles.setdefault(match[1].upper(), [])
            if current is not None:
                current.append(match[2])
        elif current is not None and (match := goes_on.match(line)):
            if flat and match[1].startswith("<"):
                current = None
            else:
                current.append(match[1])
    return [*roles.values()]


_PLACES = np.full(256, -1, np.int64)
_PLACES[np.frombuffer(LETTERS.encode("ascii"), np.uint8)] = np.arange(len(LETTERS))


def _letters(text: str) -> tuple[Letters, int]:
    """Return the characters (n,) of a text as places in `LETTERS`, and how many are unknown."""
    places = _PLACES[np.frombuffer(text.encode("latin-1"), np.uint8)]
    unknown = places < 0
    return np.where(unknown, LETTERS.index(" "), places).astype(np.uint8), int(unknown.sum())


def _windows(letters: Letters) -> tuple[Letters, Letters]:
    """Return the windows (n, 81) of a role for training and for testing, with their labels."""
    every = np.lib.stride_tricks.sliding_window_view(letters, WINDOW + 1)
    cut = int(TRAIN_PART * len(every))
    return every[:cut], every[cut + WINDOW - 1 :]


def _inputs_and_labels(parts: Sequence[Letters]) -> tuple[Letters, NDArray[np.int64]]:
    """Return the characters (n, 80) of all windows, and the next ones (n,)."""
    labels = np.concatenate([windows[:, -1] for windows in parts])
    return np.concatenate([windows[:, :-1] for windows in parts]), labels.astype(np.int64)
