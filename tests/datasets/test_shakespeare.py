"""Shakespeare is read by role, and damaged files are refused in one line."""

from __future__ import annotations

import gzip
import lzma
import os
from pathlib import Path

import numpy as np
import pytest

from dfl.datasets import DATASETS, PARTITIONS, Data, shakespeare, split_data
from dfl.datasets.shakespeare import LETTERS
from tests.support.cifar_files import PACK
from tests.support.idx_files import refused
from tests.support.plays import FLAT, LONG, PLAY, TEXT, write_plays

REAL = Path(os.environ.get("DFL_DATA") or Path(__file__).parents[3] / "shared" / "data")
FILE = "t8.shakespeare.txt"


def load(directory: Path, **options: int) -> Data:
    return DATASETS["shakespeare_leaf"](directory, **options)


def text_of(window: np.ndarray) -> str:
    return "".join(LETTERS[place] for place in window)


def test_the_alphabet_has_80_characters() -> None:
    assert len(set(LETTERS)) == len(LETTERS) == 80


def test_roles_have_their_lines() -> None:
    """A role goes on after another one, and a heading of the flat play ends a role's text."""
    found = shakespeare._roles(TEXT)
    assert [len(lines) for lines in found] == [4, 2, 8, 3, 1]
    assert found[1] == ["One line.", "Two lines!"]
    assert found[0][1] == f"{LONG}   of   nothing"
    assert found[3] == [LONG, f"  {LONG}", LONG]
    assert found[4] == [LONG]


def test_windows_are_in_time_and_do_not_overlap(tmp_path: Path) -> None:
    data = load(write_plays(tmp_path / "shakespeare").parent)
    assert data.train_groups is not None
    assert data.test_groups is not None
    whole = " ".join([LONG] * 8)
    places = np.flatnonzero(data.train_groups == 1)
    first = [text_of(data.train_inputs[k]) + LETTERS[data.train_labels[k]] for k in places]
    n = len(whole) - 80
    assert first == [whole[k : k + 81] for k in range(int(0.8 * n))]
    tested = np.flatnonzero(data.test_groups == 1)
    last = [text_of(data.test_inputs[k]) + LETTERS[data.test_labels[k]] for k in tested]
    assert last == [whole[k : k + 81] for k in range(int(0.8 * n) + 79, n)]


def test_spaces_are_one_and_unknown_characters_are_named(tmp_path: Path) -> None:
    folder = write_plays(tmp_path / "shakespeare", TEXT.replace("UVWXYZ", "UV_XY#"))
    data = load(tmp_path)
    assert "  " not in text_of(data.train_inputs[:, 0])
    (official, note) = data.notes
    assert f"{folder / FILE}: 28 unknown characters" in note
    assert "SHA-256" in official


def test_short_roles_are_left_out(tmp_path: Path) -> None:
    write_plays(tmp_path / "shakespeare")
    counts, noted = {}, {}
    for least in (1, 3, 4):
        data = load(tmp_path, min_lines=least)
        assert data.train_groups is not None
        counts[least] = len(np.unique(data.train_groups))
        noted[least] = [
            note
            for note in data.notes
            if "roles that have no window of 80 characters are left out: 1" in note
        ]
    assert counts == {1: 4, 3: 3, 4: 2}
    assert {least: len(notes) for least, notes in noted.items()} == {1: 1, 3: 0, 4: 0}


def test_natural_peers_are_roles(tmp_path: Path) -> None:
    data = load(write_plays(tmp_path / "shakespeare").parent)
    split = split_data(PARTITIONS["natural"], data, peers=3)
    assert data.train_groups is not None
    assert [set(data.train_groups[own]) for own in split.train] == [{0}, {1}, {2}]


@pytest.mark.parametrize("packing", ["", ".gz", ".xz"])
def test_the_file_is_read_packed_or_not(tmp_path: Path, packing: str) -> None:
    (tmp_path / f"{FILE}{packing}").write_bytes(PACK[packing](TEXT.replace("\n", "\r\n").encode()))
    one, other = load(tmp_path), load(write_plays(tmp_path / "more" / "shakespeare").parent)
    assert np.array_equal(one.train_inputs, other.train_inputs)


RAW = TEXT.encode()
OTHER = TEXT.replace("THE COMEDY", "A COMEDY")
KINGS = TEXT.replace("Fool.", "KING.").replace("LEAR", "KING").replace(FLAT, "")
DAMAGE: dict[str, tuple[str, bytes, str]] = {
    "empty": (FILE, b"", "found no role"),
    "a page": (FILE, b"<html>404</html>", "found no role"),
    "the sonnets only": (FILE, TEXT[: TEXT.index(PLAY)].encode(), "found no role"),
    "no author": (FILE, TEXT.replace("Shakespeare", "Bacon").encode(), "found no role"),
    "one author": (FILE, TEXT[TEXT.index(PLAY) :].replace(FLAT, "").encode(), "found no role"),
    "no indentation": (FILE, OTHER.replace("\n  ", "\n").encode(), "found no role"),
    "tabs": (FILE, OTHER.replace("  ", "\t").encode(), "found no role"),
    "one role in a play": (FILE, KINGS.encode(), "found no role"),
    "one line": (FILE, TEXT.replace("\n", " ").encode(), "found no role"),
    "another encoding": (FILE, TEXT.encode("utf-16"), "found no role"),
    "cut before the plays": (FILE, RAW[:100], "found no role"),
    "zeros": (FILE, bytes(1000), "found no role"),
    "too large": (FILE, bytes(2**24 + 1), "more than 16,777,216"),
    "no gzip": (f"{FILE}.gz", RAW, "expected a readable gzipped text"),
    "gzip cut": (f"{FILE}.gz", gzip.compress(RAW)[:-9], "ended before"),
    "gzip, checksum": (f"{FILE}.gz", gzip.compress(RAW)[:-8] + bytes(8), "CRC"),
    "a bomb": (f"{FILE}.gz", gzip.compress(bytes(2**24 + 1)), "more than 16,777,216"),
    "no xz": (f"{FILE}.xz", RAW, "expected a readable xz-packed text"),
    "xz cut": (f"{FILE}.xz", lzma.compress(RAW)[:-9], "ended before"),
    "xz, checksum": (f"{FILE}.xz", lzma.compress(RAW)[:-1] + b"!", "expected a readable xz"),
}  # fmt: skip
SHORT = {
    "short lines": (FILE, TEXT.replace(LONG, "Nothing.").encode(), "found no role"),
}
"""A damage of the task of LEAF alone, whose examples are windows of 80 characters."""


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert refused(lambda: load(tmp_path)).startswith(f"{tmp_path / 'shakespeare'}: found no")
    (tmp_path / "shakespeare").mkdir()
    assert refused(lambda: load(tmp_path)).startswith(f"{tmp_path / 'shakespeare' / FILE}.gz: ")


@pytest.mark.slow
@pytest.mark.skipif(
    not (REAL / "shakespeare").is_dir(), reason=f"no {REAL / 'shakespeare'}: set DFL_DATA"
)
def test_the_real_plays_have_the_roles_of_leaf() -> None:
    with gzip.open(REAL / "shakespeare" / f"{FILE}.gz") as file:
        roles = shakespeare._roles(file.read().decode("latin-1"))
    assert len(roles) == 1302
    assert sum(len(lines) > 2 for lines in roles) == 1145
    data = load(REAL)
    (note,) = data.notes
    assert note.endswith("roles that have no window of 80 characters are left out: 15")
    assert text_of(data.train_inputs[0]).startswith("In delivering my son from me")
