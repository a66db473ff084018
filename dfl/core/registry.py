"""Registries of components, from this package and others, and the specs that choose from them.

A spec is `name` or `name:key=value,key=value`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from dfl.core.errors import InputError, one_line
from dfl.core.options import Component, Option, checked, has_default, options
from dfl.core.parse import nearest, shown

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T", bound=Component)
_C = TypeVar("_C", bound=Component)
_R = TypeVar("_R")


BEGINNING = "[0-9]*[A-Za-z]"
"""The beginning of a name in a spec, by which a + before it is known to separate specs."""
OWN = "own"
"""The name in a spec that describes an object of the caller: own:MyMethod(beta=0.9)."""


def own(value: object) -> str:
    """Return the spec that describes an object of the caller in run.json and in messages."""
    return f"{OWN}:{_described(value)}"


def is_own(spec: object) -> bool:
    """Return whether a spec only describes an object."""
    return isinstance(spec, str) and spec.partition(":")[0] == OWN


def name_of(spec: object) -> str:
    """Return the name of a component: that in its spec, or the description of an object."""
    text = shown_spec(spec)
    name, _, rest = text.partition(":")
    return rest if name == OWN else name


def shown_spec(spec: object) -> str:
    """Return a spec as messages have it, an object as its description."""
    return str(spec) if isinstance(spec, str | int | float) else own(spec)


def _described(value: Any) -> str:
    """Return a short text that is the same in every process: no address of memory."""
    if isinstance(value, partial):
        return _described(value.func)
    if isinstance(value, list | tuple):
        return "+".join([*map(_described, value[:4]), *(["..."] if len(value) > 4 else [])])
    kind = type(value).__name__
    if hasattr(value, "number_of_nodes"):
        return f"{kind}({value.number_of_nodes()} nodes)"
    if isinstance(getattr(value, "shape", None), tuple):
        return f"{kind}{tuple(value.shape)}"
    if hasattr(value, "__name__"):
        return str(value.__name__)
    text = shown(value)
    return text if is_dataclass(value) and text.startswith(kind) and " at 0x" not in text else kind


def flag(name: str) -> str:
    """Return the flag of a field: local_steps -> --local-steps."""
    return "--" + name.replace("_", "-")


def example_with(flags: str = "", options: str = "") -> Callable[[_C], _C]:
    """Return a decorator that states what a command line that runs a component needs, as `--help`
    shows it.

    Args:
        flags: further flags.
        options: of the component, where those without a default and the first one do not do.
    """

    def state(component: _C) -> _C:
        setattr(component, "example_flags", flags)  # noqa: B010  no attribute of a function's type
        setattr(component, "example_options", options)  # noqa: B010
        return component

    return state


class Registry(Mapping[str, _T]):
    """The components of one kind, by the name that the command line uses.

    Other packages add theirs by entry points of the group, name = "package.module:component". Such
    a package is imported when one of its components is looked up, not when names are listed.

    Args:
        field: the field of `dfl.Run` that chooses a component, for messages.
        group: the group of the entry points.
        components: the first components; they are not made to check their options.

    Raises:
        InputError: on listing or looking up names: an installed package has a component under a
            name that is registered here or by another package; on looking one up: the package
            cannot be imported.
    """

    def __init__(self, field: str, group: str, components: dict[str, _T] | None = None) -> None:
        self.flag = flag(field)
        self.group = group
        self._registered: dict[str, _T] = {} if components is None else components
        self._loaded: dict[str, _T] = {}
        self._installed: dict[tuple[str, ...], Mapping[str, EntryPoint]] = {}

    def register(self, name: str) -> Callable[[_C], _C]:
        """Return a decorator that registers a class or a function under `name`.

        The component then checks its options (`dfl.core.options.checked`), and a class gets the
        attribute `name`. The same definition may be registered again, as when a cell of a notebook
        is run twice.

        Raises:
            InputError: another component has that name, or a spec cannot have it.
        """
        if not re.fullmatch(f"{BEGINNING}[A-Za-z0-9_-]*", name):
            raise InputError(
                f"{self.flag}: a component must have a name of letters, digits, _ and -, which "
                f"begins with a letter or digits before one, as my_component, not {shown(name)}"
            )

        def enter(component: _C) -> _C:
            if name in self._registered:
                self._refuse_clash(name, _path(self._registered[name]), _path(component))
            entered: _C = self._enter(name, component)
            self._registered[name] = entered  # type: ignore[assignment]  # a bound cannot be _T
            return entered

        return enter

    @contextmanager
    def replaced(self, **components: _T) -> Iterator[None]:
        """Replace the components of some names during a block."""
        before = dict(self._registered)
        self._registered.update(components)
        try:
            yield
        finally:
            self._registered.clear()
            self._registered.update(before)

    def only_here(self, name: str) -> bool:
        """Return whether a component was registered in this process by the caller's own code, which
        other processes do not run.
        """
        return (
            name in self._registered
            and name not in self.installed
            and not _path(self._registered[name]).startswith(("dfl.", "topologies."))
        )

    def _refuse_clash(self, name: str, one: str, other: str) -> None:
        if one != other:
            raise InputError(f"{self.flag} {name} is both {one} and {other}: keep one of them")

    def _enter(self, name: str, component: Any) -> Any:
        if isinstance(component, type):
            component.name = name  # type: ignore[attr-defined]
        return checked(f"{self.flag} {name}", component)

    @property
    def installed(self) -> Mapping[str, EntryPoint]:
        """The entry points of other packages, by name; they are read once.

        Raises:
            InputError: two packages, or a package and this one, have a component of the same name.
        """
        if (path := tuple(sys.path)) not in self._installed:
            found: dict[str, EntryPoint] = {}
            for each in _entry_points(path)(self.group):
                if each.name in found:
                    self._refuse_clash(each.name, _source(found[each.name]), _source(each))
                if each.name in self._registered:
                    there = _path(self._registered[each.name])
                    self._refuse_clash(
                        each.name, there, there if there == each.value else _source(each)
                    )
                found[each.name] = each
            self._installed[path] = dict(sorted(found.items()))
        return self._installed[path]

    def __getitem__(self, name: str) -> _T:
        installed = self.installed
        if name not in self._registered and name not in self._loaded:
            self._loaded[name] = self._load(name, installed[name])
        return self._registered[name] if name in self._registered else self._loaded[name]

    def _load(self, name: str, entry: EntryPoint) -> _T:
        try:
            component: _T = entry.load()
        except Exception as error:
            raise InputError(
                f"{self.flag} {name}: {package_of(entry)} cannot be imported ({one_line(error)})"
            ) from error
        if not callable(component):
            raise InputError(
                f"{self.flag} {name}: {_source(entry)} must be a class or a "
                f"function, not {shown(component)}"
            )
        if name in self._registered:  # its module called `register`
            return self._registered[name]
        entered: _T = self._enter(name, component)
        return entered

    def __contains__(self, name: object) -> bool:
        return name in self.installed or name in self._registered

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*self._registered, *self.installed]))

    def __len__(self) -> int:
        return len(list(iter(self)))


@cache
def _entry_points(path: tuple[str, ...]) -> Callable[[str], Iterable[EntryPoint]]:
    """Return a function that lists the entry points of a group, of all packages on `path`."""
    from importlib.metadata import entry_points

    found = entry_points()
    return lambda group: found.select(group=group)


def _source(entry: EntryPoint) -> str:
    return f"{entry.value} of package {entry.dist.name}" if entry.dist else entry.value


def package_of(entry: EntryPoint) -> str:
    """Return the package of an entry point, for messages."""
    return f"package {entry.dist.name}" if entry.dist else entry.module


def _path(component: Component) -> str:
    return f"{component.__module__}:{getattr(component, '__qualname__', component)}"


def choose(where: str, spec: str, registry: Mapping[str, Callable[..., _R]]) -> partial[_R]:
    """Read a spec `name` or `name:key=value,key=value` against a registry.

    Args:
        where: the flag, for messages.
        spec: the text of the user.
        registry: name -> component.

    Returns:
        The component with its options bound.

    Raises:
        InputError: an unknown name or option, a value of the wrong kind or out of its range, or a
            missing option.
    """
    name, colon, rest = spec.partition(":")
    if name == OWN:
        raise InputError(
            f"{where} {shown(rest)} is an object that the run was given: give it again, in Python"
        )
    if name not in registry:
        raise InputError(f"{where}: unknown {shown(name)}{nearest(name, list(registry))}")
    known = options(registry[name])
    given: dict[str, object] = {}
    for item in rest.split(",") if colon else []:
        key, equals, text = item.partition("=")
        if key not in known:
            if has_default(registry[name], key):
                raise InputError(
                    f"{where} {name}: {key} is no option, since it is not keyword-only: write "
                    "kw_only=True in its dataclass, or * before it in its function"
                )
            raise InputError(
                f"{where} {name}: unknown option {shown(key)}{nearest(key, list(known))}"
            )
        if not equals or key in given:
            raise InputError(
                f"{where} {name}: options are written {key}=VALUE, each once, not {shown(rest)}"
            )
        given[key] = known[key].read(f"{where} {name}: {key}", text)
    for key, option in known.items():
        if option.required and key not in given:
            raise InputError(
                f"{where} {name} needs {key}: write {name}:{key}={option.spelled.upper()}"
            )
    return partial(registry[name], **given)


def choose_several(
    where: str, specs: str, registry: Mapping[str, Callable[..., _R]]
) -> list[partial[_R]]:
    """Read specs that are joined by +.

    Raises:
        InputError: as for `choose`, or a component is named twice.
    """
    found = [choose(where, spec, registry) for spec in split_specs(specs)]
    if len({each.func for each in found}) < len(found):
        raise InputError(f"{where} {specs} names something twice: give each once")
    return found


def split_specs(specs: str) -> list[str]:
    """Split specs that are joined by +; a + that no name follows belongs to an option."""
    return re.split(rf"\+(?={BEGINNING})", specs)


def usage(name: str, component: Component) -> str:
    """Return a component as a spec has it, with its options and their defaults."""
    given = [written(key, option) for key, option in options(component).items()]
    return f"{name}:{','.join(given)}" if given else name


def written(key: str, option: Option) -> str:
    """Return an option as a spec has it, with its default or the kind of its value."""
    value = option.default
    if option.required or value is None:
        text = f"{key}={option.spelled.upper().replace('TUPLE[INT, ...]', 'A+B')}"
        return text if value is not None else f"[{text}]"
    if isinstance(value, tuple):
        return f"{key}={'+'.join(map(str, value))}"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
