"""Jobs under a real mpirun: the same results on any number of ranks, and how jobs end."""

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from safetensors.numpy import load_file

from dfl.algorithms import ALGORITHMS
from tests.mpi import layouts
from tests.mpi.estimates import COMMANDS, FILES
from tests.support.hospitals import frame
from tests.support.mpirun import CLOCKS, ENV, ROOT, mpirun, mpirun_command

pytestmark = pytest.mark.mpi

PART = {1: "all", 2: "even", 3: "odd", 16: "methods"}
"""The combinations that run on each number of ranks."""
TABLES = {"many": 5, "two": 2}
"""Tables for inference, with the numbers of their sites."""


@dataclass(frozen=True)
class Job:
    """A job that has ended, and the folders of its runs and of its estimates."""

    ended: subprocess.CompletedProcess[str]
    folder: Path
    estimates: Path


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Job]:
    """Run a job for each number of ranks: runs, the tests of tests/mpi, commands of inference.

    On 16 ranks inference has the smaller table alone, where most ranks have no site.
    """
    top, found = tmp_path_factory.mktemp("ranks"), {}
    for name, sites in TABLES.items():
        frame(sites).to_csv(top / f"{name}.csv", index=False)
    tables = [str(top / f"{name}.csv") for name in TABLES]
    for ranks, part in PART.items():
        folder = top / str(ranks)
        command = ("-m", "tests.mpi.layouts", str(folder), part, "tests")
        ended = mpirun(ranks, *command, *(tables if ranks < 16 else tables[-1:]), timeout=900)
        found[ranks] = Job(ended, folder, top / f"{ranks}-estimates")
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


@pytest.mark.parametrize("ranks", [*PART][1:])
def test_commands_of_inference_write_the_same_bytes(jobs: dict[int, Job], ranks: int) -> None:
    tables = list(TABLES) if ranks < 16 else ["two"]
    for table, command, file in product(tables, COMMANDS, FILES):
        one, other = (jobs[r].estimates / table / command / file for r in (1, ranks))
        assert one.read_bytes() == other.read_bytes(), file


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
    done = mpirun(3, "-m", "dfl.run", "--topology", "rign")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        line for line in done.stderr.splitlines() if "rign" in line
    ]
    assert "did you mean ring?" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - begun < 60


BAD = [
    ["--dataset=mnist", "--data-dir={folder}", "--out={folder}/new/run"],
    ["--peers=0"],
    ["--topology=edges:path=/none"],
    ["--lr=fast"],
    ["--out={folder}/file/run"],
    ["--out={folder}/own", "--rounds=1"],
]
"""Command lines that are refused where they are read, where data is read, and where files are."""
REFUSED = """
import json, sys
from dfl.run import main
for tokens in json.loads(sys.argv[1]):
    sys.argv = ["run.py", *tokens]
    assert main() == 2, tokens
"""


def test_bad_input_is_printed_once_and_no_file_changes(tmp_path: Path) -> None:
    """One launch reads all command lines, since it starts for longer than they take."""
    own = tmp_path / "folder" / "own"
    for name in ("heartbeats/0", "checkpoint/0000000001.json", "state.safetensors", "metrics.csv"):
        (own / name).parent.mkdir(parents=True, exist_ok=True)
        (own / name).write_text("mine")
    (own.parent / "file").touch()
    before = {file: file.is_dir() or file.read_bytes() for file in own.parent.rglob("*")}
    (tmp_path / "refused.py").write_text(REFUSED)
    bad = [[token.format(folder=own.parent) for token in tokens] for tokens in BAD]
    done = mpirun(3, str(tmp_path / "refused.py"), json.dumps(bad))
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(BAD), lines
    flags = [tokens[0].partition("=")[0] for tokens in BAD]
    for line, flag in zip(lines, flags, strict=True):
        assert line.startswith("dfl: ")
        assert flag in line or "mnist" in line
    assert "cannot be written to: Not a directory" in lines[4]
    assert f"--out {own}" in lines[5]
    assert {file: file.is_dir() or file.read_bytes() for file in own.parent.rglob("*")} == before


FAILING = """
import sys, time, dfl
from dfl.simulation import loop
def broken(run_state, prepared, error):
    if run_state.t == 3 and prepared.world.rank == 1:
        raise RuntimeError("deliberately broken")
    return 0
loop._agree_after_round = broken
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


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_the_job_ends_when_it_is_interrupted(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "forever.py").write_text(FOREVER)
    (tmp_path / "alive").mkdir()
    job = subprocess.Popen(
        mpirun_command(2, str(tmp_path / "forever.py"), str(tmp_path / "alive")),
        cwd=ROOT,
        env=ENV,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "alive").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks = [int(f.name) for f in (tmp_path / "alive").iterdir()]
    assert len(ranks) == 2
    job.send_signal(how)
    job.communicate(timeout=10)
    assert job.returncode != 0
    time.sleep(0.5)
    assert not [
        pid
        for pid in ranks
        if Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
