"""`Data`, the form of every data set, and `DATASETS`, the registry of loaders.

To add one, write a loader in a file of its own, decorate it with `@DATASETS.register("its name")`
and import the file in `dfl/datasets/__init__.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dfl.core.arrays import Array, Arrays
from dfl.core.errors import InputError, in_one_line, one_line
from dfl.core.parse import shown
from dfl.core.parts import Parts, map_parts, parts_of, shape_of, shown_shape
from dfl.core.registry import Registry

MOST_CLASSES = 1_000_000
"""The largest number of labels."""
IGNORED = -100
"""The label of a place of a sequence that counts nowhere: one that is padded, or has no answer."""

DATASETS: Registry[Callable[..., Data]] = Registry("dataset", "dfl.datasets")
"""Name -> f(directory, *, options) -> Data; `directory` is a Path, or None for the user's cache.

A loader raises an `InputError` where it cannot return valid data.
"""


@dataclass(frozen=True)
class Data:
    """A data set with its common test set, in the dtype of its files.

    A caller may give lists and torch tensors in place of arrays; `checked` turns them into arrays.

    Sequences of unequal length are padded: a label of -100 (`IGNORED`) is no prediction. Loss and
    accuracy are means over all other places, so that a token counts, and no padded place.

    Attributes:
        train_inputs: (n, *shape) integers or floats; images are (n, channels, height, width). A
            tuple of such arrays where an input has several parts: a model takes each part as an
            argument.
        train_labels: (n,) int64 in range(classes), or (n, *places) where there is a label at every
            place, such as the next character; any target of the loss where classes is 0.
        test_inputs, test_labels: the common test set, in the same form.
        classes: how many labels there are; 0 where labels are no classes.
        scale, shift: a batch enters a model as float(x) * scale + shift; numbers, or arrays that
            broadcast over the shape of one example. A tuple of them is one for each part.
        train_groups, test_groups: (n,) int64, the person, author or place that an example came
            from, by the same numbers in both halves; None where that is not known.
        train_protected, test_protected: (n, k) int64 of 0 and 1, the k protected attributes of
            every example; None where there are none.
        protected: the names of these k attributes.
        notes: warnings to show before a run, one line each.
    """

    train_inputs: Parts
    train_labels: Array
    test_inputs: Parts
    test_labels: Array
    classes: int
    scale: Parts = 1.0
    shift: Parts = 0.0
    train_groups: NDArray[np.int64] | None = None
    test_groups: NDArray[np.int64] | None = None
    train_protected: NDArray[np.int64] | None = None
    test_protected: NDArray[np.int64] | None = None
    protected: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_sequence(self) -> bool:
        """Whether an example has a label at each of several places."""
        return bool(self.classes) and self.train_labels.ndim > 1


def checked(data: Data) -> Data:
    """Return a data set as arrays in dtypes of torch, labels and groups as int64.

    Raises:
        InputError: no `Data`; values that are no numbers, or not finite in inputs, scale or shift;
            unequal lengths or no examples; targets that are not finite; test inputs of another
            shape than the training inputs; labels that are not whole numbers in range(classes), or
            an example without a label;
            groups that are not one whole number per example; or protected attributes that are not
            one 0 or 1 per example and name.
    """
    if not isinstance(data, Data):
        raise InputError(
            f"data must be a dfl.Data, not {shown(data)}: write dfl.Data(train_inputs, ...)"
        )
    if not (_is_whole(data.classes) and 0 <= data.classes <= MOST_CLASSES):
        raise InputError(
            f"classes must be a whole number from 0 to {MOST_CLASSES:,}, not {shown(data.classes)}"
        )
    names = ("inputs", "labels", "groups", "protected")
    optional = ("groups", "protected")
    arrays: dict[str, Any] = {
        name: _arrays(name, value)
        for name in (f"{half}_{name}" for half in ("train", "test") for name in names)
        if (value := getattr(data, name)) is not None or not name.endswith(optional)
    }
    for half in ("train", "test"):
        _check_examples(half, arrays[f"{half}_inputs"], arrays[f"{half}_labels"])
        arrays |= _whole_numbers(half, arrays, int(data.classes))
    _check_same_form(arrays["train_inputs"], arrays["test_inputs"])
    _check_protected(data, arrays)
    normalization = {
        name: _factors(name, getattr(data, name), arrays["train_inputs"])
        for name in ("scale", "shift")
    }
    return replace(data, classes=int(data.classes), **arrays, **normalization)


def _is_whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _arrays(name: str, value: Any) -> Parts:
    """Return a caller's values as an array, or inputs of several parts as a tuple of arrays."""
    if not (isinstance(value, tuple) and name.endswith("inputs")):
        return as_array(name, value)
    if len(value) < 2:
        raise InputError(f"{name} is a tuple of {len(value)} arrays: give two parts, or an array")
    return tuple(as_array(f"{name}[{k}]", part) for k, part in enumerate(value))


