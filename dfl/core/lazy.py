"""Modules and attributes that are imported at their first use.

Importing torch takes 1.5 s, times 16 ranks. Modules that check a command line take torch from here,
so that a mistyped flag is refused before that time is spent:

    if TYPE_CHECKING:
        import torch
    else:
        from dfl.core.lazy import torch
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> object:
        value = getattr(import_module(self.__name__), name)
        setattr(self, name, value)  # the next access does not come here
        return value


torch = _Lazy("torch")


def attributes(
    module: str, sources: Mapping[str, str], modules: Mapping[str, str] | None = None
) -> Callable[[str], object]:
    """Return a `__getattr__` for a module, which imports attributes at their first use.

    Args:
        module: the name of the module.
        sources: attribute -> the module that defines it.
        modules: attribute -> the module that it is.
    """

    def load(name: str) -> object:
        if modules and name in modules:
            return import_module(modules[name])
        if name not in sources:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(sources[name]), name)

    return load
