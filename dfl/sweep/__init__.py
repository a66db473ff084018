"""Grids of runs: cells, scheduler, status, tables, figures, Slurm.

From the command line, `python -m dfl.sweep GRID`. From Python:

    from dfl.sweep import combinations, run_grid

    cells = combinations({"peers": 16}, {"topology": ["ring", "torus"], "seed": [0, 1]})
    rows = run_grid(cells, "sweeps/graphs", jobs=2)
"""

from typing import TYPE_CHECKING

from dfl.core.lazy import attributes

if TYPE_CHECKING:
    from dfl.sweep.grid import Cell, combinations
    from dfl.sweep.runner import run_grid

__all__ = ["Cell", "combinations", "run_grid"]

# Imported at their first use: the command reacts to Ctrl-C before its imports.
__getattr__ = attributes(
    __name__,
    {
        "Cell": "dfl.sweep.grid",
        "combinations": "dfl.sweep.grid",
        "run_grid": "dfl.sweep.runner",
    },
)


def __dir__() -> list[str]:
    return __all__
