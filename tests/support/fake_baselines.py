"""Small stand-ins for the parts of gossipy and Flower that the drivers use.

They are for machines without these packages. They train for real, in a few lines each, and accept
only the arguments of the true packages; the drivers are tested with the true ones where those are
installed (DFL_BASELINES).
"""

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

Tensors = dict[str, torch.Tensor]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    """Make a module that can be imported, and the packages around it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if path not in sys.modules:
            monkeypatch.setitem(sys.modules, path, ModuleType(path))
        if depth > 1:
            setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[path])
    for member, value in members.items():
        setattr(sys.modules[name], member, value)


def mean(models: list[Tensors]) -> Tensors:
    return {name: torch.stack([each[name] for each in models]).mean(0) for name in models[0]}


# gossipy


class Mode(Enum):
    MERGE_UPDATE = 2


class Protocol(Enum):
    PUSH = 1


@dataclass
class Handler:
    net: Any
    optimizer: Callable[..., torch.optim.Optimizer]
    optimizer_params: dict[str, float]
    criterion: Callable[..., torch.Tensor]
    local_epochs: int
    batch_size: int
    create_model_mode: Mode

    @property
    def model(self) -> Any:
        return self.net

    def update(self, inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer = self.optimizer(self.net.parameters(), **self.optimizer_params)
        for batch in torch.randperm(len(labels)).split(self.batch_size):
            optimizer.zero_grad()
            self.criterion(self.net(inputs[batch]), labels[batch]).backward()
            optimizer.step()


@dataclass
class Node:
    idx: int
    data: tuple[torch.Tensor, torch.Tensor]
    model_handler: Handler
    neighbours: Any
    round_len: int

    @classmethod
    def generate(
        cls, data: Any, network: Any, handler: Handler, *, round_len: int, sync: bool
    ) -> dict[int, "Node"]:
        assert sync
        return {
            i: cls(i, data.of(i), deepcopy(handler), network[i].nonzero()[0], round_len)
            for i in range(len(network))
        }


@dataclass
class Dispatcher:
    handler: tuple[torch.Tensor, torch.Tensor]
    n: int
    eval_on_user: bool
    auto_assign: bool
    own: list[list[int]] = field(default_factory=list)

    def set_assignments(self, train: list[list[int]], test: None) -> None:
        self.own = train

    def of(self, node: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert not self.eval_on_user
        assert not self.auto_assign
        inputs, labels = (each[self.own[node]] for each in self.handler)
        return inputs, labels


@dataclass
class Simulator:
    nodes: dict[int, Node]
    data: Dispatcher
    delta: int
    protocol: Protocol
    receivers: list[Any] = field(default_factory=list)

    def init_nodes(self) -> None:
        for node in self.nodes.values():
            node.model_handler.update(*node.data)

    def add_receiver(self, receiver: Any) -> None:
        self.receivers.append(receiver)

    def start(self, n_rounds: int) -> None:
        for t in range(n_rounds * self.delta):
            if t % self.delta == 0:
                self._exchange()
            for receiver in self.receivers:
                receiver.update_timestep(t)

    def _exchange(self) -> None:
        for node in self.nodes.values():
            receiver = self.nodes[int(node.neighbours[0])]
            nets = [each.model_handler.net for each in (node, receiver)]
            nets[1].load_state_dict(mean([net.state_dict() for net in nets]))
            receiver.model_handler.update(*receiver.data)


def perceptron(inputs: int, outputs: int, hidden: tuple[int, ...] = ()) -> torch.nn.Module:
    sizes = (inputs, *hidden, outputs)
    layers = [torch.nn.Linear(*pair) for pair in pairwise(sizes)]
    return torch.nn.Sequential(
        *[each for layer in layers for each in (layer, torch.nn.ReLU())][:-1]
    )


def fake_gossipy(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "gossipy", set_seed=lambda seed: np.random.seed(seed))  # noqa: NPY002
    module(
        monkeypatch,
        "gossipy.core",
        AntiEntropyProtocol=Protocol,
        CreateModelMode=Mode,
        StaticP2PNetwork=lambda nodes, topology: topology[:nodes],
    )
    module(monkeypatch, "gossipy.data", DataDispatcher=Dispatcher)
    module(
        monkeypatch,
        "gossipy.data.handler",
        ClassificationDataHandler=lambda x, y, test_size: (x, y),
    )
    module(monkeypatch, "gossipy.model", TorchModel=torch.nn.Module)
    module(monkeypatch, "gossipy.model.handler", TorchModelHandler=Handler)
    module(monkeypatch, "gossipy.model.nn", LogisticRegression=perceptron, TorchMLP=perceptron)
    module(monkeypatch, "gossipy.node", GossipNode=Node)
    module(monkeypatch, "gossipy.simul", GossipSimulator=Simulator, SimulationEventReceiver=object)


# Flower


class Arrays(dict[str, torch.Tensor]):
    def to_torch_state_dict(self) -> Tensors:
        return dict(self)


@dataclass
class Message:
    content: dict[str, Any]
    reply_to: Any = None


class App:
    """A ClientApp or a ServerApp: keeps the function that it is given."""

    function: Callable[..., Any]

    def train(self) -> Callable[..., Any]:
        return lambda function: setattr(self, "function", function)

    main = train


@dataclass
class FedAvg:
    fraction_evaluate: float
    min_train_nodes: int
    min_available_nodes: int

    def start(
        self, *, grid: Any, initial_arrays: Arrays, num_rounds: int, evaluate_fn: Any
    ) -> SimpleNamespace:
        assert self.fraction_evaluate == 0
        evaluate_fn(0, initial_arrays)
        for t in range(num_rounds):
            initial_arrays = Arrays(
                mean(
                    [reply.content["arrays"] for reply in grid(Message({"arrays": initial_arrays}))]
                )
            )
            evaluate_fn(t + 1, initial_arrays)
        return SimpleNamespace(arrays=initial_arrays)


def run_simulation(
    server: App, client: App, *, num_supernodes: int, backend_config: dict[str, Any]
) -> None:
    assert backend_config["client_resources"]["num_cpus"] == 1
    contexts = [SimpleNamespace(node_config={"partition-id": i}) for i in range(num_supernodes)]
    server.function(
        lambda message: [deepcopy(client.function(message, context)) for context in contexts], None
    )


def fake_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        monkeypatch,
        "flwr.app",
        ArrayRecord=Arrays,
        Message=Message,
        MetricRecord=dict,
        RecordDict=dict,
    )
    module(monkeypatch, "flwr.clientapp", ClientApp=App)
    module(monkeypatch, "flwr.serverapp", ServerApp=App)
    module(monkeypatch, "flwr.serverapp.strategy", FedAvg=FedAvg)
    module(monkeypatch, "flwr.simulation", run_simulation=run_simulation)
