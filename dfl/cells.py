"""How far is the run in a folder? What its files say: run.json, metrics.csv, output.log, and who holds its locks."""

from __future__ import annotations

import csv
import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dfl.errors import DivergedError, InputError, Suspended
from dfl.files import flocked

DONE, DIVERGED, FAILED = "done", "diverged", "failed"
RUNNING, STOPPED, WAITING = "running", "stopped", "waiting"
STATUSES = (DONE, DIVERGED, FAILED, RUNNING, STOPPED, WAITING)
"""A run that stopped was interrupted, or killed, and goes on where it is started again; one that waits never began."""

RUN_LOCK = ".lock"
"""What a run locks in its folder while it writes there."""
CELL_LOCK = ".sweep.lock"
"""What a sweep locks in the folder of a cell while it has the cell run: no other sweep starts that cell meanwhile."""
LOCKS = (RUN_LOCK, CELL_LOCK)

LAST = 12
"""Lines of output.log among which an error is looked for."""

_ENDINGS: dict[int | None, str] = {
    0: DONE,
    DivergedError.code: DIVERGED,
    Suspended.code: STOPPED,
    130: STOPPED,
    None: STOPPED,
}


@dataclass(frozen=True)
class Seen:
    """What a folder tells of its run.

    Attributes:
        status: one of `STATUSES`.
        row: the last row of metrics.csv, as it is written there; empty where there is none.
        reason: what was said last, where it failed or diverged.
    """

    status: str
    row: Mapping[str, str]
    reason: str = ""


def look(folder: Path, locks: Sequence[str] = LOCKS) -> Seen:
    """See how far the run in a folder is.

    Args:
        folder: the folder.
        locks: as `running` takes them.
    """
    before = running(folder, locks)  # asked twice: the run may begin, or end, while its files are read
    record, row, said = _record(folder), last_row(folder), last_words(folder)
    if before or running(folder, locks):
        return Seen(RUNNING, row)
    if record is None:
        return Seen(FAILED, row, said) if said else Seen(WAITING, row)
    status = _ENDINGS.get(record.get("exit"), FAILED)
    return Seen(status, row, said or str(record.get("ending")) if status in (FAILED, DIVERGED) else "")


def record(folder: Path) -> dict[str, Any]:
    """The run.json of a folder.

    Raises:
        InputError: it has none.
    """
    found = _record(folder)
    if found is None or "run" not in found:
        raise InputError(f"{folder} is no run directory: it has no run.json that can be read")
    return found


def _record(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def table(folder: Path) -> str:
    """The rows of metrics.csv that are whole, which the run may be adding to; empty where there are none."""
    try:
        text = (folder / "metrics.csv").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    return text[: text.rfind("\n") + 1]


def last_row(folder: Path) -> dict[str, str]:
    """The last row of metrics.csv that is whole, as text; empty where there is none."""
    rows = list(csv.DictReader(StringIO(table(folder))))
    return dict(rows[-1]) if rows else {}


def last_words(folder: Path) -> str:
    """The last line of output.log; an error of ours, if it is among the last, before what an ending MPI says."""
    try:
        text = (folder / "output.log").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST:]
    ours = [line.removeprefix("dfl: ") for line in lines if line.startswith("dfl: ")]
    return (ours or lines or [""])[-1]


def running(folder: Path, locks: Sequence[str] = LOCKS) -> bool:
    """Whether some program runs the run in a folder.

    Args:
        folder: the folder.
        locks: those of which the program holds one. A sweep leaves out the one that it holds itself.
    """
    return any(held(folder, name) for name in locks)


def held(folder: Path, name: str = RUN_LOCK) -> bool:
    """Whether some program holds a lock in a folder, as `dfl.files.Lock` takes it."""
    try:
        with (folder / name).open() as file:
            return not flocked(file, fcntl.LOCK_SH, folder)
    except OSError:
        return False
