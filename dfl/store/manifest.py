"""run.json: the record of a run, with a checksum of itself and of the files of a run that ended.

    {"run": {...}, ..., "exit": 0,
     "files": {"metrics.csv": {"bytes": 812, "sha256": "..."}, ...}, "checksum": "..."}

`files` is written last, with the exit code. It is missing while a run is not over, and has
metrics.csv alone where the run ended early. It does not have logs, which are written to until the
process ends, files of TensorBoard, which have checksums of their own and hold nothing that
metrics.csv does not, and checkpoints (`dfl.store.checkpoint_files`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dfl.core.errors import InputError
from dfl.core.files import LOCK, atomically, is_locked, sha256
from dfl.core.reading import read_bounded

NAME = "run.json"
"""The file's name in the folder of a run."""
RUNNING, KILLED = "running", "killed"
"""The "ending" of a run that goes on, and of one whose program was killed."""
LONGEST = 2**24
"""Maximum number of bytes of a run.json."""


def write(folder: Path, record: Mapping[str, object], names: Sequence[str] = ()) -> None:
    """Write run.json.

    Args:
        folder: of the run.
        record: its content; `run` has the settings.
        names: of the files in the folder whose checksums it gets, with / for folders.

    Raises:
        OSError: it cannot be written, or one of the files cannot be read.
    """
    page = {name: value for name, value in record.items() if name not in ("files", "checksum")}
    if names:
        page["files"] = {name: _sum(folder / name) for name in names}
    with atomically(folder / NAME) as part:
        part.write_text(json.dumps({**page, "checksum": checksum(page)}, indent=2) + "\n")


def runs_in(folder: Path) -> str:
    """Return the end of a message on a folder that is no run; empty where it holds no runs."""
    with suppress(OSError):
        if any(folder.glob(f"*/{NAME}")):
            return f", but {folder}/* hold runs: give those"
    return ""


def read(folder: Path) -> dict[str, Any]:
    """Return the content of run.json.

    Raises:
        InputError: there is none, or it is damaged.
    """
    try:
        page = json.loads(read_bounded(folder / NAME, LONGEST).decode())
        whole = isinstance(page, dict) and page.get("checksum") == checksum(page)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        line = f"{folder} is no run directory: its {NAME} cannot be read ({why}){runs_in(folder)}"
        raise InputError(line) from None
    if not isinstance(page, dict) or not isinstance(page.get("run"), dict):
        raise InputError(f"{folder} is no run directory: its {NAME} has no settings of a run")
    if not whole:
        why = "its checksum does not match" if "checksum" in page else "it has no checksum"
        raise InputError(f"{folder}/{NAME} is damaged: {why}")
    return page


def read_now(folder: Path) -> dict[str, Any]:
    """Return the content of run.json; "ending" is "killed" where the run has not ended and no
    program writes to its folder.

    Raises:
        InputError: there is none, or it is damaged.
    """
    written_to = is_locked(folder / LOCK)  # before reading: the run may end meanwhile
    record = read(folder)
    killed = record.get("ending") == RUNNING and not written_to
    return record | {"ending": KILLED} if killed else record


def damage(folder: Path, *names: str) -> str:
    """Return in one line which file of a run is damaged or missing; empty where all are whole.

    Of a run that is not over, only run.json is checked.

    Args:
        folder: of the run.
        names: the files to check; all whose checksums it has where none are given.
    """
    try:
        record = read(folder)
    except InputError as error:
        return str(error)
    known: Mapping[str, object] = record.get("files", {})
    lines = (damaged(folder, name, known[name]) for name in names or known if name in known)
    return next(filter(None, lines), "")


def damaged(folder: Path, name: str, known: object) -> str:
    """Return in one line what is wrong with a file; empty if its size and sum are `known`."""
    try:
        whole = _sum(folder / name) == known
        return "" if whole else f"{folder / name} is damaged: its checksum does not match"
    except FileNotFoundError:
        return f"{folder / name} is missing"
    except OSError as error:
        return f"{folder / name} is damaged: {error.strerror or error}"


def checksum(page: Mapping[str, object]) -> str:
    """Return the SHA-256 of the content of a JSON file without its own checksum."""
    content = {name: value for name, value in page.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sum(path: Path) -> dict[str, int | str]:
    return {"bytes": path.stat().st_size, "sha256": sha256(path)}
