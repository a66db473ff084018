"""Small stand-ins for the parts of FedJAX and JAX that the driver uses, on torch; they train for
real.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.fake_baselines import Tensors, module

Gradient = Callable[[Tensors, Mapping[str, Tensor], Any], Tensors]


class Sgd(NamedTuple):
    lr: float
    momentum: float | None = None


@dataclass
class ShuffleRepeatBatchHParams:
    batch_size: int
    num_epochs: int


class ClientDataset:
    def __init__(self, examples: dict[str, np.ndarray]) -> None:
        self.examples = {name: torch.from_numpy(each) for name, each in examples.items()}

    def batches(self, params: ShuffleRepeatBatchHParams) -> Iterator[dict[str, Tensor]]:
        for _ in range(params.num_epochs):
            for rows in torch.randperm(len(self.examples["x"])).split(params.batch_size):
                yield {name: each[rows] for name, each in self.examples.items()}


@dataclass
class ServerState:
    params: Tensors


class FederatedAveraging:
    """Notes the backend in which it was made, and the clients of every round."""

    backend = ""
    seen: list[list[int]] = []  # noqa: RUF012

    def __init__(
        self, gradient: Gradient, client: Sgd, server: Sgd, batches: ShuffleRepeatBatchHParams
    ) -> None:
        assert server == Sgd(1.0)
        self.gradient, self.client, self.batches = gradient, client, batches

    def init(self, params: Tensors) -> ServerState:
        return ServerState(params)

    def apply(
        self, state: ServerState, clients: list[tuple[int, ClientDataset, Any]]
    ) -> tuple[ServerState, None]:
        self.seen.append([k for k, _, _ in clients])
        ends = [self._trained(state.params, *client[1:]) for client in clients]
        params = {name: torch.stack([e[name] for e in ends]).mean(0) for name in state.params}
        return ServerState(params), None

    def _trained(self, params: Tensors, data: ClientDataset, key: Any) -> Tensors:
        y = dict(params)
        v = {name: torch.zeros_like(value) for name, value in y.items()}
        for batch in data.batches(self.batches):
            found = self.gradient(y, batch, key)
            v = {name: (self.client.momentum or 0) * v[name] + g for name, g in found.items()}
            y = {name: value - self.client.lr * v[name] for name, value in y.items()}
        return y


def grad(loss: Callable[[Tensors, Mapping[str, Tensor], Any], Tensor]) -> Gradient:
    def found(params: Tensors, batch: Mapping[str, Tensor], key: Any) -> Tensors:
        leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
        values = torch.autograd.grad(loss(leaves, batch, key).mean(), list(leaves.values()))
        return dict(zip(leaves, values, strict=True))

    return found


@contextmanager
def for_each_client_backend(name: str) -> Iterator[None]:
    FederatedAveraging.backend = name
    yield


def scan(step: Callable[[Any, Tensor], tuple[Any, Any]], state: Any, rows: Tensor) -> Any:
    for row in rows:
        state, _ = step(state, row)
    return state, None


def fake_fedjax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FederatedAveraging, "backend", "")
    monkeypatch.setattr(FederatedAveraging, "seen", [])
    monkeypatch.setenv("XLA_FLAGS", "")
    module(
        monkeypatch, "jax.numpy", asarray=torch.as_tensor, take_along_axis=_taken, tanh=torch.tanh,
        transpose=torch.permute, split=lambda x, n, axis: x.chunk(n, axis), zeros=torch.zeros,
    )  # fmt: skip
    module(
        monkeypatch, "jax.nn", relu=torch.relu, sigmoid=torch.sigmoid,
        log_softmax=lambda x: torch.log_softmax(x, 1),
    )  # fmt: skip
    module(
        monkeypatch, "jax.lax", scan=scan, max="max",
        conv_general_dilated=lambda x, w, _strides, _padding: torch.conv2d(x, w),
        reduce_window=lambda x, *_: torch.max_pool2d(x, 2),
    )  # fmt: skip
    module(monkeypatch, "jax.random", split=lambda key, n: [key] * n, PRNGKey=lambda seed: seed)
    module(monkeypatch, "jax", block_until_ready=lambda values: values)
    module(monkeypatch, "fedjax.optimizers", sgd=Sgd)
    module(monkeypatch, "fedjax.algorithms.fed_avg", federated_averaging=FederatedAveraging)
    module(
        monkeypatch, "fedjax", ClientDataset=ClientDataset, grad=grad,
        ShuffleRepeatBatchHParams=ShuffleRepeatBatchHParams,
        for_each_client_backend=for_each_client_backend,
    )  # fmt: skip


def _taken(values: Tensor, index: Tensor, axis: int) -> Tensor:
    return values.gather(axis, index.long())
