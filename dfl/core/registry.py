"""How is a component chosen? By a spec, `name` or `name:key=value,key=value`, against a registry."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dfl.core.errors import InputError
from dfl.core.parse import nearest, read, shown

Component = Callable[..., Any]


def flag(name: str) -> str:
    """The flag of a field: local_steps -> --local-steps."""
    return "--" + name.replace("_", "-")


def choose(where: str, spec: str, registry: Mapping[str, Component]) -> partial[Any]:
    """Read a spec `name` or `name:key=value,key=value` against a registry.

    A component's options are its keyword-only parameters; their annotations say how a value is read.

    Args:
        where: the flag, for messages.
        spec: what the user wrote.
        registry: name -> component.

    Returns:
        The component with its options bound.

    Raises:
        InputError: an unknown name or option, a value of the wrong kind, or a missing option.
    """
    name, colon, rest = spec.partition(":")
    if name not in registry:
        raise InputError(f"{where}: unknown {shown(name)}{nearest(name, list(registry))}")
    known, given = options(registry[name]), {}
    for item in rest.split(",") if colon else []:
        key, equals, text = item.partition("=")
        if key not in known:
            raise InputError(
                f"{where} {name}: unknown option {shown(key)}{nearest(key, list(known))}"
            )
        if not equals or key in given:
            raise InputError(
                f"{where} {name}: options are written {key}=VALUE, each once, not {shown(rest)}"
            )
        given[key] = read(f"{where} {name}: {key}", text, _kind(known[key]))
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise InputError(
                f"{where} {name} needs {key}: write {name}:{key}={_kind(parameter).upper()}"
            )
    return partial(registry[name], **given)


def choose_several(where: str, specs: str, registry: Mapping[str, Component]) -> list[partial[Any]]:
    """Read specs that are joined by +; a + that no name follows belongs to an option.

    Raises:
        InputError: as `choose` does, or a component that is named twice.
    """
    found = [choose(where, spec, registry) for spec in re.split(r"\+(?=[A-Za-z])", specs)]
    if len({each.func for each in found}) < len(found):
        raise InputError(f"{where} {specs} names something twice: give each once")
    return found


def options(component: Component) -> dict[str, inspect.Parameter]:
    """The options of a component, by name."""
    parameters = inspect.signature(component).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def describe(registry: Mapping[str, Component]) -> str:
    """Every component of a registry with its options and their defaults, for --help."""
    return " · ".join(map(_usage, registry, registry.values()))


def _usage(name: str, component: Component) -> str:
    shown = [_option(key, parameter) for key, parameter in options(component).items()]
    return f"{name}:{','.join(shown)}" if shown else name


def _option(key: str, parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty or value is None:
        text = f"{key}={_kind(parameter).upper().replace('TUPLE[INT, ...]', 'A+B')}"
        return text if value is not None else f"[{text}]"
    if isinstance(value, tuple):
        return f"{key}={'+'.join(map(str, value))}"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _kind(parameter: inspect.Parameter) -> str:
    """An option's type, as its annotation spells it, without `None`."""
    spelled = parameter.annotation
    text = spelled if isinstance(spelled, str) else getattr(spelled, "__name__", str(spelled))
    return text.removesuffix(" | None")
