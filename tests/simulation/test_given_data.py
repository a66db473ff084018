"""Data sets and partitions that `Run` takes as objects."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dfl
from dfl.datasets.data import DATASETS
from dfl.datasets.given import as_data
from dfl.datasets.partitions.base import Assignment
from dfl.training.losses import squared_error
from tests.support.given import DATA, PEERS, X, Y, last, refused, small

pytestmark = pytest.mark.filterwarnings("ignore:24 of 120 examples")

NONE: Any = None


def test_pairs_of_arrays_and_torch_datasets_are_the_same_data() -> None:
    arrays = as_data((X, Y), 3)
    tensors = as_data(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 3)
    assert (len(arrays.train_inputs), len(arrays.test_inputs), arrays.classes) == (96, 24, 4)
    for name in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
        np.testing.assert_array_equal(getattr(arrays, name), getattr(tensors, name))
    every = np.concatenate([arrays.train_inputs, arrays.test_inputs])
    np.testing.assert_array_equal(np.sort(every, axis=0), np.sort(X, axis=0))
    other = as_data((X, Y), 4)
    assert (other.test_labels != arrays.test_labels).any() or (
        other.test_inputs != arrays.test_inputs
    ).any()
    assert "24 of 120 examples" in arrays.notes[0]


def test_a_train_and_a_test_set() -> None:
    train, test = (
        (X[:96], Y[:96]),
        TensorDataset(torch.from_numpy(X[96:]), torch.from_numpy(Y[96:])),
    )
    assert last(small(dataset=(train, test))) == last(small())


def test_one_example_is_a_test_set() -> None:
    row = last(small(dataset=((X, Y), (X[:1], Y[:1]))))
    assert row["accuracy_mean"] in [k / PEERS for k in range(PEERS + 1)]


class Inputs(TensorDataset):
    """Items without a label."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index]


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Inputs(torch.from_numpy(X)), "items of a torch Dataset must be pairs (input, label), not"),
        (TensorDataset(torch.from_numpy(X)), "must be pairs (input, label), not (tensor("),
        ((X[:1], Y[:1]), "--dataset must have two examples or more"),
        (((X[:0], Y[:0]), (X, Y)), "--dataset must have an example or more"),
    ],
)
def test_examples_that_are_no_pairs_are_refused(dataset: Any, reason: str) -> None:
    assert reason in refused(lambda: small(dataset=dataset))


def test_targets_that_are_not_finite_are_refused() -> None:
    for half in range(2):
        target = [X[:, 0].copy(), X[:, 1].copy()]
        target[half][3] = np.nan
        dataset = (X, target[0]), (X, target[1])
        run = small(dataset=dataset, model=nn.Linear(6, 1), loss="squared_error")
        line = refused(partial(replace, run))
        assert line == f"{['train', 'test'][half]}_labels has nan at (3,): it must be finite"


@pytest.mark.parametrize(("half", "value"), [(0, -1), (0, 4), (1, -1)])
def test_numbers_that_are_no_tokens_are_refused(half: int, value: int) -> None:
    tokens = [np.random.default_rng(half).integers(4, size=(24, 5)) for half in range(2)]
    labels = [each.copy() for each in tokens]
    tokens[half][3, 2] = value
    data = dfl.Data(tokens[0], labels[0], tokens[1], labels[1], 4)
    line = refused(lambda: small(dataset=data, model="char_lstm:hidden=4,layers=1"))
    assert "takes whole numbers in range(4) as inputs, and those" in line
    assert f"int64 from {min(value, 0)} to {max(value, 3)}" in line


def test_regression_on_arrays() -> None:
    target = X @ np.arange(6, dtype=np.float32)
    run = small(
        dataset=(X, target), model=nn.Linear(6, 1), loss="squared_error", rounds=30, lr=0.01
    )
    first, *_, row = dfl.simulate(run)
    assert row.train_loss < 0.05 * first.train_loss
    assert np.isnan(row.accuracy_mean)


def test_whole_numbers_are_targets_of_a_regression() -> None:
    """Integers give the figures of the same floats; they may be negative."""
    target = np.round(3 * X @ np.arange(6, dtype=np.float32))
    assert target.min() < 0
    run = small(model=nn.Linear(6, 1), loss="squared_error", lr=0.01)
    row = last(replace(run, dataset=(X, target.astype(np.int64))))
    assert row == pytest.approx(last(replace(run, dataset=(X, target))), nan_ok=True, abs=0)
    assert np.isnan(row["accuracy_mean"])


@pytest.mark.parametrize("dataset", ["digits", DATA, (X, Y)])
def test_squared_error_of_several_outputs_for_a_number_is_refused(dataset: Any) -> None:
    own = isinstance(dataset, tuple)
    settings = {"dataset": dataset, "model": nn.Linear(6, 4) if own else "softmax"}
    line = refused(lambda: small(loss="squared_error", **settings))
    assert line.startswith("--loss squared_error")


def test_squared_error() -> None:
    outputs = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert squared_error(outputs, torch.zeros(2, 2)).tolist() == [5.0, 9.0]
    assert squared_error(outputs[:, :1], torch.ones(2)).tolist() == [0.0, 1.0]


def missing(directory: Path | None) -> dfl.Data:
    raise FileNotFoundError(2, "No such file", "x.npy")


def without_a_folder() -> dfl.Data:
    return DATA


