"""Values as text: how they are written in flags and options, and how messages show them."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from dfl.core.errors import InputError


class Kind(NamedTuple):
    """A type of values.

    Attributes:
        read: parses the text of a value; raises a ValueError.
        types: the Python types of a value.
        meant: the name of such a value in messages.
    """

    read: Callable[[str], object]
    types: tuple[type, ...]
    meant: str

    def holds(self, value: object) -> bool:
        """Return whether a value is of this kind; True is no number."""
        if isinstance(value, tuple) and tuple in self.types:
            return all(map(KINDS["int"].holds, value))
        return isinstance(value, self.types) and (bool in self.types or not isinstance(value, bool))


def _whole(text: str) -> int:
    # int() also takes 1_000 and the digits of every script.
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError
    return int(text)


def _number(text: str) -> float:
    value = float(text) if re.fullmatch(r"[-+.0-9eE]+", text) else math.nan
    if not math.isfinite(value):
        raise ValueError
    return value


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _path(text: str) -> Path:
    if not text or "\0" in text:
        raise ValueError
    return Path(os.path.expanduser(text))


KINDS = {
    "int": Kind(_whole, (int,), "a whole number"),
    "float": Kind(_number, (int, float), "a number"),
    "bool": Kind(_truth, (bool,), "true or false"),
    "str": Kind(str, (str,), "text"),
    "Path": Kind(_path, (Path,), "a path"),
    "tuple[int, ...]": Kind(
        lambda text: tuple(map(_whole, text.split("+"))),
        (tuple,),
        "whole numbers joined by +, as 200+200",
    ),
}
"""The kinds of values, by the annotation of the field or parameter that takes them."""


def read(where: str, text: str, kind: str) -> Any:
    """Parse the text of a flag or an option.

    Args:
        where: the flag or option, for the message.
        text: what the user wrote.
        kind: the type of the value, as an annotation spells it.

    Raises:
        InputError: the text is not of that type.
    """
    try:
        return KINDS[kind].read(text)
    except ValueError:
        raise InputError(f"{where} must be {KINDS[kind].meant}, not {shown(text)}") from None


def nearest(name: str, known: list[str]) -> str:
    """Return the end of a message about an unknown name: the nearest name, and the choices."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{hint}; choose from {', '.join(known)}" if known else "; it has none"


def shown(value: object) -> str:
    """Return a value as messages show it: its repr if that is one short line, else its type.

    Of a long text the beginning is shown.
    """
    if isinstance(value, str) and len(value) > 80:
        return f"{value[:60]!r}... ({len(value)} characters)"
    try:
        text = repr(value)
    except Exception:
        text = ""
    short = isinstance(value, str) or (0 < len(text) <= 80 and text.isprintable())
    return text if short else f"a value of type {type(value).__name__}"


def unquoted(value: object) -> str:
    """Return a value as settings have it, without quotes."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
