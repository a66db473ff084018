"""Runs on several ranks that are killed or stopped and resumed, under mpirun.

python -m tests.store.test_survival 20    kill a random rank at 20 random moments; print each result
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import dfl
from dfl.run import read_command
from tests.support.mpirun import ENV, ROOT, mpirun, mpirun_command
from tests.support.stopping import same

pytestmark = pytest.mark.mpi

HARD = [
    "--topology=one_peer_exponential",
    "--bits=3",
    "--attack=sign_flip:peers=2",
    "--model=mlp:hidden=12",
    "--faults=link_loss:p=0.2+outage:p=0.05",
    "--links=uplink:mbps=8",
]
LONG = [
    "--peers=7",
    "--rounds=30",
    "--eval-every=7",
    "--checkpoint-every=5",
    "--local-steps=20",
    *HARD,
]
BOUND = 15
"""Seconds within which a job must end after one of its ranks was killed."""


def dfl_run(ranks: int, *flags: str) -> subprocess.CompletedProcess[str]:
    return mpirun(ranks, "-m", "dfl.run", *flags)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_mpirun_stops_the_run_after_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    folder = tmp_path / "run"
    job = launched(folder, ranks=2)
    wait_for(folder / "metrics.csv", job)
    job.send_signal(number)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 75, errors
    (t,) = re.findall(
        rf"dfl: stopped by {number.name} after round (\d+) of 30: go on with --resume", errors
    )
    assert [file.stem for file in sorted((folder / "checkpoint").glob("*.json"))][
        -1
    ] == f"{int(t):010}"
    assert left_over(folder) == []


def test_a_job_with_a_killed_rank_ends_and_is_resumed_on_more_ranks(
    tmp_path: Path, no_figures: None
) -> None:
    """On fewer ranks as well, in tests/simulation/test_ranks.py."""
    folder, whole = tmp_path / "run", tmp_path / "whole"
    run = read_command([*LONG, f"--out={whole}"], 1).run
    assert run is not None
    list(dfl.simulate(run))
    first = "checkpoint/0000000005.json"
    assert killed(folder, 0, random.Random(0), ranks=2, first=first) < BOUND
    resumed = dfl_run(3, f"--resume={folder}")
    assert resumed.returncode == 0
    assert re.search(r"after round \d+, from", resumed.stdout)
    same(whole, folder)


def launched(folder: Path, ranks: int) -> subprocess.Popen[str]:
    command, nowhere = (
        mpirun_command(ranks, "-m", "dfl.run", *LONG, f"--out={folder}"),
        subprocess.DEVNULL,
    )
    return subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdin=nowhere, stdout=nowhere, stderr=subprocess.PIPE, text=True
    )


def wait_for(file: Path, job: subprocess.Popen[str], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not file.exists():
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ranks_of(folder: Path) -> list[int]:
    """The processes of the ranks that simulate the run of a folder."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            arguments, state = (
                (place / "cmdline").read_bytes().split(b"\0"),
                (place / "stat").read_text(),
            )
        except OSError:
            continue
        if (
            os.fsencode(f"--out={folder}") in arguments
            and b"python" in arguments[0]
            and " Z " not in state
        ):
            found.append(int(place.name))
    return sorted(found)


def left_over(folder: Path) -> list[int]:
    """The ranks that still run after at most 5 seconds."""
    deadline = time.monotonic() + 5
    while ranks_of(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    return ranks_of(folder)


def killed(
    folder: Path, after: float, drawn: random.Random, ranks: int = 3, first: str = "metrics.csv"
) -> float:
    """Kill one rank some seconds after a first file; return the seconds until the job ended."""
    job = launched(folder, ranks)
    wait_for(folder / first, job)
    time.sleep(after)
    os.kill(drawn.choice(ranks_of(folder)), signal.SIGKILL)
    begun = time.monotonic()
    job.communicate(timeout=60)
    assert job.returncode != 0
    took = time.monotonic() - begun
    assert left_over(folder) == []
    return took


def main(times: int) -> None:
    """Kill a random rank at random moments of a run, and resume it."""
    drawn, top = random.Random(1), Path(tempfile.mkdtemp())
    begun = time.monotonic()
    assert dfl_run(3, *LONG, f"--out={top / 'whole'}").returncode == 0
    rows = (top / "whole" / "metrics.csv").read_text().splitlines()
    whole = float(rows[-1].split(",")[1])
    print(
        f"undisturbed: {time.monotonic() - begun:.1f} s, {whole:.1f} s of them in rounds",
        flush=True,
    )
    for k in range(times):
        after = drawn.uniform(0, 0.9 * whole)
        took = killed(top / str(k), after, drawn)
        kept = sorted(each.stem for each in (top / str(k) / "checkpoint").glob("*.json"))
        done = dfl_run(drawn.choice([1, 2, 3]), f"--resume={top / str(k)}")
        assert done.returncode == 0, done.stderr
        same(top / "whole", top / str(k))
        print(
            f"{k}: killed after {after:.2f} s, ended {took:.2f} s later, "
            f"resumed from {kept[-1:]}, same bits",
            flush=True,
        )
    shutil.rmtree(top)


if __name__ == "__main__":
    main(int(sys.argv[1]))
