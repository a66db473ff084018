"""What is in an IDX file, and is it whole? The format of MNIST: big-endian sizes, then one byte per value."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.errors import InputError

_BYTES = 0x0800  # the magic number of a file of unsigned bytes; the number of dimensions is added to it


def read_idx(path: Path, example: tuple[int, ...], largest: int = 255) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in .gz, and verify all of it.

    Args:
        path: the file.
        example: the shape of one example; () for labels.
        largest: the largest value that may occur.

    Returns:
        (n, *example) uint8 with n >= 1.

    Raises:
        InputError: the file cannot be read or is not such a file; it says what was found and what was expected.

    Source:
        Y. LeCun, C. Cortes, C. Burges, "The MNIST database", "File formats".
    """
    content = _content(path)
    header = struct.Struct(f">{2 + len(example)}I")
    if len(content) < header.size:
        raise _not_as_expected(path, f"{len(content)} bytes", f"an IDX header of {header.size} bytes")
    magic, n, *shape = header.unpack_from(content)
    values = np.frombuffer(content, np.uint8)[header.size :]
    most, size = int(values.max(initial=0)), n * math.prod(example)
    for good, found, expected in (
        (magic == _BYTES + 1 + len(example), f"magic number {magic}", f"{_BYTES + 1 + len(example)}"),
        (shape == list(example), f"examples of shape {tuple(shape)}", f"{example}"),
        (n > 0, "no examples", "at least one"),
        (len(values) == size, f"{len(values)} bytes of values", f"{size} for {n} examples"),
        (most <= largest, f"the value {most}", f"values from 0 to {largest}"),
    ):
        if not good:
            raise _not_as_expected(path, found, expected)
    return values.reshape(n, *example).copy()  # writable, without the header


def _content(path: Path) -> bytes:
    packed = path.suffix == ".gz"
    try:
        return gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise _not_as_expected(path, reason, f"a readable {'gzipped ' if packed else ''}IDX file") from None


def _not_as_expected(path: Path, found: str, expected: str) -> InputError:
    return InputError(f"{path}: found {found}, expected {expected}")
