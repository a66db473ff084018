"""The components of a run: those that its specs name, with their options bound, or the caller's
own objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeVar

from dfl.algorithms import ALGORITHMS, Algorithm, Method
from dfl.compression import COMPRESSORS, Compressor
from dfl.config import Run
from dfl.core.errors import InputError, one_line
from dfl.core.parse import shown
from dfl.core.registry import Registry, choose, choose_several, flag
from dfl.environment.faults import FAULTS, Fault
from dfl.environment.link_models import LINK_MODELS, LinkModel
from dfl.models.model_file import ModelFile, file_of
from dfl.models.modules import modules_of
from dfl.models.zoo import MODELS, NamedModels
from dfl.robust.aggregators import AGGREGATORS, Aggregate
from dfl.robust.attacks import ATTACKS, Attack
from dfl.training.augmentation import AUGMENTS, Augment
from dfl.training.auxiliaries import AUXILIARIES, Auxiliary
from dfl.training.losses import LOSSES, Loss, is_regression
from dfl.training.objectives import ADVERSARIES, Adversary, RepresentationObjective, objective
from dfl.training.schedules import SCHEDULES

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from scipy.sparse import csr_array
    from torch.nn import Module

    import topologies
    from dfl.datasets.data import Data
    from dfl.datasets.partitions.base import Partition

T = TypeVar("T")

ON_EVERY_RANK: dict[str, Registry[Any]] = {
    "algorithm": ALGORITHMS,
    "compressor": COMPRESSORS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "model": MODELS,
    "loss": LOSSES,
    "augment": AUGMENTS,
    "auxiliary": AUXILIARIES,
    "fairness_adversary": ADVERSARIES,
    "lr_schedule": SCHEDULES,
    "links": LINK_MODELS,
    "faults": FAULTS,
}
"""Registries that every rank uses, by field of `Run`."""


@cache
def registries() -> Mapping[str, Registry[Any]]:
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


@dataclass(frozen=True)
class Components:
    """The components of a run that every rank uses.

    Attributes:
        algorithm: the method.
        compressor: encodes messages.
        aggregator: (updates) -> aggregate.
        attack: what attackers send.
        model: the caller's modules; a function in the user's file; or the models that are named.
        loss: (outputs, labels) -> (n,).
        augment: changes the examples of a batch.
        objective: what training minimises beside the loss, or None.
        lr_schedule: (t, rounds) -> factor on the learning rate; an `InputError` in a round for
            which there is none.
        links: the speeds of links and peers.
        faults: the faults that have an effect.
    """

    algorithm: Method
    compressor: Compressor
    aggregator: partial[Aggregate]
    attack: Attack
    model: tuple[Module, ...] | ModelFile | NamedModels
    loss: Loss
    augment: Augment
    objective: RepresentationObjective | None
    lr_schedule: Callable[[int, int], float]
    links: LinkModel
    faults: tuple[Fault, ...]

    @property
    def own_module(self) -> bool:
        """Whether the caller gave the model."""
        return not isinstance(self.model, NamedModels)


@dataclass(frozen=True)
class Sources:
    """The components of a run that only rank 0 uses.

    Attributes:
        topology: (peers, rng) -> graph; None where peers have no neighbours.
        mixing: graph -> mixing matrix; None where peers have no neighbours.
        dataset: (directory) -> data set.
        partition: (labels, peers, rng) -> parts.
    """

    topology: Callable[[int, np.random.Generator], topologies.Graph] | None
    mixing: Callable[[csr_array], csr_array] | None
    dataset: Callable[[Path | None], Data]
    partition: Partition


def components_of(run: Run) -> Components:
    """Return the components of a settled run that every rank uses; needs no torch.

    Raises:
        InputError: an unknown component or option, a bad value, or an object of another kind.
    """
    auxiliary = _instance(run, "auxiliary", Auxiliary, optional=True)
    adversary = _instance(run, "fairness_adversary", Adversary, optional=True)
    schedule = partial(_factor, _function(run, "lr_schedule"))
    schedule(0, run.rounds)
    return Components(
        algorithm=_instance(run, "algorithm", Algorithm),
        compressor=_compressor(run),
        aggregator=_function(run, "aggregator"),
        attack=_instance(run, "attack", Attack),
        model=_model(run),
        loss=_loss(run),
        augment=_instance(run, "augment", Augment),
        objective=objective(auxiliary, adversary),
        lr_schedule=schedule,
        links=_instance(run, "links", LinkModel),
        faults=_faults(run),
    )


def sources_of(run: Run) -> Sources:
    """Return the components of a settled run that only rank 0 uses.

    Raises:
        InputError: an unknown component or option, a bad value, or an object of another kind.
    """
    from dfl.datasets.given import as_partition
    from dfl.simulation import given_objects

    regression = is_regression(_loss(run))
    return Sources(
        topology=_one_of(run, "topology", given_objects.topology),
        mixing=_one_of(run, "mixing", given_objects.mixing),
        dataset=_one_of(
            run, "dataset", partial(given_objects.dataset, seed=run.seed, regression=regression)
        ),
        partition=_one_of(run, "partition", as_partition),
    )


def check(run: Run) -> tuple[Components, Sources]:
    """Return all components of a settled run.

    Raises:
        InputError: as `components_of` and `sources_of` do.
    """
    return components_of(run), sources_of(run)


def _named(run: Run, field: str) -> partial[Any]:
    return choose(flag(field), getattr(run, field), registries()[field])


def _one_of(run: Run, field: str, adapt: Callable[[object], object]) -> Any:
    value = getattr(run, field)
    if value is None:
        return None
    return _named(run, field) if isinstance(value, str) else adapt(value)


def _instance(run: Run, field: str, kind: Callable[..., T], optional: bool = False) -> Any:
    """Return the component of a field: that of its spec, or the caller's object of a class.

    Args:
        run: the settled run.
        field: a field of `Run`.
        kind: the class.
        optional: whether a component may be None.
    """
    value = getattr(run, field)
    if isinstance(value, str):
        value = choose(flag(field), value, ON_EVERY_RANK[field])()
    assert isinstance(kind, type)
    if not isinstance(value, kind) and not (optional and value is None):
        raise InputError(
            f"{flag(field)} must be a spec or an object of class {kind.__name__}, "
            f"not {shown(value)}"
        )
    return value


def _function(run: Run, field: str) -> partial[Any]:
    value = getattr(run, field)
    if isinstance(value, str):
        return choose(flag(field), value, ON_EVERY_RANK[field])
    if not callable(value):
        raise InputError(f"{flag(field)} must be a spec or a function, not {shown(value)}")
    return partial(value)


def _compressor(run: Run) -> Compressor:
    value = run.compressor
    assert value is not None
    if isinstance(value, str):
        made: Compressor = choose(flag("compressor"), value, COMPRESSORS)()
        return made
    if isinstance(value, type) or not (hasattr(value, "encode") and hasattr(value, "decode")):
        raise InputError(
            f"--compressor must be a spec or an object with encode and decode, not {shown(value)}"
        )
    return value


def _model(run: Run) -> tuple[Module, ...] | ModelFile | NamedModels:
    if not isinstance(run.model, str):
        return modules_of(run.model, "--model")
    return ModelFile.of(run.model) if file_of(run.model) else NamedModels.of(run.model)


def _loss(run: Run) -> Loss:
    """Return the loss; one without options is its function, by which engines know cross entropy."""
    loss = _function(run, "loss")
    return loss if loss.keywords or loss.args else loss.func


def _faults(run: Run) -> tuple[Fault, ...]:
    """Return the faults of a run that have an effect."""
    every: list[Fault]
    if not isinstance(run.faults, str | Fault | list | tuple):
        raise InputError(
            f"--faults must be specs or objects of class Fault, not {shown(run.faults)}"
        )
    if isinstance(run.faults, str):
        every = [fault() for fault in choose_several("--faults", run.faults, FAULTS)]
    else:
        every = [run.faults] if isinstance(run.faults, Fault) else list(run.faults)
    for each in every:
        if not isinstance(each, Fault):
            raise InputError(f"--faults must be specs or objects of class Fault, not {shown(each)}")
        if each.touches == "nothing" and type(each) is not Fault:
            raise InputError(
                f"--faults {type(each).__name__}: its `touches` must be links, peers or work"
            )
    if len({type(each) for each in every}) < len(every):
        raise InputError("--faults names something twice: give each once")
    return tuple(each for each in every if each.touches != "nothing")


def _factor(schedule: Callable[[int, int], float], t: int, rounds: int) -> float:
    """Return what a schedule gives for a round.

    Raises:
        InputError: it fails, or gives something else than a finite number from 0 on.
    """
    try:
        factor = schedule(t, rounds)
    except Exception as error:
        raise InputError(f"--lr-schedule fails in round {t}: {one_line(error)}") from error
    if isinstance(factor, bool) or not isinstance(factor, Real) or not 0 <= factor < inf:
        raise InputError(
            f"--lr-schedule must return a finite number from 0 on, not {shown(factor)} in round {t}"
        )
    return factor
