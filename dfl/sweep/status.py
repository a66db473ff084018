"""The status of a cell: how far the run in a folder is.

It is read from the files of the folder, run.json, metrics.csv and output.log, and from its locks.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.files import held, read_bytes
from dfl.store import manifest

DONE, DIVERGED, FAILED, DAMAGED = "done", "diverged", "failed", "damaged"
RUNNING, STOPPED, WAITING = "running", "stopped", "waiting"
STATUSES = (DONE, DIVERGED, FAILED, DAMAGED, RUNNING, STOPPED, WAITING)
"""A stopped run was interrupted or killed and resumes when it is started again. A waiting run has
never been started."""

RUN_LOCK = ".lock"
"""The file that a run locks in its folder while it writes there."""
CELL_LOCK = ".sweep.lock"
"""The file that a sweep locks in the folder of a cell while the cell runs, so that no other sweep
starts it."""
LOCKS = (RUN_LOCK, CELL_LOCK)

LAST = 12
"""Number of lines at the end of output.log that are searched for an error."""

_ENDINGS: dict[int | None, str] = {
    0: DONE,
    DivergedError.code: DIVERGED,
    Suspended.code: STOPPED,
    130: STOPPED,
    None: STOPPED,
}


@dataclass(frozen=True)
class CellState:
    """The state of a cell, as its folder shows it.

    Attributes:
        status: one of `STATUSES`.
        row: the last row of metrics.csv, as text; empty where there is none or the file is damaged.
        reason: the last message of a run that failed or diverged, or the damage.
        table: metrics.csv up to its last complete row; empty where there is no row.
    """

    status: str
    row: Mapping[str, str]
    reason: str = ""
    table: str = ""


States = Mapping[str, CellState]
"""The states of the cells of a grid by name, in the order of the grid."""


def read_states(folder: Path, names: Iterable[str]) -> dict[str, CellState]:
    """Read the states of the cells of a sweep.

    Args:
        folder: of the sweep.
        names: of the cells.
    """
    return {name: read_state(folder / name) for name in names}


def read_state(folder: Path, locks: Sequence[str] = LOCKS) -> CellState:
    """Read the state of the run in a folder.

    Args:
        folder: the folder.
        locks: as in `is_running`.
    """
    # The locks are checked twice: the run may begin or end while its files are read.
    running_before = is_running(folder, locks)
    state = _state_at_rest(folder)
    if running_before or is_running(folder, locks):
        return CellState(RUNNING, state.row, table=state.table)
    return state


def _state_at_rest(folder: Path) -> CellState:
    """Read the state of a run that no program is running."""
    try:
        table, row = _table(folder)
        wrong = ""
    except InputError as error:
        table, row, wrong = "", {}, str(error)
    message = last_message(folder)
    if not os.path.lexists(folder / manifest.NAME):
        if wrong:
            return CellState(DAMAGED, row, wrong)
        return CellState(FAILED if message else WAITING, row, message, table)
    if damage := manifest.damage(folder) or wrong:
        vouched = not wrong and not manifest.damage(folder, "metrics.csv")
        return CellState(DAMAGED, row if vouched else {}, damage, table if vouched else "")
    record = manifest.read(folder)
    code = record.get("exit")
    status = _ENDINGS.get(code, FAILED) if isinstance(code, int | None) else FAILED
    reason = message or str(record.get("ending")) if status in (FAILED, DIVERGED) else ""
    return CellState(status, row, reason, table)


def _table(folder: Path) -> tuple[str, dict[str, str]]:
    """Read the complete rows of metrics.csv, to which the run may be appending.

    Returns:
        The text up to the last complete row, and that row by column; both empty without a row.

    Raises:
        InputError: the file is damaged.
    """
    path = folder / "metrics.csv"
    try:
        text = read_bytes(path).decode()
        text = text[: text.rfind("\n") + 1]
        header, *rows = list(csv.reader(StringIO(text), strict=True)) or [[]]
    except FileNotFoundError:
        return "", {}
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"{path} is damaged: {getattr(error, 'strerror', None) or error}"
        ) from None
    if header and ("round" not in header or len(set(header)) < len(header)):
        raise InputError(f"{path} is damaged: its first line is not a header")
    last = -1
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or not all(map(_number, row)):
            raise InputError(f"{path} is damaged: line {number} is no row of {len(header)} numbers")
        reached = float(row[header.index("round")] or "nan")
        if not (reached > last and reached.is_integer()):
            found = row[header.index("round")]
            raise InputError(f"{path} is damaged: line {number} has round {found!r} after {last}")
        last = int(reached)
    return (text, dict(zip(header, rows[-1], strict=True))) if rows else ("", {})


def _number(text: str) -> bool:
    """Return whether a field of a table is a number or empty."""
    try:
        return not text or not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False


def last_message(folder: Path) -> str:
    """Return the last message in output.log.

    An error line of dfl among the last lines is preferred to what MPI prints when it ends a job.
    """
    try:
        text = read_bytes(folder / "output.log").decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST:]
    ours = [line.removeprefix("dfl: ") for line in lines if line.startswith("dfl: ")]
    return (ours or lines or [""])[-1]


def is_running(folder: Path, locks: Sequence[str] = LOCKS) -> bool:
    """Return whether some program is running the run in a folder.

    Args:
        folder: the folder.
        locks: the lock files to check. A sweep leaves out the one that it holds itself.
    """
    return any(held(folder / name) for name in locks)
