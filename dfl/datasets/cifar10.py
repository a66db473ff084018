"""CIFAR-10, binary version: 60,000 colour images of 32 x 32 pixels in ten classes."""

from __future__ import annotations

from pathlib import Path

from dfl.datasets.cifar import Form, read
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Official, Source

INNER = "cifar-10-batches-bin"
ARCHIVE = "cifar-10-binary.tar"
BATCHES = (*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin")
SOURCE = Source(
    url="https://www.cs.toronto.edu/~kriz/",
    files={
        f"{ARCHIVE}.gz": Official(
            size=170_052_171,
            md5="c32a1d4ab5d03f1284b67883e8d87530",
            sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        )
    },
    contents={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    others=(INNER, BATCHES[0]),
)
"""The official archive and the files in it."""
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of the training pixels of each colour, divided by 255."""


@DATASETS.register("cifar10")
def cifar10(directory: Path | None) -> Data:
    """CIFAR-10: 50,000 training and 10,000 test images of things and animals, (n, 3, 32, 32) uint8.

    Args:
        directory: holds cifar10/, cifar-10-batches-bin/, its six files, compressed (.gz, .xz) or
            not, or the official archive, which is downloaded where none of them exists. None is the
            user's cache.

    Raises:
        InputError: a file is missing or damaged, or a download failed.

    Source:
        A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    form = Form("cifar10", "CIFAR-10", SOURCE, INNER, ARCHIVE, BATCHES, (10,), MEAN, STD)
    return read(form, directory)
