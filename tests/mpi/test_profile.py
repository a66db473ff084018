"""The profile of a run has all ranks; run under mpirun on any ranks."""

from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

import dfl
from dfl.core.profiling import PHASES
from dfl.store.callbacks import Callback, Outcome

pytestmark = pytest.mark.mpi


class Keep(Callback):
    outcome: Outcome | None = None

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome


def test_every_rank_is_measured(tmp_path: Path) -> None:
    folder = Path(MPI.COMM_WORLD.bcast(str(tmp_path)))
    kept, ranks = Keep(), MPI.COMM_WORLD.size
    few: dict[str, Any] = {
        "peers": 16,
        "rounds": 2,
        "model": "softmax",
        "examples_per_peer": 20,
        "report": False,
    }
    list(dfl.simulate(dfl.Run(**few, profile=True, out=folder / "run"), [kept]))
    assert (kept.outcome is not None) == (MPI.COMM_WORLD.rank == 0)
    if kept.outcome is None:
        return
    assert kept.outcome.profile is not None
    counted, events = kept.outcome.profile
    assert counted.shape == (ranks, len(PHASES), 2)
    send, work = PHASES.index("send"), PHASES.index("forward and backward")
    assert (counted[:, send, 0] == 2).all()
    assert (counted[:, work, 1] > 0).all()
    assert set(events[:, 0]) == set(range(ranks))
    assert (events[:, 3] >= events[:, 2]).all()
