"""Heartbeats of the ranks of a simulation."""

import os
import threading
from pathlib import Path

from dfl.comm.mpi import World
from dfl.simulation.heartbeats import alive


def test_one_rank_writes_no_heartbeat(tmp_path: Path) -> None:
    with alive(World(), tmp_path, 1):
        assert os.listdir(tmp_path) == []
        assert not [t for t in threading.enumerate() if t.name == "pulse"]
