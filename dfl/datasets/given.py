"""Data sets that a caller gives as arrays or as torch datasets, and partitions as indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.arrays import Array
from dfl.core.errors import InputError, in_one_line
from dfl.core.forms import form_of
from dfl.core.parse import shown
from dfl.core.parts import Parts, map_parts, parts_of
from dfl.datasets.data import Data, as_array
from dfl.datasets.partitions.base import Assignment, Labels, Partition

TEST_SHARE = 0.2
"""The fraction of the examples that becomes the common test set where none is given."""


def as_data(value: Any, seed: int, regression: bool = False) -> Data:
    """Return a data set that a caller gives.

    Args:
        value: a `Data`; a pair of arrays (inputs, labels), or a torch Dataset of such pairs; or two
            of these, (train, test). Inputs of several parts are a tuple; items of a Dataset may
            also be (part, part, label). Without a test set, a fifth of the examples, at least one,
            becomes it: drawn at random (address "common test set") and announced in a note.
        seed: of the run.
        regression: whether labels of arrays are numbers to predict, also where they are whole.

    Raises:
        InputError: something else.
    """
    if isinstance(value, Data):
        return value
    if has_test_set(value):
        train, test = (_examples(each) for each in value)
        return _data(train, test, regression)
    if not _is_examples(value):
        raise InputError(
            "--dataset must be a spec, a dfl.Data, a pair of arrays (inputs, labels), a torch "
            f"Dataset, or two of these, (train, test), not {shown(value)}"
        )
    inputs, labels = _examples(value, least=2)  # one of them for the test set
    n = len(labels)
    order = randomness.generator(seed, "common test set").permutation(n)
    held = max(1, round(TEST_SHARE * n))
    last = np.sort(order[:held])
    rest = np.sort(order[held:])
    note = f"{held} of {n} examples, drawn at random, are the common test set"
    train, test = (
        (map_parts(lambda part, own=own: part[own], inputs), labels[own]) for own in (rest, last)
    )
    return _data(train, test, regression, (note,))


def has_test_set(value: object) -> bool:
    """Return whether a data set that a caller gives has a test set of its own."""
    pairs = isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_examples, value))
    return isinstance(value, Data) or pairs


def _is_examples(value: object) -> bool:
    """Return whether a value is a pair of arrays or a map-style torch Dataset."""
    if isinstance(value, tuple | list):
        return len(value) == 2 and all(
            hasattr(part, "shape") for part in (*parts_of(value[0]), value[1])
        )
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not _is_plain(value)


def _is_plain(value: object) -> bool:
    return isinstance(value, str | bytes | dict) or hasattr(value, "shape")


def _examples(value: Any, least: int = 1) -> tuple[Parts, Array]:
    """Return inputs (n, *shape), or a tuple of them, and labels (n,).

    Raises:
        InputError: unequal lengths, fewer than `least` examples, or items that are no pairs of
            equal shapes.
    """
    if isinstance(value, tuple | list):
        inputs, labels = map_parts(_whole, value[0]), _whole(value[1])
    else:
        with in_one_line("--dataset cannot be read"):
            items = [_item(value[i]) for i in range(len(value))]
            *stacked, labels = (np.stack(column) for column in zip(*items, strict=True))
        inputs = tuple(stacked) if len(stacked) > 1 else stacked[0]
    arrays = (*parts_of(inputs), labels)
    scalars = any(part.ndim < 1 for part in arrays)
    if scalars or len({len(part) for part in arrays}) > 1 or len(labels) < least:
        shapes = " and ".join(str(part.shape) for part in parts_of(inputs))
        number = "two examples or more" if least == 2 else "an example or more"
        raise InputError(
            f"--dataset must have {number}, with a label each, not inputs of shape "
            f"{shapes} and labels of shape {labels.shape}"
        )
    return inputs, labels


def _item(item: Any) -> tuple[Array, ...]:
    """Return the parts of the input of an item of a torch Dataset, and its label."""
    if not (isinstance(item, tuple | list) and len(item) > 1):
        raise InputError(
            f"--dataset: items of a torch Dataset must be pairs (input, label), not {shown(item)}"
        )
    *inputs, label = item
    parts = inputs if len(inputs) > 1 else parts_of(inputs[0])
    return (*map(_array, parts), _array(label))


def _whole(value: object) -> Array:
    try:
        return as_array("dataset", value)
    except InputError as error:
        raise InputError(f"--dataset: {error}") from None


def _array(value: object) -> Array:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _data(
    train: tuple[Parts, Array],
    test: tuple[Parts, Array],
    regression: bool,
    notes: tuple[str, ...] = (),
) -> Data:
    labels = train[1], test[1]
    numbered = not regression and all(
        each.dtype.kind in "iub" and each.ndim == 1 for each in labels
    )
    classes = 1 + max(int(each.max(initial=0)) for each in labels) if numbered else 0
    return Data(train[0], train[1], test[0], test[1], classes, notes=notes)


def as_partition(value: Any) -> Partition:
    """Return a partition by the caller's indices of training examples, an array for each peer.

    Peers have no local test examples then, but those of an `Assignment`.

    Raises:
        InputError: something else than arrays of whole numbers, an `Assignment`, or a function.
    """
    if callable(value):
        function: Partition = value
        return function
    if parts_given(value) is None:
        raise InputError(
            "--partition must be a spec, a list of arrays of indices, an Assignment, or a function "
            f"(labels, peers, rng), not {shown(value)}"
        )
    own = value.train if isinstance(value, Assignment) else value

    def given(labels: Labels, peers: int, rng: np.random.Generator) -> Assignment:
        if len(own) != peers:
            raise InputError(f"--partition has {len(own)} arrays of indices for {peers} peers")
        n = len(labels.train)
        train = [_indices(i, each, n) for i, each in enumerate(own)]
        if isinstance(value, Assignment):
            return Assignment(train, value.test)
        return Assignment(train, [np.zeros(0, np.int64) for _ in range(peers)])

    return given


def _indices(peer: int, value: object, n: int) -> NDArray[np.int64]:
    own = np.asarray(value)
    good = own.ndim == 1 and (own.dtype.kind in "iu" or not len(own))
    outside = own[(own < 0) | (own >= n)] if good else own
    if not good or len(outside):
        there = str(outside[0]) if good else form_of(own)
        raise InputError(
            f"--partition: the indices of peer {peer} must be whole numbers from 0 to {n - 1}, "
            f"not {there}"
        )
    ascending = np.sort(own.astype(np.int64))
    twice = ascending[1:][np.diff(ascending) == 0]
    if len(twice):
        raise InputError(
            f"--partition: the indices of peer {peer} must differ, and {twice[0]} is there twice"
        )
    return ascending


def parts_given(value: object) -> int | None:
    """Return the number of peers to which a caller's indices assign examples; None for a spec or a
    function.
    """
    if isinstance(value, Assignment) and isinstance(value.train, Sequence | np.ndarray):
        return len(value.train)
    return len(value) if isinstance(value, list | tuple) else None
