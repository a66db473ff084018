"""Small files in the formats of CIFAR-10 and CIFAR-100, for the tests of data sets."""

from __future__ import annotations

import gzip
import io
import lzma
import tarfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

FOLDER = "cifar-10-batches-bin"
TEST = "test_batch.bin"
NAMES = [*(f"data_batch_{k}.bin" for k in range(1, 6)), TEST]
PACK = {"": bytes, ".gz": lambda raw: gzip.compress(raw, mtime=0), ".xz": lzma.compress}


def contents(n: int = 4) -> dict[str, bytes]:
    """Return the six files, unpacked: n records of a label from 0 to 9 and 3,072 pixels."""
    rng = np.random.default_rng(0)
    records = {name: rng.integers(0, 256, (n, 3073), np.uint8) for name in NAMES}
    for batch in records.values():
        batch[:, 0] %= 10
    return {name: batch.tobytes() for name, batch in records.items()}


def write_batches(folder: Path, packing: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in BATCHES.items():
        (folder / f"{name}{packing}").write_bytes(PACK[packing](raw))
    return folder


def archive(files: Mapping[str, bytes], *links: tarfile.TarInfo) -> bytes:
    """Return an unpacked tar archive of some files and links."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, raw in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            tar.addfile(info, io.BytesIO(raw))
        for link in links:
            tar.addfile(link)
    return buffer.getvalue()


BATCHES = contents()
OFFICIAL = {f"{FOLDER}/{name}": raw for name, raw in {"readme.html": b"<html>", **BATCHES}.items()}
"""The content of the archive."""


def fine() -> dict[str, bytes]:
    """Return the two files of CIFAR-100: records of two labels and 3,072 pixels."""
    rng = np.random.default_rng(0)
    found = {}
    for name, n in (("train.bin", 6), ("test.bin", 3)):
        records = rng.integers(0, 256, (n, 3074), np.uint8)
        records[:, 0] %= 20
        records[:, 1] %= 100
        found[name] = records.tobytes()
    return found


def write_cifar100(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in FINE.items():
        (folder / name).write_bytes(raw)
    return folder


FINE = fine()
