"""VQA v2: questions about photographs, with features of their regions."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.options import Count
from dfl.core.parse import KINDS, shown
from dfl.core.registry import example_with
from dfl.datasets.data import DATASETS, Data
from dfl.datasets.files import Source, content, find, locate, read_json, unpacked
from dfl.datasets.questions import bags, vocabulary
from dfl.datasets.text import most_frequent

HALVES = ("train2014", "val2014")
FEATURES = "trainval_resnet101_faster_rcnn_genome_36.tsv"
SOURCE = Source(
    url="https://visualqa.org/download.html",
    files={},
    contents={},
    others=tuple(f"v2_mscoco_{half}_annotations.json" for half in HALVES),
)
"""Its archives are not downloaded: no checksums of them are published, and the features have 20 GB.
"""
MOST = 2**30
"""The most bytes of a JSON file, as a bound on memory; official ones have up to 400 MB."""
LONGEST = 2**21
"""The most bytes of a line of features; official ones have some 400 KB."""
COLUMNS = ("image_id", "image_w", "image_h", "num_boxes", "boxes", "features")
"""The columns of a line of features, as bottom-up-attention's tools/generate_tsv.py writes them."""
MOST_FEATURES = 2**26
"""The most bytes of a file of features per question, as a bound on time."""


class Half(NamedTuple):
    """The questions of a half, with their answers and the numbers of their images."""

    questions: list[str]
    answers: list[str]
    images: list[int]


@DATASETS.register("vqa2")
@example_with("--model vqa")
def vqa2(directory: Path | None, *, answers: Count = 1000, words: Count = 1000) -> Data:
    """VQA v2, balanced real images: 443,757 training questions, and those of validation for
    testing.

    An input has two parts: the mean of the features of the image's regions, (n, features) float32,
    and how often each word of the vocabulary is in the question, (n, words) uint8. The label is the
    most frequent of the ten answers (`multiple_choice_answer`), and accuracy is that of exact
    answers, not of the ten. Training questions with other answers than the most frequent ones are
    left out; test questions with such have a label of their own, which no training example has.

    Args:
        directory: holds vqa2/, or itself the official files, compressed (.gz, .xz) or not:
            v2_OpenEnded_mscoco_train2014_questions.json, v2_mscoco_train2014_annotations.json,
            those of val2014, and trainval_resnet101_faster_rcnn_genome_36.tsv, the features of
            bottom-up attention. Nothing is downloaded.
        answers: how many of the most frequent training answers are labels.
        words: how many of the most frequent words of the training questions count.

    Raises:
        InputError: a file is missing or damaged.

    Source:
        Y. Goyal et al., "Making the V in VQA Matter", CVPR 2017; P. Anderson et al., "Bottom-Up and
        Top-Down Attention", CVPR 2018.
    """
    folder = locate("vqa2", directory, SOURCE)
    train, test = (_half(folder, half) for half in HALVES)
    common = most_frequent(train.answers, answers)
    label = {answer: k for k, answer in enumerate(common)}
    own = [k for k, answer in enumerate(train.answers) if answer in label]
    train = Half(*([column[k] for k in own] for column in train))  # type: ignore[arg-type]
    path = find(folder, FEATURES)
    wanted = {*train.images, *test.images}
    features = _features(path, wanted)
    known = vocabulary(train.questions, words)

    def inputs(half: Half) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        return np.stack([features[image] for image in half.images]), bags(half.questions, known)

    return Data(
        train_inputs=inputs(train),
        train_labels=np.array([label[answer] for answer in train.answers]),
        test_inputs=inputs(test),
        test_labels=np.array([label.get(answer, len(common)) for answer in test.answers]),
        classes=len(common) + 1,
    )


