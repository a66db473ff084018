"""Who gets which examples? Rank 0 reads and deals, the others are told.

Each rank is sent its own peers' examples and nobody else's; everybody gets the common test set and the graph.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.mpi import World
from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.layout import Layout
from dfl.datasets.data import Data, checked
from dfl.datasets.partition import DataSplit, deal
from dfl.robust.attacks import Attack

Arrays = dict[str, NDArray[Any]]
NO_LABELS = ("iid", "quantity", "natural")
"""The partitions that do not look at labels."""


def read(run: Run, parts: Mapping[str, Any], given: Data | None) -> tuple[Data, DataSplit]:
    """Load the data set, on rank 0, and deal it to the peers.

    Raises:
        InputError: missing or damaged files, or too few examples for the peers.
    """
    named = run.data_dir or (Path(os.environ["DFL_DATA"]) if os.environ.get("DFL_DATA") else None)
    data = checked(given if given is not None else parts["dataset"](named))
    if run.eval_examples and run.eval_examples > len(data.test_labels):
        raise InputError(
            f"--eval-examples {run.eval_examples} of {len(data.test_labels)} test examples in {run.dataset}"
        )
    if not data.classes and run.partition.partition(":")[0] not in NO_LABELS:
        raise InputError(
            f"--partition {run.partition} deals by label, and these labels are no classes: choose "
            f"{', '.join(NO_LABELS[:-1])} or {NO_LABELS[-1]}"
        )
    dealt = deal(
        parts["partition"], data, run, getattr(parts.get("algorithm"), "server_data_rule", None)
    )
    if run.validation and not any(map(len, dealt.validation)):
        most = max(map(len, dealt.train))
        raise InputError(
            f"--validation {run.validation} sets no example aside where a peer has at most {most}"
        )
    return data, dealt


def count_labels(data: Data, dealt: DataSplit) -> NDArray[np.int64]:
    """Training examples of every label at every peer, (P, classes)."""
    return (
        np.array(
            [np.bincount(data.train_labels[own], minlength=data.classes) for own in dealt.train],
            dtype=np.int64,
        )
        if data.classes
        else np.zeros((len(dealt.train), 0), np.int64)
    )


def sizes(dealt: DataSplit) -> NDArray[np.int64]:
    """Training, validation and own test examples of every peer, (P, 3)."""
    return np.array(
        [
            [len(own) for own in one]
            for one in zip(dealt.train, dealt.validation, dealt.test, strict=True)
        ]
    )


def known_to_all(
    data: Data,
    dealt: DataSplit,
    weights: Sequence[csr_array],
    stationary: Sequence[NDArray[np.float64] | None] = (),
) -> Arrays:
    """What rank 0 tells everyone: the graphs, the test set, how a batch is normalised, and who has how much.

    Of the graphs go the mixing matrices, and where one is not doubly stochastic, pi with pi W = pi, if there is one.
    """
    arrays = {
        "inputs": data.test_inputs, "labels": data.test_labels, "classes": np.array(data.classes),
        "scale": np.asarray(data.scale, np.float64), "shift": np.asarray(data.shift, np.float64),
        "sizes": sizes(dealt), "largest": np.asarray(data.train_inputs.max(), np.float64),
    }  # fmt: skip
    arrays |= {"protected": data.test_protected} if data.test_protected is not None else {}
    for k, matrix in enumerate(weights):
        arrays |= {
            f"data {k}": matrix.data,
            f"indices {k}": matrix.indices,
            f"indptr {k}": matrix.indptr,
        }
    uneven = {
        f"stationary {k}": pi for k, pi in enumerate(stationary) if pi is not None and np.ptp(pi)
    }
    return arrays | uneven


def fingerprint(common: bytes, data: Data, dealt: DataSplit) -> str:
    """A checksum of what everyone is told, of the training examples, and of who has which."""
    seen = hashlib.sha256(common)
    for values in (
        data.train_inputs,
        data.train_labels,
        *dealt.train,
        *dealt.validation,
        *dealt.test,
    ):
        seen.update(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)
    return seen.hexdigest()


def matrices(common: Arrays) -> list[csr_array]:
    """The mixing matrices in what everyone was told."""
    peers, count = len(common["sizes"]), sum(name.startswith("indptr") for name in common)
    parts = [
        [common[f"{part} {k}"] for part in ("data", "indices", "indptr")] for k in range(count)
    ]
    return [csr_array(tuple(part), shape=(peers, peers)) for part in parts]


def stationary(common: Arrays) -> list[NDArray[np.float64] | None]:
    """For each of these matrices pi (P,) with pi W = pi; None where all are alike."""
    count = sum(name.startswith("indptr") for name in common)
    return [common.get(f"stationary {k}") for k in range(count)]


def owned(
    data: Data,
    dealt: DataSplit,
    peers: range,
    attack: Attack | None = None,
    bad: Collection[int] = (),
) -> Arrays:
    """The examples of some peers, one peer after the other, and which test examples are theirs.

    What the peers in `bad` train on has passed through `attack`, peer by peer; what they set aside has not.
    """
    train, held, test = (
        np.concatenate([part[i] for i in peers] or [np.zeros(0, np.int64)])
        for part in (dealt.train, dealt.validation, dealt.test)
    )
    arrays = {
        "train inputs": data.train_inputs[train], "train labels": data.train_labels[train],
        "held inputs": data.train_inputs[held], "held labels": data.train_labels[held], "test": test,
    }  # fmt: skip
    arrays |= (
        {"train protected": data.train_protected[train]} if data.train_protected is not None else {}
    )
    ends = np.cumsum([len(dealt.train[i]) for i in peers])
    for i, end in zip(peers, ends, strict=True):
        if attack is not None and i in bad:
            _poison(arrays, slice(end - len(dealt.train[i]), end), attack, data.classes)
    return arrays


def _poison(arrays: Arrays, places: slice, attack: Attack, classes: int) -> None:
    """Put into the places of one peer's training examples what it learns from instead."""
    inputs, labels = arrays["train inputs"], arrays["train labels"]
    new = attack.poison(inputs[places], labels[places], classes)
    for old, poisoned in zip((inputs, labels), new, strict=True):
        assert (poisoned.shape, poisoned.dtype) == (old[places].shape, old.dtype), (
            "an attack must keep the form"
        )
        old[places] = poisoned


def root(data: Data, dealt: DataSplit) -> Arrays:
    """The examples that the server has of its own, n of them: inputs (n, *shape) and labels (n,)."""
    arrays = {"inputs": data.train_inputs[dealt.root], "labels": data.train_labels[dealt.root]}
    return arrays | (
        {"protected": data.train_protected[dealt.root]} if data.train_protected is not None else {}
    )


def scatter(world: World, layout: Layout, hand: Callable[[range], Arrays]) -> Arrays:
    """Give every rank what rank 0 has for its peers; `hand` is only called there."""
    if world.size == 1:
        return hand(layout.block(0))
    return unpack(world.scatter(lambda rank: pack(hand(layout.block(rank)))))


def pack(arrays: Arrays) -> bytes:
    """Arrays by name as bytes that can be sent or stored; nothing is pickled."""
    from safetensors.numpy import save

    return save({name: np.asarray(value, order="C") for name, value in arrays.items()})


def unpack(message: bytes) -> Arrays:
    """The inverse of `pack`."""
    from safetensors.numpy import load

    return load(message)
