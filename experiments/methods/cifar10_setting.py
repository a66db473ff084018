"""The setting of `methods_cifar10`: its methods, its cases, its data set and its partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from dfl.core import randomness
from dfl.core.options import Positive
from dfl.core.registry import choose
from dfl.datasets import DATASETS, PARTITIONS, Data
from dfl.datasets.partitions.base import Assignment, Labels, needs_classes
from dfl.datasets.partitions.label_skew import dirichlet

MOMENTUM = 0.9
HELD_OUT = 0.1
"""Share of the training examples that no run trains on and that choose the rates."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of the comparison.

    Attributes:
        title: its name in tables.
        algorithm: as --algorithm.
        rate: the learning rate with which the search begins.
        momentum: as --momentum.
        steps: local steps of a round.
        setting: further fields of `Run`.
    """

    title: str
    algorithm: str
    rate: float
    momentum: float = 0.0
    steps: int = 1
    setting: Mapping[str, Any] = field(default_factory=dict)


METHODS = {
    "dpsgd": Method(title="D-PSGD", algorithm="dpsgd", rate=0.1),
    "dsgdm": Method(title="DSGDm", algorithm="dsgdm", rate=0.01, momentum=MOMENTUM),
    "qg_dsgdm": Method(title="QG-DSGDm", algorithm="qg_dsgdm", rate=0.01, momentum=MOMENTUM),
    "gradient_tracking": Method(
        title="gradient tracking", algorithm="gradient_tracking", rate=0.1
    ),
    "momentum_tracking": Method(
        title="momentum tracking", algorithm="momentum_tracking", rate=0.01, momentum=MOMENTUM
    ),
    "d2": Method(title="D2", algorithm="d2", rate=0.1),
    "relay_sgd": Method(
        title="RelaySGD on a chain", algorithm="relay_sgd", rate=0.3, setting={"topology": "chain"}
    ),
    "all_reduce": Method(
        title="all-reduce with momentum", algorithm="dsgdm", rate=0.01, momentum=MOMENTUM,
        setting={"topology": "complete", "mixing": "uniform"},
    ),
    "dfedavgm": Method(
        title="DFedAvgM with 5 steps", algorithm="dfedavgm", rate=0.01, momentum=MOMENTUM, steps=5
    ),
    "decentlam": Method(title="DecentLaM", algorithm="decentlam", rate=0.01, momentum=MOMENTUM),
    "choco": Method(
        title="CHOCO with top 10 %", algorithm="choco:gamma=0.4", rate=0.1,
        setting={"compressor": "top_k:share=0.1"},
    ),
}  # fmt: skip
"""In the order in which they run. DSGDm on a complete graph is SGD with momentum on the batches of
all peers.
"""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A number of peers and a partition.

    Attributes:
        title: its name in tables.
        peers: on a ring, for RelaySGD on a chain.
        partition: as --partition.
        methods: those that it compares.
        rates_of: the case whose learning rates it takes; its own where None.
        published: percent right, by method.
        source: of these.
    """

    title: str
    peers: int
    partition: str
    methods: tuple[str, ...] = tuple(METHODS)
    rates_of: str | None = None
    published: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


def _ring(peers: int, alpha: str, **more: Any) -> Case:
    return Case(
        title=f"{peers} peers, alpha = {alpha}",
        peers=peers,
        partition=f"even_dirichlet:alpha={alpha}",
        **more,
    )


LENET = "Momentum Tracking, released notebook; mean over the peers"
VGG = "RelaySGD, Table 2; worst peer"
RELAY = ("all_reduce", "dpsgd", "qg_dsgdm", "d2", "relay_sgd")
CASES = {
    "ring8_0.1": _ring(8, "0.1"),
    "ring8_4": Case(
        title="8 peers, 4 classes each", peers=8, partition="labels:per_peer=4",
        methods=("dsgdm", "qg_dsgdm", "decentlam", "momentum_tracking"), source=LENET,
        published={"dsgdm": 35.6, "qg_dsgdm": 49.4, "decentlam": 54.9, "momentum_tracking": 66.8},
    ),
    "ring8_0.01": _ring(8, "0.01"),
    "ring8_1": _ring(8, "1"),
    "ring16_0.1": _ring(
        16, "0.1", rates_of="ring8_0.1", source=VGG,
        published=dict(zip(RELAY, (90.2, 79.9, 84.8, 84.0, 87.2), strict=True)),
    ),
    "ring16_0.01": _ring(
        16, "0.01", rates_of="ring8_0.01", source=VGG,
        published=dict(zip(RELAY, (90.2, 53.9, 63.3, 38.2, 86.5), strict=True)),
    ),
    "ring16_1": _ring(
        16, "1", rates_of="ring8_1", source=VGG,
        published=dict(zip(RELAY, (90.2, 87.4, 89.5, 87.2, 87.3), strict=True)),
    ),
}  # fmt: skip
"""In the order in which they run."""


@DATASETS.register("held_out")
def held_out(directory: Path | None, *, of: str = "cifar10", validate: bool = False) -> Data:
    """A data set without a tenth of its training examples.

    They are drawn at random, the same ones in every run.

    Args:
        directory: as for the data set.
        of: its spec.
        validate: whether they are the common test set, in place of the official one.
    """
    data = _read(of, directory)
    n = len(data.train_labels)
    order = randomness.generator(0, "held out").permutation(n)
    out, rest = np.split(np.asarray(order), [round(HELD_OUT * n)])
    inputs, labels = np.asarray(data.train_inputs), np.asarray(data.train_labels)
    kept = replace(data, train_inputs=inputs[rest], train_labels=labels[rest])
    return replace(kept, test_inputs=inputs[out], test_labels=labels[out]) if validate else kept


@cache
def _read(of: str, directory: Path | None) -> Data:
    """Return a data set, which is read once."""
    return choose("--dataset", of, DATASETS)(directory)


@PARTITIONS.register("even_dirichlet")
@needs_classes
def even_dirichlet(
    labels: Labels, peers: int, rng: np.random.Generator, *, alpha: Positive = 0.1
) -> Assignment:
    """The parts of `dirichlet` one after the other, cut into P parts whose sizes differ by one at
    most.

    Source:
        RelaySGD (Vogels et al. 2021), released code, tasks/cifar.py, `dirichlet_split`, which cuts
        each part by label.
    """
    drawn = dirichlet(labels, peers, rng, alpha=alpha, min_examples=0)
    halves = (np.array_split(np.concatenate(parts), peers) for parts in (drawn.train, drawn.test))
    return Assignment(*([np.sort(part) for part in half] for half in halves))
