"""How far is the run in a folder? What its files say: run.json, metrics.csv, output.log, and who holds its locks."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.files import held, read_bytes
from dfl.store import manifest

DONE, DIVERGED, FAILED, DAMAGED = "done", "diverged", "failed", "damaged"
RUNNING, STOPPED, WAITING = "running", "stopped", "waiting"
STATUSES = (DONE, DIVERGED, FAILED, DAMAGED, RUNNING, STOPPED, WAITING)
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
class CellState:
    """What a folder tells of its run.

    Attributes:
        status: one of `STATUSES`.
        row: the last row of metrics.csv, as it is written there; empty where there is none, or it is damaged.
        reason: what was said last, where it failed or diverged; what is damaged.
        table: the rows of metrics.csv that are whole, below their header; empty where there is no row.
    """

    status: str
    row: Mapping[str, str]
    reason: str = ""
    table: str = ""


Sight = Mapping[str, CellState]
"""How the cells of a grid were seen, by name, in its order."""


def see(folder: Path, names: Iterable[str]) -> dict[str, CellState]:
    """See how far the cells of a sweep are.

    Args:
        folder: of the sweep.
        names: of the cells.
    """
    return {name: look(folder / name) for name in names}


def look(folder: Path, locks: Sequence[str] = LOCKS) -> CellState:
    """See how far the run in a folder is.

    Args:
        folder: the folder.
        locks: as `running` takes them.
    """
    before = running(
        folder, locks
    )  # asked twice: the run may begin, or end, while its files are read
    found = _at_rest(folder)
    if before or running(folder, locks):
        return CellState(RUNNING, found.row, table=found.table)
    return found


def _at_rest(folder: Path) -> CellState:
    """How far a run is that nobody runs."""
    try:
        table, row = _table(folder)
        wrong = ""
    except InputError as error:
        table, row, wrong = "", {}, str(error)
    said = last_words(folder)
    if not os.path.lexists(folder / manifest.NAME):
        if wrong:
            return CellState(DAMAGED, row, wrong)
        return CellState(FAILED, row, said, table) if said else CellState(WAITING, row, "", table)
    if damage := manifest.damage(folder) or wrong:
        vouched = not wrong and not manifest.damage(folder, "metrics.csv")
        return CellState(DAMAGED, row if vouched else {}, damage, table if vouched else "")
    record = manifest.read(folder)
    code = record.get("exit")
    status = _ENDINGS.get(code, FAILED) if isinstance(code, int | None) else FAILED
    return CellState(
        status,
        row,
        said or str(record.get("ending")) if status in (FAILED, DIVERGED) else "",
        table,
    )


def _table(folder: Path) -> tuple[str, dict[str, str]]:
    """The rows of metrics.csv that are whole, which the run may be adding to, as text; and the last of them.

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
        raise InputError(f"{path} is damaged: its first line is no header of ours")
    last = -1
    for number, row in enumerate(rows, 2):
        if len(row) != len(header) or not all(map(_number, row)):
            raise InputError(f"{path} is damaged: line {number} is no row of {len(header)} numbers")
        reached = float(row[header.index("round")] or "nan")
        if not (reached > last and reached.is_integer()):
            raise InputError(
                f"{path} is damaged: line {number} has round {row[header.index('round')]!r} behind {last}"
            )
        last = int(reached)
    return (text, dict(zip(header, rows[-1], strict=True))) if rows else ("", {})


def _number(text: str) -> bool:
    """Whether a field of a table is a number, or empty."""
    try:
        return not text or not math.isnan(float(text)) or text == "nan"
    except ValueError:
        return False


def record(folder: Path) -> dict[str, Any]:
    """The run.json of a folder.

    Raises:
        InputError: it has none, or it is damaged.
    """
    return manifest.read(folder)


def last_words(folder: Path) -> str:
    """The last line of output.log; an error of ours, if it is among the last, before what an ending MPI says."""
    try:
        text = read_bytes(folder / "output.log").decode(errors="replace")
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
    return any(held(folder / name) for name in locks)
