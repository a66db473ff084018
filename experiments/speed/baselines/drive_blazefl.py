"""BlazeFL: federated averaging with all clients, set up as in its documentation and its examples.

The server is `FedAvgBaseServerHandler` of `blazefl.contrib`, and a round is that of its examples:
sample clients, send them the model, train, load what they return. Its trainers of federated
averaging have no momentum, so the clients' training is written here, which its documentation
intends. With two processes it is a `ProcessPoolClientTrainer` whose tensors are in shared memory;
with two threads a `ThreadPoolClientTrainer`, each thread with one of torch; else clients train one
after the other. Clients keep no generators between rounds where processes train them, which saves
their files. Threads compute at the same time only where torch releases the lock of the interpreter;
Python without that lock, which BlazeFL recommends, needs version 3.14.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.multiprocessing as mp
from blazefl.contrib.fedavg import FedAvgBaseServerHandler
from blazefl.core import (
    IPCMode,
    ProcessPoolClientTrainer,
    SHMHandle,
    ThreadPoolClientTrainer,
    deserialize_model,
    serialize_model,
)

from . import job as jobs


@dataclass
class Trained:
    """What a client returns."""

    cid: int
    model_parameters: Any
    data_size: int


class Clients:
    """The clients: a network, and examples in memory."""

    def __init__(self, job: jobs.Job) -> None:
        self.job = job
        self.inputs, self.labels = (torch.from_numpy(each) for each in jobs.data(job))

    def train(self, payload: Any, cid: int) -> Trained:
        """Return a client's model after an epoch."""
        net = jobs.network(self.job)
        deserialize_model(net, payload.model_parameters)
        generator = torch.Generator().manual_seed(cid)
        jobs.train(self.job, net, self.inputs[cid], self.labels[cid], generator)
        return Trained(cid, serialize_model(net), self.job.examples)


class Cache:
    """Keeps what clients return until the server takes it."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.cache: list[Trained] = []

    def uplink_package(self) -> list[Trained]:
        """Return the trained models, and forget them."""
        found, self.cache = self.cache, []
        return found


class Serial(Cache):
    """Trains the clients one after the other."""

    def local_process(self, payload: Any, cid_list: list[int]) -> None:
        """Train clients from a model."""
        self.cache += [self.clients.train(payload, cid) for cid in cid_list]


class Threads(Cache, ThreadPoolClientTrainer):  # type: ignore[misc]
    """Trains the clients in threads of this process."""

    def __init__(self, clients: Clients) -> None:
        Cache.__init__(self, clients)
        self.num_parallels = clients.job.threads
        self.device = "cpu"
        self.stop_event = threading.Event()

    def worker(self, cid: int, device: str, payload: Any, stop_event: Any) -> Trained:
        """Train a client."""
        return self.clients.train(payload, cid)


class Processes(Cache, ProcessPoolClientTrainer):  # type: ignore[misc]
    """Trains the clients in processes, which take the examples over from this one."""

    here: Clients
    """The clients of this process, and of those that it forks."""

    def __init__(self, clients: Clients) -> None:
        Cache.__init__(self, clients)
        Processes.here = clients
        self.num_parallels = clients.job.processes
        self.device = "cpu"
        self.ipc_mode = IPCMode.SHARED_MEMORY
        self.stop_event = mp.Manager().Event()
        self.empty = serialize_model(jobs.network(clients.job))

    def get_client_config(self, cid: int) -> int:
        """Return the configuration of a client, which is its number."""
        return cid

    def prepare_uplink_package_buffer(self) -> Trained:
        """Return memory for a client's model."""
        return Trained(-1, self.empty.clone(), 0)

    @staticmethod
    def worker(
        config: int, payload: Any, device: str, stop_event: Any, *, shm_buffer: Any = None
    ) -> Trained:
        """Train a client, and leave its model in shared memory."""
        trained = Processes.here.train(payload, config)
        shm_buffer.model_parameters.copy_(trained.model_parameters)
        return Trained(trained.cid, SHMHandle(), trained.data_size)


def drive(job: jobs.Job) -> tuple[jobs.Watch, tuple[float, float]]:
    """Run the rounds; return their times, and the losses before and after."""
    clients = Clients(job)
    trainer: Any = (Threads if job.threads > 1 else Serial)(clients)
    if job.processes > 1:
        trainer = Processes(clients)
    handler = FedAvgBaseServerHandler(
        model_selector=SimpleNamespace(select_model=lambda name: jobs.network(job)),
        model_name=job.network,
        dataset=None,
        global_round=job.warm_up + job.rounds,
        num_clients=job.peers,
        sample_ratio=1.0,
        device="cpu",
        batch_size=job.batch_size,
        seed=0,
    )
    before = jobs.loss(handler.model, job)
    watch = jobs.Watch(job)
    watch.end(lambda: [handler.model.state_dict()])
    while not handler.if_stop():
        chosen = handler.sample_clients()
        trainer.local_process(handler.downlink_package(), chosen)
        for package in trainer.uplink_package():
            handler.load(package)
        watch.end(lambda: [handler.model.state_dict()])
    return watch, (before, jobs.loss(handler.model, job))


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    torch.set_num_threads(1)
    watch, losses = drive(job)
    jobs.report(job, "blazefl", watch, losses)


if __name__ == "__main__":
    main()
