"""A small stand-in for the parts of BlazeFL that its driver uses, for machines without it.

It averages for real, and accepts only the arguments of the true package. Its processes are calls:
what they return holds a handle, as that of the true ones does, and no tensor.
"""

from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

import pytest
import torch

from tests.support.fake_baselines import module


class Mode(StrEnum):
    SHARED_MEMORY = "SHARED_MEMORY"


class Handle:
    """Stands for a tensor in shared memory."""


class ProcessPool:
    ipc_mode: Mode
    num_parallels: int
    cache: list[Any]

    def local_process(self, payload: Any, cid_list: list[int]) -> None:
        assert self.ipc_mode == Mode.SHARED_MEMORY
        own: Any = self
        for cid in cid_list:
            buffer = own.prepare_uplink_package_buffer()
            config = own.get_client_config(cid)
            found = own.worker(config, payload, own.device, own.stop_event, shm_buffer=buffer)
            assert isinstance(found.model_parameters, Handle)
            found.model_parameters = buffer.model_parameters
            self.cache.append(found)


class ThreadPool:
    num_parallels: int
    cache: list[Any]

    def local_process(self, payload: Any, cid_list: list[int]) -> None:
        own: Any = self
        with ThreadPoolExecutor(self.num_parallels) as pool:
            found = [
                pool.submit(own.worker, cid, own.device, payload, own.stop_event)
                for cid in cid_list
            ]
        self.cache += [each.result() for each in found]


class Server:
    def __init__(
        self, model_selector: Any, model_name: str, dataset: Any, global_round: int,
        num_clients: int, sample_ratio: float, device: str, batch_size: int, seed: int,
    ) -> None:  # fmt: skip
        self.model = model_selector.select_model(model_name)
        self.left = global_round
        self.clients = int(num_clients * sample_ratio)
        self.buffer: list[Any] = []

    def if_stop(self) -> bool:
        return self.left == 0

    def sample_clients(self) -> list[int]:
        return list(range(self.clients))

    def downlink_package(self) -> Any:
        return type("Package", (), {"model_parameters": serialize(self.model)})()

    def load(self, payload: Any) -> None:
        self.buffer.append(payload)
        if len(self.buffer) == self.clients:
            n = sum(each.data_size for each in self.buffer)
            parts = [each.model_parameters * (each.data_size / n) for each in self.buffer]
            deserialize(self.model, torch.stack(parts).sum(0))
            self.left, self.buffer = self.left - 1, []


def serialize(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.flatten() for each in model.state_dict().values()])


def deserialize(model: torch.nn.Module, serialized_parameters: torch.Tensor) -> None:
    values = model.state_dict().values()
    parts = serialized_parameters.split([each.numel() for each in values])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))


def fake_blazefl(monkeypatch: pytest.MonkeyPatch) -> None:
    module(
        monkeypatch, "blazefl.core",
        IPCMode=Mode, SHMHandle=Handle,
        ProcessPoolClientTrainer=ProcessPool, ThreadPoolClientTrainer=ThreadPool,
        serialize_model=serialize, deserialize_model=deserialize,
    )  # fmt: skip
    module(monkeypatch, "blazefl.contrib.fedavg", FedAvgBaseServerHandler=Server)
