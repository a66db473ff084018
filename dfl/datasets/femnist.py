"""FEMNIST: handwritten digits and letters by writer, in the files that LEAF makes of NIST's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.parse import shown
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import PACKINGS, Source, content, find, locate, read_json

SOURCE = Source(url="https://github.com/TalwalkarLab/leaf", files={}, contents={})
"""Its scripts draw a sample of the writers and write the files; there is no official content."""
INNER = "data"
HALVES = ("train", "test")
CLASSES = 62
"""Ten digits, 26 capital and 26 small letters."""
SIDE = 28
MOST = 2**30
"""The most bytes of a file, as a bound on memory; LEAF puts a hundred writers in one."""

Images = NDArray[np.uint8]
Ints = NDArray[np.int64]


@DATASETS.register("femnist")
@example_with("--model cnn --partition natural")
def femnist(directory: Path | None) -> Data:
    """FEMNIST: images of digits and letters, (n, 1, 28, 28) uint8, by writer.

    The halves are those of the files: `preprocess.sh -t sample` of LEAF splits the examples of each
    writer, so that all peers of the partition `natural` have test examples; `-t user` splits the
    writers. A pixel of a file is a number from 0 (ink) to 1; it is kept as the nearest of 256.

    Args:
        directory: holds femnist/, and in it train/ and test/, or data/ with these, with LEAF's
            .json files, compressed (.gz, .xz) or not. Nothing is downloaded.

    Raises:
        InputError: a file is missing or damaged.

    Source:
        S. Caldas et al., "LEAF: A Benchmark for Federated Settings", arXiv 1812.01097; G. Cohen et
        al., "EMNIST", 2017.
    """
    folder = locate("femnist", directory, SOURCE)
    folder = folder / INNER if (folder / INNER).is_dir() else folder
    halves = [_half(folder / half) for half in HALVES]
    number = {name: k for k, name in enumerate(sorted({*halves[0], *halves[1]}))}
    arrays = [
        (
            np.concatenate([images for images, _ in half.values()]),
            np.concatenate([labels for _, labels in half.values()]),
            np.repeat(
                [number[name] for name in half], [len(labels) for _, labels in half.values()]
            ),
        )
        for half in halves
    ]
    (train_inputs, train_labels, train_groups), (test_inputs, test_labels, test_groups) = arrays
    return Data(
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        classes=CLASSES,
        scale=1 / 255,
        train_groups=train_groups,
        test_groups=test_groups,
    )


def _half(folder: Path) -> dict[str, tuple[Images, Ints]]:
    """Return images (n, 1, 28, 28) and labels (n,) of every writer, in the order of the files."""
    names = {
        path.name.removesuffix(packing)
        for packing in PACKINGS
        for path in folder.glob(f"[!.]*.json{packing}")
    }
    found: dict[str, tuple[Images, Ints]] = {}
    for path in (find(folder, name) for name in sorted(names)):
        for name, images, labels in _writers(path):
            if name in found:
                raise InputError(
                    f"{path}: found the writer {shown(name)} again, expected each of them once"
                )
            found[name] = images, labels
    if not any(len(labels) for _, labels in found.values()):
        raise InputError(f"{folder}: found no examples, expected .json files of LEAF")
    return found


def _writers(path: Path) -> Iterator[tuple[str, Images, Ints]]:
    """Yield the name, images and labels of every writer in a file."""
    page = read_json(str(path), content(path, "JSON file of LEAF", MOST))
    keys = ("users", "num_samples", "user_data")
    if not isinstance(page, dict) or not set(keys) <= set(page):
        raise InputError(f"{path}: found no {', '.join(keys)}, expected a file of LEAF")
    users, counts, data = (page[key] for key in keys)
    right = isinstance(users, list) and isinstance(counts, list) and isinstance(data, dict)
    if not right or len(users) != len(counts) or sorted(map(str, users)) != sorted(data):
        raise InputError(
            f"{path}: found users, num_samples and user_data that differ, expected one of each for "
            "every writer"
        )
    for name, count in zip(users, counts, strict=True):
        where = f"{path}: user_data of {shown(name)}"
        own = data[str(name)]
        if not isinstance(own, dict) or not {"x", "y"} <= set(own):
            raise InputError(f"{where}: found no x and y, expected lists of images and labels")
        images, labels = _images(where, own["x"]), _labels(where, own["y"])
        if not len(images) == len(labels) == count:
            raise InputError(
                f"{where}: found {len(images)} images and {len(labels)} labels, expected "
                f"{shown(count)} of each as in num_samples"
            )
        yield str(name), images, labels


def _images(where: str, x: Any) -> Images:
    values = _array(where, "x", x)
    if not values.size:
        values = np.zeros((0, SIDE * SIDE))
    if values.ndim != 2 or values.shape[1] != SIDE * SIDE or values.dtype.kind not in "if":
        raise InputError(
            f"{where}: found x of shape {values.shape} and dtype {values.dtype}, expected images "
            f"of {SIDE * SIDE} numbers"
        )
    if not ((values >= 0) & (values <= 1)).all():
        raise InputError(
            f"{where}: found a pixel {values[~((values >= 0) & (values <= 1))][0]}, expected "
            "numbers from 0 to 1"
        )
    images: Images = np.rint(values * 255).astype(np.uint8)
    return images.reshape(-1, 1, SIDE, SIDE)


def _labels(where: str, y: Any) -> Ints:
    values = _array(where, "y", y)
    if not values.size:
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind != "i":
        raise InputError(
            f"{where}: found y of shape {values.shape} and dtype {values.dtype}, expected whole "
            "numbers"
        )
    if values.min() < 0 or values.max() >= CLASSES:
        raise InputError(
            f"{where}: found labels from {values.min()} to {values.max()}, expected labels from 0 "
            f"to {CLASSES - 1}"
        )
    return values.astype(np.int64)


def _array(where: str, key: str, values: Any) -> NDArray[Any]:
    try:
        return np.array(values if isinstance(values, list) else None)
    except ValueError:
        raise InputError(f"{where}: found {key} of unequal lengths, expected a table") from None
