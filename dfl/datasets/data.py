"""What does every data set hand over, and which data sets are there?

To add one, write a loader in a file of its own, decorate it with `@dataset("its name")` and import the file in
`dfl/datasets/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Data:
    """A data set with its common test set, in the dtype of its files.

    Attributes:
        train_inputs: (n, *shape) uint8 or float; images are (n, channels, height, width).
        train_labels: (n,) int64 in range(classes); anything that the loss understands where classes is 0.
        test_inputs, test_labels: the common test set, in the same form.
        classes: how many labels there are; 0 where labels are no classes.
        scale, shift: a batch enters a model as float(x) * scale + shift; numbers, or arrays that broadcast
            over the shape of one example.
        train_groups, test_groups: (n,) int64, from which person, author or place an example came, in both halves
            by the same numbers; None where that is not known.
        train_protected, test_protected: (n, k) int64 of 0 and 1, the k protected attributes of every example; None
            where none is known.
        protected: the names of these k.
        notes: what to warn of before a run, one line each.
    """

    train_inputs: NDArray[Any]
    train_labels: NDArray[Any]
    test_inputs: NDArray[Any]
    test_labels: NDArray[Any]
    classes: int
    scale: float | NDArray[np.float32] = 1.0
    shift: float | NDArray[np.float32] = 0.0
    train_groups: NDArray[np.int64] | None = None
    test_groups: NDArray[np.int64] | None = None
    train_protected: NDArray[np.int64] | None = None
    test_protected: NDArray[np.int64] | None = None
    protected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_L = TypeVar("_L", bound=Callable[..., Data])

DATASETS: dict[str, Callable[..., Data]] = {}
"""Name -> f(directory, *, options) -> Data; `directory` is a Path, or None to use the user's cache.

A loader raises `InputError`, one line, for whatever keeps it from handing over good data.
"""


def dataset(name: str) -> Callable[[_L], _L]:
    """Enter a loader into `DATASETS` under the name that the command line uses."""

    def enter(load: _L) -> _L:
        DATASETS[name] = load
        return load

    return enter
