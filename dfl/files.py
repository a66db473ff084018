"""How is a file written so that it is there whole or not at all, and by one program at a time?"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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

    Raises:
        InputError: another program has it.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path) -> None:
        self.path, patience = folder / ".lock", time.monotonic() + PATIENCE
        while not self._taken():
            self.file.close()
            if time.monotonic() > patience:
                raise InputError(f"{folder} is being written to by another run: wait for it, or end it")
            time.sleep(0.01)

    def _taken(self) -> bool:
        self.file = self.path.open("w")
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system that knows of no locks
            return True
        return self._held()  # else who had it took it away in the meantime

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
