"""Words of the plays by role or by play: vocabulary, unknown words, damaged files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dfl
from dfl.datasets import DATASETS, Data
from dfl.datasets.data import IGNORED, checked
from dfl.models.zoo import MODELS
from tests.support.idx_files import refused
from tests.support.plays import TEXT, write_plays

REAL = Path(os.environ.get("DFL_DATA") or Path(__file__).parents[3] / "shared" / "data")
HALF = ["abcdefghij", "klmnopqrst", "uvwxyz"]
LINE = [*HALF, *HALF, ",", ";", "nothing", "will", "come"]


def load(directory: Path, **options: Any) -> Data:
    return checked(DATASETS["words"](directory, **options))


def test_labels_are_the_next_known_words(tmp_path: Path) -> None:
    """Frequency decides, then the alphabet; marks are words, figures are not. The second role of
    the plays has no known word in its test half.
    """
    data = load(write_plays(tmp_path / "shakespeare").parent, steps=100)
    whole = data.train_labels[data.train_groups == 1].ravel()
    words = ["abcdefghij", "klmnopqrst", "uvwxyz", "nothing", ",", ";", "come", "will"]
    numbers = [words.index(word) for word in LINE] * 6
    assert whole[whole != IGNORED].tolist() == numbers
    inputs = data.train_inputs[data.train_groups == 1].ravel()
    assert inputs[: len(numbers)].tolist() == [9998, *numbers[:-1]]
    assert (inputs[len(numbers) :] == 9999).all()
    assert data.classes == 10_000


def test_unknown_words_are_no_labels(tmp_path: Path) -> None:
    data = load(write_plays(tmp_path / "shakespeare").parent, vocabulary=5, steps=4)
    assert any(
        "roles that have no known word" in note and note.endswith("left out: 1")
        for note in data.notes
    )
    assert set(data.train_labels.ravel()) == {0, 1, IGNORED}
    assert {2, 3} <= set(data.train_inputs.ravel()) <= {0, 1, 2, 3, 4}
    assert (data.train_labels != IGNORED).any(1).all()


def test_a_vocabulary_without_words_of_any_role_is_named(tmp_path: Path) -> None:
    author = "by William Shakespeare\n"
    roles = "  KING. ay\n    ay\n    no\n  FOOL. me\n    you\n"
    write_plays(tmp_path / "shakespeare", f"{author}{author}{roles}")
    assert "vocabulary of more than 4" in refused(lambda: load(tmp_path, vocabulary=4))


def test_peers_are_roles_or_plays(tmp_path: Path) -> None:
    write_plays(tmp_path / "shakespeare")
    groups = {by: load(tmp_path, by=by).train_groups for by in ("role", "play")}
    assert {by: sorted(set(() if own is None else own)) for by, own in groups.items()} == {
        "role": [0, 1, 2],
        "play": [0, 1],
    }


@pytest.mark.parametrize("name", ["words", "shakespeare"])
def test_rows_longer_than_memory_are_refused(name: str) -> None:
    with pytest.raises(dfl.InputError, match=r"steps.*2147483647"):
        next(dfl.simulate(dfl.Run(dataset=f"{name}:steps=2147483647")))


def test_the_model_has_the_published_parameters() -> None:
    """McMahan et al. (2017): 256 units, 10,000 words in 192 dimensions, 4,950,544 parameters."""
    published = MODELS["word_lstm"]((10,), 10_000, (10,), peepholes=True)
    assert sum(value.numel() for value in published.parameters()) == 4_950_544


@pytest.mark.filterwarnings("ignore:.*SHA-256")
@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_run_learns_them(tmp_path: Path, tied: str) -> None:
    write_plays(tmp_path / "shakespeare", TEXT)
    run = dfl.Run(
        dataset="words:vocabulary=20,steps=5", data_dir=tmp_path, partition="natural", peers=3,
        model=f"word_lstm:embedding=6,hidden=8,tied={tied}", lr=0.5, momentum=0.9, rounds=3,
        local_epochs=4, out=tmp_path / "run",
    )  # fmt: skip
    first, *_, last = dfl.simulate(run)
    assert last.train_loss < 0.9 * first.train_loss
    module: Any = dfl.load(tmp_path / "run").mean_model()
    assert (module.last.weight is module.embedding.weight) == (tied == "true")


@pytest.mark.slow
@pytest.mark.skipif(not (REAL / "shakespeare").is_dir(), reason="no plays: set DFL_DATA")
def test_the_real_plays() -> None:
    data = load(REAL, by="play")
    assert data.notes == ()
    assert data.train_groups is not None
    assert len(np.unique(data.train_groups)) == 36
