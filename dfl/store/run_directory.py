"""The folders that dfl writes to: those with its marker, and new or empty ones, which get it.

The marker is the regular file `.dfl` with `CONTENT` in it, and is written before anything else.
run.json is no marker, because users keep copies of it beside files of their own, to replay a run.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dfl.comm import stalls
from dfl.core.errors import InputError
from dfl.core.files import Lock, make_directory, no_follow
from dfl.core.reading import open_regular

MARKER = ".dfl"
"""The name of the marker."""
CONTENT = b"dfl writes to this folder\n"
"""The content of the marker."""
FILES = ("run.json", "metrics.csv", "peers.csv", "state.safetensors")
"""The files that a run writes to its folder."""
FOLDERS = ("checkpoint", "figures", "logs", "heartbeats", "tensorboard", "history", "profile")
"""The folders that a run makes in its folder."""
OUTPUTS = (*FILES, *FOLDERS[:2])
"""What shows that a folder has a run. A sweep writes to the folder of a cell before that."""
PAGE = "report.html"
"""The page of a run, a sweep or a comparison, in its folder."""
GRID = "grid.toml"
"""The copy of the file of a grid, in the folder of a sweep."""
CELL = "cell.toml"
"""The settings of a cell of a sweep, in the folder of the cell."""
LONGEST = "x" * 100
"""As long as the longest name of a file in the folder of a run."""


def refuse_unusable(folder: Path, resume: bool, page: bool = True) -> None:
    """Refuse a folder that a run may not write to; nothing is touched.

    Args:
        folder: which need not exist.
        resume: whether the run in it is resumed.
        page: whether the run writes a page.

    Raises:
        InputError: it is foreign, its name leaves no room for names in it, it holds a sweep, a run
            that is not to be resumed, a foreign page, or something else in the place of a file of a
            run.
    """
    flag = "--resume" if resume else "--out"
    refuse_foreign(flag, folder)
    if os.path.lexists(folder / GRID) or next(folder.glob(f"*/{CELL}"), None):
        raise InputError(f"{flag} {folder} holds a sweep, not a run: give another folder")
    if not resume and outputs(folder):
        raise InputError(
            f"--out {folder} holds a run already, and runs are never overwritten: "
            f"give another folder, or --resume {folder}, in Python dfl.resumed({str(folder)!r})"
        )
    try:
        for name in (LONGEST, *FILES, *FOLDERS):
            _check_kind(folder / name)
    except OSError as error:
        raise _unusable(flag, folder, error) from None
    if page:
        refuse_foreign_page(folder)


def refuse_foreign_page(folder: Path) -> None:
    """Refuse to overwrite a page that dfl did not write.

    Raises:
        InputError: the folder has such a page, or one that cannot be read.
    """
    path = folder / PAGE
    head = beginning(path)
    if head is not None and b'content="dfl.' not in head:
        raise InputError(f"{path} was not written by dfl and is left as it is: move it away")


def beginning(path: Path) -> bytes | None:
    """Return the first 1,000 bytes of a file; None where there is none.

    Raises:
        InputError: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            return file.read(1000)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def outputs(folder: Path) -> list[str]:
    """Return the names of the files and folders of a run in a folder."""
    return [name for name in OUTPUTS if os.path.lexists(folder / name)]


def refuse_foreign(flag: str, folder: Path) -> None:
    """Refuse a folder that is not empty and was not claimed; nothing is touched.

    Args:
        flag: by which the folder was given, for messages.
        folder: which need not exist.

    Raises:
        InputError: it holds something foreign, or cannot be read.
    """
    try:
        names = os.listdir(folder)
        foreign = bool(names) and not _marked(folder, names)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise _unusable(flag, folder, error) from None
    if foreign:
        raise InputError(
            f"{flag} {folder} is not empty and not a folder of dfl (it has no valid {MARKER}): "
            "give another folder"
        )


def claim(folder: Path, flag: str = "--out") -> list[Path]:
    """Create a folder and its marker, before anything else is written to it.

    Args:
        folder: a new one, an empty one, or one with the marker, which stays as it is.
        flag: by which it was given, for messages.

    Returns:
        The files and folders that were created, for `take_back`.

    Raises:
        InputError: it holds something foreign, or cannot be written to.
    """
    refuse_foreign(flag, folder)
    marker = folder / MARKER
    made = list[Path]()
    try:
        made = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            handle = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
            with open(handle, "wb") as file:
                file.write(CONTENT)
            made.insert(0, marker)
        if _held(marker) != CONTENT:  # its writer was killed, or is writing
            with open(marker, "wb", opener=no_follow) as file:
                file.write(CONTENT)
        refuse_foreign(flag, folder)  # another program may have filled it meanwhile
    except (OSError, ValueError) as error:
        take_back(made)
        raise error if isinstance(error, InputError) else _unusable(flag, folder, error) from None
    return made


def take_back(made: Sequence[Path]) -> None:
    """Undo `claim` where nothing was written since: remove a lone marker and empty folders."""
    for each in made:
        with suppress(OSError):
            if each.is_dir():
                each.rmdir()
            elif os.listdir(each.parent) == [each.name]:
                each.unlink()


class Heartbeats(NamedTuple):
    """The folder of the ranks' heartbeats.

    Attributes:
        made: what was made, for `take_back`; the folder is first.
        lock: held while the job lives, so that another job does not remove its files.
    """

    made: list[Path]
    lock: Lock


def make_heartbeats(folder: Path) -> Heartbeats:
    """Make the folder of the ranks' heartbeats in the folder of a run, which is claimed.

    Files that the ranks of a job left there are removed; anything else stays.

    Raises:
        InputError: it cannot be made, or another job writes to the folder of the run.
    """
    made = claim(folder.parent)
    try:
        Lock(folder.parent).release()
        make_directory(folder)
        lock = Lock(folder.parent, f"{folder.name}/.lock")
        with lock.unless_this_fails():
            for each in folder.iterdir():
                if (
                    re.fullmatch(r"[0-9]+|\.[0-9]+\.part", each.name)
                    and not each.is_symlink()
                    and stalls.read(each)
                ):
                    each.unlink()
    except InputError:
        take_back(made)
        raise
    except OSError as error:
        take_back(made)
        raise InputError(f"--out {folder.parent} cannot be written to: {error.strerror}") from None
    return Heartbeats([folder, *made], lock)


def _marked(folder: Path, names: Sequence[str]) -> bool:
    """Return whether a folder has the marker, of which a part suffices if it is alone."""
    marker = folder / MARKER
    if MARKER not in names or not stat.S_ISREG(marker.lstat().st_mode):
        return False
    held = _held(marker)
    return held == CONTENT or (list(names) == [MARKER] and CONTENT.startswith(held))


def _held(marker: Path) -> bytes:
    """Return the content of a marker, of a longer file one byte more than a marker has."""
    with open_regular(marker) as file:
        return file.read(len(CONTENT) + 1)


def _check_kind(path: Path) -> None:
    """Refuse what a run could not write to.

    Raises:
        OSError: a file is in the place of a directory, or the other way round.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if path.name in FOLDERS and not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path.name} is a link or no directory, remove it")
    if path.name in FILES and not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise OSError(errno.EINVAL, f"{path.name} is not a regular file, remove it")


def _unusable(flag: str, folder: Path, error: Exception) -> InputError:
    why = getattr(error, "strerror", None) or error
    return InputError(f"{flag} {folder} cannot be written to: {why}")
