"""Shakespeare by role with a label at every place: split in time, padded rows, damaged files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dfl
from dfl.datasets import DATASETS, PARTITIONS, Data, split_data
from dfl.datasets.data import IGNORED, checked
from dfl.datasets.shakespeare_roles import BEGIN, PADDING
from dfl.datasets.text import rows_of, split_in_time
from tests.support.plays import LONG, TEXT, write_plays

REAL = Path(os.environ.get("DFL_DATA") or Path(__file__).parents[3] / "shared" / "data")


def load(directory: Path, **options: Any) -> Data:
    """Return the plays, with the role of two lines."""
    return checked(DATASETS["shakespeare"](directory, **{"min_lines": 2, **options}))


def text_of(labels: Any) -> str:
    return bytes(labels[labels != IGNORED].astype(np.uint8)).decode("latin-1")


def own(data: Data, role: int) -> tuple[Any, Any, Any, Any]:
    assert data.train_groups is not None
    assert data.test_groups is not None
    train, test = data.train_groups == role, data.test_groups == role
    return (
        data.train_inputs[train], data.train_labels[train],
        data.test_inputs[test], data.test_labels[test],
    )  # fmt: skip


def test_rows_predict_each_token_from_those_before() -> None:
    x, y = rows_of(np.arange(1, 8), 3, begin=0, padding=9)
    assert x.tolist() == [[0, 1, 2], [3, 4, 5], [6, 9, 9]]
    assert y.tolist() == [[1, 2, 3], [4, 5, 6], [7, IGNORED, IGNORED]]


@pytest.mark.parametrize(("n", "last"), [(2, 1), (4, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_the_last_fifth_of_the_lines_is_for_testing(n: int, last: int) -> None:
    lines = [str(k) for k in range(n)]
    train, test = split_in_time(lines)
    assert [*train, *test] == lines
    assert len(test) == last


def test_roles_are_split_in_time(tmp_path: Path) -> None:
    data = load(write_plays(tmp_path / "shakespeare").parent)
    x, y, test_x, test_y = own(data, 2)  # Lear, with eight lines
    assert text_of(y) == "\n".join([LONG] * 6)
    assert text_of(test_y) == "\n".join([LONG] * 2)
    assert x[0, 0] == test_x[0, 0] == BEGIN
    assert (x.ravel()[1:][y.ravel()[:-1] != IGNORED][: y.size - 1] >= 0).all()
    assert ((x == PADDING) == (y == IGNORED)).all()
    assert (x.ravel()[1 : 6 * 88] == y.ravel()[: 6 * 88 - 1]).all()
    assert data.classes == 258


def test_lines_may_be_texts_of_their_own(tmp_path: Path) -> None:
    write_plays(tmp_path / "shakespeare")
    joined, lines = load(tmp_path), load(tmp_path, rows="lines", steps=100)
    x, y, _, test_y = own(lines, 2)
    assert [text_of(row) for row in y] == [f"{LONG}\n"] * 6
    assert [text_of(row) for row in test_y] == [f"{LONG}\n"] * 2
    assert (x[:, 0] == BEGIN).all()
    assert text_of(y).strip() == text_of(own(joined, 2)[1])
    assert len(own(load(tmp_path, rows="lines", steps=80), 2)[1]) == 12  # 89 characters, two rows


def noted(data: Data) -> str:
    """Return the note on roles that are left out, without the path."""
    found = [note for note in data.notes if "are left out" in note]
    return found[0].partition(": ")[2] if found else ""


def test_short_and_empty_roles_are_left_out(tmp_path: Path) -> None:
    text = TEXT.replace("    Two lines!", "     ")
    write_plays(tmp_path / "shakespeare", text)
    found = {least: load(tmp_path, min_lines=least).train_groups for least in (2, 4)}
    counts = {least: len(set(() if own is None else own)) for least, own in found.items()}
    assert counts == {2: 3, 4: 2}
    why = "have no text in one half of their lines"
    assert noted(load(tmp_path, min_lines=2)) == f"roles that {why} are left out: 1"
    assert not noted(load(tmp_path, min_lines=4))


def test_peers_are_roles_or_drawn(tmp_path: Path) -> None:
    data = load(write_plays(tmp_path / "shakespeare").parent, steps=20)
    assert data.train_groups is not None
    split = split_data(PARTITIONS["natural"], data, peers=4)
    assert [set(data.train_groups[rows]) for rows in split.train] == [{0}, {1}, {2}, {3}]
    sizes = [len(rows) for rows in split_data(PARTITIONS["iid"], data, peers=4).train]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.filterwarnings("ignore:.*SHA-256")
def test_a_run_learns_them(tmp_path: Path) -> None:
    write_plays(tmp_path / "shakespeare")
    run = dfl.Run(
        dataset="shakespeare:steps=11,min_lines=2", data_dir=tmp_path, partition="natural",
        model="char_lstm:hidden=8,layers=1", lr=1.0, momentum=0.9, local_epochs=4, peers=4,
        rounds=3,
    )  # fmt: skip
    first, *_, last = dfl.simulate(run)
    assert last.train_loss < 0.9 * first.train_loss


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "shakespeare").is_dir(), reason="no plays: set DFL_DATA")
def test_the_real_plays() -> None:
    data = checked(DATASETS["shakespeare"](REAL))
    assert data.notes == ()
    assert data.train_groups is not None
    assert len(np.unique(data.train_groups)) == 1145
    assert text_of(data.train_labels[0]).startswith("In delivering my son from me")


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "shakespeare").is_dir(), reason="no plays: set DFL_DATA")
def test_lines_give_the_steps_that_the_paper_counts() -> None:
    """Table 2 has u = E n / (K B) = 37.1 for E = 5, B = 10, and 7.4 and 1.5 for E = 1, B = 10 and
    50.
    """
    data = checked(DATASETS["shakespeare"](REAL, rows="lines"))
    per_role = len(data.train_labels) / 1145
    assert 5 * per_role / 10 == pytest.approx(37.1, rel=0.01)
    assert [round(per_role / b, 1) for b in (10, 50)] == [7.4, 1.5]
