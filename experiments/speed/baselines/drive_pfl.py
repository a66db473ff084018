"""pfl: federated averaging with all users, set up as in its documentation and tutorials.

`FederatedAveraging().run(...)` with a `SimulatedBackend`, a `PyTorchModel` whose local optimizer
is torch's SGD with momentum, and central SGD with learning rate 1, so the new model is the mean.
Users are `PyTorchTensorDataset`s that are made once: pfl keeps their batches, in the order of the
examples, which saves it the shuffling of the others. `MinimizeReuseUserSampler` takes users in
turn, so a cohort of all has each once. pfl evaluates on the users whenever `evaluation_frequency`
divides the number of the round, so only in round 0, which no experiment counts. With more than one
process, which its guide to fast simulations recommends, the driver is launched by torchrun. The
optimizer is torch's default; its fused form was no faster here. pfl takes a GPU where there is one,
and keeps the users' tensors and the model there; bfloat16 is its `amp_dtype`.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

from . import job as jobs


class Model(torch.nn.Module):
    """The network with the two methods that pfl requires."""

    def __init__(self, job: jobs.Job) -> None:
        super().__init__()
        self.layers = jobs.network(job)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        scores: torch.Tensor = self.layers(inputs)
        return scores

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss that local training minimizes."""
        return torch.nn.functional.cross_entropy(self(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return the figures of an evaluation."""
        return {"loss": Weighted(self.loss(inputs, labels).item() * len(inputs), len(inputs))}


class RoundTimes(TrainingProcessCallback):  # type: ignore[misc]
    """Records the time at the start and at the end of every round."""

    def __init__(self, job: jobs.Job, net: Model) -> None:
        self.watch = jobs.Watch(job)
        self.net = net

    def on_train_begin(self, *, model: Any) -> Any:
        """Record the time."""
        self.watch.end(lambda: [self.net.layers.state_dict()])
        return Metrics()

    def after_central_iteration(
        self, metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Any]:
        """Record the time, and continue."""
        self.watch.end(lambda: [self.net.layers.state_dict()])
        return False, Metrics()


def users(job: jobs.Job) -> FederatedDataset:
    """Return the examples of all users, as tensors in memory."""
    inputs, labels = (torch.from_numpy(each) for each in jobs.data(job))
    made = [
        PyTorchTensorDataset((inputs[user], labels[user]), user_id=str(user))
        for user in range(job.peers)
    ]
    return FederatedDataset(made.__getitem__, MinimizeReuseUserSampler(list(range(job.peers))))


def drive(job: jobs.Job) -> tuple[jobs.Watch, tuple[float, float]]:
    """Run the rounds; return their times, and the losses before and after."""
    net = Model(job).to(job.device)
    times = RoundTimes(job, net)
    everyone = users(job)
    before = jobs.loss(net, job)
    jobs.set_precision(job)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.warm_up + job.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=job.peers,
            val_cohort_size=None,
        ),
        SimulatedBackend(everyone, everyone),
        PyTorchModel(
            net,
            partial(torch.optim.SGD, momentum=jobs.MOMENTUM),
            torch.optim.SGD(net.parameters(), 1.0),
            amp_dtype=torch.bfloat16 if job.precision == "bf16" else None,
        ),
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=jobs.LR, local_batch_size=job.batch_size
        ),
        callbacks=[times],
        send_metrics_to_platform=False,
    )
    return times.watch, (before, jobs.loss(net, job))


def main() -> None:
    """Run the job of the command line; the first process prints the result."""
    job = jobs.read()
    torch.set_num_threads(job.threads)
    watch, losses = drive(job)
    if int(os.environ.get("RANK", "0")) == 0:
        jobs.report(job, "pfl", watch, losses)


if __name__ == "__main__":
    main()
