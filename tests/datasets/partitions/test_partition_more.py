"""Partitions with unequal peers follow their sources: dirichlet, biased, quantity, natural."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.datasets import split_data
from dfl.datasets.data import Data
from dfl.datasets.partitions.assign import dirichlet_proportions
from dfl.datasets.partitions.base import Assignment, DataSplit, Labels
from dfl.datasets.partitions.label_skew import biased, dirichlet
from dfl.datasets.partitions.quantity_skew import natural, quantity
from dfl.simulation import distribute_data
from dfl.simulation.components import sources_of
from tests.datasets.partitions.test_partition import (
    MNIST_TEST,
    MNIST_TRAIN,
    balanced,
    each_once,
    made,
    mixed,
    split,
)

Ints = NDArray[np.int64]


def table(parts: Sequence[Ints], values: Ints) -> Ints:
    """Return the number of examples of every label at every peer, (P, L)."""
    return np.array([np.bincount(values[part], minlength=int(values.max()) + 1) for part in parts])


def test_partitions_of_a_thousand_peers_hold_every_example_once() -> None:
    data = Labels(
        mixed(MNIST_TRAIN), mixed(MNIST_TEST), *(np.arange(n) % 1999 for n in (60000, 10000))
    )
    for divide in (
        partial(dirichlet, alpha=0.01, min_examples=10),
        partial(quantity, alpha=0.01),
        biased,
        natural,
    ):
        parts = split(divide, data, 1000)
        assert each_once(parts.train, 60000)
        assert each_once(parts.test, 10000)
        assert min(map(len, parts.train)) >= 1


# --- Dirichlet proportions


@pytest.mark.parametrize("alpha", [5e-324, 1e-300, 1e-3, 1.0, 1e3, 1e300])
def test_dirichlet_proportions_of_any_alpha(alpha: float) -> None:
    shares = dirichlet_proportions(np.random.default_rng(0), (50, 1000), alpha)
    assert np.all(shares >= 0)
    assert np.abs(shares.sum(axis=1) - 1).max() < 1e-9
    if alpha < 1e-100:
        assert np.all(shares.max(axis=1) == 1)
    if alpha > 1e100:
        assert np.allclose(shares, 1e-3)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_dirichlet_proportions_have_their_moments(alpha: float) -> None:
    shares = dirichlet_proportions(np.random.default_rng(1), (20000, 4), alpha)
    assert np.abs(shares.mean(axis=0) - 1 / 4).max() < 0.02
    assert np.abs(shares.var(axis=0) - 3 / 16 / (4 * alpha + 1)).max() < 0.005


# --- biased


@pytest.mark.parametrize("q", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("peers", [10, 23, 100])
def test_biased_has_the_counts_of_fltrust(q: float, peers: int) -> None:
    data = Labels(mixed(MNIST_TRAIN), mixed(MNIST_TEST))
    parts = split(partial(biased, q=q), data, peers)
    sizes = np.array([len(range(k, peers, 10)) for k in range(10)])
    for half, counts in ((parts.train, MNIST_TRAIN), (parts.test, MNIST_TEST)):
        found = table(half, data.train if half is parts.train else data.test)
        # Groups do not depend on q.
        group = groups_of(split(partial(biased, q=1.0), data, peers), data)
        assert np.bincount(group).tolist() == sizes.tolist()
        rule = np.full((10, 10), (1 - q) / 9)
        np.fill_diagonal(rule, q)
        expected = (rule * counts / sizes[:, None])[group]
        errors = (found - expected) / np.sqrt(expected)
        assert np.abs(errors).max() < 5
        assert 0.8 < errors.std() < 1.1  # every example is assigned independently


def groups_of(parts: Assignment, data: Labels) -> Ints:
    """Return the only label of every peer."""
    counts = table(parts.train, data.train)
    assert np.all((counts > 0).sum(axis=1) == 1)
    return np.asarray(counts.argmax(axis=1))


def test_groups_of_biased_are_random() -> None:
    data = Labels(balanced(4000), balanced(100))
    groups = [groups_of(split(partial(biased, q=1.0), data, 20, seed), data) for seed in range(3)]
    assert not np.array_equal(groups[0], np.arange(20) % 10)
    assert not np.array_equal(groups[0], groups[1])


def test_biased_with_q_zero_gives_no_example_of_the_own_label() -> None:
    data = Labels(balanced(4000), balanced(2000))
    own = groups_of(split(partial(biased, q=1.0), data, 10), data)
    parts = split(partial(biased, q=0.0), data, 10)
    for half, values in ((parts.train, data.train), (parts.test, data.test)):
        counts = table(half, values)
        assert np.all(counts[np.arange(10), own] == 0)
        assert np.all(np.sort(counts, axis=1)[:, 1] > 0)


def test_biased_with_missing_labels_and_with_one_label() -> None:
    gaps = Labels(np.array([3, 7] * 50), np.array([7, 9] * 5))
    parts = split(partial(biased, q=1.0), gaps, 3)
    assert each_once(parts.train, 100)
    assert each_once(parts.test, 10)
    assert all(len(set(gaps.train[part].tolist())) <= 1 for part in parts.train)
    alone = split(partial(biased, q=0.3), Labels(np.full(100, 5), np.full(10, 5)), 4)
    assert each_once(alone.train, 100)


def test_biased_refuses_a_split_that_leaves_a_peer_without_examples() -> None:
    with pytest.raises(InputError, match=r"leaves \d+ of 60 peers without training examples"):
        split_data(biased, made(100), peers=60)


# --- quantity


def test_quantity_sizes_follow_one_draw() -> None:
    data = Labels(balanced(2000), balanced(10))
    sizes = np.array(
        [
            [len(p) for p in split(partial(quantity, alpha=0.5), data, 5, s).train]
            for s in range(400)
        ]
    )
    shares = sizes / 2000
    assert np.abs(shares.mean(axis=0) - 0.2).max() < 0.04  # standard error 0.011
    assert np.abs(shares.var(axis=0) - 0.16 / 3.5).max() < 0.012
    assert np.ptp([len(p) for p in split(partial(quantity, alpha=1e9), data, 7).train]) <= 4


def test_quantity_has_the_same_shares_for_testing_and_for_every_label() -> None:
    data = Labels(np.sort(mixed(MNIST_TRAIN)), np.sort(mixed(MNIST_TEST)))
    parts = split(quantity, data, 8)
    for train, test in zip(parts.train, parts.test, strict=True):
        assert abs(len(train) / 60000 - len(test) / 10000) < 2e-4
    counts = table(parts.train, data.train)
    expected = counts.sum(axis=1, keepdims=True) * np.array(MNIST_TRAIN) / 60000
    assert np.all(np.abs(counts - expected) < 5 * np.sqrt(expected) + 1)


def test_quantity_fills_small_peers_up_with_any_label() -> None:
    # The last examples are all of the last label.
    data = Labels(np.sort(balanced(5000)), np.sort(balanced(50)))
    pure = split(partial(quantity, alpha=0.01, min_examples=0), data, 25)
    filled = split(partial(quantity, alpha=0.01, min_examples=40), data, 25)
    assert min(map(len, pure.train)) == 0
    assert min(map(len, filled.train)) == 40
    assert each_once(filled.train, 5000)
    assert all(np.array_equal(a, b) for a, b in zip(pure.test, filled.test, strict=True))
    small = [part for part in filled.train if len(part) == 40]
    assert table(small, data.train).sum(axis=0).min() > 0.05 * sum(map(len, small))


# --- natural


def grouped(train: Ints, test: Ints) -> Labels:
    return Labels(np.zeros(len(train), np.int64), np.zeros(len(test), np.int64), train, test)


def test_as_many_groups_as_peers_are_assigned_in_order() -> None:
    data = grouped(np.array([40, -7, 40, 12, -7, 40]), np.array([12, 40, 40, -7, 99, 0, -8]))
    parts = split(natural, data, 3, seed=5)
    assert [part.tolist() for part in parts.train] == [[1, 4], [3], [0, 2, 5]]
    # No peer trains on groups 99, 0 and -8.
    assert [part.tolist() for part in parts.test] == [[3], [0], [1, 2]]
    assert all(part.dtype == np.int64 for part in (*parts.train, *parts.test))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 12), st.integers(0, 99)
)
def test_whole_groups_are_assigned_to_the_smallest_peer(
    counts: list[int], peers: int, seed: int
) -> None:
    groups = randomness.generator(seed, "order").permutation(
        np.repeat(np.arange(len(counts)), counts)
    )
    peers = min(peers, len(counts))
    parts = split(natural, grouped(groups, groups[::-1]), peers, seed)
    assert each_once(parts.train, len(groups))
    assert each_once(parts.test, len(groups))
    owners = [
        {peer for peer, part in enumerate(parts.train) if k in groups[part]}
        for k in range(len(counts))
    ]
    assert {len(own) for own in owners} == {1}
    assert all(
        set(groups[a]) == set(groups[::-1][b]) for a, b in zip(parts.train, parts.test, strict=True)
    )
    sizes = [len(part) for part in parts.train]
    # The largest peer was the smallest before its last group.
    assert max(sizes) - min(sizes) <= max(counts)
    assert min(sizes) >= 1


def test_the_order_of_many_groups_is_random() -> None:
    data = grouped(np.arange(40) % 20, np.arange(0))
    first, again, other = (
        [part.tolist() for part in split(natural, data, 7, seed).train] for seed in (0, 0, 1)
    )
    assert first == again != other


def test_natural_uses_the_groups_of_the_data_and_of_a_subset() -> None:
    data = made(400)
    assert data.train_groups is not None
    parts = split_data(natural, data, peers=25, examples_per_peer=8, validation=0.25)
    own = [np.concatenate(pair) for pair in zip(parts.train, parts.validation, strict=True)]
    assert sum(map(len, own)) == 200
    assert [set(data.train_groups[part]) for part in own] == [{i} for i in range(25)]
    assert [set(part % 25) for part in parts.test] == [{i} for i in range(25)]


@pytest.mark.parametrize(
    ("change", "peers", "message"),
    [
        ({}, 26, "--partition natural: 26 peers outnumber the 25 groups of these data"),
        ({"train_groups": None}, 4, "--partition natural: these data do not come in groups"),
        ({"test_groups": None}, 4, "--partition natural: these data have train_groups and no test"),
        (
            {"train_groups": np.zeros(399, np.int64)}, 4,
            "train_groups of shape (399,) as int64: they must be whole numbers, one for each of "
            "400 examples",
        ),
        (
            {"test_groups": np.zeros(200)}, 4,
            "test_groups of shape (200,) as float64: they must be whole numbers",
        ),
    ],
)  # fmt: skip
def test_bad_groups_are_refused(change: dict[str, Any], peers: int, message: str) -> None:
    data = replace(made(400), **change)
    with pytest.raises(InputError) as caught:
        read(Run(peers=peers, partition="natural"), data)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def read(run: Run, data: Data) -> tuple[Data, DataSplit]:
    run = replace(run, dataset=data)
    return distribute_data.read(run, sources_of(run), None)


# --- labels that are no classes


@pytest.mark.parametrize("spec", ["iid", "natural", "quantity:alpha=0.3", "biased:q=0.3", "shards"])
def test_partitions_by_label_refuse_labels_that_are_no_classes(spec: str) -> None:
    data = replace(made(400), train_labels=np.linspace(0, 1, 400), classes=0)
    name = spec.partition(":")[0]
    run = Run(peers=20, partition=spec)
    if name in ("biased", "shards"):
        with pytest.raises(
            InputError,
            match=f"^--partition {spec} partitions by label, .*: choose iid, quantity or nat",
        ):
            read(run, data)
    else:
        _, parts = read(run, data)
        assert each_once(parts.train, 400)
