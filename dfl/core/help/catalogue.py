"""The components that there are to choose from as text: `--help KIND`, `dfl list`."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dfl.core.errors import InputError
from dfl.core.help.docstrings import cited, described
from dfl.core.options import MOST, Component, Option, options
from dfl.core.parse import nearest, shown
from dfl.core.registry import Registry, package_of, written

_SAMPLES = {
    "int": "2",
    "float": "0.5",
    "bool": "true",
    "str": "NAME",
    "Path": "FILE",
    "tuple[int, ...]": "1+2",
}
"""Values of options without a default in examples, by kind."""

Registries = Iterable[Registry[Any]]


def kind_of(registry: Registry[Any]) -> str:
    """Return what the components of a registry are called together: topologies."""
    return registry.group.removeprefix("dfl.")


def find(kind: str, registries: Registries) -> Registry[Any]:
    """Return the registry of a kind, which its plural or its flag names.

    Raises:
        InputError: there is no such kind.
    """
    plurals = {kind_of(each): each for each in registries}
    flags = {each.flag: each for each in reversed(plurals.values())}  # the first of a name stays
    ends = {name.rpartition(".")[2]: each for name, each in reversed(plurals.items())}
    found = ends.get(kind) or plurals.get(kind)
    found = found or flags.get("--" + kind.removeprefix("--").replace("_", "-"))
    if found is None:
        raise InputError(f"unknown kind {shown(kind)}{nearest(kind, list(plurals))}")
    return found


def overview(registries: Registries, width: int) -> str:
    """Return the kinds with their flags and the names of their components."""
    return "\n\n".join(
        f"{kind_of(each)} ({each.flag})\n" + filled(", ".join(each), width, "  ")
        for each in registries
    )


def page(registry: Registry[Any], names: Sequence[str], command: str, width: int) -> str:
    """Return components with their options, sources and examples.

    Args:
        registry: of the kind.
        names: the components, which are then shown with all that their docstrings state; all of the
            kind where empty. Those of other packages are imported where they are named.
        command: the beginning of an example, before the flag.
        width: columns of the text.

    Raises:
        InputError: there is no component of such a name, or its package cannot be imported.
    """
    for name in names:
        if name not in registry:
            known = list(registry)
            raise InputError(f"{kind_of(registry)}: unknown {shown(name)}{nearest(name, known)}")
    shared = Counter(getattr(registry[n], "__module__", "") for n in _here(registry))
    entries = [f"{len(registry)} {kind_of(registry)}, for {registry.flag}"] if not names else []
    for name in names or registry:
        if not names and name in registry.installed:
            entries.append(f"{name}\n  of {package_of(registry.installed[name])}")
            continue
        component = registry[name]
        alone = shared[getattr(component, "__module__", "")] < 2
        more = getattr(component, "example_flags", "")
        example = f"{command} {registry.flag} {_example(name, component)} {more}".rstrip()
        entries.append(_entry(name, component, alone, bool(names), width) + f"\n  $ {example}")
    return "\n\n".join(entries)


def filled(text: str, width: int, indent: str, first: str | None = None) -> str:
    """Return a text in lines of at most `width` columns, the first of which begins otherwise."""
    return textwrap.fill(
        text, max(width, 40), initial_indent=indent if first is None else first,
        subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _here(registry: Registry[Any]) -> list[str]:
    return [name for name in registry if name not in registry.installed]


def _entry(name: str, component: Component, alone: bool, whole: bool, width: int) -> str:
    """Return a component with its options and its source.

    Args:
        name: what the command line calls it.
        component: the class or the function.
        alone: whether its module has no other component, so that the module's source is its own.
        whole: whether to show its docstring to the end.
        width: columns of the text.
    """
    known = described(component)
    lines = [name, filled(known.summary, width, "  ")]
    if whole and known.body:
        lines += ["", textwrap.indent(known.body, "  "), ""]
    lines += _options(component, known.options, width)
    module = sys.modules.get(getattr(component, "__module__", ""))
    papers = [*cited(module.__doc__ or "")] if alone and module else []
    source = "; ".join(dict.fromkeys([*papers, *([known.source] if known.source else [])]))
    if source:
        lines.append(filled(source, width, "    ", "  source: "))
    return "\n".join(lines)


def _options(component: Component, meanings: Mapping[str, str], width: int) -> list[str]:
    """Return a line, or several, for each option: default, meaning and range."""
    known = {key: (written(key, option), option) for key, option in options(component).items()}
    column = min(max((len(spelled) for spelled, _ in known.values()), default=0), 24)
    lines = []
    for key, (spelled, option) in known.items():
        text = " ".join(filter(None, (meanings.get(key), _accepted(option, meanings.get(key, "")))))
        first = f"    {spelled:<{column}}  "
        lines.append(filled(text, width, " " * (column + 6), first) or first.rstrip())
    return lines


def _accepted(option: Option, meaning: str) -> str:
    """Return the values that an option takes, unless its meaning or its default shows them."""
    if option.choices:
        return "" if all(each in meaning for each in option.choices) else f"[{option.accepted}]"
    if not option.bounds:
        return "" if meaning or not option.required else f"[{option.accepted}]"
    low, high = option.bounds.get("ge"), option.bounds.get("le")
    return f"[{low} or more]" if high == MOST else f"[{option.accepted}]"


def _example(name: str, component: Component) -> str:
    """Return a spec of the component: with what it needs, else with its first option."""
    if stated := getattr(component, "example_options", ""):
        return f"{name}:{stated}"
    known = options(component)
    needed = [f"{key}={_sample(option)}" for key, option in known.items() if option.required]
    given = [written(k, o) for k, o in known.items() if not o.required and o.default is not None]
    chosen = needed or given[:1]
    return f"{name}:{','.join(chosen)}" if chosen else name


def _sample(option: Option) -> str:
    return option.choices[0] if option.choices else _SAMPLES[option.spelled]
