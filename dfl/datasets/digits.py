"""Handwritten digits of 8 x 8 pixels, a part of scikit-learn that needs no download."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.datasets.data import DATASETS, Data

MEAN = 0.3055
STD = 0.3763
"""Mean and standard deviation of the training pixels divided by 16."""
TEST = 359
"""Examples of the test set, a fifth of all 1,797."""


@DATASETS.register("digits")
def digits(directory: Path | None) -> Data:
    """1,438 training and 359 test images, (n, 1, 8, 8) uint8 from 0 to 16, of the ten digits.

    The test set is drawn at random with a fixed seed: it does not depend on the run's seed, so that
    runs with different seeds are measured on the same examples.

    Args:
        directory: not used: there are no files.

    Source:
        E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (its test
        part).
    """
    images, labels = _read()
    order = randomness.generator(0, "digits").permutation(len(images))
    test, train = np.sort(order[:TEST]), np.sort(order[TEST:])
    return Data(
        train_inputs=images[train],
        train_labels=labels[train],
        test_inputs=images[test],
        test_labels=labels[test],
        classes=10,
        scale=1 / (16 * STD),
        shift=-MEAN / STD,
    )


@cache
def _read() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return all images and labels in their order, which are not to be written to.

    They are read from the file of scikit-learn, whose import takes a second.
    """
    package = find_spec("sklearn")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(path, np.uint8, delimiter=",")
    return table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
