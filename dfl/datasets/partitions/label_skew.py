"""Partitions in which peers have different labels: shards, labels, dirichlet, biased.

`dfl.datasets.partitions.base` describes what a partition is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.options import Count, Index, Positive, Share
from dfl.core.ragged import Ragged
from dfl.datasets.partitions.assign import (
    by_owner,
    check_enough,
    dirichlet_proportions,
    ensure_minimum,
)
from dfl.datasets.partitions.base import PARTITIONS, Assignment, Indices, Labels, needs_classes


@PARTITIONS.register("shards")
@needs_classes
def shards(
    labels: Labels, peers: int, rng: np.random.Generator, *, per_peer: Count = 2
) -> Assignment:
    """Every peer gets few labels, since examples are assigned in shards sorted by label.

    Sorted by label, the examples are cut into P * per_peer shards whose sizes differ by one at
    most, and every peer gets `per_peer` of them at random. The test set is cut likewise and the
    same shards are assigned, so a peer is tested on about the labels that it trains on where both
    sets have about the same share of each label. Every example is used.

    Args:
        labels, peers, rng: as for every partition.
        per_peer: shards for each peer.

    Raises:
        InputError: fewer training examples than shards.

    Source:
        McMahan et al., AISTATS 2017, section 3, "pathological non-IID": 100 peers with 2 of 200
        shards of 300.
    """
    check_enough("shards", "per_peer", per_peer, peers, len(labels.train))
    order = rng.permutation(peers * per_peer)

    def cut(half: NDArray[np.int64]) -> Ragged:
        pieces = np.array_split(np.argsort(half, kind="stable"), peers * per_peer)
        return _merged([pieces[k] for k in order], per_peer)

    return Assignment(cut(labels.train), cut(labels.test))


@PARTITIONS.register("labels")
@needs_classes
def labels(
    labels: Labels, peers: int, rng: np.random.Generator, *, per_peer: Count = 2
) -> Assignment:
    """Every peer draws `per_peer` labels, and has examples of these only.

    The P * per_peer draws hold every label equally often; where the number of labels does not
    divide them, some labels, chosen at random, are drawn once more than the others. A peer may draw
    a label twice: with 100 peers, 10 labels and 2 draws, 9.55 peers on average have one label only.
    The examples of a label are cut into as many shards as it has draws, their sizes differing by
    one at most. The test set is cut by the same draws.

    Every example is used, except those of labels that no peer draws: with fewer draws than labels
    there are some.

    Args:
        labels, peers, rng: as for every partition; only labels of the training set are drawn.
        per_peer: labels for each peer.

    Raises:
        InputError: fewer training examples than draws.

    Source:
        LG-FedAvg (Liang et al. 2020), released code, utils/sampling.py, `noniid`, which requires
        that the number of labels divides the draws. The paper's text describes `shards`.
    """
    check_enough("labels", "per_peer", per_peer, peers, len(labels.train))
    known = np.unique(labels.train)
    draws = rng.permutation(rng.permutation(known)[np.arange(peers * per_peer) % len(known)])
    slots = {int(label): rng.permutation(np.flatnonzero(draws == label)) for label in known}

    def cut(half: NDArray[np.int64]) -> Ragged:
        shards: list[Indices] = [np.empty(0, dtype=np.int64)] * len(draws)
        for label, own in slots.items():
            if not len(own):
                continue
            pieces = np.array_split(np.flatnonzero(half == label), len(own))
            for slot, piece in zip(own, pieces, strict=True):
                shards[slot] = piece
        return _merged(shards, per_peer)

    return Assignment(cut(labels.train), cut(labels.test))


@PARTITIONS.register("dirichlet")
@needs_classes
def dirichlet(
    labels: Labels,
    peers: int,
    rng: np.random.Generator,
    *,
    alpha: Positive = 0.1,
    min_examples: Index = 1,
) -> Assignment:
    """The examples of every label are spread over the peers by proportions p ~ Dirichlet(alpha,
    ..., alpha), drawn for each label.

    Small alpha gives each label to few peers, large alpha the same share to every peer. The test
    set is spread by the same proportions. Every example is used.

    Then small peers are filled up, so that no draw need be rejected: in ascending order, every peer
    below `min_examples` training examples gets the last one of the peer that has most, until it has
    enough. With many peers and small alpha most peers have just these. Test examples do not move.

    Args:
        labels, peers, rng: as for every partition.
        alpha: concentration, above 0.
        min_examples: training examples that every peer has at least; 0 moves none.

    Raises:
        InputError: an option out of its range, or fewer than P * min_examples training examples.

    Source:
        Yurochkin et al., ICML 2019 (arXiv 1905.12022), section 4: p_k ~ Dir(alpha) over the peers
        for each label k. Hsu, Qi, Brown 2019 (arXiv 1909.06335) draw over the labels for each peer.
    """
    check_enough("dirichlet", "min_examples", min_examples, peers, len(labels.train))
    known = np.union1d(labels.train, labels.test)
    ends = np.cumsum(dirichlet_proportions(rng, (len(known), peers), alpha), axis=1)

    def spread(half: NDArray[np.int64]) -> Ragged:
        owner = np.empty(len(half), dtype=np.int64)
        for label, end in zip(known, ends, strict=True):
            members = rng.permutation(np.flatnonzero(half == label))
            owner[members] = np.searchsorted(
                np.rint(end[:-1] * len(members)), np.arange(len(members)), side="right"
            )
        return by_owner(owner, peers)

    return Assignment(ensure_minimum(spread(labels.train), min_examples), spread(labels.test))


@PARTITIONS.register("biased")
@needs_classes
def biased(labels: Labels, peers: int, rng: np.random.Generator, *, q: Share = 0.5) -> Assignment:
    """Peers prefer a label: an example goes to the peers of its own label with probability q.

    The peers form a group for each of the L labels, at random and with sizes that differ by one at
    most. An example goes to the group of its label with probability q and to each other group with
    (1 - q) / (L - 1), and within the group to each peer with the same probability. The test set is
    partitioned by the same rule. q = 1 / L is IID; with q = 1 a peer has one label. Every example
    is used.

    Args:
        labels, peers, rng: as for every partition.
        q: probability of the own group, from 0 to 1.

    Raises:
        InputError: an option out of its range, or fewer peers than labels.

    Source:
        Fang, Cao, Jia, Gong, "Local Model Poisoning Attacks to Byzantine-Robust Federated
        Learning", USENIX Security 2020, and FLTrust (Cao et al., NDSS 2021), each under
        "experimental setup".
    """
    known = np.union1d(labels.train, labels.test)
    if peers < len(known):
        raise InputError(
            f"--partition biased: {len(known)} labels need a peer each, there are {peers}"
        )
    order = rng.permutation(peers)
    groups = [order[k :: len(known)] for k in range(len(known))]
    sizes = np.array([len(group) for group in groups])
    starts = np.cumsum(sizes) - sizes
    members = np.concatenate(groups)

    def spread(half: NDArray[np.int64]) -> Ragged:
        group = np.searchsorted(known, half)
        away = rng.random(len(half)) >= (q if len(known) > 1 else 1)
        group[away] = (group[away] + rng.integers(1, max(len(known), 2), away.sum())) % len(known)
        return by_owner(members[starts[group] + rng.integers(0, sizes[group])], peers)

    return Assignment(spread(labels.train), spread(labels.test))


def _merged(shards: Sequence[Indices], per_peer: int) -> Ragged:
    """Return one part for every `per_peer` consecutive shards."""
    cut = Ragged.of(shards)
    return Ragged(cut.values, cut.sizes.reshape(-1, per_peer).sum(axis=1)).sorted()
