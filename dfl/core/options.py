"""Options of components and fields of settings: kinds, ranges and choices, from their annotations.

A component is a class or a function whose keyword-only parameters are its options. A range stands
in the annotation, in the terms of `annotated-types`, and choices are a `Literal`:

    fraction: Annotated[float, Interval(ge=0, le=1)] = 1.0
    weighting: Literal["examples", "uniform"] = "examples"
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import NoneType, SimpleNamespace, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, GroupedMetadata, Gt, Interval, Le, Lt

from dfl.core.errors import InputError, one_line
from dfl.core.parse import KINDS, Kind, read, shown

MOST = 2**31 - 1
"""The largest count, as of rounds or peers."""

Count = Annotated[int, Interval(ge=1, le=MOST)]
"""A whole number, 1 or more."""
Index = Annotated[int, Interval(ge=0, le=MOST)]
"""A whole number, 0 or more."""
Share = Annotated[float, Interval(ge=0, le=1)]
"""A share or a probability, from 0 to 1."""
Positive = Annotated[float, Gt(0)]
"""A number above 0."""
NotNegative = Annotated[float, Ge(0)]
"""A number, 0 or more."""
BelowOne = Annotated[float, Interval(ge=0, lt=1)]
"""A number, 0 or more and below 1."""

Component = Callable[..., Any]
_C = TypeVar("_C", bound=Component)
_BOUNDS = {Ge: "ge", Gt: "gt", Le: "le", Lt: "lt"}


@dataclass(frozen=True)
class Option:
    """An option of a component, or a field of settings.

    Attributes:
        spelled: its type as an annotation spells it, a key of `KINDS`.
        default: its value where it is not given; `inspect.Parameter.empty` where it is required.
        optional: whether None is a value.
        choices: the texts that are accepted; empty where any is.
        bounds: the range of its value, or of each of several values, by "ge", "gt", "le" and "lt".
    """

    spelled: str
    default: object
    optional: bool
    choices: tuple[str, ...]
    bounds: Mapping[str, float]

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def kind(self) -> Kind:
        """The kind of its values."""
        return KINDS[self.spelled]

    @functools.cached_property
    def accepted(self) -> str:
        """A phrase for the values that it takes, for messages."""
        if self.choices:
            *most, last = self.choices
            return f"{', '.join(most)} or {last}" if most else last
        if not self.bounds:
            return self.kind.meant
        each = " each" if tuple in self.kind.types else ""
        return _range(self.bounds) + each

    def read(self, where: str, text: str) -> Any:
        """Read a value as it is written in a flag or a spec.

        Args:
            where: the flag or the option, for the message.
            text: what the user wrote.

        Raises:
            InputError: it is of another kind, or out of the range.
        """
        return self.check(where, read(where, text, self.spelled))

    def check(self, where: str, value: Any) -> Any:
        """Return a value as a plain Python value: numpy scalars become Python numbers.

        Raises:
            InputError: it is of another kind, out of the range, or none of the choices.
        """
        if value is None and self.optional:
            return value
        value = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
        if not self.kind.holds(value):
            meant = self.accepted if self.choices else self.kind.meant
            raise InputError(f"{where} must be {meant}, not {shown(value)}")
        require(all(map(self._inside, _several(value))), where, self.accepted, value)
        return value

    def _inside(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if float in self.kind.types and not abs(value) <= sys.float_info.max:
            return False  # NaN, infinity, or a whole number beyond the largest float
        low, above = self.bounds.get("ge"), self.bounds.get("gt")
        high, below = self.bounds.get("le"), self.bounds.get("lt")
        return (
            (low is None or value >= low)
            and (above is None or value > above)
            and (high is None or value <= high)
            and (below is None or value < below)
        )


def _several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def require(good: bool, where: str, accepted: str, value: object) -> None:
    """Raise an error unless a value of an option fits the run and the other options.

    Args:
        good: whether it fits.
        where: the option, as "--faults leave: peers".
        accepted: the values that would fit, for the message.
        value: the value.

    Raises:
        InputError: `good` is False.
    """
    if not good:
        text = "+".join(map(str, value)) if isinstance(value, tuple) else shown(value)
        raise InputError(f"{where} must be {accepted}, not {text}")


def check_chosen(where: str, fraction: float | None, peers: tuple[int, ...] | None) -> None:
    """Refuse a choice of peers by a share and by number at once, or of none by number.

    Args:
        where: the component, as "--faults leave".
        fraction: the share of all peers; None where not given.
        peers: the peers by number; None where not given.

    Raises:
        InputError: both are given, or no peer is.
    """
    if peers is None:
        return
    if fraction is not None:
        raise InputError(
            f"{where}: fraction {fraction:g} and peers {'+'.join(map(str, peers))} both choose "
            "peers: give one of them"
        )
    if not peers:
        raise InputError(f"{where}: peers must be at least one peer, not ()")


def _plain(value: object) -> object:
    """Return a numpy scalar as a Python number; anything else as it is."""
    numpy = sys.modules.get("numpy")  # without it there are no numpy scalars
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _range(bounds: Mapping[str, float]) -> str:
    """Return a phrase for a range."""
    text = {name: str(b) if isinstance(b, int) else f"{b:g}" for name, b in bounds.items()}
    if text.keys() == {"ge", "le"}:
        return f"from {text['ge']} to {text['le']}"
    if text == {"gt": "0"}:
        return "a positive number"
    phrases = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return " and ".join(f"{phrases[name]} {text[name]}" for name in phrases if name in text)


def options(component: Component) -> Mapping[str, Option]:
    """Return the options of a component, its keyword-only parameters, by name.

    Raises:
        InputError: an option has no annotation, or one of a type that a spec cannot spell.
    """
    return _options(component)


@functools.cache
def _options(component: Component) -> Mapping[str, Option]:
    parameters = inspect.signature(component).parameters.values()
    return {
        each.name: _option(component, each.name, each.default)
        for each in parameters
        if each.kind is each.KEYWORD_ONLY
    }


def has_default(component: Component, name: str) -> bool:
    """Return whether a component has a parameter of this name with a default."""
    parameter = inspect.signature(component).parameters.get(name)
    return parameter is not None and parameter.default is not parameter.empty


def _option(component: Component, name: str, default: object) -> Option:
    try:
        hint = _annotation(component, name)
        optional = get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint)
        if optional:
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        hint, bounds = _bounds(hint)
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        spelled = "str" if choices else _spelled(hint)
        if get_origin(hint) is tuple:
            element, bounds = _bounds(get_args(hint)[0])
            spelled = f"tuple[{_spelled(element)}, ...]"
        return Option(_known(spelled), default, optional, choices, bounds)
    except (NameError, ValueError, TypeError) as error:
        where = getattr(component, "__qualname__", component)
        raise InputError(
            f"option {name} of {where} must be annotated as one of {', '.join(KINDS)}, or choices: "
            f"{error}"
        ) from None


def _spelled(hint: object) -> str:
    return getattr(hint, "__name__", str(hint))


def _known(spelled: str) -> str:
    if spelled not in KINDS:
        raise TypeError(f"{spelled} is none of them")
    return spelled


def _annotation(component: Component, name: str) -> Any:
    """Return the annotation of one parameter, resolved in the module that defines it.

    Those of other parameters are not resolved: they may name types that are imported for type
    checking only.
    """
    if isinstance(component, type):
        for each in component.__mro__:
            if name in (found := vars(each).get("__annotations__", {})):
                return _resolved(name, found, vars(sys.modules[each.__module__]))
        component = component.__init__  # type: ignore[misc]  # it is a class's own
    function = inspect.unwrap(component)
    return _resolved(name, function.__annotations__, getattr(function, "__globals__", {}))


def _resolved(name: str, annotations: Mapping[str, object], names: dict[str, Any]) -> Any:
    if name not in annotations:
        raise TypeError("it has no annotation")
    one = SimpleNamespace(__annotations__={name: annotations[name]})
    return get_type_hints(one, names, include_extras=True)[name]


def _bounds(hint: Any) -> tuple[Any, dict[str, float]]:
    """Return a type without its annotations, and the bounds among them."""
    if get_origin(hint) is not Annotated:
        return hint, {}
    kind, *metadata = get_args(hint)
    return kind, {_BOUNDS[type(b)]: getattr(b, _BOUNDS[type(b)]) for b in _flat(metadata)}


def _flat(metadata: Iterable[object]) -> Iterator[object]:
    for each in metadata:
        if isinstance(each, GroupedMetadata):
            yield from _flat(each)
        elif type(each) in _BOUNDS:
            yield each


def checked(where: str, component: _C) -> _C:
    """Make a component check the kinds and ranges of its options when it is called.

    The constructor of a class checks them, before `__post_init__`; a function is wrapped.

    Args:
        where: the name of the component in messages, as "--faults link_loss".
        component: the class, which is altered, or the function.

    Returns:
        The class, or the wrapped function. Called with a value of another kind or out of its range,
        it raises an `InputError`. So does a class where its constructor raises a ValueError.
    """
    call = component.__init__ if isinstance(component, type) else component  # type: ignore[misc]

    @functools.wraps(call)
    def checking(*args: object, **given: object) -> object:
        known = options(component)
        values = {
            name: known[name].check(f"{where}: {name}", value) if name in known else value
            for name, value in given.items()
        }
        try:
            return call(*args, **values)
        except ValueError as error:
            if isinstance(error, InputError) or not isinstance(component, type):
                raise
            raise InputError(f"{where}: {one_line(error)}") from error

    if isinstance(component, type):
        component.__init__ = checking  # type: ignore[misc]
        return component
    return checking  # type: ignore[return-value]
