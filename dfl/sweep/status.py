"""The status of a cell: how far the run in a folder is.

It is read from the files of the folder, run.json, metrics.csv, output.log and cell.toml, from its
locks, and from the files that run.json vouches for that the run has read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dfl.config import Run
from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.files import LOCK, is_locked
from dfl.core.reading import open_regular
from dfl.core.registry import flag
from dfl.store import manifest, tables
from dfl.store.run_directory import CELL
from dfl.sweep.folder import read_cell

DONE, DIVERGED, FAILED, DAMAGED, CHANGED = "done", "diverged", "failed", "damaged", "changed"
RUNNING, STOPPED, WAITING = "running", "stopped", "waiting"
STATUSES = (DONE, DIVERGED, FAILED, DAMAGED, CHANGED, RUNNING, STOPPED, WAITING)
"""A stopped run was interrupted or killed and resumes when it is started again. A waiting run has
never been started. A changed one has ended, and would now have other rounds or read other files;
one that would now only have more rounds is stopped."""

LENGTH = ("rounds", "eval_every", "eval_last")
"""The settings that may change when a run is resumed by itself and that a sweep does not change."""

CELL_LOCK = ".sweep.lock"
"""The file that a sweep locks in the folder of a cell while the cell runs, so that no other sweep
starts it."""
LOCKS = (LOCK, CELL_LOCK)
"""The files that a run and its sweep lock in the folder of a cell."""

LAUNCH = "launch"
"""The first word of the line of output.log with which a launch of the cell begins."""
LAST = 12
"""Number of lines at the end of output.log that are searched for an error."""
TAIL = 2**16
"""Number of bytes at the end of output.log that are read."""

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
        reason: the last message of a run that failed or diverged, the damage, or what has changed.
        table: metrics.csv up to its last complete row; empty where there is no row.
    """

    status: str
    row: Mapping[str, str]
    reason: str = ""
    table: str = ""

    @property
    def over(self) -> bool:
        """Whether the run has ended for good: it is done, or has diverged."""
        return self.status in (DONE, DIVERGED)

    @property
    def changed(self) -> bool:
        """Whether the run has ended and would now be another: it is not started again."""
        return self.status == CHANGED

    @property
    def bad(self) -> bool:
        """Whether the run has failed or diverged, or is damaged or changed."""
        return self.status in (FAILED, DIVERGED, DAMAGED, CHANGED)


States = Mapping[str, CellState]
"""The states of the cells of a grid by name, in the order of the grid."""


def read_states(folder: Path, names: Iterable[str], models: bool = True) -> dict[str, CellState]:
    """Read the states of the cells of a sweep.

    Args:
        folder: of the sweep.
        names: of the cells.
        models: as in `read_state`.
    """
    return {name: read_state(folder / name, models=models) for name in names}


def read_state(folder: Path, locks: Sequence[str] = LOCKS, models: bool = True) -> CellState:
    """Read the state of the run in a folder.

    Args:
        folder: the folder.
        locks: as in `is_running`.
        models: whether to compare the checksums of all files of a run that has ended, its models
            and figures and the models that it began with too, which takes seconds for some
            gigabytes; else that of metrics.csv, and of other files that it read.
    """
    # The locks are checked twice: the run may begin or end while its files are read.
    running_before = is_running(folder, locks)
    state = _state_at_rest(folder, models)
    if running_before or is_running(folder, locks):
        return CellState(RUNNING, state.row, table=state.table)
    return state


def _state_at_rest(folder: Path, models: bool) -> CellState:
    """Read the state of a run that no program is running."""
    checked = () if models else ("metrics.csv",)
    try:
        found = tables.read(folder / "metrics.csv")
        table, row, wrong = (found.text, found.last, "") if found.values else ("", {}, "")
    except FileNotFoundError:
        table, row, wrong = "", {}, ""
    except InputError as error:
        table, row, wrong = "", {}, str(error)
    message = last_message(folder)
    if not os.path.lexists(folder / manifest.NAME):
        if wrong:
            return CellState(DAMAGED, row, wrong)
        return CellState(FAILED if message else WAITING, row, message, table)
    if damage := manifest.damage(folder, *checked) or wrong:
        vouched = not wrong and not manifest.damage(folder, "metrics.csv")
        return CellState(DAMAGED, row if vouched else {}, damage, table if vouched else "")
    record = manifest.read(folder)
    code = record.get("exit")
    status = _ENDINGS.get(code, FAILED) if isinstance(code, int | None) else FAILED
    if status in (DONE, DIVERGED):
        change, resumes = _change(folder, record, models)
        if change:
            return CellState(CHANGED, row, change, table)
        status = STOPPED if resumes and status == DONE else status
    reason = message or str(record.get("ending")) if status in (FAILED, DIVERGED) else ""
    return CellState(status, row, reason, table)


def _change(folder: Path, record: Mapping[str, Any], models: bool) -> tuple[str, bool]:
    """Return in one line what a cell that has ended would now do otherwise, empty for nothing; and
    whether it would go on, to more rounds.

    Args:
        folder: of the cell.
        record: its run.json.
        models: as in `read_state`.
    """
    from dfl.store.fingerprints import changed_file

    if not os.path.lexists(folder / CELL):  # a run by itself
        return "", False
    again = f"remove {folder} to run it again"
    with suppress(InputError):  # what cannot be read is not compared
        ran, cell = Run.from_dict(record["run"]), read_cell(folder / CELL)
        more = ran.rounds < cell.rounds
        for setting in LENGTH:
            old, new = getattr(ran, setting), getattr(cell, setting)
            if old != new and not (more and setting == "rounds"):
                return f"it ran with {flag(setting)} {old}, not {new}: {again}", False
        if name := changed_file(ran if models else replace(ran, init_from=None), record):
            return f"the {name} is not the one that it ran with: restore it, or {again}", False
        return "", more
    return "", False


def last_message(folder: Path) -> str:
    """Return the last message in output.log of the last launch; empty where it printed nothing.

    An error line of dfl among the last lines is preferred to what MPI prints when it ends a job.
    """
    try:
        with open_regular(folder / "output.log") as file:
            beginning = max(file.seek(0, os.SEEK_END) - TAIL, 0)
            file.seek(beginning)
            text = file.read(TAIL).decode(errors="replace")
    except OSError:
        return ""
    text = re.split(rf"^{LAUNCH} \d{{4}}(?:-\d\d){{2}} \d\d(?::\d\d){{2}}$", text, flags=re.M)[-1]
    lines = [line.strip() for line in text.splitlines() if line.strip()][-LAST:]
    ours = [line.removeprefix("dfl: ") for line in lines if line.startswith("dfl: ")]
    return (ours or lines or [""])[-1]


def is_running(folder: Path, locks: Sequence[str] = LOCKS) -> bool:
    """Return whether some program is running the run in a folder.

    Args:
        folder: the folder.
        locks: the lock files to check. A sweep leaves out the one that it holds itself.
    """
    return any(is_locked(folder / name) for name in locks)
