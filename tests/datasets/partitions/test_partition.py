"""Partitions give every example one owner and follow their sources; `split_data` splits exactly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.datasets import PARTITIONS, Data, DataSplit, split_data
from dfl.datasets.partitions.base import Assignment, Labels, Partition, iid
from dfl.datasets.partitions.label_skew import biased, dirichlet, labels, shards
from dfl.datasets.partitions.quantity_skew import natural, quantity

MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def mixed(counts: list[int]) -> NDArray[np.int64]:
    """Return labels with the given counts, in a random order."""
    return np.random.default_rng(0).permutation(np.repeat(np.arange(len(counts)), counts))


def balanced(n: int, classes: int = 10) -> NDArray[np.int64]:
    return np.random.default_rng(n).permutation(np.arange(n) % classes)


def made(n: int, n_test: int = 200) -> Data:
    """Return a data set whose only input is the index of an example, in 25 groups."""
    a = np.arange(n)
    b = np.arange(n_test)
    plain = Data(a[:, None], balanced(n), b[:, None], balanced(n_test), classes=10)
    return replace(plain, train_groups=a % 25, test_groups=b % 25)


def kinds(part: NDArray[np.int64], values: NDArray[np.int64]) -> set[int]:
    """Return the labels of some examples."""
    return set(values[part].tolist())


def each_once(parts: Sequence[NDArray[np.int64]], n: int) -> bool:
    return sorted(np.concatenate(parts).tolist()) == list(range(n))


# --- all partitions


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    peers=st.integers(1, 40),
    spare=st.integers(0, 300),
    n_test=st.integers(0, 200),
    seed=st.integers(0, 2**32),
)
def test_every_example_has_one_owner(
    name: str, peers: int, spare: int, n_test: int, seed: int
) -> None:
    classes = min(10, peers) if name == "biased" else 10
    n, groups = 2 * peers + spare, peers + min(spare, 5)
    data = Labels(
        balanced(n, classes),
        balanced(n_test, classes),
        np.arange(n) % groups,
        np.arange(n_test) % groups,
    )
    parts = PARTITIONS[name](data, peers, randomness.generator(seed, "partition"))
    for half, values in ((parts.train, data.train), (parts.test, data.test)):
        assert len(half) == peers
        assert all(part.dtype == np.int64 and np.all(np.diff(part) > 0) for part in half)
        used = np.concatenate(half)
        assert len(np.unique(used)) == len(used)
        # With fewer draws than labels, no peer draws some labels.
        assert len(used) == len(values) or (name == "labels" and 2 * peers < 10)


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_the_split_depends_on_the_seed_only(name: str) -> None:
    data = made(600)

    def first(seed: int) -> list[list[int]]:
        parts = split_data(
            PARTITIONS[name], data, peers=12, seed=seed, validation=0.2, examples_per_peer=40
        )
        return [part.tolist() for part in (*parts.train, *parts.validation, *parts.test)]

    assert first(1) == first(1) != first(2)


@pytest.mark.parametrize("name", sorted(PARTITIONS))
def test_options_can_be_read_by_the_command_line(name: str) -> None:
    parameters = list(inspect.signature(PARTITIONS[name]).parameters)
    assert parameters[:3] == ["labels", "peers", "rng"]
    assert parameters[3:] == list(options(PARTITIONS[name]))


@pytest.mark.parametrize(
    ("divide", "message"),
    [
        (partial(shards, per_peer=0), "--partition shards: per_peer must be "),
        (
            partial(shards, per_peer=51),
            "2 peers with per_peer=51 need 102 training examples, there are 100",
        ),
        (partial(labels, per_peer=-1), "--partition labels: per_peer must be "),
        (partial(labels, per_peer=10**12), "per_peer must be "),
        (
            partial(dirichlet, alpha=0.0),
            "--partition dirichlet: alpha must be ",
        ),
        (partial(dirichlet, alpha=float("nan")), "alpha must be"),
        (partial(dirichlet, alpha=float("inf")), "alpha must be"),
        (partial(dirichlet, min_examples=-1), "min_examples must be "),
        (
            partial(dirichlet, min_examples=51),
            "2 peers with min_examples=51 need 102 training examples, there are 100",
        ),
        (
            partial(quantity, alpha=-1.0),
            "--partition quantity: alpha must be ",
        ),
        (
            partial(quantity, min_examples=51),
            "--partition quantity: 2 peers with min_examples=51 need 102 training",
        ),
        (partial(biased, q=1.1), "--partition biased: q must be from 0 to 1, not 1.1"),
        (partial(biased, q=float("nan")), "--partition biased: q must be from 0 to 1, not nan"),
        (biased, "--partition biased: 10 labels need a peer each, there are 2"),
        (
            natural,
            "--partition natural: these data do not come in groups, choose another partition",
        ),
    ],
)
def test_bad_options_are_refused(divide: Partition, message: str) -> None:
    with pytest.raises(InputError) as caught:
        divide(Labels(balanced(100), balanced(10)), 2, randomness.generator(0, "partition"))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


# --- each partition


def split(divide: Callable[..., Assignment], data: Labels, peers: int, seed: int = 0) -> Assignment:
    return divide(data, peers, randomness.generator(seed, "partition"))


def test_iid_parts_have_equal_sizes_and_similar_labels() -> None:
    data = Labels(balanced(10003), balanced(1000))
    parts = split(iid, data, 10)
    assert sorted(map(len, parts.train)) == [1000] * 7 + [1001] * 3
    shares = np.array([np.bincount(data.train[part], minlength=10) for part in parts.train])
    assert 60 < shares.min() <= shares.max() < 145  # 100 each, standard deviation 9


def test_shards_give_few_labels_as_in_fedavg() -> None:
    data = Labels(mixed(MNIST_TRAIN), mixed(MNIST_TEST))
    parts = split(shards, data, 100)
    assert each_once(parts.train, 60000)
    assert each_once(parts.test, 10000)
    assert {len(part) for part in parts.train} == {600}
    assert {len(part) for part in parts.test} == {100}
    counts = [len(kinds(part, data.train)) for part in parts.train]
    assert max(counts) <= 4
    assert sum(counts) <= 200 + 9  # a shard more for every boundary between two labels


def test_shards_give_the_same_labels_for_testing() -> None:
    data = Labels(balanced(2000), balanced(400))  # no shard crosses a boundary
    parts = split(partial(shards, per_peer=2), data, 20)
    for train, test in zip(parts.train, parts.test, strict=True):
        assert kinds(train, data.train) == kinds(test, data.test)
        assert len(kinds(train, data.train)) <= 2


def test_labels_gives_one_or_two_labels_as_in_lg_fedavg() -> None:
    data = Labels(mixed(MNIST_TRAIN), mixed(MNIST_TEST))
    parts = split(labels, data, 100)
    assert each_once(parts.train, 60000)
    assert each_once(parts.test, 10000)
    for train, test in zip(parts.train, parts.test, strict=True):
        assert kinds(train, data.train) == kinds(test, data.test)
        assert 1 <= len(kinds(train, data.train)) <= 2
        assert 2 * 271 <= len(train) <= 2 * 338  # 20 shards of every label
        assert 2 * 44 <= len(test) <= 2 * 57


def test_labels_drawn_twice_have_the_expected_frequency() -> None:
    data = Labels(balanced(400), balanced(10))
    single = [
        sum(len(kinds(part, data.train)) == 1 for part in split(labels, data, 100, s).train)
        for s in range(300)
    ]
    assert abs(np.mean(single) - 100 * 19 / 199) < 0.6  # standard error 0.16


@settings(max_examples=30, deadline=None)
@given(
    peers=st.integers(1, 30),
    per_peer=st.integers(1, 12),
    classes=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_labels_draws_every_label_equally_often(
    peers: int, per_peer: int, classes: int, seed: int
) -> None:
    data = Labels(balanced(1200, classes), balanced(120, classes))
    parts = split(partial(labels, per_peer=per_peer), data, peers, seed)
    drawn = kinds(np.concatenate(parts.train), data.train)
    assert len(drawn) == min(classes, peers * per_peer)
    for half, values in ((parts.train, data.train), (parts.test, data.test)):
        assert np.concatenate(half).size == np.isin(values, list(drawn)).sum()
    assert all(1 <= len(kinds(part, data.train)) <= per_peer for part in parts.train)
    owners = [sum(label in kinds(part, data.train) for part in parts.train) for label in drawn]
    assert max(owners) <= -(-peers * per_peer // classes)


def test_labels_that_the_training_set_lacks_are_not_drawn() -> None:
    data = Labels(np.array([3, 7] * 20), np.array([1, 3, 5, 7] * 5))
    parts = split(labels, data, 5)
    assert each_once(parts.train, 40)
    assert kinds(np.concatenate(parts.test), data.test) == {3, 7}


def test_dirichlet_spreads_the_test_set_by_the_same_proportions() -> None:
    data = Labels(mixed(MNIST_TRAIN), mixed(MNIST_TEST))
    parts = split(partial(dirichlet, alpha=0.1, min_examples=0), data, 20)
    for train, test in zip(parts.train, parts.test, strict=True):
        a = np.bincount(data.train[train], minlength=10) / np.array(MNIST_TRAIN)
        b = np.bincount(data.test[test], minlength=10) / np.array(MNIST_TEST)
        assert np.abs(a - b).max() < 0.003  # rounding at both ends of a piece of a thousand


def test_dirichlet_fills_small_peers_up() -> None:
    data = Labels(balanced(500), balanced(50))
    pure = split(partial(dirichlet, alpha=0.01, min_examples=0), data, 25)
    filled = split(partial(dirichlet, alpha=0.01, min_examples=20), data, 25)
    assert min(map(len, pure.train)) == 0
    assert {len(part) for part in filled.train} == {20}  # all that there is
    assert all(np.array_equal(a, b) for a, b in zip(pure.test, filled.test, strict=True))


# --- split_data


def owned(parts: DataSplit) -> list[NDArray[np.int64]]:
    """Return the training and validation examples of every peer."""
    return [np.concatenate(pair) for pair in zip(parts.train, parts.validation, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(sorted(PARTITIONS)),
    peers=st.integers(1, 20),
    each=st.one_of(st.none(), st.integers(12, 20)),
    validation=st.floats(0, 1, exclude_max=True),
)
def test_validation_takes_its_share_but_not_the_last_example(
    name: str, peers: int, each: int | None, validation: float
) -> None:
    if name == "biased":
        peers, each = max(peers, 10), each and 20
    parts = split_data(
        PARTITIONS[name], made(400), peers=peers, examples_per_peer=each, validation=validation
    )
    used = np.concatenate(owned(parts))
    assert len(np.unique(used)) == len(used)
    if name != "labels":
        assert len(used) == (400 if each is None else peers * each)
    for train, held in zip(parts.train, parts.validation, strict=True):
        n = len(train) + len(held)
        assert len(held) == min(round(validation * n), n - 1)
        assert np.all(np.diff(train) > 0)
        assert np.all(np.diff(held) > 0)


def test_a_subset_is_split_exactly() -> None:
    data = made(5000)
    parts = split_data(shards, data, peers=16, examples_per_peer=100)
    assert {len(part) for part in parts.train} == {100}
    whole = np.concatenate(parts.train)
    assert len(np.unique(whole)) == 1600
    assert abs(whole.mean() - 2500) < 200  # from all of the data
    assert each_once(parts.test, 200)
    assert sum(len(kinds(part, data.train_labels)) for part in parts.train) <= 32 + 9


def test_validation_examples_do_not_depend_on_the_other_peers() -> None:
    data = made(400)

    def indices(peers: int) -> NDArray[np.int64]:
        parts = split_data(iid, data, peers=peers, examples_per_peer=20, validation=0.25)
        return np.searchsorted(np.sort(owned(parts)[3]), parts.validation[3])

    assert np.array_equal(indices(4), indices(20))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"peers": 101},
            "--peers 101 with 1 training example each: that takes 101 of them, there are 100",
        ),
        (
            {"peers": 10, "examples_per_peer": 11},
            "--examples-per-peer 11 for 10 peers: that takes 110 of them, there are 100",
        ),
    ],
)
def test_too_few_examples_are_refused(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        split_data(iid, made(100), **options)
    assert str(caught.value) == expected


def test_a_peer_without_examples_is_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"leaves \d+ of 50 peers without training examples, peer \d+ first: 100 of 100 ex",
    ):
        split_data(partial(dirichlet, alpha=0.01, min_examples=0), made(100), peers=50)
