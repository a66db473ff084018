"""The components that a run names in its specs, with their options bound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from dfl.algorithms import ALGORITHMS
from dfl.compression.compressors import COMPRESSORS
from dfl.config import Run
from dfl.core.registry import Registry, choose, choose_several, flag
from dfl.environment.faults import FAULTS
from dfl.environment.link_models import LINK_MODELS
from dfl.models.zoo import MODELS
from dfl.robust.aggregators import AGGREGATORS
from dfl.robust.attacks import ATTACKS
from dfl.training.augmentation import AUGMENTS
from dfl.training.auxiliaries import AUXILIARIES
from dfl.training.objectives import ADVERSARIES, objective
from dfl.training.schedules import SCHEDULES

Parts = dict[str, Any]
"""Components by the field of `Run` that names them."""

ON_EVERY_RANK: dict[str, Registry[Any]] = {
    "algorithm": ALGORITHMS,
    "compressor": COMPRESSORS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "model": MODELS,
    "augment": AUGMENTS,
    "auxiliary": AUXILIARIES,
    "fairness_adversary": ADVERSARIES,
    "lr_schedule": SCHEDULES,
    "links": LINK_MODELS,
    "faults": FAULTS,
}
"""Registries that every rank uses, by field of `Run`."""

INSTANCES = (
    "algorithm",
    "compressor",
    "attack",
    "augment",
    "auxiliary",
    "fairness_adversary",
    "links",
)
"""Fields whose components are made at once; the others are called with arguments later."""


@cache
def components() -> Mapping[str, Registry[Any]]:
    """Return all registries, by field of `Run`; only rank 0 imports those of graphs and data."""
    import topologies
    from dfl.datasets import DATASETS, PARTITIONS

    return {
        "topology": Registry("topology", "dfl.topologies", topologies.TOPOLOGIES),
        "mixing": Registry("mixing", "dfl.mixings", topologies.MIXINGS),
        "dataset": DATASETS,
        "partition": PARTITIONS,
        **ON_EVERY_RANK,
    }


def chosen(run: Run, registries: Mapping[str, Registry[Any]]) -> Parts:
    """Return the components that a settled run names; needs no torch.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    named = {name: getattr(run, name) for name in registries if name != "faults"}
    parts: Parts = {
        name: choose(flag(name), spec, registries[name])
        for name, spec in named.items()
        if spec is not None  # no graph where peers have no neighbours
    }
    parts |= {name: parts[name]() for name in INSTANCES}
    faults = choose_several(flag("faults"), run.faults, registries["faults"])
    parts["faults"] = tuple(each for each in (f() for f in faults) if each.touches != "nothing")
    parts["objective"] = objective(parts["auxiliary"], parts["fairness_adversary"])
    parts["lr_schedule"](0, run.rounds)
    return parts


def check(run: Run) -> Parts:
    """Return the components of a settled run, those of graphs and data included.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    return chosen(run, components())
