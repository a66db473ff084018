"""The server's own examples, and poisoned examples of attackers, change no other peer's data."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core import randomness
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.datasets import PARTITIONS, Data, DataSplit, split_data
from dfl.datasets.partitions.base import iid
from dfl.datasets.server_data import all_examples, biased_sample, peers_keep
from dfl.robust.attacks import ATTACKS, Attack
from dfl.simulation import distribute_data
from dfl.simulation.components import sources_of

Ints = NDArray[np.int64]


def made(n: int = 400, classes: int = 10) -> Data:
    """Return examples whose input is their index, as two uint8, and whose labels are in turn."""
    numbers = np.stack([np.arange(n) // 256, np.arange(n) % 256], axis=1).astype(np.uint8)
    return Data(
        numbers,
        np.arange(n) % max(classes, 1),
        numbers[:50],
        np.arange(50) % max(classes, 1),
        classes,
    )


def numbers(inputs: NDArray[Any]) -> list[int]:
    return [256 * int(high) + int(low) for high, low in inputs]


def refused(made: Any) -> str:
    with pytest.raises(InputError) as caught:
        made()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- counts of labels


def counts(n: int = 4000, classes: int = 10, **options: Any) -> list[int]:
    values = made(n, classes).train_labels
    chosen = biased_sample(values, classes, randomness.generator(0, "root"), **options)
    assert np.all(np.diff(chosen) > 0)
    return list(map(int, np.bincount(values[chosen], minlength=classes)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [10] * 10),
        ({"size": 100, "bias": 0.1}, [10] * 10),
        # 50 / 9 = 5.56: five are rounded up.
        ({"size": 100, "bias": 0.5}, [6, 50, 6, 6, 6, 6, 5, 5, 5, 5]),
        ({"size": 90, "bias": 0.0}, [10, 0, *[10] * 8]),
        ({"size": 7, "bias": 1.0}, [0, 7, *[0] * 8]),
        ({"size": 1, "bias": 0.3}, [0, 1, *[0] * 8]),
        ({"size": 3, "bias": 0.1}, [1, 1, 1, *[0] * 7]),  # all remainders are equal
        ({"size": 3, "bias": 0.7}, [1, 2, *[0] * 8]),  # so are these, 2.1 - 2 and 0.1
        ({"classes": 2, "size": 5, "bias": 0.5}, [3, 2]),
        ({"classes": 2, "size": 30, "bias": 0.55}, [14, 16]),
    ],
)
def test_counts_equal_those_by_hand(options: dict[str, Any], expected: list[int]) -> None:
    assert counts(**options) == expected


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 300), bias=st.floats(0, 1), classes=st.integers(2, 12))
def test_counts_are_the_nearest_whole_numbers(size: int, bias: float, classes: int) -> None:
    found = counts(4000, classes, size=size, bias=bias)
    exact = [
        size * (bias if label == 1 else (1 - bias) / (classes - 1)) for label in range(classes)
    ]
    assert sum(found) == size
    assert max(abs(a - b) for a, b in zip(found, exact, strict=True)) < 1 + 1e-6
    others = found[:1] + found[2:]
    assert max(others) - min(others) <= 1
    assert others == sorted(others, reverse=True)  # the lower label first


def test_examples_of_a_label_are_drawn_from_all_of_them() -> None:
    values = made(4000).train_labels
    draws = [biased_sample(values, 10, randomness.generator(seed, "root")) for seed in range(40)]
    assert 1900 < np.mean(draws) < 2100  # standard error 18
    assert len(np.unique(np.concatenate(draws))) > 2000


FEW_LABELS = "the server's own examples need two labels at least, and those of --dataset have"


@pytest.mark.parametrize(
    ("classes", "options", "message"),
    [
        (
            10,
            {"size": 100, "bias": 0.5},
            "the server's own examples: 100 with bias=0.5 need 50 of label 1, there are 40: change "
            "the options of --algorithm",
        ),
        (
            1,
            {},
            "the server's own examples need two labels at least, and those of --dataset have 1",
        ),
        (
            0,
            {},
            "the server's own examples need two labels at least, and those of --dataset have 0",
        ),
    ],
)
def test_too_few_labels_or_examples_are_refused(
    classes: int, options: dict[str, Any], message: str
) -> None:
    values = made(400).train_labels
    assert (
        refused(lambda: biased_sample(values, classes, randomness.generator(0, "root"), **options))
        == message
    )


# --- the server's examples in a split

SMALL = partial(biased_sample, size=40, bias=0.25)


def used(split: DataSplit) -> list[int]:
    """Return the training and validation examples of all peers."""
    return sorted(np.concatenate([*split.train, *split.validation]).tolist())


@pytest.mark.parametrize("name", ["iid", "dirichlet", "shards"])
def test_the_servers_examples_belong_to_no_peer(name: str) -> None:
    data = made()
    options: dict[str, Any] = {"peers": 6, "validation": 0.2}
    split = split_data(PARTITIONS[name], data, **options, server_rule=SMALL)
    assert sorted([*used(split), *split.server.tolist()]) == list(range(400))
    assert np.bincount(data.train_labels[split.server]).tolist() == [4, 10, 4, 4, 3, 3, 3, 3, 3, 3]
    # The partition makes no difference.
    by_iid = split_data(iid, data, **options, server_rule=SMALL)
    assert np.array_equal(split.server, by_iid.server)
    other = split_data(iid, data, **options, seed=1, server_rule=SMALL)
    assert not np.array_equal(split.server, other.server)


def test_without_a_rule_the_server_has_no_examples() -> None:
    data = made()
    options: dict[str, Any] = {"peers": 6, "validation": 0.2}
    split = split_data(iid, data, **options)
    assert split.server.tolist() == []
    assert split.server.dtype == np.int64
    assert used(split) == list(range(400))


def test_beside_a_subset_the_server_has_other_examples() -> None:
    data = made()
    options: dict[str, Any] = {"peers": 6, "examples_per_peer": 20, "validation": 0.25}
    split = split_data(iid, data, **options, server_rule=SMALL)
    plain = split_data(iid, data, **options)
    assert len(split.server) == 40
    assert not set(split.server.tolist()) & set(used(split))
    halves = ((*each.train, *each.validation) for each in (split, plain))
    for own, same in zip(*halves, strict=True):
        assert np.array_equal(own, same)  # the same as without a server


def test_too_few_examples_for_the_server_are_refused() -> None:
    def made_split(peers: int, each: int) -> DataSplit:
        return split_data(iid, made(), peers=peers, examples_per_peer=each, server_rule=SMALL)

    assert refused(lambda: made_split(4, 100)) == (
        "--examples-per-peer 100 for 4 peers: that takes all 400 of them, and the server needs "
        "some of its own"
    )
    assert "with bias=0.25 need" in refused(lambda: made_split(39, 10))


@pytest.mark.parametrize("each", [None, 20, 100])
def test_all_examples_are_those_that_the_peers_learn_from(each: int | None) -> None:
    data = made()
    options: dict[str, Any] = {"peers": 4, "examples_per_peer": each, "validation": 0.25}
    split = split_data(iid, data, **options, server_rule=all_examples)
    plain = split_data(iid, data, **options)
    assert split.server.tolist() == sorted(np.concatenate(plain.train).tolist())
    assert all(np.array_equal(a, b) for a, b in zip(split.train, plain.train, strict=True))
    assert all_examples(data.train_labels, 10, randomness.generator(0, "root")).tolist() == list(
        range(400)
    )


class EverySecond:
    """A rule of one's own, under which the peers keep their examples."""

    peers_keep = True

    def __call__(self, labels: Ints, classes: int, rng: np.random.Generator) -> Ints:
        return np.arange(0, len(labels), 2)


