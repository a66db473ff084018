"""Which examples does each peer get? Ways to deal a data set, `PARTITIONS`, and the deal of a run.

A partition looks at labels only. To add one, write a function of (labels, peers, rng) with its options as
keyword-only parameters, and decorate it with `@partition("its name")`. Test examples are dealt like the training
examples, for each peer's local test; where there are few of them, a peer may get none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl import keys
from dfl.config import Run
from dfl.datasets.data import Data
from dfl.errors import InputError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Labels:
    """What a partition looks at: `train` and `test`, (n,) int64 each, from 0 up."""

    train: NDArray[np.int64]
    test: NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """What a partition makes: for each of P peers the ascending places of its examples in `train` and in `test`.

    No example has two owners.
    """

    train: list[Indices]
    test: list[Indices]


@dataclass(frozen=True)
class Deal:
    """Who gets what: for each of P peers ascending places in the data set's arrays.

    Attributes:
        train: training examples to learn from, at least one for every peer.
        validation: training examples set aside.
        test: test examples, the peer's local test; may be empty.
    """

    train: list[Indices]
    validation: list[Indices]
    test: list[Indices]


Partition = Callable[[Labels, int, np.random.Generator], Parts]
"""A partition with its options bound."""

_P = TypeVar("_P", bound=Callable[..., Parts])

PARTITIONS: dict[str, Callable[..., Parts]] = {}
"""Name -> f(labels, peers, rng, *, options) -> Parts."""


def partition(name: str) -> Callable[[_P], _P]:
    """Enter a function into `PARTITIONS` under the name that the command line uses."""

    def enter(divide: _P) -> _P:
        PARTITIONS[name] = divide
        return divide

    return enter


def deal(partition: Partition, data: Data, run: Run) -> Deal:
    """Deal a data set to the peers of a run.

    First P * `examples_per_peer` training examples are drawn (address "subset"), then they are partitioned (address
    "partition"), then each peer sets its share for `validation` aside (address "validation", peer): the nearest
    whole number of examples, but never its last one.

    Args:
        partition: a function of `PARTITIONS` with its options bound.
        data: the data set.
        run: a settled run; P, the seed and how much is dealt are read from it.

    Raises:
        InputError: fewer examples than were asked for, or a peer that gets none.
    """
    chosen = _subset(len(data.train_labels), run)
    labels = Labels(data.train_labels[chosen], data.test_labels)
    parts = partition(labels, _peers(run), keys.generator(run.seed, "partition"))
    poor = [peer for peer, part in enumerate(parts.train) if not len(part)]
    if poor:
        raise InputError(
            f"--partition leaves {len(poor)} of {run.peers} peers without training examples, peer {poor[0]} first: "
            f"{len(chosen)} examples are too few for it"
        )
    aside = [_set_aside(len(part), peer, run) for peer, part in enumerate(parts.train)]
    return Deal(
        train=[chosen[part[~held]] for part, held in zip(parts.train, aside, strict=True)],
        validation=[chosen[part[held]] for part, held in zip(parts.train, aside, strict=True)],
        test=parts.test,
    )


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
    return np.sort(keys.generator(run.seed, "subset").choice(n, wanted, replace=False))


def _set_aside(n: int, peer: int, run: Run) -> NDArray[np.bool_]:
    """Which of a peer's n examples are for validation."""
    aside = np.zeros(n, dtype=np.bool_)
    if count := min(round(run.validation * n), n - 1):
        aside[keys.generator(run.seed, "validation", peer).choice(n, count, replace=False)] = True
    return aside


@partition("iid")
def iid(labels: Labels, peers: int, rng: np.random.Generator) -> Parts:
    """Every peer draws from the same distribution: a random order cut into P parts whose sizes differ by one at most.

    Every example is used.
    """
    halves = (np.array_split(rng.permutation(len(half)), peers) for half in (labels.train, labels.test))
    return Parts(*([np.sort(part) for part in half] for half in halves))


@partition("shards")
def shards(labels: Labels, peers: int, rng: np.random.Generator, *, per_peer: int = 2) -> Parts:
    """Every peer gets few labels, because the examples are dealt in sorted order.

    Sorted by label, the examples are cut into P * per_peer shards whose sizes differ by one at most, and every
    peer gets `per_peer` of them at random. The test set is cut likewise and the same shards are dealt, so a peer
    is tested on about the labels that it trains on where both sets have about the same share of each label.
    Every example is used.

    Args:
        labels, peers, rng: as for every partition.
        per_peer: shards for each peer.

    Raises:
        InputError: fewer training examples than shards.

    Source:
        McMahan et al., AISTATS 2017, section 3, "pathological non-IID": 100 peers with 2 of 200 shards of 300.
    """
    _check_hands("shards", labels, peers, per_peer)
    dealt = rng.permutation(peers * per_peer)

    def cut(half: NDArray[np.int64]) -> list[Indices]:
        pieces = np.array_split(np.argsort(half, kind="stable"), peers * per_peer)
        return _joined([pieces[k] for k in dealt], per_peer)

    return Parts(cut(labels.train), cut(labels.test))


