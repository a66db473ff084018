"""Small files in LEAF's format of FEMNIST, for the tests of data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

WRITERS = {
    "train": {"f0001_41": 5, "f0002_00": 2, "f0100_12": 3},
    "test": {"f0002_00": 1, "f0001_41": 2},
}
"""The examples of every writer."""


def page(half: str) -> dict[str, Any]:
    """Return the content of a file: white images with one pixel of ink each."""
    rng = np.random.default_rng(len(half))
    data = {}
    for name, n in WRITERS[half].items():
        x = np.full((n, 784), 255)
        x[np.arange(n), rng.integers(784, size=n)] = rng.integers(200, size=n)
        data[name] = {"x": (x / 255).tolist(), "y": rng.integers(62, size=n).tolist()}
    writers = WRITERS[half]
    return {"users": [*writers], "num_samples": [*writers.values()], "user_data": data}


def path_of(folder: Path, half: str, k: int = 0) -> Path:
    """Return the path that LEAF gives a file."""
    return folder / half / f"all_data_{k}_niid_0_keep_0_{half}_9.json"


def write_femnist(folder: Path) -> Path:
    for half in WRITERS:
        path = path_of(folder, half)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(page(half)))
    return folder
