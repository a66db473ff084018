"""What is in an IDX file, and is it whole? The format of MNIST: big-endian sizes, then one byte per value."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.datasets.files import content
from dfl.errors import InputError

_BYTES = 0x0800  # the magic number of a file of unsigned bytes; the number of dimensions is added to it


def read_idx(path: Path, example: tuple[int, ...], largest: int = 255) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes, packed if its name says so, and verify all of it.

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
    raw = content(path, "IDX file")
    header = struct.Struct(f">{2 + len(example)}I")
    if len(raw) < header.size:
        raise _not_as_expected(path, f"{len(raw)} bytes", f"an IDX header of {header.size} bytes")
    magic, n, *shape = header.unpack_from(raw)
    values = np.frombuffer(raw, np.uint8)[header.size :]
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


def _not_as_expected(path: Path, found: str, expected: str) -> InputError:
    return InputError(f"{path}: found {found}, expected {expected}")
