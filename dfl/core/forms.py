"""Calls of a caller's own component, and the form of the arrays and tensors that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dfl.core.errors import InputError, in_one_line
from dfl.core.parse import shown


def called(what: str, call: Callable[[], Any]) -> Any:
    """Return what a component returns, without warnings of NumPy.

    Args:
        what: the beginning of a message, as "--attack own:Mine".
        call: calls the component.

    Raises:
        InputError: the component fails.
    """
    with in_one_line(f"{what} fails"), np.errstate(all="ignore"):
        return call()


def require_form(
    what: str, value: object, kind: type, shape: Sequence[int | str], dtype: object = None
) -> None:
    """Refuse a value that is no array, or no tensor, of a shape.

    Args:
        what: its name, as "--compressor own:Mine: 8 encoded messages".
        value: what a component returned.
        kind: the wanted class.
        shape: the numbers of its axes; a letter where any number will do.
        dtype: that of its elements; None where any will do.

    Raises:
        InputError: it has another form.
    """
    there = getattr(value, "shape", ())
    if (
        isinstance(value, kind)
        and len(there) == len(shape)
        and all(isinstance(n, str) or n == m for n, m in zip(shape, there, strict=True))
        and dtype in (None, getattr(value, "dtype", None))
    ):
        return
    wanted = _written(kind, shape, dtype)
    raise InputError(f"{what} must be {wanted}, not {form_of(value)}")


def form_of(value: object) -> str:
    """Return the class, the type and the shape of an array or a tensor as messages show them; of
    another value what `shown` returns.
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None:
        return shown(value)
    return _written(type(value), shape, dtype)


def _written(kind: type, shape: Sequence[int | str], dtype: object) -> str:
    of = "" if dtype is None else f" of {str(dtype).removeprefix('torch.')}"
    comma = "," if len(shape) == 1 else ""
    return f"{kind.__name__}{of} ({', '.join(map(str, shape))}{comma})"
