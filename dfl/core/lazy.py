"""Torch, imported at its first use.

Importing torch takes 1.5 s, times 16 ranks. Modules that a command line is checked with take torch
from here, so that a mistyped flag is refused before that time is spent:

    if TYPE_CHECKING:
        import torch
    else:
        from dfl.lazy import torch
"""

import importlib
from types import ModuleType


class _Late(ModuleType):
    def __getattr__(self, name: str) -> object:
        value = getattr(importlib.import_module(self.__name__), name)
        setattr(self, name, value)  # the next access does not come here
        return value


torch = _Late("torch")
