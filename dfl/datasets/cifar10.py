"""CIFAR-10: 60,000 colour images of 32 x 32 pixels in ten classes, from the files of its binary version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.datasets.data import Data, dataset
from dfl.datasets.files import Source, content, find, locate, look, members
from dfl.errors import InputError

INNER, ARCHIVE = "cifar-10-batches-bin", "cifar-10-binary.tar"
BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
SOURCE = Source(
    url="https://www.cs.toronto.edu/~kriz/",
    md5={f"{ARCHIVE}.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
    others=(INNER, BATCHES[0]),
)
"""Where the official archive is, its published checksum, and what is in it."""
SHAPE, RECORD = (3, 32, 32), 1 + 3 * 32 * 32
"""Of an image, and the bytes of a record: its label, then its red, green and blue pixels row by row."""
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
"""Of the training pixels of each colour divided by 255."""


@dataset("cifar10")
def cifar10(directory: Path | None) -> Data:
    """CIFAR-10: things and animals, 50,000 for training and 10,000 for testing, (n, 3, 32, 32) uint8.

    Args:
        directory: holds cifar10/, cifar-10-batches-bin/, its six files, packed (.gz, .xz) or not, or the official
            archive, which is downloaded where none of them is there. None is the user's cache.

    Raises:
        InputError: a file is missing or damaged, or a download failed.

    Source:
        A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    *train, test = _batches(locate("cifar10", directory, SOURCE))
    mean, std = (np.array(of).reshape(3, 1, 1) for of in (MEAN, STD))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return Data(*_halved(train), *_halved([test]), classes=10, scale=scale, shift=shift)


def _halved(batches: list[NDArray[np.uint8]]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The images and labels of some records."""
    images = np.concatenate([batch[:, 1:] for batch in batches]).reshape(-1, *SHAPE)
    return images, np.concatenate([batch[:, 0] for batch in batches]).astype(np.int64)


def _batches(folder: Path) -> list[NDArray[np.uint8]]:
    """The records of every batch, (n, 3073), from files or, where there are none, from the archive."""
    inner = folder / INNER if (folder / INNER).is_dir() else folder
    archive = look(folder, ARCHIVE)
    if archive and not look(inner, BATCHES[0]):
        held = members(archive, [f"{INNER}/{name}" for name in BATCHES])
        found = {f"{archive}: {name}": _records(f"{archive}: {name}", raw) for name, raw in held.items()}
    else:
        paths = [find(inner, name) for name in BATCHES]
        found = {str(path): _records(str(path), content(path, "batch of CIFAR-10")) for path in paths}
    sizes = [len(batch) for batch in found.values()]
    for name, size in zip(found, sizes, strict=True):
        if size != sizes[0]:
            raise InputError(f"{name}: found {size} images, expected {sizes[0]} as in {BATCHES[0]}")
    return list(found.values())


def _records(name: str, raw: bytes) -> NDArray[np.uint8]:
    if not raw or len(raw) % RECORD:
        raise InputError(f"{name}: found {len(raw)} bytes, expected {RECORD} for each of one or more images")
    records = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
    if (most := int(records[:, 0].max())) > 9:
        raise InputError(f"{name}: found the label {most}, expected labels from 0 to 9")
    return records
