"""One rank of a run before round 0, as `dfl.simulation.prepare` returns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dfl.algorithms import Method
    from dfl.comm.mpi import World
    from dfl.comm.network import Network
    from dfl.config import Run
    from dfl.core.layout import Layout
    from dfl.evaluation.test_sets import TestSets
    from dfl.simulation.initialization import Starts
    from dfl.store.callbacks import RunInfo
    from dfl.store.progress import Progress
    from dfl.training.task import Task


@dataclass(frozen=True)
class Prepared:
    """One rank of a run before round 0.

    Attributes:
        run: the settled run.
        world: the ranks.
        task: the learning problem of this rank's peers.
        network: what connects the peers.
        algorithm: the method.
        test_sets: what this rank's peers are evaluated on.
        own_module: whether the caller gave the model.
        starts: the models of `--init-from`, where it is given.
        info: facts of the run, on rank 0; None elsewhere.
        progress: how far the run has come, on rank 0; None elsewhere.
    """

    run: Run
    world: World
    task: Task
    network: Network
    algorithm: Method
    test_sets: TestSets
    own_module: bool
    starts: Starts | None
    info: RunInfo | None
    progress: Progress | None

    @property
    def layout(self) -> Layout:
        """Peers and ranks."""
        return self.network.layout
