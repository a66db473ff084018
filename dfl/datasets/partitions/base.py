"""What a partition of a data set is: `PARTITIONS`, and `split_data`, which applies one of them.

`iid` is here, partitions by label are in `label_skew`, those by size or by group in
`quantity_skew`.

A partition sees labels and groups only. To add one, write a function of (labels, peers, rng) with
its options as keyword-only parameters, and decorate it with `@PARTITIONS.register("its name")`.
Test examples are partitioned like the training examples, for each peer's local test; a small test
set may leave a peer without any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.parse import shown
from dfl.core.ragged import Ragged
from dfl.core.registry import Registry
from dfl.datasets.data import Data
from dfl.datasets.server_data import ServerDataRule, peers_keep

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """What a partition depends on.

    Attributes:
        train, test: labels, (n,) int64 each, from 0 up; (n, *places) of sequences.
        train_groups, test_groups: (n,) int64 each, the person, author or place that an example
            came from; None where that is not known.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    train_groups: NDArray[np.int64] | None = None
    test_groups: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Assignment:
    """The result of a partition: for each of P peers the ascending indices of its examples in
    `train` and in `test`, as a `Ragged` or a list of arrays.

    No example belongs to two peers.
    """

    train: Sequence[Indices]
    test: Sequence[Indices]


@dataclass(frozen=True)
class DataSplit:
    """The examples of each of P peers and of the server: ascending indices into the arrays of the
    data set.

    Attributes:
        train: training examples to learn from, at least one for every peer.
        validation: training examples that are held out.
        test: test examples, the peer's local test; may be empty.
        server: training examples that the server has; may be empty.
    """

    train: Ragged
    validation: Ragged
    test: Ragged
    server: Indices = field(default_factory=lambda: np.empty(0, np.int64))


Partition = Callable[[Labels, int, np.random.Generator], Assignment]
"""A partition with its options bound."""

PARTITIONS: Registry[Callable[..., Assignment]] = Registry("partition", "dfl.partitions")
"""Name -> f(labels, peers, rng, *, options) -> Assignment. A partition that needs labels which are
classes states so by the decorator `needs_classes`.
"""

_P = TypeVar("_P", bound=Callable[..., Assignment])


def needs_classes(partition: _P) -> _P:
    """State that a partition needs labels that are classes."""
    setattr(partition, "needs_classes", True)  # noqa: B010  no attribute of a function's type
    return partition


def by_label(partition: Partition) -> bool:
    """Return whether a partition, its options bound, needs labels that are classes."""
    return bool(getattr(getattr(partition, "func", partition), "needs_classes", False))


def split_data(
    partition: Partition,
    data: Data,
    *,
    peers: int,
    seed: int = 0,
    examples_per_peer: int | None = None,
    validation: float = 0.0,
    server_rule: ServerDataRule | None = None,
) -> DataSplit:
    """Split a data set between the peers, and the server where it has data.

    First P * `examples_per_peer` training examples are drawn (address "subset"), and the server's
    examples are chosen (address "root"): from those that were not drawn, or from all where all
    were. Then the peers' examples are partitioned (address "partition"), and each peer holds out
    its `validation` share (address "validation", peer): the nearest whole number of examples, but
    never its last one. A rule with `peers_keep` chooses among what is left to train on then.

    Args:
        partition: a function of `PARTITIONS` with its options bound.
        data: the data set.
        peers: the number of peers P.
        seed: the run's seed.
        examples_per_peer: training examples per peer, in the mean; None uses all examples.
        validation: the share of each peer's training examples that is held out, in [0, 1).
        server_rule: chooses the server's examples; None where the server has none. Of a rule with
            `peers_keep` they are copies of examples that the peers learn from; of another one no
            peer has them.

    Raises:
        InputError: fewer examples than requested, or a peer that gets none.
    """
    chosen = _subset(len(data.train_labels), peers, examples_per_peer, seed)
    server = np.empty(0, np.int64)
    if server_rule is not None and not peers_keep(server_rule):
        free = chosen
        if examples_per_peer is not None:
            free = np.setdiff1d(np.arange(len(data.train_labels)), chosen)
        if not len(free):
            raise InputError(
                f"--examples-per-peer {examples_per_peer} for {peers} peers: that takes all "
                f"{len(chosen)} of them, and the server needs some of its own"
            )
        server = _for_server(server_rule, free, data, seed)
        chosen = np.setdiff1d(chosen, server)
    groups = None if data.train_groups is None else data.train_groups[chosen]
    labels = Labels(data.train_labels[chosen], data.test_labels, groups, data.test_groups)
    parts = partition(labels, peers, randomness.generator(seed, "partition"))
    own, test = _checked(parts, peers, len(labels.train), len(labels.test))
    empty = np.flatnonzero(own.sizes == 0)
    if len(empty):
        raise InputError(
            f"--partition leaves {len(empty)} of {peers} peers without training examples, peer "
            f"{empty[0]} first: {own.sizes.sum()} of {len(chosen)} examples are with others"
        )
    held, counts = _held_out(own, validation, seed)
    train = chosen[own.values[~held]]
    if server_rule is not None and peers_keep(server_rule):
        server = _for_server(server_rule, np.sort(train), data, seed)
    return DataSplit(
        train=Ragged(train, own.sizes - counts),
        validation=Ragged(chosen[own.values[held]], counts),
        test=test,
        server=server,
    )


