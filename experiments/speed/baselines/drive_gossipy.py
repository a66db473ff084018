"""gossipy: gossip learning on a ring, set up as in its documentation and scripts.

`GossipSimulator` with `PUSH` messages, `GossipNode`s on a `StaticP2PNetwork`, and a
`TorchModelHandler` that averages what it receives with its own model and then trains an epoch
(`MERGE_UPDATE`, the default), on the package's own `TorchMLP` or `LogisticRegression`, or a
`TorchModel` around a network that it lacks, and torch's SGD. Every node sends its model to one of
its two neighbours in a round and trains when one arrives: as many epochs and half as many messages
as peers that send to both neighbours, for which version 0.0.1, the only one on PyPI, has no
simulator. There is no test set, so nothing is evaluated. Style `tutorial` spreads a round over 100
time steps, as its scripts do; style `lean` makes it one step, in which all nodes send before any
receives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gossipy import set_seed
from gossipy.core import AntiEntropyProtocol, CreateModelMode, StaticP2PNetwork
from gossipy.data import DataDispatcher
from gossipy.data.handler import ClassificationDataHandler
from gossipy.model import TorchModel
from gossipy.model.handler import TorchModelHandler
from gossipy.model.nn import LogisticRegression, TorchMLP
from gossipy.node import GossipNode
from gossipy.simul import GossipSimulator, SimulationEventReceiver
from numpy.typing import NDArray

from . import job as jobs

STEPS = {"tutorial": 100, "lean": 1}
"""Style -> time steps of a round."""


class RoundTimes(SimulationEventReceiver):  # type: ignore[misc]
    """Records the time at which every round ended."""

    def __init__(self, job: jobs.Job, run: GossipSimulator) -> None:
        self.steps = STEPS[job.style]
        self.watch = jobs.Watch(job)
        self.run = run

    def end(self) -> None:
        """Record the time."""
        self.watch.end(
            lambda: (node.model_handler.model.state_dict() for node in self.run.nodes.values())
        )

    def update_timestep(self, t: int) -> None:
        """Record the time at the last step of a round."""
        if (t + 1) % self.steps == 0:
            self.end()

    def update_message(self, failed: bool, msg: Any = None) -> None:
        """Nothing to do."""

    def update_end(self) -> None:
        """Nothing to do."""


def ring(peers: int) -> NDArray[np.int64]:
    """Return the adjacency matrix of a ring."""
    eye = np.eye(peers, dtype=np.int64)
    return np.roll(eye, 1, axis=1) | np.roll(eye, -1, axis=1)


class Model(TorchModel):  # type: ignore[misc]
    """A network that the package lacks."""

    def __init__(self, job: jobs.Job) -> None:
        super().__init__()
        self.layers = jobs.network(job)

    def init_weights(self) -> None:
        """Nothing to do: all drivers begin with the same weights."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the scores of the classes."""
        scores: torch.Tensor = self.layers(inputs)
        return scores


def model(job: jobs.Job) -> Any:
    """Return the package's own model of this shape, where it has one."""
    if job.network != "perceptron":
        return Model(job)
    (features,) = job.shape
    if job.hidden:
        return TorchMLP(features, jobs.CLASSES, job.hidden)
    return LogisticRegression(features, jobs.CLASSES)


def simulator(job: jobs.Job) -> GossipSimulator:
    """Return the simulator with its nodes, their data and models."""
    inputs, labels = (
        torch.from_numpy(each.reshape(-1, *each.shape[2:])) for each in jobs.data(job)
    )
    dispatcher = DataDispatcher(
        ClassificationDataHandler(inputs, labels, test_size=0),
        job.peers,
        eval_on_user=False,
        auto_assign=False,
    )
    own = np.arange(job.peers * job.examples).reshape(job.peers, job.examples).tolist()
    dispatcher.set_assignments(own, None)
    handler = TorchModelHandler(
        net=model(job),
        optimizer=torch.optim.SGD,
        optimizer_params={"lr": jobs.LR, "momentum": jobs.MOMENTUM},
        criterion=torch.nn.CrossEntropyLoss(),
        local_epochs=1,
        batch_size=job.batch_size,
        create_model_mode=CreateModelMode.MERGE_UPDATE,
    )
    network = StaticP2PNetwork(job.peers, ring(job.peers))
    steps = STEPS[job.style]
    nodes = GossipNode.generate(dispatcher, network, handler, round_len=steps, sync=True)
    return GossipSimulator(nodes, dispatcher, delta=steps, protocol=AntiEntropyProtocol.PUSH)


def own_loss(run: GossipSimulator, job: jobs.Job) -> float:
    """Return the mean loss of the first nodes on their own examples: labels are random, so it does
    not fall on others.
    """
    nodes = range(min(job.peers, 16))
    return float(
        np.mean([jobs.loss(run.nodes[i].model_handler.model, job, slice(i, i + 1)) for i in nodes])
    )


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    torch.set_num_threads(job.threads)
    set_seed(0)
    run = simulator(job)
    before = own_loss(run, job)
    run.init_nodes()
    times = RoundTimes(job, run)
    run.add_receiver(times)
    times.end()
    run.start(n_rounds=job.warm_up + job.rounds)
    jobs.report(job, "gossipy-dfl", times.watch, (before, own_loss(run, job)), model(job))


if __name__ == "__main__":
    main()
