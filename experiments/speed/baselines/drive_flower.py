"""Flower: federated averaging with all clients, set up as in its documentation and tutorials.

`run_simulation` with a `ServerApp` and a `ClientApp` of the message API, its strategy `FedAvg`
with all clients in every round and `fraction_evaluate=0`, and the ray backend with a CPU for each
client, so as many clients at a time as processes. A process draws the data of all clients once
and keeps them: a client loads the weights that it receives, trains an epoch of heavy-ball steps
on shuffled batches and sends its weights. Style `tutorial` makes a new model for every client and
takes batches from a DataLoader, as the tutorial does; style `lean` keeps one model in a process
and takes slices of tensors. The end of a round is recorded by the `evaluate_fn` of the strategy,
which is called before the first and after each. `run_simulation` is the way in from Python; the
command `flwr run`, which Flower has come to prefer, starts the same simulation.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from . import job as jobs
from .client_flower import train


def drive(job: jobs.Job) -> tuple[jobs.Watch, tuple[float, float]]:
    """Run the rounds; return their times, and the losses before and after."""
    client = ClientApp()
    server = ServerApp()
    watch = jobs.Watch(job)
    losses: list[float] = []

    client.train()(partial(train, job))

    @server.main()  # type: ignore[untyped-decorator]
    def _serve(grid: Any, context: Any) -> None:
        net = jobs.network(job)
        losses.append(jobs.loss(net, job))
        strategy = FedAvg(
            fraction_evaluate=0.0, min_train_nodes=job.peers, min_available_nodes=job.peers
        )
        result = strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(net.state_dict()),
            num_rounds=job.warm_up + job.rounds,
            evaluate_fn=lambda _, arrays: watch.end(lambda: [arrays.to_torch_state_dict()]),
        )
        net.load_state_dict(result.arrays.to_torch_state_dict())
        losses.append(jobs.loss(net, job))

    resources = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": job.processes},
    }
    run_simulation(server, client, num_supernodes=job.peers, backend_config=resources)
    return watch, (losses[0], losses[1])


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    torch.set_num_threads(job.threads)
    watch, losses = drive(job)
    jobs.report(job, "flwr", watch, losses)


if __name__ == "__main__":
    main()