def _for_server(rule: ServerDataRule, free: Indices, data: Data, seed: int) -> Indices:
    """Return the server's training examples, which a rule chooses among some (n,)."""
    rng = randomness.generator(seed, "root")
    return free[rule(data.train_labels[free], data.classes, rng)]


def _checked(parts: Assignment, peers: int, n_train: int, n_test: int) -> list[Ragged]:
    """Return the parts of both halves, and refuse what is no partition: a function of the caller
    may return anything.

    Raises:
        InputError: parts that are no ascending indices in range, one array for each of P peers, or
            an example with two owners.
    """
    if not isinstance(parts, Assignment):
        raise InputError(f"--partition must return an Assignment, not {shown(parts)}")
    checked = []
    for half, arrays, n in (("train", parts.train, n_train), ("test", parts.test, n_test)):
        listed = isinstance(arrays, np.ndarray) and arrays.ndim > 0
        if not (listed or isinstance(arrays, Ragged | list | tuple)):
            raise InputError(
                f"--partition returns {shown(arrays)} as {half} parts: it must be an array of "
                "indices for each peer"
            )
        if len(arrays) != peers:
            raise InputError(f"--partition returns {len(arrays)} {half} parts for {peers} peers")
        wrong = np.zeros(peers, dtype=np.bool_)
        if not isinstance(arrays, Ragged):
            good = [
                isinstance(own, np.ndarray) and own.dtype.kind in "iu" and own.ndim == 1
                for own in arrays
            ]
            wrong = ~np.array(good, dtype=np.bool_)
        if not wrong.any():
            own = Ragged.of(arrays)
            values, owners = own.values, own.owners
            wrong[owners[(values < 0) | (values >= n)]] = True
            wrong[owners[1:][(np.diff(values) <= 0) & (np.diff(owners) == 0)]] = True
        if wrong.any():
            raise InputError(
                f"--partition: the {half} part of peer {int(wrong.argmax())} must be ascending "
                f"whole numbers from 0 to {n - 1}"
            )
        counts = np.bincount(values, minlength=1)
        if counts.max() > 1:
            raise InputError(
                f"--partition: {half} example {int(counts.argmax())} has several owners"
            )
        checked.append(own)
    return checked


def _subset(n: int, peers: int, examples_per_peer: int | None, seed: int) -> Indices:
    """Return the training examples that are split, ascending."""
    needed = peers * (examples_per_peer or 1)
    if needed > n:
        requested = f"--peers {peers} with 1 training example each"
        if examples_per_peer:
            requested = f"--examples-per-peer {examples_per_peer} for {peers} peers"
        raise InputError(f"{requested}: that takes {needed} of them, there are {n}")
    if examples_per_peer is None:
        return np.arange(n)
    return np.sort(randomness.generator(seed, "subset").choice(n, needed, replace=False))


def _held_out(own: Ragged, validation: float, seed: int) -> tuple[NDArray[np.bool_], Indices]:
    """Return which of the peers' examples are for validation, (n,), and how many of each, (P,)."""
    held = np.zeros(len(own.values), dtype=np.bool_)
    counts = np.minimum(np.rint(validation * own.sizes).astype(np.int64), own.sizes - 1)
    some = np.flatnonzero(counts)
    for peer, rng in zip(some, randomness.generators(seed, "validation", some), strict=True):
        chosen = rng.choice(own.sizes[peer], counts[peer], replace=False)
        held[own.ends[peer] + chosen] = True
    return held, counts


@PARTITIONS.register("iid")
def iid(labels: Labels, peers: int, rng: np.random.Generator) -> Assignment:
    """Every peer draws from the same distribution: a random order cut into P parts whose sizes
    differ by one at most.

    Every example is used.
    """

    def cut(n: int) -> Ragged:
        sizes = n // peers + (np.arange(peers) < n % peers)
        return Ragged(rng.permutation(n), sizes).sorted()

    return Assignment(cut(len(labels.train)), cut(len(labels.test)))
