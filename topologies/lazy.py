"""networkx, imported at its first use: that takes 80 ms, and the common graphs do without it.

if TYPE_CHECKING:
    import networkx as nx
else:
    from topologies.lazy import nx
"""

from importlib import import_module
from types import ModuleType


class _Lazy(ModuleType):
    def __getattr__(self, name: str) -> object:
        return getattr(import_module(self.__name__), name)


nx = _Lazy("networkx")
