"""Sweeps that run at the same time on one folder share its cells, and all end correctly."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sweeping import ENV, ROOT, SIX, ended, fake, statuses, wait_for, without_clocks

pytestmark = pytest.mark.slow


def launches(folder: Path) -> str:
    """Return how often each cell was started, a digit per cell."""
    return "".join(str(len(path.read_text())) for path in sorted(folder.glob("*/launches")))


@pytest.mark.parametrize("pause", [0, 0.1])
def test_sweeps_at_once_share_the_cells(tmp_path: Path, pause: float) -> None:
    (tmp_path / "grid.toml").write_text(SIX)
    sweeps = [fake(tmp_path, pause, "--jobs", jobs) for jobs in ("1", "2", "1")]
    for code, printed in map(ended, sweeps):
        assert (code, printed[-2]) == (0, "6 cells: 6 done"), printed
    assert launches(tmp_path / "out") == "111111"
    assert set(without_clocks(tmp_path / "out")["status"]) == {"done"}
    left = [
        path for path in (tmp_path / "out").rglob(".*") if path.name.endswith((".part", "lock"))
    ]
    assert left == []


def test_a_sweep_resumes_the_cells_of_a_stopped_one(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(SIX)
    first = fake(tmp_path, 2, "--jobs", "6")
    wait_for(lambda: statuses(tmp_path / "out").count("running") == 6)
    second = fake(tmp_path, 0, "--jobs", "2")
    assert second.stdout is not None
    assert re.match("waiting for what another program runs: topology=", second.stdout.readline())
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 75
    assert ended(second)[0] == 0
    assert launches(tmp_path / "out") == "222222"


def test_a_sweep_waits_for_the_cells_of_one_that_was_killed(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(SIX)
    first = fake(tmp_path, 0.2, "--jobs", "6")
    wait_for(lambda: len(launches(tmp_path / "out")) == 6)
    first.kill()
    code, printed = ended(fake(tmp_path, 0, "--jobs", "2"))
    assert (code, printed[-2]) == (0, "6 cells: 6 done"), printed
    assert launches(tmp_path / "out") == "111111"
    first.communicate()


def test_failures_of_sweeps_at_once_are_reported_by_both(tmp_path: Path) -> None:
    grid = "rounds = 5\n[sweep]\npeers = [4, 13]\nlr = [0.1, 9]\n"
    (tmp_path / "grid.toml").write_text(grid)
    for code, printed in map(ended, [fake(tmp_path, 0, "--jobs", "2") for _ in range(2)]):
        assert (code, printed[-2]) == (1, "4 cells: 1 done, 1 diverged, 2 failed"), printed


def test_a_file_system_without_locks_is_reported_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("peers = 4\nrounds = 2\n[sweep]\nseed = [0, 1]\n")
    unable = (
        "import fcntl, os\n"
        "def flock(*given): raise OSError(38, os.strerror(38))\n"
        "fcntl.flock = flock\n"
    )
    code, printed = ended(fake(tmp_path, 0, begin=unable))
    warned = [line for line in printed if line.startswith("dfl: warning: the file system at ")]
    assert (code, len(warned), len(printed)) == (0, 1, 7), printed


def test_two_sweeps_of_real_runs_share_cells_and_run_damaged_ones_again(tmp_path: Path) -> None:
    grid = (
        'peers = 2\nrounds = 2\nmodel = "softmax"\nexamples_per_peer = 20\ncheckpoint_every = 1\n'
    )
    (tmp_path / "grid.toml").write_text(f"{grid}[sweep]\nseed = [0, 1]\n")
    command = [
        sys.executable,
        "-m",
        "dfl.sweep",
        str(tmp_path / "grid.toml"),
        "--out",
        str(tmp_path / "out"),
    ]
    sweeps = [
        subprocess.Popen(
            command, cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(2)
    ]
    for code, printed in map(ended, sweeps):
        assert (code, printed[-2]) == (0, "2 cells: 2 done"), printed
    tables = [path.read_text().splitlines() for path in tmp_path.glob("out/*/metrics.csv")]
    assert [[line.partition(",")[0] for line in table] for table in tables] == [
        ["round", "0", "2"]
    ] * 2

    state = tmp_path / "out/seed=1/state.safetensors"
    whole = state.read_bytes()
    state.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    again = subprocess.run(
        [*command, "--status"], cwd=ROOT, env=ENV, text=True, capture_output=True
    )
    assert "1 done, 1 damaged" in again.stdout
    again = subprocess.run(command, cwd=ROOT, env=ENV, text=True, capture_output=True)
    assert (again.returncode, again.stderr) == (0, ""), again
    assert again.stdout.startswith(f"damaged    seed=1: {state} is damaged")
    assert state.read_bytes() == whole
