"""UCI HAR: what 30 people do, by the accelerometer and the gyroscope of a phone at their waist."""

from __future__ import annotations

import io
import re
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError, one_line
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Source, content, find, locate

INNER = "UCI HAR Dataset"
SOURCE = Source(
    url="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    files={},
    contents={},
    others=(INNER,),
)
"""Its archive is not downloaded: no checksum of it is published."""
HALVES = ("train", "test")
SIGNALS = tuple(
    f"{signal}_{axis}"
    for signal, axis in product(("body_acc", "body_gyro", "total_acc"), ("x", "y", "z"))
)
"""The channels, in this order."""
STEPS = 128
"""Samples of a window, 2.56 s; windows that follow each other share half of them."""
ACTIVITIES = 6
PEOPLE = 30
MOST = 2**26
"""The most bytes of a file, as a bound on memory; official ones have up to 16 MB."""
TEST_PART = 5
"""One of so many windows of a person in an activity is for testing."""
MEAN = (-0.0007, -0.0003, -0.0002, -0.0034, -0.0002, 0.0009, 0.8083, 0.0218, 0.0848)
STD = (0.1919, 0.1219, 0.1038, 0.4039, 0.3705, 0.2540, 0.4120, 0.3973, 0.3443)
"""Mean and standard deviation of all samples of each channel."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]


@DATASETS.register("har")
@example_with("--model har_cnn --partition natural")
def har(directory: Path | None) -> Data:
    """HAR: windows of 128 samples of 9 signals, (n, 9, 128) float32, in six activities, by person.

    The raw inertial signals are read, not the 561 derived features. The official halves have no
    person in common; here they are put together, and the last fifth of the windows of each person
    in each activity is for testing. The window before these, which shares half of its samples with
    the first of them, is left out.

    Args:
        directory: holds har/ or the folder `UCI HAR Dataset` of the official archive, its text
            files compressed (.gz, .xz) or not. Nothing is downloaded.

    Raises:
        InputError: a file is missing or damaged.

    Source:
        D. Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using
        Smartphones", ESANN 2013.
    """
    folder = locate("har", directory, SOURCE)
    folder = folder / INNER if (folder / INNER).is_dir() else folder
    inputs, labels, people = (
        np.concatenate(parts)
        for parts in zip(*(_half(folder, half) for half in HALVES), strict=True)
    )
    train, test = _in_time(people * ACTIVITIES + labels)
    mean, std = (np.array(of).reshape(-1, 1) for of in (MEAN, STD))
    return Data(
        train_inputs=inputs[train],
        train_labels=labels[train],
        test_inputs=inputs[test],
        test_labels=labels[test],
        classes=ACTIVITIES,
        scale=(1 / std).astype(np.float32),
        shift=(-mean / std).astype(np.float32),
        train_groups=people[train],
        test_groups=people[test],
    )


def _in_time(part: Ints) -> tuple[Ints, Ints]:
    """Return the windows for training and for testing, ascending.

    Args:
        part: (n,), the person and the activity of every window as one number.
    """
    train, test = [], []
    for value in np.unique(part):
        own = np.flatnonzero(part == value)
        held = len(own) // TEST_PART
        train.append(own[: len(own) - held - 1] if held else own)
        test.append(own[len(own) - held :])
    return np.sort(np.concatenate(train)), np.sort(np.concatenate(test))


def _half(folder: Path, half: str) -> tuple[Floats, Ints, Ints]:
    """Return windows (n, 9, 128), activities (n,) from 0 and people (n,) of an official half."""
    labels = _numbers(find(folder / half, f"y_{half}.txt"), "activity", ACTIVITIES)
    people = _numbers(find(folder / half, f"subject_{half}.txt"), "person", PEOPLE)
    inside = folder / half / "Inertial Signals"
    paths = [find(inside, f"{signal}_{half}.txt") for signal in SIGNALS]
    windows = np.empty((len(labels), len(SIGNALS), STEPS), np.float32)
    if len(people) != len(labels):
        raise InputError(
            f"{folder / half}: found {len(people)} lines in subject_{half}.txt, expected "
            f"{len(labels)} as in y_{half}.txt"
        )
    for k, path in enumerate(paths):
        windows[:, k] = _signal(path, len(labels))
    return windows, labels - 1, people - 1


def _numbers(path: Path, what: str, most: int) -> Ints:
    """Return the numbers (n,) of a file that has one from 1 to `most` in a line."""
    lines = _text(path).split()
    for k, line in enumerate(lines, start=1):
        if not re.fullmatch("[0-9]{1,3}", line) or not 1 <= int(line) <= most:
            raise InputError(
                f"{path}: line {k}: found the {what} {line[:50]!r}, expected 1 to {most}"
            )
    if not lines:
        raise InputError(f"{path}: found no lines, expected one for each window")
    return np.array(lines).astype(np.int64)


def _signal(path: Path, n: int) -> Floats:
    """Return the samples (n, 128) of one channel."""
    text = _text(path)
    if not text.strip():
        raise InputError(f"{path}: found no numbers, expected {n} lines of {STEPS}")
    try:
        samples = np.loadtxt(io.StringIO(text), np.float32, comments=None, ndmin=2)
    except ValueError as error:
        raise InputError(
            f"{path}: found {one_line(error).partition(';')[0]}, expected {STEPS} numbers in a line"
        ) from None
    if samples.shape != (n, STEPS):
        rows, columns = samples.shape
        raise InputError(
            f"{path}: found {rows} lines of {columns} numbers, expected {n} of {STEPS}"
        )
    if not np.isfinite(samples).all():
        row, column = np.argwhere(~np.isfinite(samples))[0]
        raise InputError(
            f"{path}: line {row + 1}: found {samples[row, column]} at place {column + 1}, expected "
            "finite numbers"
        )
    return samples


def _text(path: Path) -> str:
    """Return the text of a file."""
    try:
        return content(path, "text file of HAR", MOST).decode("ascii")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: found a byte {error.object[error.start]:#x}, expected a plain text file"
        ) from None
