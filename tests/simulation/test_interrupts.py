"""Runs that Ctrl-C ends, and runs whose standard output is closed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dfl
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.core import command_line
from dfl.datasets import DATASETS
from tests.comm.test_startup import running
from tests.conftest import Command, eventually
from tests.support.mpirun import ENV, ROOT, mpirun, mpirun_command

pytestmark = pytest.mark.mpi

FEW = ["--peers=3", "--rounds=6", "--eval-every=2", "--model=softmax", "--checkpoint-every=2"]


def ctrl_c(*given: Any, **more: Any) -> Any:
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("the signal comes before the next statement")


def at_round(t: int) -> Callable[..., Any]:
    known = DFedAvgM.round

    def interrupted(self: Any, state: Any, task: Any, net: Any) -> Any:
        return ctrl_c() if net.t == t else known(self, state, task, net)

    return interrupted


@pytest.fixture(autouse=True)
def handler() -> Any:
    """Assert that runs restore the handler of Ctrl-C."""
    before = signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr
    yield
    assert (signal.getsignal(signal.SIGINT), sys.stdout, sys.stderr) == before


def test_ctrl_c_while_reading_the_command_line(
    dfl_run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfl.run.read_command", ctrl_c)
    assert (dfl_run(*FEW).code, dfl_run(*FEW).err) == (130, "dfl: interrupted\n")


def test_ctrl_c_while_reading_data(dfl_run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    with DATASETS.replaced(digits=ctrl_c):
        ended = dfl_run(*FEW)
    assert (ended.code, ended.out, ended.err) == (130, "", "dfl: interrupted\n")
    assert dfl_run.files() == []


@pytest.mark.parametrize(("t", "hint"), [(1, ""), (5, ": resume after round 4 with --resume run")])
def test_ctrl_c_in_a_round(
    dfl_run: Command, monkeypatch: pytest.MonkeyPatch, t: int, hint: str
) -> None:
    monkeypatch.setattr(DFedAvgM, "round", at_round(t))
    ended = dfl_run(*FEW, "--out=run")
    assert (ended.code, ended.err) == (130, f"dfl: interrupted{hint}\n")
    record = json.loads(Path("run/run.json").read_text())
    assert (record["exit"], record["ending"]) == (130, "interrupted")
    monkeypatch.undo()
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    os.chdir(dfl_run.folder)
    monkeypatch.setattr("sys.argv", ["run.py", "--resume=run"])
    assert dfl.run.main() == 0


def test_ctrl_c_while_drawing_figures(dfl_run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", ctrl_c)
    ended = dfl_run(*FEW, "--out=run")
    assert (ended.code, ended.err) == (
        130,
        "dfl: interrupted: resume after round 6 with --resume run\n",
    )
    assert json.loads(Path("run/run.json").read_text())["exit"] == 130


def test_ctrl_c_in_a_callback_that_drops_exceptions(
    dfl_run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As callbacks of weak references do, which imports use."""

    class Dropped:
        def __del__(self) -> None:
            ctrl_c()

    def read(*given: Any) -> Any:
        Dropped()
        time.sleep(5)
        raise AssertionError("it is raised again")

    with DATASETS.replaced(digits=read):
        ended = dfl_run(*FEW)
    assert (ended.code, ended.err) == (130, "dfl: interrupted\n")


def test_ctrl_c_is_an_exception_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DFedAvgM, "round", at_round(1))
    with pytest.raises(KeyboardInterrupt):
        list(dfl.simulate(dfl.Run(peers=3, rounds=3, model="softmax", out=tmp_path / "run")))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["ending"] == "interrupted"


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    """As in a background job of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with command_line.steady():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ranks_print_the_interruption_once(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [
        "--peers=3",
        "--rounds=1000000",
        "--model=softmax",
        "--checkpoint-every=2",
        f"--out={folder}",
    ]
    command = mpirun_command(2, "-m", "dfl.run", *flags)
    job = subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert eventually(lambda: len(list((folder / "checkpoint").glob("*.json"))) > 1, 120)
    job.send_signal(signal.SIGINT)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 130
    (line,) = [line for line in errors.splitlines() if line.startswith("dfl: ")]
    assert line.startswith("dfl: interrupted: resume after round ")
    assert line.endswith(f" with --resume {folder}")
    assert "Traceback" not in errors
    assert json.loads((folder / "run.json").read_text())["ending"] == "interrupted"
    assert eventually(lambda: not running(f"--out={folder}"), 5)


@pytest.mark.parametrize("how", [">&- 2>&- <&-", "| head -1"])
def test_a_run_continues_when_its_output_is_closed(tmp_path: Path, how: str) -> None:
    """Its files are complete, and nothing that is printed gets into them."""
    flags = " ".join(f for f in FEW if "checkpoint" not in f)
    run = f"{sys.executable} -m dfl.run {flags} --out={tmp_path / 'run'}"
    line = f"{run} {how}; echo ${{PIPESTATUS[0]}} > {tmp_path}/rc"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, env=ENV, capture_output=True, text=True)
    assert (tmp_path / "rc").read_text() == "0\n"
    assert done.stderr == ""
    assert json.loads((tmp_path / "run" / "run.json").read_text())["exit"] == 0
    rows = list(dfl.simulate(dfl.Run(peers=3, rounds=6, eval_every=2, model="softmax")))
    found = dfl.load(tmp_path / "run").rows
    assert found["train_loss"].tolist() == [row["train_loss"] for row in rows]


def test_standard_output_on_a_full_disk_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with command_line.steady():
            print("x", flush=True)
            sys.stdout.flush()
        assert sys.stdout is full
        monkeypatch.setattr(sys, "stdout", io.StringIO())


LEFT = """
import sys, dfl
rows = dfl.simulate(dfl.Run(peers=4, rounds=3, model="softmax", out=sys.argv[1]))
next(rows)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_program_may_end_with_a_run_half_way(tmp_path: Path, ranks: int) -> None:
    """The iterator lives until modules are gone; the run is closed before."""
    done = mpirun(ranks, "-c", LEFT, str(tmp_path / "run"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["ending"] == "interrupted"
