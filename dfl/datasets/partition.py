"""Which examples does each peer get? Ways to deal a data set, `PARTITIONS`, and the deal of a run.

The simplest way is here, those in which peers differ are in `skews` and `uneven`.

A partition looks at labels and groups only. To add one, write a function of (labels, peers, rng)
with its options as keyword-only parameters, and decorate it with `@PARTITIONS.register("its
name")`. Test examples are dealt like the training examples, for each peer's local test; where there
are few of them, a peer may get none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.registry import Registry
from dfl.datasets.data import Data
from dfl.datasets.server_data import ServerDataRule, everything

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """What a partition looks at.

    Attributes:
        train, test: labels, (n,) int64 each, from 0 up.
        train_groups, test_groups: (n,) int64 each, from whom an example came; None where that is
            not known.
    """

    train: NDArray[np.int64]
    test: NDArray[np.int64]
    train_groups: NDArray[np.int64] | None = None
    test_groups: NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Parts:
    """What a partition makes: for each of P peers the ascending places of its examples in `train`
    and in `test`.

    No example has two owners.
    """

    train: list[Indices]
    test: list[Indices]


@dataclass(frozen=True)
class DataSplit:
    """Who gets what: for each of P peers ascending places in the data set's arrays.

    Attributes:
        train: training examples to learn from, at least one for every peer.
        validation: training examples set aside.
        test: test examples, the peer's local test; may be empty.
        root: training examples that the server has of its own; may be empty.
    """

    train: list[Indices]
    validation: list[Indices]
    test: list[Indices]
    root: Indices = field(default_factory=lambda: np.empty(0, np.int64))


Partition = Callable[[Labels, int, np.random.Generator], Parts]
"""A partition with its options bound."""

PARTITIONS: Registry[Callable[..., Parts]] = Registry("partition", "dfl.partitions")
"""Name -> f(labels, peers, rng, *, options) -> Parts."""


def deal(
    partition: Partition, data: Data, run: Run, root: ServerDataRule | None = None
) -> DataSplit:
    """DataSplit a data set to the peers of a run, and to its server.

    First P * `examples_per_peer` training examples are drawn (address "subset") and the server's
    own are set aside (address "root"), from the others if it was a part that was drawn. Then the
    examples are partitioned (address "partition"), then each peer sets its share for `validation`
    aside (address "validation", peer): the nearest whole number of examples, but never its last
    one.

    Args:
        partition: a function of `PARTITIONS` with its options bound.
        data: the data set.
        run: a settled run; P, the seed and how much is dealt are read from it.
        root: which examples are the server's, or None. Under `everything` they are those that peers
            learn from.

    Raises:
        InputError: fewer examples than were asked for, or a peer that gets none.
    """
    apart = None if root is everything else root
    chosen, own = _apart(_subset(len(data.train_labels), run), data, run, apart)
    groups = None if data.train_groups is None else data.train_groups[chosen]
    labels = Labels(data.train_labels[chosen], data.test_labels, groups, data.test_groups)
    parts = partition(labels, _peers(run), _rng(run, "partition"))
    poor = [peer for peer, part in enumerate(parts.train) if not len(part)]
    if poor:
        raise InputError(
            f"--partition leaves {len(poor)} of {run.peers} peers without training examples, peer {poor[0]} first: "
            f"{len(chosen)} examples are too few for it"
        )
    aside = [_set_aside(len(part), peer, run) for peer, part in enumerate(parts.train)]
    train = [chosen[part[~held]] for part, held in zip(parts.train, aside, strict=True)]
    return DataSplit(
        train=train,
        validation=[chosen[part[held]] for part, held in zip(parts.train, aside, strict=True)],
        test=parts.test,
        root=np.sort(np.concatenate(train)) if root is everything else own,
    )


def _rng(run: Run, purpose: str) -> np.random.Generator:
    return randomness.generator(run.seed, purpose)


def _apart(
    chosen: Indices, data: Data, run: Run, root: ServerDataRule | None
) -> tuple[Indices, Indices]:
    """The training examples for the peers and those for the server, both ascending."""
    if root is None:
        return chosen, np.empty(0, np.int64)
    part = run.examples_per_peer is not None
    free = np.setdiff1d(np.arange(len(data.train_labels)), chosen) if part else chosen
    if not len(free):
        asked = f"--examples-per-peer {run.examples_per_peer} for {run.peers} peers"
        raise InputError(
            f"{asked}: that takes all {len(chosen)} of them, and the server needs some of its own"
        )
    own = free[root(data.train_labels[free], data.classes, _rng(run, "root"))]
    return np.setdiff1d(chosen, own), own


def _peers(run: Run) -> int:
    assert run.peers is not None, "the run is not settled"
    return run.peers


def _subset(n: int, run: Run) -> Indices:
    """The training examples to be dealt, ascending."""
    each = run.examples_per_peer or 1
    wanted = _peers(run) * each
    if wanted > n:
        asked = f"--peers {run.peers} with {each} training example each"
        if run.examples_per_peer:
            asked = f"--examples-per-peer {each} for {run.peers} peers"
        raise InputError(f"{asked}: that takes {wanted} of them, there are {n}")
    if run.examples_per_peer is None:
        return np.arange(n)
    return np.sort(_rng(run, "subset").choice(n, wanted, replace=False))


def _set_aside(n: int, peer: int, run: Run) -> NDArray[np.bool_]:
    """Which of a peer's n examples are for validation."""
    aside = np.zeros(n, dtype=np.bool_)
    if count := min(round(run.validation * n), n - 1):
        aside[
            randomness.generator(run.seed, "validation", peer).choice(n, count, replace=False)
        ] = True
    return aside


@PARTITIONS.register("iid")
def iid(labels: Labels, peers: int, rng: np.random.Generator) -> Parts:
    """Every peer draws from the same distribution: a random order cut into P parts whose sizes
    differ by one at most.

    Every example is used.
    """
    halves = (
        np.array_split(rng.permutation(len(half)), peers) for half in (labels.train, labels.test)
    )
    return Parts(*([np.sort(part) for part in half] for half in halves))
