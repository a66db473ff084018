"""Small stand-ins for the parts of pfl that its driver uses; they train for real."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.fake_baselines import Tensors, mean, module


@dataclass
class NNAlgorithmParams:
    central_num_iterations: int
    evaluation_frequency: int
    train_cohort_size: int
    val_cohort_size: int | None


@dataclass
class NNTrainHyperParams:
    local_num_epochs: int
    local_learning_rate: float
    local_batch_size: int


@dataclass
class PyTorchTensorDataset:
    tensors: tuple[torch.Tensor, ...]
    user_id: str

    def iter(self, size: int) -> Iterator[list[torch.Tensor]]:
        for start in range(0, len(self.tensors[0]), size):
            yield [each[start : start + size] for each in self.tensors]


@dataclass
class FederatedDataset:
    make: Callable[[int], PyTorchTensorDataset]
    sampler: Callable[[], int]


class MinimizeReuseUserSampler:
    def __init__(self, users: list[int]) -> None:
        self.users = users
        self.next = -1

    def __call__(self) -> int:
        self.next = (self.next + 1) % len(self.users)
        return self.users[self.next]


@dataclass
class SimulatedBackend:
    training: FederatedDataset
    validation: FederatedDataset


@dataclass
class PyTorchModel:
    net: Any
    local: Callable[..., torch.optim.Optimizer]
    central: torch.optim.Optimizer
    amp_dtype: torch.dtype | None = None


class Callback:
    pass


class FederatedAveraging:
    """Notes its users in `seen`, the last run first."""

    seen: list[list[str]] = []  # noqa: RUF012

    def run(
        self,
        params: NNAlgorithmParams,
        backend: SimulatedBackend,
        model: PyTorchModel,
        train: NNTrainHyperParams,
        **others: Any,
    ) -> None:
        callbacks = others.pop("callbacks")
        assert others == {"send_metrics_to_platform": False}
        for callback in callbacks:
            callback.on_train_begin(model=model)
        for t in range(params.central_num_iterations):
            data = [
                backend.training.make(backend.training.sampler())
                for _ in range(params.train_cohort_size)
            ]
            self.seen.insert(0, [user.user_id for user in data])
            start = deepcopy(model.net.state_dict())
            model.net.load_state_dict(
                mean([self._trained(start, model, user, train) for user in data])
            )
            assert not any(
                callback.after_central_iteration(None, model, central_iteration=t)[0]
                for callback in callbacks
            )

    @staticmethod
    def _trained(
        start: Tensors, model: PyTorchModel, user: PyTorchTensorDataset, train: NNTrainHyperParams
    ) -> Tensors:
        model.net.load_state_dict(start)
        optimizer = model.local(model.net.parameters(), lr=train.local_learning_rate)
        for batch in user.iter(train.local_batch_size):
            optimizer.zero_grad()
            model.net.loss(*batch).backward()
            optimizer.step()
        return deepcopy(model.net.state_dict())


def fake_pfl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FederatedAveraging, "seen", [])
    module(monkeypatch, "pfl.aggregate.simulate", SimulatedBackend=SimulatedBackend)
    module(monkeypatch, "pfl.algorithm.base", NNAlgorithmParams=NNAlgorithmParams)
    module(monkeypatch, "pfl.algorithm.federated_averaging", FederatedAveraging=FederatedAveraging)
    module(monkeypatch, "pfl.callback.base", TrainingProcessCallback=Callback)
    module(monkeypatch, "pfl.data.federated_dataset", FederatedDataset=FederatedDataset)
    module(monkeypatch, "pfl.data.pytorch", PyTorchTensorDataset=PyTorchTensorDataset)
    module(monkeypatch, "pfl.data.sampling", MinimizeReuseUserSampler=MinimizeReuseUserSampler)
    module(monkeypatch, "pfl.hyperparam.base", NNTrainHyperParams=NNTrainHyperParams)
    module(monkeypatch, "pfl.metrics", Metrics=dict, Weighted=lambda value, weight: value / weight)
    module(monkeypatch, "pfl.model.pytorch", PyTorchModel=PyTorchModel)
