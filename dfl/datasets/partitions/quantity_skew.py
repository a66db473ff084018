"""Partitions that do not depend on labels, registered in `PARTITIONS`: by size and by group.

`dfl.datasets.partitions.base` describes what a partition is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.options import Index, Positive
from dfl.core.ragged import Ragged
from dfl.core.registry import example_with
from dfl.datasets.partitions.assign import (
    by_owner,
    check_enough,
    dirichlet_proportions,
    ensure_minimum,
)
from dfl.datasets.partitions.base import PARTITIONS, Assignment, Indices, Labels


@PARTITIONS.register("quantity")
def quantity(
    labels: Labels,
    peers: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.5,
    min_examples: Index = 1,
) -> Assignment:
    """Peers have the same distribution of examples but different numbers of them: sizes follow one
    draw p ~ Dirichlet(alpha, ..., alpha).

    A random order is cut by the proportions p, and that of the test set by the same. Small alpha
    gives most examples to few peers, large alpha the same number to every peer. Every example is
    used. Small peers are filled up as in `dirichlet`.

    Args:
        labels, peers, rng: as for every partition.
        alpha: concentration, above 0.
        min_examples: training examples that every peer has at least; 0 moves none.

    Raises:
        InputError: an option out of its range, or fewer than P * min_examples training examples.

    Source:
        Li, Diao, Chen, He, "Federated Learning on Non-IID Data Silos", ICDE 2022, "quantity skew".
    """
    check_enough("quantity", "min_examples", min_examples, peers, len(labels.train))
    ends = np.cumsum(dirichlet_proportions(rng, (1, peers), alpha)[0])[:-1]

    def cut(n: int) -> Ragged:
        sizes = np.diff(np.rint(ends * n).astype(np.int64), prepend=0, append=n)
        return Ragged(rng.permutation(n), sizes)

    train, test = cut(len(labels.train)), cut(len(labels.test))
    return Assignment(ensure_minimum(train, min_examples), ensure_minimum(test, 0))


@PARTITIONS.register("natural")
@example_with("--dataset har --model har_cnn")
def natural(labels: Labels, peers: int, rng: np.random.Generator) -> Assignment:
    """Every peer has the examples of one or several groups: persons, authors or places.

    With as many groups as peers, peer i has group i in ascending order. With more groups, whole
    groups are assigned in random order, each to the peer with the fewest training examples so far.
    Every training example is used; a test example belongs to the peer that has its group, and to no
    peer where no training example is of that group.

    Args:
        labels, peers, rng: as for every partition; `labels` must have groups.

    Raises:
        InputError: no groups, or fewer of them than peers.
    """
    if labels.train_groups is None:
        raise InputError(
            "--partition natural: these data do not come in groups, choose another partition"
        )
    if labels.test_groups is None:
        raise InputError(
            "--partition natural: these data have train_groups and no test_groups: give both"
        )
    known, counts = np.unique(labels.train_groups, return_counts=True)
    if peers > len(known):
        raise InputError(
            f"--partition natural: {peers} peers outnumber the {len(known)} groups of these data"
        )
    owner = np.arange(peers) if peers == len(known) else _group_owners(counts, peers, rng)

    def gather(groups: NDArray[np.int64]) -> Ragged:
        place = np.minimum(np.searchsorted(known, groups), len(known) - 1)
        return by_owner(np.where(known[place] == groups, owner[place], peers), peers + 1)[:peers]

    return Assignment(gather(labels.train_groups), gather(labels.test_groups))


def _group_owners(counts: NDArray[np.int64], peers: int, rng: np.random.Generator) -> Indices:
    """Return the owner of each group, given the number of training examples in each."""
    owner = np.empty(len(counts), np.int64)
    sizes = np.zeros(peers, np.int64)
    for group in rng.permutation(len(counts)):
        smallest = int(sizes.argmin())
        owner[group] = smallest
        sizes[smallest] += counts[group]
    return owner
