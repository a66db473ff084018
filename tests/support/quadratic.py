"""A problem with a closed form: peer i has one point c_i and minimises h/2 ||x - c_i||^2."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.config import Run
from dfl.datasets.data import Data
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import RunState, begin
from dfl.store.callbacks import RunInfo

H = 0.7


class Point(nn.Module):
    """A model with one parameter x, whose output is c - x for an example c."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(d, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        return c - self.x


def half_square(out: Tensor, labels: Tensor) -> Tensor:
    return H / 2 * out.square().sum(-1)


def points(peers: int, d: int) -> Data:
    c = np.random.default_rng(0).normal(size=(peers, d))
    labels = np.zeros(peers, np.int64)
    return Data(c, labels, c[:1], labels[:1], classes=0)


def quadratic(d: int = 5, **settings: Any) -> Prepared:
    """Return a run on points of d coordinates, ready to start."""
    run = Run(
        **{"peers": 8, "momentum": 0.0, "lr": 0.1, "local_epochs": 3, "rounds": 20, **settings}
    )
    assert run.peers is not None
    return prepare(
        replace(run, model=Point(d), dataset=points(run.peers, d), loss=half_square), World()
    )


class Scaled(Point):
    """A `Point` whose examples are (c, a), and whose output is sqrt(a) (c - x)."""

    def forward(self, example: Tensor) -> Tensor:
        return (example[..., :-1] - self.x) * example[..., -1:].sqrt()


def uneven(d: int = 10, **settings: Any) -> tuple[Prepared, Tensor]:
    """Return a run in which peer i minimises a_i/2 ||x - c_i||^2 by one step a round, and x*.

    a_i are uniform on [1, 2], so that the peers' minima are not equally far from x*, (d,).
    """
    run = Run(**{"peers": 16, "momentum": 0.0, "lr": 0.05, "local_steps": 1, **settings})
    assert run.peers is not None
    generator = np.random.default_rng(0)
    a = generator.uniform(1, 2, run.peers)
    c = generator.normal(size=(run.peers, d))
    labels = np.zeros(run.peers, np.int64)
    examples = np.column_stack([c, a])
    data = Data(examples, labels, examples[:1], labels[:1], classes=0)
    prepared = prepare(replace(run, model=Scaled(d), dataset=data, loss=_half), World())
    return prepared, torch.from_numpy(a @ c / a.sum())


def _half(out: Tensor, labels: Tensor) -> Tensor:
    return out.square().sum(-1) / 2


def run_states(setting: Prepared, rounds: int) -> Iterator[RunState]:
    """Yield the run before round 0 and after each round; personal parameters are the latest."""
    run_state = begin(setting)
    yield run_state
    for t in range(rounds):
        net = Net(setting.network, t)
        state = setting.algorithm.round(run_state.state, run_state.task.paced(net.work), net)
        run_state = RunState(t + 1, run_state.task, state)
        yield run_state


def states(setting: Prepared, rounds: int) -> Iterator[Any]:
    """Yield the state at the start and after each round."""
    return (run_state.state for run_state in run_states(setting, rounds))


def final(setting: Prepared, rounds: int) -> Tensor:
    """Return the models (P, d) after some rounds."""
    return list(run_states(setting, rounds))[-1].models


class _Still:
    def train(self, x: Tensor, t: int) -> Tensor:
        return x.clone()


STILL: Any = _Still()
"""A task that does not train."""


def centres(setting: Prepared) -> Tensor:
    """Return the point of each peer, (P, d)."""
    points: Tensor = setting.task.examples.inputs
    return points


def spread(x: Tensor) -> float:
    """Return the consensus distance sqrt(mean_i ||x_i - mean x||^2)."""
    return float((x - x.mean(0)).square().sum(1).mean().sqrt())


FEW = {"model": "mlp:hidden=8", "examples_per_peer": 25, "peers": 6, "rounds": 4}


def digits(**settings: Any) -> Prepared:
    """Return a small run on digits, ready to start."""
    return prepare(Run(**{**FEW, **settings}), World())


def info(prepared: Prepared) -> RunInfo:
    """Return the facts that callbacks receive."""
    assert prepared.info
    return prepared.info
