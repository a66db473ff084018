"""Small files in the format of UCI HAR, for the tests of data sets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIGNALS = (
    "body_acc_x", "body_acc_y", "body_acc_z", "body_gyro_x", "body_gyro_y", "body_gyro_z",
    "total_acc_x", "total_acc_y", "total_acc_z",
)  # fmt: skip
PEOPLE = {"train": (1, 3), "test": (2, 30)}
WINDOWS = (7, 5, 4)
"""Windows of every person in the first, second and fourth activity, in two pieces each."""
PLACES = [activity for activity, n in zip((1, 2, 4), WINDOWS, strict=True) for _ in range(n)]

Half = tuple[NDArray[np.float32], list[int], list[int]]


def half(name: str) -> Half:
    """Return windows (n, 9, 128), activities and people; a sample is its window and channel."""
    people = [person for person in PEOPLE[name] for _ in PLACES]
    activities = [each for _ in PEOPLE[name] for each in PLACES]
    k, channel, step = np.ogrid[: len(people), :9, :128]
    windows = (k + channel / 10 + step / 10_000).astype(np.float32)
    return windows, activities, people


def texts(halves: Mapping[str, Half]) -> dict[str, str]:
    """Return the content of the files by path."""
    found = {}
    for name, (windows, activities, people) in halves.items():
        found[f"{name}/y_{name}.txt"] = "".join(f"{each}\n" for each in activities)
        found[f"{name}/subject_{name}.txt"] = "".join(f"{each}\n" for each in people)
        for k, signal in enumerate(SIGNALS):
            lines = (" " + "".join(f" {x: .7e}" for x in window[k]) for window in windows)
            found[f"{name}/Inertial Signals/{signal}_{name}.txt"] = "\n".join(lines) + "\n"
    return found


TEXTS = texts({name: half(name) for name in PEOPLE})


def write_har(folder: Path, files: Mapping[str, str] = TEXTS) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
