"""A device that joins trained devices: it trains alone or with them. Parts of
`experiments.personal_layers.lg_rotated`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Sequential

import dfl
from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.algorithms.server.fedavg import FedAvg
from dfl.algorithms.server.fedprox import FedProx
from dfl.config import Run
from dfl.core import randomness
from dfl.datasets import Data
from dfl.models.sharing import shared_names
from dfl.store.callbacks import Callback
from dfl.training.examples import normalize

if TYPE_CHECKING:
    from dfl.algorithms.protocols import Net, Task
    from dfl.core.layout import Group

Models = Mapping[str, Tensor]
"""(P, *shape), or (1, *shape) where all have the same, by parameter name."""


@dataclass(frozen=True, kw_only=True)
class WithNewest(FedAvg):
    """FedAvg in which the newest device, the last, takes part in every round, beside clients drawn
    from the others.
    """

    def _client_counts(self, peers: int) -> tuple[int, int]:
        return round(self.fraction * (peers - 1)) + 1, 0

    def _draw(self, task: Task, net: Net) -> tuple[Group, Group, NDArray[np.int64] | None]:
        m, newest = self._client_counts(net.peers)[0], net.peers - 1
        group = net.group(
            np.append(
                randomness.generator(task.seed, "clients", net.t).permutation(newest)[: m - 1],
                newest,
            )
        )
        return group, group, None


@dataclass(frozen=True, kw_only=True)
class ProxWithNewest(WithNewest, FedProx):
    """FedProx in which the newest device takes part in every round."""


NEWEST: dict[str, type[Algorithm[Any]]] = {
    "newest_fedavg": WithNewest,
    "newest_fedprox": ProxWithNewest,
}


class Kept(Callback):
    """Keeps the last models of a run in memory, and what a function finds of those of some rounds.

    Args:
        rounds: the rounds.
        measure: the function.
    """

    needs_models = True

    def __init__(self, rounds: Collection[int], measure: Callable[[Models], Any]) -> None:
        self.last: Models = {}
        self.found: list[Any] = []
        self.rounds = rounds
        self.measure = measure

    def evaluated_models(self, t: int, state: Mapping[str, NDArray[np.floating]]) -> None:
        """Keep the models, and measure them if their round is one of `rounds`."""
        self.last = {name: torch.from_numpy(rows) for name, rows in state.items()}
        if t in self.rounds:
            self.found.append(self.measure(self.last))


class OnFixed(Module):
    """A local part f that is trained under a fixed shared part g."""

    def __init__(self, f: Module, g: Module) -> None:
        super().__init__()
        self.f = f
        self.fixed = (copy.deepcopy(g).requires_grad_(False),)  # in a tuple it is no parameter

    def forward(self, inputs: Tensor) -> Tensor:
        """Return g(f(x))."""
        out: Tensor = self.fixed[0](self.f(inputs))
        return out


def cut_of(model: Sequential) -> int:
    """Return the index in a stack of layers where the shared part begins, its last two layers."""
    return int(
        shared_names("head:2", [name for name, _ in model.named_parameters()])[0].partition(".")[0]
    )


def learn(run: Run, module: Module, data: Data, kept: Kept | None = None) -> Models:
    """Run from a model, which is left unchanged, on own data; return the models.

    Args:
        run: the settings but model and data.
        module, data: the model and the data.
        kept: receives the models of every evaluation.
    """
    kept = kept or Kept((), len)
    with ALGORITHMS.replaced(**NEWEST):
        for _ in dfl.simulate(replace(run, model=module, dataset=data), callbacks=[kept]):
            pass
    return kept.last


def filled(module: Any, models: Models, i: int = 0) -> Any:
    """Return a copy of a module with the parameters of model i."""
    made = copy.deepcopy(module)
    made.load_state_dict({name: values[i] for name, values in models.items()})
    return made


def rotated(images: NDArray[Any]) -> NDArray[Any]:
    """Return images (n, channels, height, width) rotated by 90 degrees."""
    return np.ascontiguousarray(np.rot90(images, axes=(2, 3)))


def as_inputs(data: Data, inputs: NDArray[Any]) -> Tensor:
    """Return examples as inputs of a model."""
    scale, shift = (
        torch.as_tensor(value, dtype=torch.float32) for value in (data.scale, data.shift)
    )
    return normalize(torch.from_numpy(inputs), scale, shift)


@torch.no_grad()
def outputs(model: Module, inputs: Tensor) -> Tensor:
    """Return the outputs of a model, (n, classes), for (n, *shape)."""
    return torch.cat([model(some) for some in inputs.split(2000)])
