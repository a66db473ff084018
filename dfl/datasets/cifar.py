"""The binary versions of CIFAR-10 and CIFAR-100: records of labels and an image."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.datasets.data import Data
from dfl.datasets.files import Source, content, differing, find, locate, look, members

SHAPE = (3, 32, 32)
"""The shape of an image: red, green and blue pixels row by row."""
PIXELS = 3 * 32 * 32
MOST = 10**5
"""The most records of a batch, as a bound on memory; an official one has up to 50,000."""

Records = NDArray[np.uint8]


@dataclass(frozen=True)
class Form:
    """The files of a data set.

    Attributes:
        name: of the data set.
        title: its name in messages.
        source: where its files come from.
        inner: the folder in its archive.
        archive: the archive, decompressed.
        batches: the files of records, the test set at the end.
        labels: the number of labels of each byte of a record before its pixels; the last of them
            is the label of an image.
        mean, std: those of the training pixels of each colour, divided by 255.
    """

    name: str
    title: str
    source: Source
    inner: str
    archive: str
    batches: tuple[str, ...]
    labels: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def record(self) -> int:
        """Bytes of a record."""
        return len(self.labels) + PIXELS


def read(form: Form, directory: Path | None) -> Data:
    """Return a data set from its files.

    Raises:
        InputError: a file is missing or damaged, or a download failed.
    """
    batches = _batches(form, locate(form.name, directory, form.source))
    *train, test = (records for _, records in batches.values())
    digests = {
        name: (where, hashlib.sha256(records.data).hexdigest())
        for name, (where, records) in batches.items()
    }
    mean, std = (np.array(of).reshape(3, 1, 1) for of in (form.mean, form.std))
    return Data(
        *_images_and_labels(form, train),
        *_images_and_labels(form, [test]),
        classes=form.labels[-1],
        scale=(1 / (255 * std)).astype(np.float32),
        shift=(-mean / std).astype(np.float32),
        notes=differing(form.name, form.source, digests),
    )


def _images_and_labels(
    form: Form, batches: Sequence[Records]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the images (n, 3, 32, 32) and the labels (n,) of some batches of records."""
    ahead = len(form.labels)
    images = np.concatenate([batch[:, ahead:] for batch in batches]).reshape(-1, *SHAPE)
    labels = np.concatenate([batch[:, ahead - 1] for batch in batches])
    return images, labels.astype(np.int64)


def _batches(form: Form, folder: Path) -> dict[str, tuple[str, Records]]:
    """Return for every batch the file it was read from, and its records.

    Batches are read from the archive where they are not files of their own.
    """
    inner = folder / form.inner if (folder / form.inner).is_dir() else folder
    archive = look(folder, form.archive)
    most = MOST * form.record
    if archive and not look(inner, form.batches[0]):
        held = members(archive, [f"{form.inner}/{name}" for name in form.batches], most)
        read = {
            name: (f"{archive}: {form.inner}/{name}", held[f"{form.inner}/{name}"])
            for name in form.batches
        }
    else:
        paths = {name: find(inner, name) for name in form.batches}
        read = {
            name: (str(path), content(path, f"batch of {form.title}", most))
            for name, path in paths.items()
        }
    found = {name: (where, _records(form, where, raw)) for name, (where, raw) in read.items()}
    first, *others, _ = form.batches
    n = len(found[first][1])
    for where, records in (found[name] for name in others):
        if len(records) != n:
            raise InputError(f"{where}: found {len(records)} images, expected {n} as in {first}")
    return found


def _records(form: Form, name: str, raw: bytearray) -> Records:
    if not raw or len(raw) % form.record:
        raise InputError(
            f"{name}: found {len(raw)} bytes, expected {form.record} for each of one or more images"
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, form.record)
    for place, labels in enumerate(form.labels):
        if (most := int(records[:, place].max())) >= labels:
            raise InputError(
                f"{name}: found the label {most}, expected labels from 0 to {labels - 1}"
            )
    return records
