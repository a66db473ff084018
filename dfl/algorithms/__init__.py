"""The methods, one file each; importing this package registers them in `ALGORITHMS`."""

from dfl.algorithms import (
    d2,
    decentlam,
    dfedavgm,
    dfedsam,
    dpsgd,
    dsgdm,
    exact_diffusion,
    fedavg,
    fedprox,
    fedsgd,
    fltrust,
    gradient_tracking,
    local_and_pooled,
    momentum_tracking,
    qdfedavgm,
    qg_dsgdm,
)
from dfl.algorithms.base import ALGORITHMS, Algorithm, State

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "State",
    "d2",
    "decentlam",
    "dfedavgm",
    "dfedsam",
    "dpsgd",
    "dsgdm",
    "exact_diffusion",
    "fedavg",
    "fedprox",
    "fedsgd",
    "fltrust",
    "gradient_tracking",
    "local_and_pooled",
    "momentum_tracking",
    "qdfedavgm",
    "qg_dsgdm",
]
