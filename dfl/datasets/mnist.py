"""MNIST and Fashion-MNIST: 70,000 grey images of 28 x 28 pixels in ten classes, in IDX files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dfl.core.errors import InputError
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Official, Source, differing, find, locate
from dfl.datasets.idx import read_idx

IMAGES = "images-idx3-ubyte"
LABELS = "labels-idx1-ubyte"
SOURCES = {
    "mnist": Source(
        url="https://ossci-datasets.s3.amazonaws.com/mnist/",
        files={
            f"train-{IMAGES}.gz": Official(
                size=9_912_422,
                md5="f68b3c2dcbeaaa9fbdd348bbdeb94873",
                sha256="440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ),
            f"train-{LABELS}.gz": Official(
                size=28_881,
                md5="d53e105ee54ea40749a09fcbcd1e9432",
                sha256="3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ),
            f"t10k-{IMAGES}.gz": Official(
                size=1_648_877,
                md5="9fb629c4189551a2d022fa330f9573f3",
                sha256="8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ),
            f"t10k-{LABELS}.gz": Official(
                size=4_542,
                md5="ec29112dd5afa0611ce80d1b7f02629c",
                sha256="f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
            ),
        },
        contents={
            f"train-{IMAGES}": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            f"train-{LABELS}": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            f"t10k-{IMAGES}": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            f"t10k-{LABELS}": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        },
    ),
    "fashion_mnist": Source(
        url="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/"
        "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion/",
        files={
            f"train-{IMAGES}.gz": Official(
                size=26_421_880,
                md5="8d4fb7e6c68d591d4c3dfef9ec88bf0d",
                sha256="3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ),
            f"train-{LABELS}.gz": Official(
                size=29_515,
                md5="25c81989df183df01b3e8a0aad5dffbe",
                sha256="a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ),
            f"t10k-{IMAGES}.gz": Official(
                size=4_422_102,
                md5="bef4ecab320f06d8554ea6380940ec79",
                sha256="346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ),
            f"t10k-{LABELS}.gz": Official(
                size=5_148,
                md5="bb300cfdad3c16e7a12a480ee83cd310",
                sha256="67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
            ),
        },
        contents={
            f"train-{IMAGES}": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            f"train-{LABELS}": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            f"t10k-{IMAGES}": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            f"t10k-{LABELS}": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        },
    ),
}
"""Name -> the official files."""


@DATASETS.register("mnist")
def mnist(directory: Path | None, *, unit: bool = False) -> Data:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, (n, 1, 28, 28) uint8.

    Args:
        directory: holds mnist/ or the four files, compressed or not; they are downloaded where
            neither exists. None is the user's cache.
        unit: whether pixels are scaled to lie between 0 and 1; otherwise to a mean of 0 and a
            deviation of 1 over the training set, with which models learn in fewer rounds.

    Raises:
        InputError: a file is missing or damaged, or a download failed.

    Source:
        Y. LeCun, L. Bottou, Y. Bengio, P. Haffner, "Gradient-based learning applied to document
        recognition", 1998.
    """
    return _load("mnist", directory, *((0.0, 1.0) if unit else (0.1307, 0.3081)))


@DATASETS.register("fashion_mnist")
def fashion_mnist(directory: Path | None, *, unit: bool = False) -> Data:
    """Fashion-MNIST: articles of clothing; otherwise as `mnist`, in the folder fashion_mnist/.

    Args:
        directory, unit: as for `mnist`.

    Source:
        H. Xiao, K. Rasul, R. Vollgraf, "Fashion-MNIST", arXiv 1708.07747, 2017.
    """
    return _load("fashion_mnist", directory, *((0.0, 1.0) if unit else (0.2860, 0.3530)))


def _load(name: str, directory: Path | None, mean: float, std: float) -> Data:
    """Read both halves; mean and std of the pixels divided by 255 become 0 and 1."""
    source = SOURCES[name]
    folder = locate(name, directory, source)
    paths = {file: find(folder, file) for file in source.contents}
    found = {
        file: read_idx(path, (28, 28)) if file.endswith(IMAGES) else read_idx(path, (), largest=9)
        for file, path in paths.items()
    }
    for half in ("train", "t10k"):
        images, labels = (len(found[f"{half}-{kind}"].values) for kind in (IMAGES, LABELS))
        if images != labels:
            path, other = paths[f"{half}-{LABELS}"], paths[f"{half}-{IMAGES}"].name
            raise InputError(f"{path}: found {labels} labels, expected {images} as in {other}")
    _refuse_twin(name, paths[f"train-{LABELS}"], found[f"train-{LABELS}"].sha256)
    return Data(
        train_inputs=found[f"train-{IMAGES}"].values[:, np.newaxis],
        train_labels=found[f"train-{LABELS}"].values.astype(np.int64),
        test_inputs=found[f"t10k-{IMAGES}"].values[:, np.newaxis],
        test_labels=found[f"t10k-{LABELS}"].values.astype(np.int64),
        classes=10,
        scale=1 / (255 * std),
        shift=-mean / std,
        notes=differing(
            name, source, {file: (str(paths[file]), found[file].sha256) for file in paths}
        ),
    )


def _refuse_twin(name: str, path: Path, sha256: str) -> None:
    """Raise an error for the training labels of the other data set: file names are the same."""
    for other, source in SOURCES.items():
        if other != name and sha256 == source.contents[f"train-{LABELS}"]:
            raise InputError(f"{path}: found the file of {other}, expected that of {name}")
