"""Files that are written whole or not at all, and by one program at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from dfl.core.errors import InputError
from dfl.core.reading import open_regular

LOCK = ".lock"
"""The file that a program locks in a folder while it writes there."""
WAIT = 5.0
"""Seconds for which a file is waited for that another program is writing."""
PATIENCE = 0.5
"""Seconds for which a lock is retried: another program may hold it only to check it."""


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Refuse in one line what the disk does not take.

    Args:
        where: what is written to, as "--out DIR".

    Raises:
        InputError: in place of an OSError.
    """
    try:
        yield
    except OSError as error:
        raise InputError(f"{where} cannot be written to: {error.strerror or error}") from None


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file, without waiting for the other end of a pipe.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    with open_regular(path) as file:
        return file.read()


def sha256(path: Path) -> str:
    """Return the SHA-256 of a regular file, as hexadecimal text.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    import hashlib  # takes milliseconds, which a command line is read without

    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def no_follow(path: str, flags: int) -> int:
    """Open a regular file for writing, as the `opener` of `open`; links are refused.

    Raises:
        OSError: it is a symbolic link, has several hard links, or is not a regular file.
    """
    name = os.path.basename(path)
    try:
        handle = os.open(path, flags & ~os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, f"{name} is a link, which is not followed") from None
        if error.errno == errno.ENXIO:
            raise OSError(errno.ENXIO, f"{name} is not a regular file") from None
        raise
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        os.close(handle)
        what = "has several hard links" if stat.S_ISREG(found.st_mode) else "is not a regular file"
        raise OSError(errno.EMLINK, f"{name} {what}")
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def make_directory(path: Path) -> None:
    """Make a directory unless it exists; a link to a directory is refused.

    Raises:
        OSError: the name belongs to something else, or the directory cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir()
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, f"{path.name} is a link, which is not followed")
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(errno.ENOTDIR, f"{path.name} is not a directory")


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """Give a new file to write to, which replaces `path` when the block ends without an error.

    The file is on the disk by then, so that it survives a loss of power. After an error `path` is
    as it was. A file that a killed program left under the temporary name is removed; one that
    another program is writing is waited for.

    Raises:
        OSError: `path` or the temporary name belongs to something that is no regular file, or
            another program takes `WAIT` seconds to write it.
    """
    part = path.with_name(f".{path.name}.part")
    for each in (path, part):
        if not _replaceable(each, link=each is path):
            raise OSError(errno.EEXIST, f"{each.name} is not a regular file")
    handle = _claimed(part)
    try:
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        if _has_name(handle, part):
            part.unlink()
        raise
    else:
        _sync(path.parent)
    finally:
        os.close(handle)


def _claimed(part: Path) -> int:
    """Return a new file under a temporary name, locked for as long as it is open.

    Raises:
        OSError: another program has had it for `WAIT` seconds, or the folder cannot be written to.
    """
    end = time.monotonic() + WAIT
    while True:
        with suppress(FileExistsError):
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            if _is_ours(handle, part):
                return handle
            os.close(handle)
        if not _removed(part):
            if time.monotonic() > end:
                raise OSError(errno.EBUSY, f"{part.name} is being written by another program")
            time.sleep(0.01)


def _removed(part: Path) -> bool:
    """Remove a file that no program is writing, and return whether that was so."""
    try:
        handle = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except PermissionError:  # a file of another user, in a folder that this one may write to
        part.unlink(missing_ok=True)
        return True
    try:
        if not _is_ours(handle, part):
            return False
        part.unlink()
        return True
    finally:
        os.close(handle)


def _is_ours(handle: int, part: Path) -> bool:
    """Lock an open file, and return whether no other program had it and it still has its name."""
    with suppress(OSError):  # a file system without locks
        if not _flock(handle, fcntl.LOCK_EX):
            return False
    return _has_name(handle, part)


def _has_name(handle: int, path: Path) -> bool:
    """Return whether a path is that of an open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


def _replaceable(path: Path, link: bool) -> bool:
    """Return whether a path is free, a regular file, or a link where `link` allows one."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return True
    return stat.S_ISREG(mode) or (link and stat.S_ISLNK(mode))


def _sync(folder: Path) -> None:
    """Write the names in a folder to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Lock:
    """An exclusive lock on a folder; the system releases it when its program dies.

    `filelock` leaves its file behind, follows hard links, cannot be queried without being taken,
    and falls back to a file that outlives its program on file systems without locks.

    Args:
        folder: the folder.
        name: the file that is locked. Programs that lock the same file exclude each other.
        patience: seconds to wait while another program has the lock.

    Raises:
        InputError: another program has the lock.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, name: str = LOCK, patience: float = PATIENCE) -> None:
        self.path = folder / name
        end = time.monotonic() + patience
        while not self._taken():
            self.file.close()
            if time.monotonic() > end:
                raise InputError(
                    f"{folder} is being written to by another run: wait for it, or end it"
                )
            time.sleep(0.01)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def _taken(self) -> bool:
        self.file = open(self.path, "a", opener=no_follow)  # noqa: SIM115  closed by `release`
        # False also where the program that had the lock removed the file in the meantime.
        return flocked(self.file, fcntl.LOCK_EX, self.path.parent) and _has_name(
            self.file.fileno(), self.path
        )

    @contextmanager
    def unless_this_fails(self) -> Iterator[None]:
        """Keep it only if all goes well."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        if not self.file.closed:
            self.path.unlink(missing_ok=True)
            self.file.close()


def flocked(file: IO[str] | IO[bytes], kind: int, folder: Path) -> bool:
    """Lock an open file without waiting, and return whether that succeeded.

    On a file system without locks it returns True, with a warning.

    Args:
        file: the file.
        kind: fcntl.LOCK_EX or fcntl.LOCK_SH.
        folder: where the file is, for the warning.
    """
    try:
        return _flock(file, kind)
    except OSError as error:
        warnings.warn(
            f"the file system at {_mount(folder)} has no locks ({error.strerror}): programs that "
            "write to the same folder there do not notice each other, run one at a time",
            stacklevel=2,
        )
        return True


def _flock(file: int | IO[str] | IO[bytes], kind: int) -> bool:
    """Lock an open file without waiting, and return whether no other program has it.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Return whether a program holds the `Lock` on this file."""
    try:
        with open_regular(path) as file:
            return not flocked(file, fcntl.LOCK_SH, path.parent)
    except (OSError, ValueError):  # no path has a NUL
        return False


def _mount(folder: Path) -> Path:
    """Return the directory at which the file system of a folder is mounted."""
    folder = folder.resolve()
    return next((each for each in (folder, *folder.parents) if each.is_mount()), folder)
