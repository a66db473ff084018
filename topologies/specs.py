"""Specs of graphs and rules in text: `name` or `name:key=value,key=value`."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from topologies.errors import GraphError

T = TypeVar("T")

READERS: dict[type, Callable[[str], Any]] = {
    int: int,
    float: float,
    str: str,
    Path: Path,
    bool: lambda text: {"true": True, "false": False}[text],
}
"""How a value of each type is read."""


def choose(spec: str, registry: Mapping[str, Callable[..., T]]) -> partial[T]:
    """Return the function that a spec names, with its options bound.

    Raises:
        GraphError: an unknown name or option, an option given twice, or a value of another type.
    """
    name, _, rest = spec.partition(":")
    if name not in registry:
        raise GraphError(f"unknown {name!r}; choose from {', '.join(registry)}")
    hints = get_type_hints(registry[name])
    known = {
        key: hints[key]
        for key, each in inspect.signature(registry[name]).parameters.items()
        if each.kind is each.KEYWORD_ONLY
    }
    given: dict[str, Any] = {}
    for item in rest.split(",") if rest else []:
        key, _, text = item.partition("=")
        if key not in known:
            there = f"choose from {', '.join(known)}" if known else "it has none"
            raise GraphError(f"{name}: unknown option {key!r}; {there}")
        if key in given:
            raise GraphError(f"{name}: option {key!r} is given twice; give it once")
        given[key] = _read(f"{name}: {key}", known[key], text)
    for key, each in inspect.signature(registry[name]).parameters.items():
        if key in known and each.default is each.empty and key not in given:
            raise GraphError(f"{name} needs {key}: write {name}:{key}=VALUE")
    return partial(registry[name], **given)


def _read(where: str, hint: Any, text: str) -> Any:
    """Return a value of the annotated type."""
    if get_origin(hint) is Literal:
        if text not in get_args(hint):
            raise GraphError(f"{where} must be one of {', '.join(get_args(hint))}, not {text!r}")
        return text
    (kind,) = {*(get_args(hint) or [hint])} - {NoneType}
    try:
        return READERS[kind](text)
    except (KeyError, ValueError):
        raise GraphError(f"{where} must be {kind.__name__}, not {text!r}") from None
