"""How is a file written so that it is there whole or not at all, and by one program at a time?"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from dfl.errors import InputError

PATIENCE = 0.5
"""Seconds for which a lock is asked for again: somebody may only be looking whether it is held."""


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A name to write to: what stands under it at the end appears as `path`, whole; after an error, nothing does.

    Once it has appeared, it is there also after the machine loses power.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
        _sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Have a folder's names on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """Keeps a folder to one program that writes to it; the system lets go of it when that program dies.

    Args:
        folder: the folder.
        name: the file that is locked. Programs exclude each other that lock the same one.
        patience: seconds for which to wait while another program has it.

    Raises:
        InputError: another program has it.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, name: str = ".lock", patience: float = PATIENCE) -> None:
        self.path, end = folder / name, time.monotonic() + patience
        while not self._taken():
            self.file.close()
            if time.monotonic() > end:
                raise InputError(f"{folder} is being written to by another run: wait for it, or end it")
            time.sleep(0.01)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _taken(self) -> bool:
        self.file = self.path.open("w")
        # False also where the program that had it removed the file in the meantime.
        return flocked(self.file, fcntl.LOCK_EX, self.path.parent) and self._held()

    def _held(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self.file.fileno()), self.path.stat())
        except FileNotFoundError:
            return False

    @contextmanager
    def unless_this_fails(self) -> Iterator[None]:
        """Keep it only if all goes well."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let others write."""
        if not self.file.closed:
            self.path.unlink(missing_ok=True)
            self.file.close()


def flocked(file: IO[Any], kind: int, folder: Path) -> bool:
    """Lock an open file without waiting; False where another program has locked it.

    On a file system without locks the answer is True, and a warning says so.

    Args:
        file: the file.
        kind: fcntl.LOCK_EX or fcntl.LOCK_SH.
        folder: where the file is, for the warning.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(
            f"the file system at {_mount(folder)} has no locks ({error.strerror}): programs that "
            "write to the same folder there do not notice each other, run one at a time",
            stacklevel=2,
        )
    return True


def _mount(folder: Path) -> Path:
    """The directory at which the file system of a folder is mounted."""
    folder = folder.resolve()
    return next((each for each in (folder, *folder.parents) if each.is_mount()), folder)


def measured(path: Path) -> dict[str, Any]:
    """How long a file is and what it holds, as `cut_back` wants to know; it is on the disk then."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        held = file.read()
    return {"bytes": len(held), "sha256": hashlib.sha256(held).hexdigest()}


def cut_back(path: Path, known: Mapping[str, Any]) -> None:
    """Take away what was appended to a file since it was measured.

    Raises:
        InputError: it does not begin with what was in it then.
    """
    held = path.read_bytes()[: known["bytes"]] if path.exists() else b""
    if hashlib.sha256(held).hexdigest() != known["sha256"]:
        raise InputError(f"{path} is not the file that the checkpoint goes with: put it back, or begin another run")
    with atomically(path) as part:
        part.write_bytes(held)