@pytest.mark.parametrize(
    ("loader", "reason"),
    [(missing, "FileNotFoundError: .*x.npy"), (without_a_folder, "TypeError: without_a_folder")],
)
def test_a_loader_that_fails_is_refused(loader: Callable[..., dfl.Data], reason: str) -> None:
    with DATASETS.replaced():
        DATASETS.register("mine")(loader)
        line = refused(lambda: small(dataset="mine"))
    assert re.match(f"--dataset mine cannot be read: {reason}", line)


@pytest.mark.usefixtures("without_figures")
def test_a_partition_by_indices(tmp_path: Path) -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    list(dfl.simulate(small(partition=parts, out=tmp_path / "run", rounds=0)))
    peers = dfl.load(tmp_path / "run").peers
    assert peers["n_train"].tolist() == [16] * PEERS
    counts = [np.bincount(Y[part], minlength=4) for part in parts]
    expected = [" ".join(f"{k}:{n}" for k, n in enumerate(each) if n) for each in counts]
    assert peers["labels"].tolist() == expected


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([np.arange(5)] * 2, "2 arrays of indices for 6 peers"),
        ([np.arange(5)] * PEERS, "example 0 has several owners"),
        ([np.array([96 + i]) for i in range(PEERS)], "peer 0 must be whole numbers from 0 to 95"),
        ([np.array([0.5])] * PEERS, "peer 0 must be whole numbers"),
        ([[i, 90 - i, i] for i in range(PEERS)], "peer 0 must differ, and 0 is there twice"),
        (
            [*np.split(np.arange(95), 5), np.arange(0)],
            "peer 5 first: 95 of 96 examples are with others",
        ),
        ([[i / 2] for i in range(PEERS)], "must be text, or in Python an object with arrays in"),
        ([np.array([i, 96 + i]) for i in range(PEERS)], "from 0 to 95, not 96"),
        ([np.array([-1 - i]) for i in range(PEERS)], "from 0 to 95, not -1"),
        ([np.ones(96, bool)] * PEERS, "from 0 to 95, not ndarray of bool (96,)"),
        ([np.array([0.5])] * PEERS, "from 0 to 95, not ndarray of float64 (1,)"),
        (
            Assignment([np.arange(5)] * 2, [np.arange(0)] * 2),
            "2 arrays of indices for 6 peers",
        ),
        (Assignment([np.arange(5)] * PEERS, NONE), "example 0 has several owners"),
        (Assignment(NONE, NONE), "must be a spec, a list of arrays of indices, an Assignment, or"),
        (np.arange(96), "a list of arrays of indices, an Assignment, or a function (labels, peers"),
        (lambda *_: Assignment([np.arange(3)] * PEERS, NONE), "example 0 has several owners"),
        (
            lambda *_: Assignment([np.array([i]) for i in range(PEERS)], NONE),
            "returns None as test parts: it must be an array of indices for each peer",
        ),
    ],
)
def test_indices_that_are_no_partition(parts: Any, reason: str) -> None:
    line = refused(lambda: small(partition=parts))
    assert line.startswith("--partition")
    assert reason in line


def test_indices_with_settings_that_draw_examples_are_refused() -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    line = refused(lambda: small(partition=parts, examples_per_peer=3))
    assert line.startswith("--examples-per-peer 3 has no part in --partition as indices")
    line = refused(lambda: small(partition=parts, algorithm="fltrust:root=10"))
    assert line.startswith("--partition")


@pytest.mark.parametrize(
    "goal",
    [{"until": "local_accuracy=0.1"}, {"share_all_until": "local_accuracy=0.1", "share": "head:1"}],
)
def test_indices_of_training_examples_only_have_no_local_accuracy(goal: dict[str, str]) -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    name = next(iter(goal)).replace("_", "-")
    line = refused(lambda: small(partition=parts, **goal))
    assert line.startswith(f"--{name} local_accuracy: no peer has test examples of its own")
    tests = [np.arange(4 * i, 4 * (i + 1)) for i in range(PEERS)]
    assert last(small(partition=Assignment(parts, tests), **goal))["local_accuracy_mean"] >= 0


def test_indices_need_a_test_set_of_their_own() -> None:
    line = refused(lambda: small(dataset=(X, Y), partition=[np.arange(3)] * PEERS))
    assert line.startswith("--partition")


def test_the_number_of_peers_is_that_of_the_parts() -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    expected = last(small(partition=parts))
    assert last(small(peers=None, partition=parts)) == expected
    assert last(small(peers=None, partition=[part.tolist() for part in parts])) == expected
    assert last(small(peers=None, partition=tuple(map(tuple, parts)))) == expected


def test_an_assignment_is_what_a_function_returns() -> None:
    own = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    assignment = Assignment(own, [np.arange(4 * i, 4 * (i + 1)) for i in range(PEERS)])
    expected = last(small(partition=lambda *_: assignment))
    assert last(small(peers=None, partition=assignment)) == expected
    line = refused(lambda: small(partition=assignment, examples_per_peer=3))
    assert line.startswith("--examples-per-peer 3")


def test_parts_of_a_partition_may_be_rows_of_an_array() -> None:
    own: Any = np.arange(96).reshape(PEERS, -1)
    test: Any = np.arange(24).reshape(PEERS, -1)
    arrays = last(small(partition=lambda *_: Assignment(own, test)))
    lists = last(small(partition=lambda *_: Assignment([*own], [*test])))
    assert arrays["train_loss"] == lists["train_loss"]
