"""Sites of simulated examples, and the networks between them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression.base import Compressor
from dfl.compression.exact import Exact
from dfl.core.layout import Layout
from dfl.environment.faults import Fault
from dfl.inference.exchange import Centre, Graph
from dfl.inference.models import Model, Site
from dfl.inference.sites import Separate
from topologies import MIXINGS, TOPOLOGIES, build

BETA = (1.0, -1.0)


def site(seed: int, n: int = 60, intercept: float = 0.0, kind: str = "logistic") -> Site:
    """Return the examples of a site with two common covariates and an intercept of its own."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 2))
    eta = x @ BETA + intercept
    draws: dict[str, Callable[[], Any]] = {
        "logistic": lambda: rng.uniform(size=n) < 1 / (1 + np.exp(-eta)),
        "poisson": lambda: rng.poisson(np.exp(eta / 2)),
        "linear": lambda: eta + rng.normal(size=n) * 2,
        "cox": lambda: np.ceil(10 * rng.exponential(np.exp(-eta))) / 10,  # with ties
    }
    y = draws[kind]()
    event = torch.from_numpy((rng.uniform(size=n) < 0.8) * 1.0) if kind == "cox" else None
    z = np.ones((n, 0 if kind == "cox" else 1))
    return Site(tensor(y), tensor(x), tensor(z), torch.zeros(n, dtype=torch.float64), event)


def tensor(values: object) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))


def separate(model: Model, sites: Sequence[Site]) -> Separate:
    return Separate(model, sites[0].p, sites, sites[0])


def several(model: Model, count: int = 8, kind: str = "logistic") -> Separate:
    """Return sites of different sizes and intercepts."""
    sizes, intercepts = 50 + 10 * np.arange(count), np.linspace(-1, 1, count)
    return separate(
        model,
        [site(k, int(sizes[k]), intercepts[k], kind) for k in range(count)],
    )


def centre(
    count: int = 8, faults: tuple[Fault, ...] = (), compressor: Compressor | None = None
) -> Centre:
    return Centre(network(count, (), faults, compressor))


def graph(
    topology: str,
    count: int = 8,
    faults: tuple[Fault, ...] = (),
    compressor: Compressor | None = None,
) -> Graph:
    """Return the sites on a graph, with Metropolis weights."""
    weights = build(
        TOPOLOGIES[topology], MIXINGS["metropolis"], count, np.random.default_rng(0)
    ).weights
    return Graph(network(count, weights, faults, compressor))


def network(
    count: int,
    weights: Sequence[csr_array],
    faults: tuple[Fault, ...] = (),
    compressor: Compressor | None = None,
) -> Network:
    threat_model = ThreatModel(compressor or Exact(), faults=faults)
    return Network(Layout(count, 1), MixingMatrices(weights), World(), threat_model, seed=0)
