"""The methods, one file each, of peers that `gossip` and of a `server` with its clients.

Importing this package imports all its modules, in the order of their names, and so registers the
methods in `ALGORITHMS`.
"""

from importlib import import_module
from pkgutil import walk_packages

from dfl.algorithms.base import ALGORITHMS, Algorithm, Method, State

__all__ = ["ALGORITHMS", "Algorithm", "Method", "State"]

_modules = [each.name for each in walk_packages(__path__, f"{__name__}.")]
for _module in sorted(_modules, key=lambda name: name.rpartition(".")[2]):
    import_module(_module)
