"""Federated learning without a server: peers on a graph train locally and exchange messages with
their neighbours.

The alphabet of shapes, used in every docstring:

    P peers · p peers on this rank · R ranks
    k senders, edges or links, on all ranks · f messages of attackers
    e outgoing and e' incoming directed edges of this rank's peers
    a peers or outgoing edges of this rank that take part · a' incoming edges that do
    d parameters of a model · m coordinates of a message, the parameters that peers share
    c coordinates that this rank aggregates
    q messages that are handled together · q' messages from other ranks
    B bytes of a message · b bits of a coordinate
    u rows and v columns of a parameter as a matrix · r columns of its factors
    K local steps · t round · n examples

Formulas keep the letters of their sources.

From Python:

    for row in dfl.simulate(dfl.Run(topology="ring", rounds=20)):
        print(row.round, row.accuracy_mean)

    dfl.load("runs/ring").mean_model()

    for row in dfl.simulate(dfl.resumed("runs/ring", rounds=200)): ...
"""

import os
from typing import TYPE_CHECKING

from dfl.config import Run
from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.lazy import attributes
from dfl.core.version import VERSION

if TYPE_CHECKING:
    from dfl.datasets.data import Data
    from dfl.reporting import notebook as plot
    from dfl.reporting.callbacks.live import Live
    from dfl.reporting.callbacks.mlflow import MLflow
    from dfl.reporting.callbacks.wandb import WeightsAndBiases
    from dfl.reporting.simulate import simulate
    from dfl.store.callbacks import Callback, Row
    from dfl.store.results import load
    from dfl.store.resume import resumed

__version__ = VERSION
__all__ = [
    "Callback",
    "Data",
    "DivergedError",
    "InputError",
    "Live",
    "MLflow",
    "Row",
    "Run",
    "Suspended",
    "WeightsAndBiases",
    "load",
    "plot",
    "resumed",
    "simulate",
]

# MKL rounds a matrix product by how its memory happens to be aligned, and so by who shares a rank,
# unless this variable is set. MKL reads it at its first product. No cost was measured.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

# Imported at their first use: `import dfl` alone takes milliseconds.
__getattr__ = attributes(
    __name__,
    {
        "simulate": "dfl.reporting.simulate",
        "load": "dfl.store.results",
        "Data": "dfl.datasets.data",
        "resumed": "dfl.store.resume",
        "Callback": "dfl.store.callbacks",
        "Row": "dfl.store.callbacks",
        "Live": "dfl.reporting.callbacks.live",
        "MLflow": "dfl.reporting.callbacks.mlflow",
        "WeightsAndBiases": "dfl.reporting.callbacks.wandb",
    },
    {"plot": "dfl.reporting.notebook"},
)


def __dir__() -> list[str]:
    return __all__
