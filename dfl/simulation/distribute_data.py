"""Distribution of data: rank 0 reads and partitions them, and scatters each rank its peers'
examples.

All ranks get the common test set and the mixing matrices.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Collection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.mpi import World
from dfl.comm.schedule import MixingMatrices
from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError, in_one_line
from dfl.core.layout import Layout
from dfl.core.parts import Parts, joined, map_parts, named, parts_of
from dfl.datasets.data import Data, checked
from dfl.datasets.partitions.base import DataSplit, by_label, split_data
from dfl.datasets.server_data import ServerDataRule, peers_keep
from dfl.robust.attacks import Attack
from dfl.simulation.components import Sources

ENDLESS = "endless"
"""Name, in what all ranks get, of whether the mixing matrices have no period."""
COMPARED = 2
"""The rounds of such matrices that are compared between the ranks."""


def read(run: Run, sources: Sources, server_data: ServerDataRule | None) -> tuple[Data, DataSplit]:
    """Load and partition the data set, on rank 0.

    Args:
        run: the settled run.
        sources: its data set and partition.
        server_data: the rule that chooses the server's own examples, if any.

    Raises:
        InputError: missing or damaged files, a loader that fails, or too few examples for the
            peers.
    """
    environment = os.environ.get("DFL_DATA")
    directory = run.data_dir or (Path(environment) if environment else None)
    with in_one_line(f"--dataset {run.dataset} cannot be read"):
        loaded = sources.dataset(directory)
    data = checked(loaded)
    if run.eval_examples and run.eval_examples > len(data.test_labels):
        raise InputError(
            f"--eval-examples {run.eval_examples} of {len(data.test_labels)} test examples in "
            f"{run.dataset}"
        )
    if not data.classes and by_label(sources.partition):
        raise InputError(
            f"--partition {run.partition} partitions by label, and these labels are no classes: "
            f"choose iid, quantity or natural"
        )
    if data.is_sequence and by_label(sources.partition):
        raise InputError(
            f"--partition {run.partition} partitions by label, and these examples have "
            f"{math.prod(data.train_labels.shape[1:])} labels each: choose iid, quantity or natural"
        )
    if data.is_sequence and server_data is not None and not peers_keep(server_data):
        raise InputError(
            f"--algorithm {run.algorithm} chooses the server's examples by their label, and these "
            f"have {math.prod(data.train_labels.shape[1:])} labels each"
        )
    assert run.peers is not None, "the run is not settled"
    split = split_data(
        sources.partition,
        data,
        peers=run.peers,
        seed=run.seed,
        examples_per_peer=run.examples_per_peer,
        validation=run.validation,
        server_rule=server_data,
    )
    if run.validation and not split.validation.sizes.any():
        most = int(split.train.sizes.max())
        raise InputError(
            f"--validation {run.validation} holds out no example where a peer has at most {most}"
        )
    return data, split


def count_labels(data: Data, split: DataSplit) -> NDArray[np.int64]:
    """Return the training examples of every label at every peer, (P, classes).

    It is (P, 0) where labels are no classes, or an example has several.
    """
    own = split.train
    if not data.classes or data.is_sequence:
        return np.zeros((len(own), 0), np.int64)
    places = own.owners * data.classes + data.train_labels[own.values]
    counts = np.bincount(places, minlength=len(own) * data.classes)
    return counts.reshape(len(own), data.classes).astype(np.int64, copy=False)


def sizes(split: DataSplit) -> NDArray[np.int64]:
    """Return the training, validation and own test examples of every peer, (P, 3)."""
    return np.stack([split.train.sizes, split.validation.sizes, split.test.sizes], axis=1)


def known_to_all(data: Data, split: DataSplit, mixing_matrices: MixingMatrices) -> Arrays:
    """Return what all ranks get: mixing matrices, test set, normalisation, and sizes of the peers'
    data.

    For a mixing matrix that is not doubly stochastic, pi with pi W = pi comes with it, if there is
    one. Of a sequence without a period only the first rounds come; every rank draws all by itself.
    """
    largest = map_parts(lambda part: np.asarray(part.max(), np.float64), data.train_inputs)
    scale, shift = (
        map_parts(lambda factor: np.asarray(factor, np.float64), factors)
        for factors in (data.scale, data.shift)
    )
    arrays = {
        **named("inputs", data.test_inputs), "labels": data.test_labels,
        "classes": np.array(data.classes), **named("scale", scale), **named("shift", shift),
        "sizes": sizes(split), **named("largest", largest),
    }  # fmt: skip
    arrays |= {"protected": data.test_protected} if data.test_protected is not None else {}
    weights, stationary, _ = mixing_matrices
    if mixing_matrices.endless:
        weights, stationary = weights[:COMPARED], ()
        arrays |= {ENDLESS: np.array(True)}
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


def fingerprint(common: bytes, data: Data, split: DataSplit) -> str:
    """Return a checksum of what all ranks get, of the training examples, and of the partition."""
    checksum = hashlib.sha256(common)
    for values in (
        *parts_of(data.train_inputs),
        data.train_labels,
        split.train.values,
        split.validation.values,
        split.test.values,
    ):
        checksum.update(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)
    return checksum.hexdigest()


def matrices(common: Arrays) -> list[csr_array]:
    """Return the mixing matrices in what all ranks get; without a period, the first of them."""
    peers, count = len(common["sizes"]), sum(name.startswith("indptr") for name in common)
    parts = [
        [common[f"{part} {k}"] for part in ("data", "indices", "indptr")] for k in range(count)
    ]
    return [csr_array(tuple(part), shape=(peers, peers)) for part in parts]


def stationary(common: Arrays) -> list[NDArray[np.float64] | None]:
    """Return pi (P,) with pi W = pi for each of these matrices; None where pi is uniform."""
    count = sum(name.startswith("indptr") for name in common)
    return [common.get(f"stationary {k}") for k in range(count)]


def owned(
    data: Data,
    split: DataSplit,
    peers: NDArray[np.int64],
    attack: Attack | None = None,
    attackers: Collection[int] = (),
) -> Arrays:
    """Return the examples of some peers, one peer after the other, and the places of their test
    examples.

    Training examples of attackers are poisoned by the attack; their validation examples are not.
    """
    train, held, test = (of.some(peers) for of in (split.train, split.validation, split.test))
    arrays = {
        **named("train inputs", _rows(data.train_inputs, train.values)),
        "train labels": data.train_labels[train.values],
        **named("held inputs", _rows(data.train_inputs, held.values)),
        "held labels": data.train_labels[held.values],
        "test": test.values,
    }
    if data.train_protected is not None:
        arrays["train protected"] = data.train_protected[train.values]
    if attack is not None:
        for i in np.flatnonzero(np.isin(peers, list(attackers))):
            places = slice(train.ends[i], train.ends[i + 1])
            _poison(arrays, places, attack, data.classes)
    return arrays


def _poison(arrays: Arrays, places: slice, attack: Attack, classes: int) -> None:
    """Replace one attacker's training examples by poisoned ones."""
    inputs, labels = joined(arrays, "train inputs"), arrays["train labels"]
    new_inputs, new_labels = attack.poison(_rows(inputs, places), labels[places], classes)
    whole, new = (*parts_of(inputs), labels), (*parts_of(new_inputs), new_labels)
    for old, poisoned in zip(whole, new, strict=True):
        assert (poisoned.shape, poisoned.dtype) == (old[places].shape, old.dtype), (
            "an attack keeps shape and dtype"
        )
        old[places] = poisoned


def _rows(inputs: Parts, places: NDArray[np.int64] | slice) -> Parts:
    return map_parts(lambda part: part[places], inputs)


def server(data: Data, split: DataSplit) -> Arrays:
    """Return the server's own examples: inputs (n, *shape) and labels (n,)."""
    arrays = {
        **named("inputs", _rows(data.train_inputs, split.server)),
        "labels": data.train_labels[split.server],
    }
    return arrays | (
        {"protected": data.train_protected[split.server]}
        if data.train_protected is not None
        else {}
    )


def scatter(world: World, layout: Layout, part: Callable[[NDArray[np.int64]], Arrays]) -> Arrays:
    """Return the part of this rank's peers; `part` is called on rank 0 only."""
    packed = world.scatter(lambda rank: pack(part(layout.hosted(rank))) if rank else b"")
    return unpack(packed) if world.rank else part(layout.hosted(0))


def pack(arrays: Arrays) -> bytes:
    """Return arrays by name as bytes that can be sent or stored; nothing is pickled."""
    from safetensors.numpy import save

    return save({name: np.asarray(value, order="C") for name, value in arrays.items()})


def unpack(message: bytes) -> Arrays:
    """Return the inverse of `pack`."""
    from safetensors.numpy import load

    return load(message)
