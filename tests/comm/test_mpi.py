"""The tests that need ranks, each started under a real mpirun."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file

from tests.support.mpirun import CLOCKS, ENV, ROOT, mpirun, mpirun_command

pytestmark = pytest.mark.mpi

RANKS = (1, 2, 3, 5, 16)
EVERY = {5: 2, 16: 6}
"""Ranks that outnumber the cores run every so many-th combination only."""


@pytest.mark.parametrize("ranks", RANKS)
def test_the_verbs(ranks: int) -> None:
    done = mpirun(
        ranks,
        "-m",
        "pytest",
        "--with-mpi",
        "-p",
        "no:cacheprovider",
        "--override-ini=addopts=-q",
        "tests/mpi",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(" passed") == ranks
    assert "skipped" not in done.stdout


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Every combination, on every number of ranks."""
    folders = {ranks: tmp_path_factory.mktemp(f"ranks{ranks}") for ranks in RANKS}
    for ranks, folder in folders.items():
        done = mpirun(
            ranks, "-m", "tests.mpi.layouts", str(folder), str(EVERY.get(ranks, 1)), timeout=900
        )
        assert done.returncode == 0, done.stderr[-3000:]
    return folders


@pytest.mark.parametrize("ranks", RANKS[1:])
def test_results_do_not_depend_on_the_launch(launched: dict[int, Path], ranks: int) -> None:
    everything, names = (sorted(f.name for f in launched[n].iterdir()) for n in (1, ranks))
    assert len(names) > 20
    assert set(names) <= set(everything)
    assert len(names) == -(-len(everything) // EVERY.get(ranks, 1))
    for name in names:
        alone, other = launched[1] / name, launched[ranks] / name
        assert (alone / "state.safetensors").read_bytes() == (
            other / "state.safetensors"
        ).read_bytes(), name
        for table, clocks in (("metrics.csv", CLOCKS), ("peers.csv", ["rank"])):
            one, two = (
                pd.read_csv(run / table, dtype=str).drop(columns=clocks) for run in (alone, other)
            )
            pd.testing.assert_frame_equal(one, two, obj=f"{name} {table}")


def test_the_runs_of_the_layout_test_differ_and_learn(launched: dict[int, Path]) -> None:
    """Else their equality would say nothing."""
    states = {f.name: load_file(f / "state.safetensors") for f in launched[1].iterdir()}
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


@pytest.mark.parametrize("bad", [["--dataset", "mnist", "--data-dir", "/no/such/folder/at/all"], ["--peers", "0"],
                                 ["--topology", "edges:path=/none"], ["--lr", "fast"]])  # fmt: skip
def test_other_bad_input_is_printed_once(bad: list[str]) -> None:
    done = mpirun(4, "-m", "dfl.run", *bad)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


FAILING = """
import sys, time, dfl
from dfl.simulation import loop
def broken(moment, prepared):
    if moment.t == 3 and prepared.world.rank == 1:
        raise RuntimeError("deliberately broken")
    return 0
loop._agree = broken
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
    job = subprocess.Popen(mpirun_command(3, str(tmp_path / "forever.py"), str(tmp_path / "alive")), cwd=ROOT, env=ENV,
                           stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)  # fmt: skip
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