def test_the_peers_keep_what_a_rule_states_that_they_keep() -> None:
    data = made()
    options: dict[str, Any] = {"peers": 4, "examples_per_peer": 20, "validation": 0.25}
    split = split_data(iid, data, **options, server_rule=EverySecond())
    plain = split_data(iid, data, **options)
    assert all(np.array_equal(a, b) for a, b in zip(split.train, plain.train, strict=True))
    assert split.server.tolist() == sorted(np.concatenate(plain.train).tolist())[::2]
    taken = split_data(iid, data, **options, server_rule=SMALL)
    assert not np.isin(taken.server, taken.train.values).any()


def test_a_rule_states_that_the_peers_keep_their_examples() -> None:
    assert peers_keep(all_examples)
    assert peers_keep(partial(all_examples))
    assert peers_keep(partial(EverySecond()))
    assert not peers_keep(SMALL)
    assert not peers_keep(None)


def test_the_servers_arrays_have_the_dtypes_of_the_data() -> None:
    data = made()
    split = split_data(iid, data, peers=4, server_rule=SMALL)
    arrays = distribute_data.server(data, split)
    assert sorted(arrays) == ["inputs", "labels"]
    assert arrays["inputs"].dtype == np.uint8
    assert numbers(arrays["inputs"]) == split.server.tolist()
    assert np.array_equal(arrays["labels"], split.server % 10)
    assert distribute_data.server(data, split_data(iid, data, peers=4))["inputs"].shape == (0, 2)


