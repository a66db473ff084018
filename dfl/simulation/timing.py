"""The simulated clock of a network, which its link model sets."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.comm.network import Network
from dfl.environment.clock import Clock

if TYPE_CHECKING:
    from dfl.environment.link_models import LinkModel
    from dfl.training.task import Task

Floats = NDArray[np.float64]


def set_clock(network: Network, links: LinkModel, task: Task, sizes: NDArray[np.int64]) -> Task:
    """Set the clock of a network, if the links have speeds, and return the task: one that measures
    its seconds of training, if the clock counts them.

    Args:
        network: the network.
        links: the speeds of peers and links.
        task: the problem of this rank's peers.
        sizes: (P,) training examples of every peer.

    Raises:
        InputError: on every rank, if the link model is about other edges.
    """
    peers, world = network.layout.peers, network.transport.world
    connections = links.connections(peers, network.seed, network.schedule.edges, world.from_root)
    if connections is None:
        return task
    step_seconds = links.step_seconds(peers, network.seed)
    if step_seconds is not None:
        seconds = step_seconds * task.solver.steps_for(sizes)
        network.clock = Clock(peers, connections, lambda: seconds)
        return task
    train_seconds, here = np.zeros(peers), network.layout.hosted(world.rank)

    def measured() -> Floats:
        everyone = network.layout.ascending(world.all_gather(train_seconds[here]))
        train_seconds[:] = 0
        return everyone

    network.clock = Clock(peers, connections, measured)
    return replace(task, train_seconds=train_seconds)
