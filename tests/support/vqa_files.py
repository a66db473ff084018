"""Small files in the formats of easy-VQA and VQA v2, for the tests of data sets."""

from __future__ import annotations

import base64
import io
import json
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ANSWERS = ["circle", "red", "blue", "yes", "no"]
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
IMAGES = {"train": 24, "test": 4}


def picture(half: str, number: int) -> NDArray[np.uint8]:
    """Return an image (64, 64, 3): red where its number is even, else blue; one pixel is its
    number.
    """
    image = np.zeros((64, 64, 3), np.uint8)
    image[...] = COLOURS["red" if number % 2 == 0 else "blue"]
    image[0, 0] = number, half == "test", 7
    return image


def png(image: NDArray[np.uint8], kind: int = 2) -> bytes:
    """Return an image (height, width, channels) as a PNG file."""
    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)

    def chunk(name: bytes, content: bytes) -> bytes:
        checked = name + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    header = struct.pack(">IIBBBBB", width, height, 8, kind, 0, 0, 0)
    parts = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def questions(half: str) -> list[list[Any]]:
    """Return three questions on every image of a half."""
    found: list[list[Any]] = []
    for number in range(IMAGES[half]):
        colour = "red" if number % 2 == 0 else "blue"
        found.append(["what color is the shape?", colour, number])
        found.append(["is there a red shape?", "yes" if colour == "red" else "no", number])
        found.append(["what is the shape?", "circle", number])
    return found


def easy_files() -> dict[str, bytes]:
    """Return the content of the files by path."""
    files = {"answers.txt": "".join(f"{each}\n" for each in ANSWERS).encode()}
    for half, n in IMAGES.items():
        files[f"{half}/questions.json"] = json.dumps(questions(half)).encode()
        files |= {f"{half}/images/{k}.png": png(picture(half, k)) for k in range(n)}
    return files


def write_easy(folder: Path, files: Mapping[str, bytes] | None = None) -> Path:
    for name, content in (easy_files() if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def write_easy_archive(folder: Path) -> Path:
    """Write the archive easy-vqa.tar.xz with the files."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / "easy-vqa.tar.xz", "w:xz") as tar:
        for name, content in easy_files().items():
            entry = tarfile.TarInfo(f"easy-vqa/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return folder


REGIONS, FEATURES = 3, 4
HALVES = {"train2014": (1, 2, 3), "val2014": (7,)}
"""The numbers of the images of a half."""
ASKED = [("What is this?", "net"), ("What is it?", "net"), ("Is it red?", "yes"), ("Why?", "art")]
"""Questions on every image, and their answers; that of the last is another on every image."""


def vqa2_pages(half: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the files of questions and of annotations; these are in another order."""
    asked, annotations = [], []
    for image in HALVES[half]:
        for k, (question, answer) in enumerate(ASKED):
            number = 10 * image + k
            asked.append({"image_id": image, "question": question, "question_id": number})
            most = f"{answer} {image}" if k == 3 else answer
            annotations.append(
                {
                    "question_type": "what", "multiple_choice_answer": most, "answers": [
                        {"answer": most, "answer_confidence": "yes", "answer_id": each}
                        for each in range(1, 11)
                    ], "image_id": image, "answer_type": "other", "question_id": number,
                }
            )  # fmt: skip
    facts = {"info": {"version": "2.0"}, "license": {}, "data_subtype": half}
    return facts | {"questions": asked}, facts | {"annotations": annotations[::-1]}


def regions(image: int) -> NDArray[np.float32]:
    """Return the features (regions, features) of an image."""
    return (image + np.arange(REGIONS * FEATURES).reshape(REGIONS, -1) / 8).astype(np.float32)


def line(image: int) -> bytes:
    """Return a line of the file of features."""
    boxes = np.zeros((REGIONS, 4), np.float32)
    fields = (str(image), "640", "480", str(REGIONS), boxes, regions(image))
    return b"\t".join(
        each.encode() if isinstance(each, str) else base64.b64encode(each.tobytes())
        for each in fields
    )


def vqa2_files() -> dict[str, bytes]:
    """Return the content of the files by name."""
    files = {}
    for half in HALVES:
        asked, annotations = vqa2_pages(half)
        files[f"v2_OpenEnded_mscoco_{half}_questions.json"] = json.dumps(asked).encode()
        files[f"v2_mscoco_{half}_annotations.json"] = json.dumps(annotations).encode()
    lines = [line(image) for image in (99, *HALVES["val2014"], *HALVES["train2014"])]
    files["trainval_resnet101_faster_rcnn_genome_36.tsv"] = b"".join(x + b"\n" for x in lines)
    return files


def write_vqa2(folder: Path, files: Mapping[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (vqa2_files() if files is None else files).items():
        (folder / name).write_bytes(content)
    return folder
