"""Ranks that show each other that they are alive."""

import os
import threading
from pathlib import Path

from dfl.comm.mpi import World
from dfl.simulation.liveness import alive


def test_one_rank_needs_no_pulse(tmp_path: Path) -> None:
    with alive(World(), tmp_path, 1):
        assert os.listdir(tmp_path) == []
        assert not [t for t in threading.enumerate() if t.name == "pulse"]