@partition("labels")
def labels(labels: Labels, peers: int, rng: np.random.Generator, *, per_peer: int = 2) -> Parts:
    """Every peer draws `per_peer` labels, and has examples of these alone.

    The P * per_peer draws hold every label equally often; where that does not come out even, some labels, chosen
    at random, are drawn once more than the others. A peer may draw a label twice: with 100 peers, 10 labels and
    2 draws, 9.55 peers on average have one label only. The examples of a label are cut into as many shards as
    it has draws, their sizes differing by one at most. The test set is cut by the same draws.

    Every example is used, but for those of labels that nobody draws: with fewer draws than labels there are some.

    Args:
        labels, peers, rng: as for every partition; only labels of the training set are drawn.
        per_peer: labels for each peer.

    Raises:
        InputError: fewer training examples than draws.

    Source:
        LG-FedAvg (Liang et al. 2020), released code, utils/sampling.py, `noniid`, which asks that the draws come
        out even. The paper's text describes `shards`.
    """
    _check_hands("labels", labels, peers, per_peer)
    known = np.unique(labels.train)
    draws = rng.permutation(rng.permutation(known)[np.arange(peers * per_peer) % len(known)])
    places = {int(label): rng.permutation(np.flatnonzero(draws == label)) for label in known}

    def cut(half: NDArray[np.int64]) -> list[Indices]:
        hands: list[Indices] = [np.empty(0, dtype=np.int64)] * len(draws)
        for label, takers in places.items():
            if not len(takers):
                continue
            for place, piece in zip(takers, np.array_split(np.flatnonzero(half == label), len(takers)), strict=True):
                hands[place] = piece
        return _joined(hands, per_peer)

    return Parts(cut(labels.train), cut(labels.test))


@partition("dirichlet")
def dirichlet(
    labels: Labels, peers: int, rng: np.random.Generator, *, alpha: float = 0.1, min_examples: int = 1
) -> Parts:
    """Every label is spread over the peers by proportions p ~ Dirichlet(alpha, ..., alpha) of its own.

    Small alpha gives each label to few peers, large alpha the same share to everyone. The test set is spread by the
    same proportions. Every example is used.

    Then the poor are helped, so that no draw need be thrown away: in ascending order, every peer below
    `min_examples` training examples gets the last one of the peer that has most, until it has enough. With many
    peers and small alpha most peers have just these. Test examples do not move.

    Args:
        labels, peers, rng: as for every partition.
        alpha: concentration, above 0.
        min_examples: training examples that every peer has at least; 0 moves none.

    Raises:
        InputError: an option out of its range, or fewer than P * min_examples training examples.

    Source:
        Yurochkin et al., ICML 2019 (arXiv 1905.12022), section 4: p_k ~ Dir(alpha) over the peers for each label k.
        Hsu, Qi, Brown 2019 (arXiv 1909.06335) draw over the labels for each peer.
    """
    if not 0 < alpha < math.inf:
        raise InputError(f"--partition dirichlet: alpha must be a number above 0, not {alpha}")
    if min_examples < 0:
        raise InputError(f"--partition dirichlet: min_examples must be at least 0, not {min_examples}")
    if peers * min_examples > len(labels.train):
        wanted = f"{peers} peers with min_examples={min_examples} need {peers * min_examples} training examples"
        raise InputError(f"--partition dirichlet: {wanted}, there are {len(labels.train)}")
    known = np.union1d(labels.train, labels.test)
    ends = np.cumsum(_proportions(rng, (len(known), peers), alpha), axis=1)

    def spread(half: NDArray[np.int64]) -> list[Indices]:
        owner = np.empty(len(half), dtype=np.int64)
        for label, end in zip(known, ends, strict=True):
            members = rng.permutation(np.flatnonzero(half == label))
            owner[members] = np.searchsorted(np.rint(end[:-1] * len(members)), np.arange(len(members)), side="right")
        return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner, minlength=peers))[:-1])

    return Parts(_level(spread(labels.train), min_examples), spread(labels.test))


def _proportions(rng: np.random.Generator, shape: tuple[int, int], alpha: float) -> NDArray[np.float64]:
    """Rows of a symmetric Dirichlet distribution, by logarithms, since gamma numbers of a small alpha are all 0.0.

    Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), where -log U is exponential.
    """
    power = rng.standard_exponential(shape)
    with np.errstate(over="ignore"):  # infinitely small
        logs = np.log(rng.standard_gamma(alpha + 1, shape)) - (power - power.min(axis=1, keepdims=True)) / alpha
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _level(parts: list[Indices], least: int) -> list[Indices]:
    """Move examples from the largest parts to those with fewer than `least`."""
    sizes = np.array([len(part) for part in parts])
    hands = [part.tolist() for part in parts]
    for peer in np.flatnonzero(sizes < least):
        while sizes[peer] < least:
            rich = int(sizes.argmax())
            hands[peer].append(hands[rich].pop())
            sizes[peer], sizes[rich] = sizes[peer] + 1, sizes[rich] - 1
    return [np.array(sorted(hand), dtype=np.int64) for hand in hands]


def _check_hands(name: str, labels: Labels, peers: int, per_peer: int) -> None:
    if per_peer < 1:
        raise InputError(f"--partition {name}: per_peer must be at least 1, not {per_peer}")
    needed, n = peers * per_peer, len(labels.train)
    if needed > n:
        wanted = f"{peers} peers with per_peer={per_peer} need {needed} training examples"
        raise InputError(f"--partition {name}: {wanted}, there are {n}")


def _joined(hands: Sequence[Indices], per_peer: int) -> list[Indices]:
    """Every `per_peer` consecutive hands in one part."""
    return [np.sort(np.concatenate(hands[k : k + per_peer])) for k in range(0, len(hands), per_peer)]