def _half(folder: Path, half: str) -> Half:
    """Return the questions of a half in the order of their file."""
    path = find(folder, f"v2_mscoco_{half}_annotations.json")
    answers: dict[int, tuple[int, str]] = {}
    for k, entry in enumerate(_entries(path, "annotations")):
        number, image = _numbers(path, k, entry)
        answer = entry.get("multiple_choice_answer")
        if not isinstance(answer, str):
            raise InputError(
                f"{path}: found the multiple_choice_answer {shown(answer)} at place {k}, expected "
                "a text"
            )
        answers[number] = image, answer
    path = find(folder, f"v2_OpenEnded_mscoco_{half}_questions.json")
    found, seen = Half([], [], []), set[int]()
    for k, entry in enumerate(_entries(path, "questions")):
        number, image = _numbers(path, k, entry)
        question = entry.get("question")
        if not isinstance(question, str):
            raise InputError(
                f"{path}: found the question {shown(question)} at place {k}, expected a text"
            )
        if number not in answers or answers[number][0] != image:
            raise InputError(
                f"{path}: found the question_id {number} of image {image} at place {k}, expected "
                "one of the annotations"
            )
        if number in seen:
            raise InputError(f"{path}: found the question_id {number} twice, expected each once")
        seen.add(number)
        found.questions.append(question)
        found.answers.append(answers[number][1])
        found.images.append(image)
    return found


def _entries(path: Path, key: str) -> list[dict[str, Any]]:
    page = read_json(str(path), content(path, "JSON file of VQA", MOST))
    entries = page.get(key) if isinstance(page, dict) else None
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: found no list of {key}, expected an official file of VQA v2")
    for k, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise InputError(f"{path}: found {shown(entry)} at place {k}, expected an object")
    return entries


def _numbers(path: Path, k: int, entry: dict[str, Any]) -> tuple[int, int]:
    """Return the numbers of a question and of its image."""
    for key in ("question_id", "image_id"):
        if not KINDS["int"].holds(entry.get(key)):
            raise InputError(
                f"{path}: found the {key} {shown(entry.get(key))} at place {k}, expected a number"
            )
    return entry["question_id"], entry["image_id"]


def _features(path: Path, wanted: set[int]) -> dict[int, NDArray[np.float32]]:
    """Return the mean over regions (features,) for the images that are wanted."""
    found: dict[int, NDArray[np.float32]] = {}
    size = 0
    for k, line in enumerate(_lines(path, MOST_FEATURES * max(1, len(wanted))), start=1):
        image, mean = _one(f"{path}: line {k}", line)
        if size and len(mean) != size:
            raise InputError(
                f"{path}: line {k}: found {len(mean)} features, expected {size} as in line 1"
            )
        size = len(mean)
        if image in wanted:
            found[image] = mean
    missing = sorted(wanted - found.keys())
    if missing:
        raise InputError(
            f"{path}: found no features of {len(missing)} images, as {missing[0]}, expected those "
            "of all questions"
        )
    return found


def _lines(path: Path, limit: int) -> Iterator[bytes]:
    with unpacked(path, "file of features", limit) as file:
        while line := file.readline(LONGEST + 1):
            if len(line) > LONGEST:
                raise InputError(f"{path}: found a line of more than {LONGEST:,} bytes")
            yield line


def _one(where: str, line: bytes) -> tuple[int, NDArray[np.float32]]:
    """Return the number of an image and the mean of the features of its regions."""
    fields: Sequence[bytes] = line.rstrip(b"\r\n").split(b"\t")
    if len(fields) != len(COLUMNS):
        raise InputError(f"{where}: found {len(fields)} columns, expected {', '.join(COLUMNS)}")
    image, boxes = (fields[COLUMNS.index(name)] for name in ("image_id", "num_boxes"))
    if not (image.isdigit() and boxes.isdigit() and len(image) < 19 and 0 < len(boxes) < 4):
        raise InputError(
            f"{where}: found the image_id {shown(image)} with {shown(boxes)} boxes, expected "
            "numbers"
        )
    try:
        raw = base64.b64decode(fields[-1], validate=True)
    except binascii.Error as error:
        raise InputError(f"{where}: found {error}, expected features in base64") from None
    n = int(boxes)
    if not n or not raw or len(raw) % (4 * n):
        raise InputError(
            f"{where}: found {len(raw)} bytes of features for {n} boxes, expected float32 for each"
        )
    regions = np.frombuffer(raw, "<f4").reshape(n, -1)
    if not np.isfinite(regions).all():
        raise InputError(f"{where}: found features that are not finite, expected numbers")
    return int(image), regions.mean(0, dtype=np.float64).astype(np.float32)
