"""MNIST and its look-alike Fashion-MNIST: 70,000 grey images of 28 x 28 pixels in ten classes, from IDX files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dfl.datasets.data import Data, dataset
from dfl.datasets.files import Source, find, locate
from dfl.datasets.idx import read_idx
from dfl.errors import InputError

SOURCES = {
    "mnist": Source(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        md5={
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fashion_mnist": Source(
        url="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        md5={
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}
"""Name -> where the official files are, and their published checksums."""


@dataset("mnist")
def mnist(directory: Path | None, *, unit: bool = False) -> Data:
    """MNIST: handwritten digits, 60,000 for training and 10,000 for testing, (n, 1, 28, 28) uint8.

    Args:
        directory: holds mnist/ or the four files, packed or not; they are downloaded where neither is there.
            None is the user's cache.
        unit: whether a model sees pixels from 0 to 1; else with a mean of 0 and a deviation of 1 over the training set,
            with which it learns in fewer rounds.

    Raises:
        InputError: a file is missing or damaged, or a download failed.

    Source:
        Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document recognition", 1998.
    """
    return _load("mnist", directory, *((0.0, 1.0) if unit else (0.1307, 0.3081)))


@dataset("fashion_mnist")
def fashion_mnist(directory: Path | None, *, unit: bool = False) -> Data:
    """Fashion-MNIST: articles of clothing, otherwise just like `mnist`; the folder is fashion_mnist/.

    Source:
        H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv 1708.07747, 2017.
    """
    return _load("fashion_mnist", directory, *((0.0, 1.0) if unit else (0.2860, 0.3530)))


def _load(name: str, directory: Path | None, mean: float, std: float) -> Data:
    """Read both halves; mean and std are what is made 0 and 1, of the pixels divided by 255."""
    folder = locate(name, directory, SOURCES[name])
    train_inputs, train_labels = _half(folder, "train")
    test_inputs, test_labels = _half(folder, "t10k")
    _refuse_twin(name, folder)
    return Data(
        train_inputs=train_inputs,
        train_labels=train_labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        classes=10,
        scale=1 / (255 * std),
        shift=-mean / std,
    )


def _half(folder: Path, half: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images_path, labels_path = find(folder, f"{half}-images-idx3-ubyte"), find(folder, f"{half}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, (28, 28)), read_idx(labels_path, (), largest=9)
    if len(images) != len(labels):
        raise InputError(f"{labels_path}: found {len(labels)} labels, expected {len(images)} as in {images_path.name}")
    return images[:, np.newaxis], labels.astype(np.int64)


def _refuse_twin(name: str, folder: Path) -> None:
    """The two data sets have the same file names, so a wrong --data-dir would go unnoticed."""
    path = find(folder, "train-labels-idx1-ubyte")
    digest = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    for other, source in SOURCES.items():
        if other != name and digest == source.md5["train-labels-idx1-ubyte.gz"]:
            raise InputError(f"{path}: found the file of {other}, expected that of {name}")
