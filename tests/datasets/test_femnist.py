"""FEMNIST is read from LEAF's files, by writer, and damaged files are refused in one line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dfl.datasets import DATASETS, PARTITIONS, Data, split_data
from tests.support.femnist_files import WRITERS, page, path_of, write_femnist
from tests.support.idx_files import refused


def load(directory: Path) -> Data:
    return DATASETS["femnist"](directory)


@pytest.mark.parametrize("below", ["femnist", "femnist/data"])
def test_images_labels_and_writers_are_in_their_places(tmp_path: Path, below: str) -> None:
    write_femnist(tmp_path / below)
    data = load(tmp_path)
    assert data.classes == 62
    number = {name: k for k, name in enumerate(sorted(WRITERS["train"]))}
    for half, inputs, labels, groups in (
        ("train", data.train_inputs, data.train_labels, data.train_groups),
        ("test", data.test_inputs, data.test_labels, data.test_groups),
    ):
        written = page(half)["user_data"]
        assert groups is not None
        assert groups.tolist() == [
            number[name] for name, n in WRITERS[half].items() for _ in range(n)
        ]
        assert labels.tolist() == [y for own in written.values() for y in own["y"]]
        x = np.array([x for own in written.values() for x in own["x"]]).reshape(-1, 1, 28, 28)
        np.testing.assert_allclose(inputs * data.scale + data.shift, x, atol=1e-6)


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    write_femnist(tmp_path / "one" / "femnist")
    write_femnist(tmp_path / "two" / "femnist")
    whole = page("train")
    for k, name in enumerate(whole["users"]):
        part = {
            "users": [name],
            "num_samples": [WRITERS["train"][name]],
            "user_data": {name: whole["user_data"][name]},
        }
        path = path_of(tmp_path / "two" / "femnist", "train", k)
        path.unlink(missing_ok=True)
        path.with_suffix(".json.gz").write_bytes(gzip.compress(json.dumps(part).encode()))
    one, two = load(tmp_path / "one"), load(tmp_path / "two")
    assert np.array_equal(one.train_inputs, two.train_inputs)
    assert one.train_groups is not None
    assert two.train_groups is not None
    assert np.array_equal(one.train_groups, two.train_groups)


def test_natural_peers_are_writers(tmp_path: Path) -> None:
    data = load(write_femnist(tmp_path / "femnist").parent)
    split = split_data(PARTITIONS["natural"], data, peers=3)
    assert [len(own) for own in split.train] == [5, 2, 3]
    assert [len(own) for own in split.test] == [2, 1, 0]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    message = refused(lambda: load(tmp_path))
    assert message.startswith(f"{tmp_path / 'femnist'}: found no such folder")
    assert list(tmp_path.iterdir()) == []


def at(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """Return a change of a value in a page; `to` is None where it is removed."""

    def change(whole: dict[str, Any]) -> None:
        inside = whole
        for key in keys[:-1]:
            inside = inside[key]
        if to is None:
            del inside[keys[-1]]
        else:
            inside[keys[-1]] = to

    return change


OWN = ("user_data", "f0002_00")
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no users": (at("users", to=None), "found no users, num_samples, user_data"),
    "no counts": (at("num_samples", to=None), "found no users, num_samples, user_data"),
    "a user too few": (at("users", 0, to=None), "that differ"),
    "another user": (at("users", 0, to="f9999_99"), "that differ"),
    "a user twice": (at("users", 0, to="f0002_00"), "that differ"),
    "users as text": (at("users", to="f0002_00"), "that differ"),
    "data as a list": (at("user_data", to=[1, 2, 3]), "that differ"),
    "another count": (at("num_samples", 1, to=7), "2 images and 2 labels, expected 7"),
    "no labels": (at(*OWN, "y", to=None), "'f0002_00': found no x and y"),
    "no dictionary": (at(*OWN, to=[1]), "'f0002_00': found no x and y"),
    "a label too few": (at(*OWN, "y", to=[1]), "found 2 images and 1 labels"),
    "label 62": (at(*OWN, "y", to=[1, 62]), "labels from 1 to 62, expected labels from 0 to 61"),
    "label -1": (at(*OWN, "y", to=[-1, 3]), "labels from -1 to 3"),
    "half a label": (at(*OWN, "y", to=[0.5, 1.0]), "dtype float64, expected whole numbers"),
    "a label as text": (at(*OWN, "y", to=["1", "2"]), "expected whole numbers"),
    "labels in a table": (at(*OWN, "y", to=[[1], [2]]), "y of shape (2, 1)"),
    "a pixel too few": (at(*OWN, "x", 1, 783, to=None), "found x of unequal lengths"),
    "small images": (at(*OWN, "x", to=[[0.5] * 64] * 2), "x of shape (2, 64)"),
    "a pixel of 255": (at(*OWN, "x", 1, 5, to=255), "found a pixel 255.0"),
    "a pixel below 0": (at(*OWN, "x", 1, 5, to=-0.25), "found a pixel -0.25"),
    "no number": (at(*OWN, "x", 1, 5, to=float("nan")), "found a pixel nan"),
    "a pixel as text": (at(*OWN, "x", 1, 5, to="0.5"), "expected images of 784 numbers"),
    "images as text": (at(*OWN, "x", to="0.5"), "expected images of 784 numbers"),
}  # fmt: skip


def test_a_packed_file_is_taken_and_hidden_files_are_not_read(tmp_path: Path) -> None:
    folder = write_femnist(tmp_path / "femnist")
    whole = load(tmp_path)
    path = path_of(folder, "train")
    path.with_suffix(".json.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.write_text("not read")
    (folder / "train" / f"._{path.name}").write_bytes(b"\0\5\x16\7")
    assert np.array_equal(load(tmp_path).train_inputs, whole.train_inputs)


def test_a_packed_file_that_is_cut_is_named_once(tmp_path: Path) -> None:
    path = path_of(write_femnist(tmp_path / "femnist"), "train")
    packed = path.with_suffix(".json.gz")
    packed.write_bytes(gzip.compress(path.read_bytes())[:-20])
    line = refused(lambda: load(tmp_path))
    assert line.startswith(f"{packed}: found Compressed file ended before")
    assert line.count(str(packed)) == 1


BYTES = {
    "empty": (b"", "found no JSON"),
    "cut": (json.dumps(page("train")).encode()[:-100], "found no JSON"),
    "a page": (b"<html>404</html>", "found no JSON"),
    "a number": (b"7", "found no users"),
    "deep": (b"[" * 100_000, "found no JSON"),
    "no text": (b"\xff\xfe\xfa", "found no JSON"),
}
FILE = str(path_of(Path(), "train"))


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return the training file with a change."""
    whole = page("train")
    change(whole)
    return json.dumps(whole).encode()


DAMAGE = {name: (FILE, changed(change), part) for name, (change, part) in CHANGES.items()} | {
    name: (FILE, raw, part) for name, (raw, part) in BYTES.items()
}


def test_a_writer_in_two_files_and_a_folder_without_files_are_refused(tmp_path: Path) -> None:
    folder = write_femnist(tmp_path / "femnist")
    other = path_of(folder, "train", 1)
    other.write_text(json.dumps(page("train")))
    assert "writer 'f0001_41' again" in refused(lambda: load(tmp_path))
    other.unlink()
    path_of(folder, "test").unlink()
    assert refused(lambda: load(tmp_path)).startswith(f"{folder / 'test'}: found no examples")
