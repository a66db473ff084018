"""The methods, one file each; importing this package registers them in `ALGORITHMS`."""

from dfl.algorithms import (
    dfedavgm,
    fedavg,
    fedprox,
    fedsgd,
    fltrust,
    local_and_pooled,
    qdfedavgm,
)
from dfl.algorithms.base import ALGORITHMS, Algorithm, State

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "State",
    "dfedavgm",
    "fedavg",
    "fedprox",
    "fedsgd",
    "fltrust",
    "local_and_pooled",
    "qdfedavgm",
]
