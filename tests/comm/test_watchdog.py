"""Heartbeats under a real mpirun: late ranks end the job, and rank 0 may take its time."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dfl.comm.stalls import read
from tests.conftest import eventually
from tests.support.mpirun import ENV, ROOT, mpirun, mpirun_command

pytestmark = pytest.mark.mpi

SLOW = """
import sys, time, dfl
from dfl import datasets
from pathlib import Path
from dfl.store.run_files import RunFiles
digits, finish, out = datasets.DATASETS["digits"], RunFiles.finish, Path(sys.argv[1])
def slow(directory):
    time.sleep(4)
    print("shown", len(list((out / "heartbeats").glob("[0-9]"))), flush=True)
    return digits(directory)
def draw(self, *given):
    time.sleep(4)
    finish(self, *given)
RunFiles.finish = draw
with datasets.DATASETS.replaced(digits=slow):
    for row in dfl.simulate(dfl.Run(peers=2, rounds=2, timeout=2, out=out)):
        pass
"""


def test_rank_0_may_read_and_draw_for_longer_than_the_timeout(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    done = mpirun(2, str(tmp_path / "slow.py"), str(tmp_path / "run"), timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("shown 2") == 1
    assert "heartbeats" not in os.listdir(tmp_path / "run")
    assert "metrics.csv" in os.listdir(tmp_path / "run")


def alive(pids: list[int]) -> list[int]:
    """Return those processes that run or are stopped; zombies have ended."""
    stats = {pid: Path(f"/proc/{pid}/stat") for pid in pids}
    return [pid for pid, stat in stats.items() if stat.exists() and " Z " not in stat.read_text()]


def stopped(folder: Path, reached: str, rank: int) -> tuple[str, float]:
    """Start three ranks, stop one when a file is there, and wait for the end of the job.

    Returns:
        What it printed to standard error, and the seconds from the stop to the end.
    """
    command = mpirun_command(
        3, "-m", "dfl.run", "--out", str(folder), "--rounds", "1000000", "--timeout", "5"
    )
    job = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert eventually(
        lambda: len([*folder.glob("heartbeats/[012]"), *folder.glob(reached)]) == 4, 120
    )
    ranks = [read(folder / "heartbeats" / str(r)) for r in range(3)]
    pids = [shown.pid for shown in ranks if shown]
    assert len(pids) == 3
    os.kill(pids[rank], signal.SIGSTOP)
    begun = time.monotonic()
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 1
    assert eventually(lambda: not alive(pids), 5)
    return errors, time.monotonic() - begun


@pytest.mark.parametrize(("rank", "reached"), [(0, "metrics.csv"), (2, "heartbeats")])
def test_a_rank_that_is_stopped_is_named(tmp_path: Path, rank: int, reached: str) -> None:
    """In a round, and before it, while rank 0 reads."""
    errors, seconds = stopped(tmp_path / "run", reached, rank)
    lines = [line for line in errors.splitlines() if line.startswith("dfl: ")]
    assert 1 <= len(lines) <= 2, errors
    assert all(
        f"rank {rank} on " in line and "did not arrive: no sign of life for" in line
        for line in lines
    ), errors
    assert "Traceback" not in errors
    assert seconds < 30


NAMELESS = """
import os, signal, dfl, dfl.comm.mpi
for row in dfl.simulate(dfl.Run(peers=3, rounds=10**6, model="softmax", eval_every=5, timeout=3)):
    if row["round"] == 10 and dfl.comm.mpi.connect().rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_late_ranks_without_heartbeats_end_the_job_as_well(tmp_path: Path) -> None:
    (tmp_path / "nameless.py").write_text(NAMELESS)
    done = mpirun(3, str(tmp_path / "nameless.py"), timeout=120)
    assert done.returncode == 1
    assert "ranks 1, 2 did not arrive: no heartbeat shows where they are" in done.stderr
    assert "Traceback" not in done.stderr
