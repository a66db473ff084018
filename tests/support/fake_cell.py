"""A quick stand-in for `python -m dfl.run --config CELL/cell.toml --resume CELL` without learning.

It does what a sweep relies on: files, lock, exit codes, and a checkpoint when it is stopped. A cell
with lr 9 diverges, one with 13 peers is refused, one with `device = "cuda:7"` breaks with a
traceback.
"""

import csv
import json
import math
import signal
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically
from dfl.store import manifest

signals: list[int] = []
"""The signals that this process has received."""


def main(folder: Path, pause: float) -> int:
    """Write the files of a run and return its exit code."""
    run = Run.from_dict(tomllib.loads((folder / "cell.toml").read_text()))
    (folder / "launches").open("a").write("x")
    if run.peers == 13:
        print("dfl: --topology torus with 13 peers: has no sides", file=sys.stderr)
        return 2
    if run.device == "cuda:7":
        raise RuntimeError("deliberately broken")
    try:
        lock = Lock(folder)
    except InputError as error:
        print(f"dfl: {error}", file=sys.stderr)
        return 2
    if (
        (folder / "run.json").exists()
        and manifest.read(folder)["exit"] == 0
        and not manifest.damage(folder)
    ):
        lock.release()
        return 0
    begun = (
        json.loads((folder / "checkpoint").read_text())["round"] + 1
        if (folder / "checkpoint").exists()
        else 0
    )
    keep(folder, run, None, "running")
    code, ending = rounds(folder, run, begun, pause)
    if code == 3:
        print(f"dfl: {ending}", file=sys.stderr)
    keep(folder, run, code, ending)
    lock.release()
    return code


def rounds(folder: Path, run: Run, begun: int, pause: float) -> tuple[int, str]:
    """Write a row and a checkpoint per round, each but the first after a pause.

    Returns:
        The exit code and the ending.
    """
    lines = (folder / "metrics.csv").read_text().splitlines()[: begun + 1] if begun else []
    (folder / "metrics.csv").write_text("".join(f"{line}\n" for line in lines))
    for t in range(begun, run.rounds + 1):
        if run.lr == 9 and t == 2:
            return 3, "peer 1 is no longer finite after round 2: try a smaller --lr"
        if signals:
            return 75, "stopped by SIGTERM"
        time.sleep(pause if t else 0)
        append(folder / "metrics.csv", row(run, t))
        with atomically(folder / "checkpoint") as part:
            part.write_text(json.dumps({"round": t}))
    return 0, "finished"


def append(path: Path, figures: dict[str, Any]) -> None:
    """Write a row, after a header if it is the first."""
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, list(figures), lineterminator="\n")
        if not file.tell():
            table.writeheader()
        table.writerow(figures)


def row(run: Run, t: int) -> dict[str, Any]:
    """Return figures by the settings: more edges and more bits learn better and cost more."""
    edges = {"ring": 2, "torus": 4, "complete": 15}.get(str(run.topology or "ring"), 3)
    rate = (
        0.02
        * math.sqrt(edges)
        * (1 - 0.4 / (run.bits or 32))
        * (1 + 0.1 * math.sin(7 * run.seed + edges))
    )
    accuracy = 0.95 - 0.85 * math.exp(-rate * t)
    payload = t * edges * 16 * 1000 * (run.bits or 32) // 8
    return {
        "round": t,
        "seconds": time.time(),
        "train_loss": 2 - accuracy,
        "accuracy_mean": accuracy,
        "accuracy_min": accuracy - 0.05,
        "accuracy_max": accuracy,
        "accuracy_std": 0.01,
        "consensus_distance": 1 / (t + 1),
        "payload_bytes": payload,
    } | ({"relative_squared_error": 1 / run.bits} if run.bits else {})


def keep(folder: Path, run: Run, code: int | None, ending: str) -> None:
    """Write run.json."""
    record = {"run": run.to_dict(), "exit": code, "ending": ending, "seconds": 1.0}
    manifest.write(folder, record, ["metrics.csv"] if code == 0 else [])


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, lambda number, frame: signals.append(number))
    sys.exit(main(Path(sys.argv[1]), float(sys.argv[2])))
