"""Reading of a user's files: only regular files, and only up to a number of bytes."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

SETTINGS = 2**14
"""The most bytes of a TOML file of settings: parsing takes up to the square of its length."""


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading, through links.

    A FIFO or a device is not opened: that may wait for a writer, or change the device.

    Raises:
        OSError: the file does not exist, is no regular file, or may not be read.
    """
    _check_regular(path, os.stat(path))
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    try:
        _check_regular(path, os.fstat(file.fileno()))  # another file may have taken the name
    except OSError:
        file.close()
        raise
    return file


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    Raises:
        OSError: as for `open_regular`, or the file is larger.
    """
    with open_regular(path) as file:
        return file.read(check_size(file, limit))


def read_text(path: Path, limit: int) -> str:
    """Return the text of a regular file of at most `limit` bytes, without a byte-order mark.

    Raises:
        OSError: as for `read_bounded`.
        UnicodeDecodeError: it is not UTF-8.
    """
    return read_bounded(path, limit).decode("utf-8-sig")


def check_size(file: BinaryIO, limit: int) -> int:
    """Return the length of an open file.

    Raises:
        OSError: it has more than `limit` bytes.
    """
    size = os.fstat(file.fileno()).st_size
    if size > limit:
        raise OSError(errno.EFBIG, f"a file of {size:,} bytes, more than {limit:,}", file.name)
    return size


def _check_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
