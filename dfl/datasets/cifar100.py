"""CIFAR-100, binary version: 60,000 colour images of 32 x 32 pixels in a hundred classes."""

from __future__ import annotations

from pathlib import Path

from dfl.datasets.cifar import Form, read
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Official, Source

INNER = "cifar-100-binary"
ARCHIVE = "cifar-100-binary.tar"
BATCHES = ("train.bin", "test.bin")
SOURCE = Source(
    url="https://www.cs.toronto.edu/~kriz/",
    files={
        f"{ARCHIVE}.gz": Official(
            size=168_513_733,
            md5="03b5dce01913d631647c71ecec9e9cb8",
            sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        )
    },
    contents={
        "train.bin": "f31298fc616915fa142368359df1c4ca2ae984d6915ca468b998a5ec6aeebf29",
        "test.bin": "d8b1e6b7b3bee4020055f0699b111f60b1af1e262aeb93a0b659061746f8224a",
    },
    others=(INNER,),
)
"""The official archive and the files in it."""
LABELS = (20, 100)
"""The labels of a record: one of 20 superclasses, then one of 100 classes."""
MEAN = (0.5071, 0.4867, 0.4408)
STD = (0.2675, 0.2565, 0.2761)
"""Mean and standard deviation of the training pixels of each colour, divided by 255."""


@DATASETS.register("cifar100")
def cifar100(directory: Path | None) -> Data:
    """CIFAR-100: 50,000 training and 10,000 test images, (n, 3, 32, 32) uint8, of 100 classes.

    Args:
        directory: holds cifar100/, cifar-100-binary/, its two files in cifar100/, compressed (.gz,
            .xz) or not, or the official archive, which is downloaded where none of them exists.
            None is the user's cache.

    Raises:
        InputError: a file is missing or damaged, or a download failed.

    Source:
        A. Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
    """
    form = Form("cifar100", "CIFAR-100", SOURCE, INNER, ARCHIVE, BATCHES, LABELS, MEAN, STD)
    return read(form, directory)