def as_array(name: str, value: Any) -> Array:
    """Return a caller's values as an array in a dtype of torch."""
    torch = sys.modules.get("torch")
    with in_one_line(f"{name} must be an array of numbers"):
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
        if np.ma.is_masked(value):
            raise InputError(f"{name} has masked values: fill them or leave these examples out")
        array = np.asarray(value)
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "biuf" or size > 8 or not array.ndim:
        found = f"{shown(value)} of dtype {array.dtype}"
        raise InputError(f"{name} must be an array of whole numbers or floats, not {found}")
    if kind == "u" and size > 1:
        if size == 8 and array.size and array.max() > np.iinfo(np.int64).max:
            raise InputError(f"{name} has {array.max()}, which is no int64")
        return array.astype(np.int64)
    return array.astype(np.uint8 if kind == "b" else array.dtype.newbyteorder("="), copy=False)


def _check_examples(half: str, values: Parts, labels: Array) -> None:
    """Raise an error for unequal numbers of examples and labels, empty examples, and inputs that
    are not finite.
    """
    for k, part in enumerate(parts_of(values)):
        name = f"{half}_inputs[{k}]" if isinstance(values, tuple) else f"{half}_inputs"
        _check_part(half, name, part, labels)


def _check_part(half: str, name: str, inputs: Array, labels: Array) -> None:
    if len(inputs) != len(labels) or not len(labels):
        raise InputError(
            f"{len(inputs)} {half} inputs with {len(labels)} labels: as many of each, and at least "
            "one"
        )
    if not inputs.size:
        raise InputError(f"{name} of shape {inputs.shape} have examples without numbers")
    _check_finite(name, inputs)
    if labels.size:
        _check_finite(f"{half}_labels", labels)


def _check_finite(name: str, values: Array) -> None:
    # A NaN is the minimum and the maximum.
    if values.dtype.kind == "f" and not np.isfinite([values.min(), values.max()]).all():
        place = tuple(np.argwhere(~np.isfinite(values))[0].tolist())
        raise InputError(f"{name} has {values[place]} at {place}: it must be finite")


def _whole_numbers(half: str, arrays: Arrays, classes: int) -> dict[str, NDArray[np.int64]]:
    """Return the groups of one half, and its labels if they are classes, as int64."""
    whole: dict[str, NDArray[np.int64]] = {}
    labels, n = arrays[f"{half}_labels"], len(arrays[f"{half}_labels"])
    if classes:
        _check_classes(half, labels, arrays["train_labels"].shape[1:], classes)
        whole[f"{half}_labels"] = labels.astype(np.int64, copy=False)
    if (groups := arrays.get(f"{half}_groups")) is not None:
        if groups.dtype.kind not in "iu" or groups.shape != (n,):
            raise InputError(
                f"{half}_groups of shape {groups.shape} as {groups.dtype}: they must be whole "
                f"numbers, one for each of {n} examples"
            )
        whole[f"{half}_groups"] = groups.astype(np.int64, copy=False)
    return whole


