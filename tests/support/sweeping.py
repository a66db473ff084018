"""What tests of sweeps share: grids, and `python -m dfl.sweep` whose cells are
`tests.support.fake_cell`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from dfl.sweep.status import read_state
from dfl.sweep.tables import CLOCKS

ROOT = Path(__file__).parents[2]
ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

SIX = """
peers = 4
rounds = 5
eval_every = 1
model = "softmax"
[sweep]
topology = ["ring", "complete"]
bits = ["none", 4, 2]
"""
"""A grid of six cells."""

FAKE = """
import sys
from dfl.sweep import command, plots, scheduler
pause = sys.argv.pop(1)
scheduler.command = lambda folder: ["-m", "tests.support.fake_cell", str(folder), pause]
plots.figures = lambda *given: {}  # they have tests of their own
sys.exit(command.main())
"""


def fake(folder: Path, pause: float, *words: str, begin: str = "") -> subprocess.Popen[str]:
    """Start a sweep of FOLDER/grid.toml to FOLDER/out whose cells learn nothing; `begin` is run
    before all else.
    """
    command = [
        sys.executable,
        "-c",
        begin + FAKE,
        str(pause),
        str(folder / "grid.toml"),
        "--out",
        str(folder / "out"),
        *words,
    ]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=ENV,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def statuses(folder: Path) -> list[str]:
    """How the cells are of which a sweep's folder has a file."""
    return [read_state(path.parent).status for path in folder.glob("*/cell.toml")]


def ended(sweep: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """The exit code of a sweep, and its lines."""
    said, _ = sweep.communicate(timeout=1200)
    return sweep.returncode, said.splitlines()


def wait_for(what: Callable[[], object], seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def interrupt(sweep: subprocess.Popen[str], how: signal.Signals) -> tuple[int, list[str]]:
    """Send a signal to a sweep, and wait for its end."""
    assert sweep.poll() is None, "it was too fast to be interrupted"
    sweep.send_signal(how)
    return ended(sweep)


def without_clocks(folder: Path) -> pd.DataFrame:
    """The sweep.csv of a folder, but for what depends on the time that passed."""
    return pd.read_csv(folder / "sweep.csv", dtype=str).drop(columns=list(CLOCKS))
