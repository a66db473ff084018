"""Jobs under a real mpirun: the same results on any number of ranks, and how jobs end."""

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file

from dfl.algorithms import ALGORITHMS
from tests.mpi import layouts
from tests.support.mpirun import CLOCKS, ENV, ROOT, mpirun, mpirun_command

pytestmark = pytest.mark.mpi

PART = {1: "all", 2: "even", 3: "odd", 5: "every fifth", 16: "methods"}
"""The combinations that run on each number of ranks."""


@dataclass(frozen=True)
class Job:
    """A job that has ended, and the folder of its runs."""

    ended: subprocess.CompletedProcess[str]
    folder: Path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    """Run a job for each number of ranks: the combinations, then the tests of tests/mpi."""
    found = {}
    for ranks, part in PART.items():
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        command = ("-m", "tests.mpi.layouts", str(folder), part, "tests")
        found[ranks] = Job(mpirun(ranks, *command, timeout=900), folder)
    return found


@pytest.mark.parametrize("ranks", PART)
def test_the_tests_of_ranks_pass_on_every_rank(jobs: dict[int, Job], ranks: int) -> None:
    done = jobs[ranks].ended
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(" passed") == ranks
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("ranks", [*PART][1:])
def test_results_are_the_same_on_any_number_of_ranks(jobs: dict[int, Job], ranks: int) -> None:
    whole = jobs[1].folder
    part = jobs[ranks].folder
    everything, names = (sorted(f.name for f in folder.iterdir()) for folder in (whole, part))
    assert len(names) > 20
    assert set(names) <= set(everything)
    assert names == sorted(name for name, _ in layouts.PARTS[PART[ranks]]())
    for name in names:
        states = [(folder / name / "state.safetensors").read_bytes() for folder in (whole, part)]
        assert states[0] == states[1], name
        for table, clocks in (("metrics.csv", CLOCKS), ("peers.csv", ["rank"])):
            one, two = (
                pd.read_csv(folder / name / table, dtype=str).drop(columns=clocks)
                for folder in (whole, part)
            )
            pd.testing.assert_frame_equal(one, two, obj=f"{name} {table}")


def test_every_combination_runs_on_two_or_three_ranks_and_every_method_on_sixteen() -> None:
    names = {part: [name for name, _ in make()] for part, make in layouts.PARTS.items()}
    assert sorted(names["even"] + names["odd"]) == sorted(names["all"])
    methods = [str(run.algorithm) for _, run in layouts.methods()]
    assert {spec.partition(":")[0] for spec in methods} >= {*ALGORITHMS}


def test_the_runs_of_the_layout_test_have_different_results(jobs: dict[int, Job]) -> None:
    """Otherwise their equality would show nothing."""
    states = {f.name: load_file(f / "state.safetensors") for f in jobs[1].folder.iterdir()}
    seen = {b"".join(v.tobytes() for v in state.values()) for state in states.values()}
    assert len(seen) == len(states)


def test_a_wrong_command_line_is_refused_once() -> None:
    begun = time.monotonic()
    done = mpirun(4, "-m", "dfl.run", "--topology", "rign")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        line for line in done.stderr.splitlines() if "rign" in line
    ]
    assert "did you mean ring?" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "bad",
    [
        ["--dataset", "mnist", "--data-dir", "/no/such/folder/at/all"],
        ["--peers", "0"],
        ["--topology", "edges:path=/none"],
        ["--lr", "fast"],
    ],
)
def test_other_bad_input_is_printed_once(bad: list[str]) -> None:
    done = mpirun(2, "-m", "dfl.run", *bad)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


FAILING = """
import sys, time, dfl
from dfl.simulation import loop
def broken(run_state, prepared):
    if run_state.t == 3 and prepared.world.rank == 1:
        raise RuntimeError("deliberately broken")
    return 0
loop._check_round = broken
for row in dfl.simulate(dfl.Run(peers=6, rounds=10**6, model="softmax")):
    print("round", row["round"], flush=True)
"""


def test_an_exception_on_one_rank_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    begun = time.monotonic()
    done = mpirun(3, str(tmp_path / "failing.py"), timeout=120)
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: deliberately broken") == 1
    assert done.stderr.count("Traceback") == 1
    assert "rank 1 of 3 (peers 2 to 3) failed" in done.stderr
    assert time.monotonic() - begun < 90


FOREVER = """
import os, sys, dfl
from pathlib import Path
for row in dfl.simulate(dfl.Run(peers=4, rounds=10**6, model="softmax", eval_every=5)):
    Path(sys.argv[1], f"{os.getpid()}").touch()
"""


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM], ids=["ctrl-c", "kill a rank", "term"]
)
def test_the_job_ends_when_it_is_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    (tmp_path / "alive").mkdir()
    job = subprocess.Popen(
        mpirun_command(3, str(tmp_path / "forever.py"), str(tmp_path / "alive")),
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "alive").iterdir())) < 3 and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [int(f.name) for f in (tmp_path / "alive").iterdir()]
    assert len(ranks) == 3
    os.kill(ranks[1] if how is signal.SIGKILL else job.pid, how)
    job.communicate(timeout=10)
    assert job.returncode != 0
    time.sleep(0.5)
    assert not [
        pid
        for pid in ranks
        if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
