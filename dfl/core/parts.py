"""Inputs of several parts, such as an image and a question: tuples of arrays or of tensors.

Where there is one part, it is an array or a tensor and no tuple. A model takes the parts as its
arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Parts: TypeAlias = Any
"""An array or a tensor, or a tuple of them."""
Shape: TypeAlias = tuple[Any, ...]
"""The shape of an example: numbers; or, of several parts, a tuple of their shapes."""

IMAGE = 3
"""The axes of an image: channels, height and width."""


def parts_of(value: Parts) -> tuple[Any, ...]:
    """Return the parts as a tuple, also where there is only one."""
    return value if isinstance(value, tuple) else (value,)


def map_parts(f: Callable[..., Any], value: Parts, *others: Parts) -> Parts:
    """Return f(part), or f(part, ...) with the same part of other values, in the form of `value`.

    Another value of one part goes with every part.
    """
    if not isinstance(value, tuple):
        return f(value, *others)
    rest = (other if isinstance(other, tuple) else (other,) * len(value) for other in others)
    return tuple(map(f, value, *rest))


def shape_of(value: Parts) -> Shape:
    """Return the shape of an example, given n of them, (n, *shape)."""
    shape: Shape = map_parts(lambda part: tuple(part.shape[1:]), value)
    return shape


def numbers_of(value: Parts) -> int:
    """Return how many numbers an example has, given n of them, (n, *shape)."""
    return sum(math.prod(part.shape[1:]) for part in parts_of(value))


def shapes_of(shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the parts of an example as a tuple, also where there is only one."""
    return shape if shape and isinstance(shape[0], tuple) else (shape,)


def images_in(shape: Shape) -> tuple[int, ...]:
    """Return which parts of an example are images, channels x height x width; the first part where
    none is one.
    """
    return tuple(k for k, one in enumerate(shapes_of(shape)) if len(one) == IMAGE) or (0,)


def shown_shape(shape: Shape) -> str:
    """Return the shape of an example for a message: 3x32x32, or 3x32x32 and 12."""
    return " and ".join("x".join(map(str, one)) for one in shapes_of(shape))


def named(name: str, value: Parts) -> dict[str, Any]:
    """Return arrays by name: `name`, or "`name` part 0" and so on where there are several."""
    if not isinstance(value, tuple):
        return {name: value}
    return {f"{name} part {k}": part for k, part in enumerate(value)}


def joined(arrays: Mapping[str, Any], name: str) -> Parts:
    """Return the inverse of `named`."""
    if name in arrays:
        return arrays[name]
    count = sum(key.startswith(f"{name} part ") for key in arrays)
    return tuple(arrays[f"{name} part {k}"] for k in range(count))