@pytest.mark.parametrize(("rule", "size"), [(SMALL, 40), (None, 0)])
def test_the_rule_of_the_algorithm_chooses_the_servers_data(rule: Any, size: int) -> None:
    run = Run(peers=4, dataset=made())
    _, split = distribute_data.read(run, sources_of(run), rule)
    assert len(split.server) == size
    assert sum(map(len, split.train)) == 400 - size


# --- poisoned examples


class Poison(Attack):
    """Changes every input to 7 and reverses every label, in place."""

    def poison(self, inputs: NDArray[Any], labels: Ints, classes: int) -> tuple[NDArray[Any], Ints]:
        inputs[:] = 7
        inputs[0, 0] = len(inputs)
        return inputs, classes - 1 - labels


def own(arrays: Arrays, split: DataSplit, peers: range, peer: int) -> tuple[NDArray[Any], Ints]:
    """Return one peer's training examples among those of some peers."""
    first = sum(len(split.train[i]) for i in peers if i < peer)
    places = slice(first, first + len(split.train[peer]))
    return arrays["train inputs"][places], arrays["train labels"][places]


@pytest.mark.parametrize("peers", [range(6), range(2, 5), range(5, 6)])
@pytest.mark.parametrize("bad", [(), (3,), np.array([0, 2, 5]), (0, 1, 2, 3, 4, 5)])
def test_attackers_get_poisoned_examples(peers: range, bad: Any) -> None:
    data = made(403)
    split = split_data(PARTITIONS["dirichlet"], data, peers=6, validation=0.2)
    arrays = distribute_data.owned(data, split, np.array(peers), Poison(), bad)
    clean = distribute_data.owned(data, split, np.array(peers))
    for peer in peers:
        inputs, labels = own(arrays, split, peers, peer)
        if peer not in bad:
            assert numbers(inputs) == split.train[peer].tolist()
            assert np.array_equal(labels, split.train[peer] % 10)
        else:
            assert inputs[0, 0] == len(inputs)  # poisoned one peer at a time
            assert np.all(inputs[:, 1] == 7)
            assert np.array_equal(labels, 9 - split.train[peer] % 10)
    for name in ("held inputs", "held labels", "test"):
        assert np.array_equal(arrays[name], clean[name])
    assert numbers(data.train_inputs) == list(range(403))  # the data set is unchanged


def test_attackers_that_change_messages_learn_from_their_own_examples() -> None:
    data = made()
    split = split_data(iid, data, peers=4)
    arrays = distribute_data.owned(data, split, np.arange(4), ATTACKS["sign_flip"](), (1, 2))
    clean = distribute_data.owned(data, split, np.arange(4))
    assert all(np.array_equal(arrays[name], clean[name]) for name in clean)


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x.astype(np.float64)])
def test_poisoned_examples_must_have_the_same_shape_and_dtype(change: Any) -> None:
    class Wrong(Attack):
        def poison(
            self, inputs: NDArray[Any], labels: Ints, classes: int
        ) -> tuple[NDArray[Any], Ints]:
            return change(inputs), labels

    data = made()
    split = split_data(iid, data, peers=4)
    with pytest.raises(AssertionError, match="keeps shape and dtype"):
        distribute_data.owned(data, split, np.arange(4), Wrong(), (1,))
