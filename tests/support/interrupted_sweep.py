"""Is a sweep that was interrupted the same as one that was not? With real runs, on digits; 24 cells
take minutes:

    python -m tests.support.interrupted_sweep [SEED]

A sweep runs whole, and another is ended three times, by SIGTERM, SIGINT and SIGKILL in some order
and at moments that the seed draws. Both must have the same sweep.csv but for the clocks, the same
summary.csv, and the same models.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tests.support.sweeping import ENV, ROOT, ended, interrupt, statuses, wait_for, without_clocks

GRID = """
peers = 4
rounds = 30
eval_every = 2
checkpoint_every = 5
model = "softmax"
examples_per_peer = 60
[sweep]
"""
HOWS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL)
MANY = GRID + 'topology = ["ring", "star", "complete"]\nbits = ["none", 8, 4, 2]\nseed = [0, 1]\n'


def start(folder: Path, name: str) -> subprocess.Popen[str]:
    """Start the sweep of a folder, or go on with it."""
    words = [
        "-m",
        "dfl.sweep",
        str(folder / "grid.toml"),
        "--out",
        str(folder / name),
        "--jobs",
        "2",
    ]
    return subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def at_work(folder: Path, cells: int) -> bool:
    """Whether so many cells of a sweep are done, and others run."""
    found = statuses(folder)
    return found.count("done") >= cells and "running" in found


def check(folder: Path, grid: str, seed: int, hows: Sequence[signal.Signals] = HOWS) -> list[str]:
    """Run a grid whole and interrupted, and compare; what happened, a line each."""
    (folder / "grid.toml").write_text(grid)
    code, said = ended(start(folder, "whole"))
    assert code == 0, said
    whole, happened = without_clocks(folder / "whole"), []
    draw = random.Random(seed)
    moments = sorted(draw.sample(range(len(whole) - 1), len(hows)))
    for done, how in zip(moments, draw.sample(hows, len(hows)), strict=True):
        running = start(folder, "parts")
        wait_for(partial(at_work, folder / "parts", done), 600)
        time.sleep(draw.uniform(0, 2))
        code, said = interrupt(running, how)
        now = statuses(folder / "parts")
        happened.append(f"{how.name}: exit code {code}, cells {dict(Counter(now))}")
        assert code == {signal.SIGTERM: 75, signal.SIGINT: 130, signal.SIGKILL: -9}[how], said
    wait_for(
        lambda: "running" not in statuses(folder / "parts"), 600
    )  # the cells of a sweep that was killed
    code, said = ended(start(folder, "parts"))
    assert code == 0, said
    assert without_clocks(folder / "parts").equals(whole)
    for name in ("summary.csv", *(f"{cell}/state.safetensors" for cell in whole["name"])):
        assert (folder / "parts" / name).read_bytes() == (folder / "whole" / name).read_bytes(), (
            name
        )
    return [*happened, f"the same sweep.csv, summary.csv and models of {len(whole)} cells"]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        print("\n".join(check(Path(place), MANY, int(sys.argv[1]) if sys.argv[1:] else 0)))
