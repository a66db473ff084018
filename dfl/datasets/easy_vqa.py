"""easy-VQA: questions about the shape in a small image, and its colour."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from dfl.core.errors import InputError, one_line
from dfl.core.options import require
from dfl.core.parse import KINDS, shown
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Source, content, find, locate, look, members, read_json
from dfl.datasets.questions import bags, vocabulary

INNER = "easy-vqa"
ARCHIVE = "easy-vqa.tar"
SOURCE = Source(
    url="https://github.com/vzhou842/easy-VQA",
    files={},
    contents={},
    others=(INNER, ARCHIVE),
)
"""Its files are in the folder easy_vqa/data there; no checksum of them is published."""
HALVES = ("train", "test")
SIDE = 64
"""The height and the width of an image."""
HEADER = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + SIDE.to_bytes(4) * 2 + b"\x08\x02"
"""How a file begins: a PNG of this size, with 8 bits for each of red, green and blue."""
MOST = 2**24
"""The most bytes of a file, as a bound on memory; official ones have up to 2 MB."""
ENTRIES = 10**5
"""The most entries of an archive; the official files are some 5,000."""
WORDS = 1000
"""The most words of the vocabulary, as a bound on memory; there are 26."""
MEAN = (0.9042, 0.9055, 0.8974)
STD = (0.1835, 0.1783, 0.1953)
"""Mean and standard deviation of the training pixels of each colour at `side=16`, divided by 255.

At 64 the standard deviations are 0.1934, 0.1867 and 0.2059.
"""

Images = NDArray[np.uint8]


class Half(NamedTuple):
    """The questions of a half, with the place of each answer in answers.txt, and the images."""

    questions: list[str]
    answers: list[int]
    images: list[int]


Read = Callable[[Sequence[str]], dict[str, tuple[str, bytearray]]]
"""Names of files -> for each the path of messages, and its content."""


@DATASETS.register("easy_vqa")
@example_with("--model vqa")
def easy_vqa(
    directory: Path | None, *, side: Annotated[int, Interval(ge=1, le=SIDE)] = SIDE
) -> Data:
    """easy-VQA: 38,575 training and 9,673 test questions on images of one shape, of 13 answers.

    An input has two parts: the image, (n, 3, side, side) uint8, and how often each word of the
    vocabulary is in the question, (n, words) uint8. The vocabulary is that of the training
    questions.

    Args:
        directory: holds easy_vqa/ or easy-vqa/ with the official files, or the archive
            easy-vqa.tar, compressed (.gz, .xz) or not. Nothing is downloaded.
        side: the height and width of an image; below 64, a divisor of it, pixels are the mean of
            those of a square.

    Raises:
        InputError: a file is missing or damaged.

    Source:
        V. Zhou, easy-VQA, 2019.
    """
    require(SIDE % side == 0, "--dataset easy_vqa: side", f"a divisor of {SIDE}", side)
    read = _reader(locate("easy_vqa", directory, SOURCE))
    names = ["answers.txt", *(f"{half}/questions.json" for half in HALVES)]
    files = read(names)
    answers = _answers(*files[names[0]])
    train, test = (_half(*files[name], answers) for name in names[1:])
    known = vocabulary(train.questions, WORDS)
    pictures = [
        _pictures(read, half, of, side) for half, of in zip(HALVES, (train, test), strict=True)
    ]
    mean, std = (np.array(of).reshape(3, 1, 1) for of in (MEAN, STD))
    return Data(
        train_inputs=(pictures[0], bags(train.questions, known)),
        train_labels=np.array(train.answers),
        test_inputs=(pictures[1], bags(test.questions, known)),
        test_labels=np.array(test.answers),
        classes=len(answers),
        scale=((1 / (255 * std)).astype(np.float32), 1.0),
        shift=((-mean / std).astype(np.float32), 0.0),
    )


def _reader(folder: Path) -> Read:
    """Return the function that reads files of a folder, or of the archive in it."""
    inner = folder / INNER if (folder / INNER).is_dir() else folder
    archive = look(folder, ARCHIVE)
    if archive is None or look(inner, "answers.txt"):

        def from_folder(names: Sequence[str]) -> dict[str, tuple[str, bytearray]]:
            paths = {name: find(inner, name) for name in names}
            return {
                name: (str(path), content(path, "file of easy-VQA", MOST))
                for name, path in paths.items()
            }

        return from_folder

    def from_archive(names: Sequence[str]) -> dict[str, tuple[str, bytearray]]:
        found = members(archive, [f"{INNER}/{name}" for name in names], MOST, ENTRIES)
        return {name: (f"{archive}: {INNER}/{name}", found[f"{INNER}/{name}"]) for name in names}

    return from_archive


def _answers(where: str, raw: bytearray) -> list[str]:
    answers = raw.decode("utf-8", "replace").split()
    if not answers or len(set(answers)) < len(answers):
        raise InputError(
            f"{where}: found {len(answers)} answers, {len(set(answers))} of them different, "
            "expected one in a line"
        )
    return answers


def _half(where: str, raw: bytearray, answers: Sequence[str]) -> Half:
    page = read_json(where, raw)
    if not isinstance(page, list) or not page:
        raise InputError(f"{where}: found {shown(page)}, expected a list of questions")
    half = Half([], [], [])
    label = {answer: k for k, answer in enumerate(answers)}
    for k, entry in enumerate(page):
        if not (isinstance(entry, list) and len(entry) == 3 and isinstance(entry[0], str)):
            raise InputError(
                f"{where}: found {shown(entry)} at place {k}, expected [question, answer, image]"
            )
        question, answer, image = entry
        if not isinstance(answer, str) or answer not in label:
            raise InputError(
                f"{where}: found the answer {shown(answer)} at place {k}, expected one of "
                "answers.txt"
            )
        if not KINDS["int"].holds(image) or not 0 <= image < 10**9:
            raise InputError(
                f"{where}: found the image {shown(image)} at place {k}, expected its number"
            )
        half.questions.append(question)
        half.answers.append(label[answer])
        half.images.append(image)
    return half


def _pictures(read: Read, half: str, of: Half, side: int) -> Images:
    """Return the image of every question, (n, 3, side, side)."""
    numbers, which = np.unique(of.images, return_inverse=True)
    files = read([f"{half}/images/{number}.png" for number in numbers])
    images = np.stack([_image(*file) for file in files.values()])
    squares = images.reshape(-1, 3, side, SIDE // side, side, SIDE // side)
    means: Images = np.rint(squares.mean((3, 5))).astype(np.uint8)
    return means[which]


def _image(where: str, raw: bytearray) -> Images:
    """Return an image (3, 64, 64)."""
    from matplotlib.image import imread

    if not raw.startswith(HEADER):
        raise InputError(
            f"{where}: found a file of {len(raw)} bytes, expected a PNG of {SIDE} x {SIDE} pixels "
            "with 8 bits for each of red, green and blue"
        )
    try:
        pixels = imread(io.BytesIO(raw), format="png")
    except Exception as error:
        raise InputError(f"{where}: found {one_line(error)}, expected a readable PNG") from None
    image: Images = np.rint(pixels * 255).astype(np.uint8)
    return image.transpose(2, 0, 1)
