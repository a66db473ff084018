"""The points of `gaussian` have the documented distribution and best accuracy."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

import dfl
from dfl.datasets import DATASETS, Data
from dfl.datasets.gaussian import means
from tests.conftest import Command
from tests.support.idx_files import refused, same

gaussian: Callable[..., Data] = partial(DATASETS["gaussian"], None)


def best(classes: int) -> float:
    """Return the accuracy of the best classifier, E Phi(Z + 3)^(classes - 1)."""
    return float(quad(lambda z: norm.pdf(z) * norm.cdf(z + 3) ** (classes - 1), -12, 12)[0])


def test_the_means_are_orthonormal_but_for_their_length() -> None:
    for features, classes in ((64, 10), (3, 3), (1, 1)):
        u = means(features, classes).astype(np.float64)
        assert np.abs(u @ u.T - np.eye(classes)).max() < 1e-6


def test_moments_are_those_of_the_model() -> None:
    data, n = gaussian(features=6, classes=3, examples=90_000), 30_000
    for label, mean in enumerate(3 * means(6, 3)):
        cloud = data.train_inputs[data.train_labels == label].astype(np.float64)
        assert abs(len(cloud) - n) < 5 * np.sqrt(n)
        assert np.abs(cloud.mean(0) - mean).max() < 5 / np.sqrt(n)
        assert np.abs(np.cov(cloud.T) - np.eye(6)).max() < 8 / np.sqrt(n)


@pytest.mark.parametrize("classes", [1, 2, 10, 64])
def test_the_best_classifier_has_the_documented_accuracy(classes: int) -> None:
    data = gaussian(classes=classes, examples=100_000, test=1)
    predicted = (data.train_inputs @ means(64, classes).T).argmax(1)
    stated = best(classes)
    assert abs((predicted == data.train_labels).mean() - stated) < 1e-9 + 4 * np.sqrt(
        abs(stated * (1 - stated)) / 100_000
    )


def test_the_docstring_states_the_accuracy_of_the_defaults() -> None:
    assert f"({best(10):.3f} for ten classes)" in (DATASETS["gaussian"].__doc__ or "")


def test_peers_come_close_to_the_best_accuracy() -> None:
    dataset = "gaussian:features=16,examples=6000,test=4000"
    run = dfl.Run(
        peers=20, topology="regular:k=4", dataset=dataset, model="softmax", rounds=15, lr=0.01
    )
    *_, last = dfl.simulate(run)
    assert best(10) - 0.03 < last["accuracy_mean"] < best(10) + 0.02


def test_examples_do_not_depend_on_their_number() -> None:
    first, again, fewer = (gaussian(examples=n, test=100) for n in (40_000, 40_000, 30_000))
    assert same(first, again)
    assert np.array_equal(first.train_inputs[:30_000], fewer.train_inputs)
    assert np.array_equal(first.train_labels[:30_000], fewer.train_labels)
    assert np.array_equal(first.test_inputs, fewer.test_inputs)
    assert first.train_labels[:8].tolist() == [6, 3, 3, 9, 5, 3, 7, 9]
    assert not np.isin(first.test_inputs[:, 0], first.train_inputs[:, 0]).any()


def test_generation_takes_little_more_memory_than_the_data() -> None:
    tracemalloc.start()
    data = gaussian(features=128, examples=100_000, test=10)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.4 * data.train_inputs.nbytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("features=0", "features must be from 1 to 1048576, not 0"),
        ("features=9", "classes must be from 1 to features=9, not 10"),
        ("classes=0", "classes must be "),
        ("classes=65", "classes must be from 1 to features=64, not 65"),
        ("examples=0", "examples must be "),
        ("examples=99999999", "examples must be from 1 to 67108864 here, not 99999999"),
        ("test=-1", "test must be "),
        ("examples=many", "examples must be a whole number, not 'many'"),
        ("noise=1", "unknown option 'noise'"),
    ],
)
def test_bad_options_are_refused(dfl_run: Command, options: str, message: str) -> None:
    line = dfl_run.refused("--dataset", f"gaussian:{options}", "--peers", "4")
    assert line.startswith("--dataset gaussian: ")
    assert message in line


def test_bad_options_from_python_are_refused() -> None:
    assert refused(lambda: gaussian(classes=100)).endswith(
        "classes must be from 1 to features=64, not 100"
    )


def test_help_lists_the_options(dfl_run: Command) -> None:
    shown = dfl_run("--help", "datasets").out.split()
    assert {"gaussian", "features=64", "classes=10", "examples=60000", "test=10000"} <= {*shown}


def test_too_few_examples_for_the_peers_are_refused(dfl_run: Command) -> None:
    line = dfl_run.refused(
        "--dataset", "gaussian:examples=100", "--peers", "4", "--examples-per-peer", "60"
    )
    assert "--examples-per-peer 60 for 4 peers" in line