def _check_classes(half: str, labels: Array, places: tuple[int, ...], classes: int) -> None:
    """Raise an error for labels that are no whole numbers in range(classes) at some places."""
    sequences = labels.ndim > 1
    good = labels.dtype.kind in "iu" and labels.size and labels.shape[1:] == places
    if good:
        counted = labels[labels != IGNORED] if sequences else labels
        good = bool(counted.size) and counted.min() >= 0 and counted.max() < classes
    if not good and labels.shape[1:] != places:
        raise InputError(
            f"test_labels of shape {labels.shape} and train_labels with {shown_shape(places) or 1} "
            "for an example: as many in both halves"
        )
    if not good:
        ends = f"from {labels.min()} to {labels.max()} " if labels.size else ""
        or_padded = f" or {IGNORED}" if sequences else ""
        raise InputError(
            f"{half}_labels {ends}of shape {labels.shape} as {labels.dtype}: they must be "
            f"whole numbers in range({classes}){or_padded} of shape "
            f"{(len(labels), *places)}, or classes=0 and a loss of your own"
        )
    if sequences:
        empty = (labels == IGNORED).reshape(len(labels), -1).all(1)
        if empty.any():
            raise InputError(
                f"{half}_labels of example {int(empty.argmax())} are all {IGNORED}: leave out "
                "examples without a label"
            )


def _check_same_form(train: Parts, test: Parts) -> None:
    """Raise an error unless both halves have one shape, and both floats or both not."""
    if shape_of(train) != shape_of(test):
        raise InputError(
            f"test_inputs have examples of shape {shown_shape(shape_of(test))}, and train_inputs "
            f"of {shown_shape(shape_of(train))}"
        )
    for one, other in zip(parts_of(train), parts_of(test), strict=True):
        if (one.dtype.kind == "f") != (other.dtype.kind == "f"):
            raise InputError(
                f"test_inputs are {other.dtype}, and train_inputs {one.dtype}: both floats or both "
                "not"
            )


def _check_protected(data: Data, arrays: Arrays) -> None:
    """Convert protected attributes in `arrays` to int64.

    Raises:
        InputError: they are not a 0 or 1 for every example and name, in both halves or in none.
    """
    for half in ("train", "test"):
        name, n = f"{half}_protected", len(arrays[f"{half}_labels"])
        if name not in arrays and data.protected:
            raise InputError(
                f"no {name}: data that name {', '.join(data.protected)} have it in both halves"
            )
        if name not in arrays:
            continue
        z = arrays[name]
        right = z.dtype.kind in "iu" and z.shape == (n, len(data.protected)) and data.protected
        if not (right and np.isin(z, (0, 1)).all()):
            raise InputError(
                f"{name} of shape {z.shape} as {z.dtype}, {len(data.protected)} names in protected"
                f": it must be 0 or 1, one for each of {n} examples and each name"
            )
        arrays[name] = z.astype(np.int64, copy=False)


def _factors(name: str, value: Any, inputs: Parts) -> Parts:
    """Return a scale or shift for inputs, or one for each of their parts."""
    if isinstance(inputs, tuple) and isinstance(value, tuple) and len(value) != len(inputs):
        raise InputError(f"{name} has {len(value)} parts, and inputs have {len(inputs)}")
    return map_parts(lambda part, one: _factor(name, one, part.shape[1:]), inputs, value)


def _factor(name: str, value: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a scale or shift as an array that broadcasts over one example of `shape`."""
    try:
        array = np.asarray(value, np.float64)
        fits = np.broadcast_shapes(array.shape, shape) == shape
    except (ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{name} must be a number or an array for examples of shape {shape}: {one_line(error)}"
        ) from None
    if not (fits and np.isfinite(array).all()):
        raise InputError(
            f"{name} must be finite and broadcast over examples of shape {shape}, not "
            f"{shown(value)}"
        )
    return array
