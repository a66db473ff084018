"""The error of this package."""

from collections.abc import Callable, Mapping
from typing import Any


class GraphError(ValueError):
    """A graph, option, file or matrix that cannot be used.

    The message is one line that names the thing, the value and what would be accepted.
    """


def refuse_clash(
    kind: str, there: Mapping[str, Callable[..., Any]], function: Callable[..., Any]
) -> None:
    """Refuse a function whose name another one has; the same definition may come again, as when a
    cell of a notebook is run twice.

    Raises:
        GraphError: another function has the name.
    """
    name = function.__name__
    one, other = (
        f"{each.__module__}:{each.__qualname__}" for each in (there.get(name, function), function)
    )
    if one != other:
        raise GraphError(f"{kind} {name} is both {one} and {other}: keep one of them")
