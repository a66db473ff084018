"""The kinds of model of a run: built, read from a file or copied, and checked against the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError, one_line
from dfl.core.parse import shown
from dfl.core.parts import Shape, joined, shape_of, shown_shape
from dfl.core.registry import flag
from dfl.datasets.data import Data
from dfl.models.model_file import ModelFile
from dfl.models.parameter_layout import PLAIN, ParameterLayout
from dfl.models.sharing import nets_of
from dfl.models.zoo import (
    MODELS,
    NamedModels,
    has_places,
    has_several_parts,
    has_tokens,
    without_values,
)
from dfl.simulation.components import Components

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch


def make_module(
    build: partial[Module], shape: Shape, classes: int, places: tuple[int, ...] = ()
) -> Module:
    """Build a model of the zoo on the meta device: its weights are drawn later.

    Args:
        build: (shape, classes) -> module.
        shape: of an example.
        classes: number of labels; 0 where labels are no classes.
        places: the shape of an example's labels; () where it has one.

    Raises:
        InputError: there is no such model for data of this kind.
    """
    if not (shape and classes):
        kind = (
            "examples that are single numbers"
            if classes
            else "labels that are no classes (classes=0)"
        )
        raise InputError(f"--model cannot be built for {kind}: give a module of your own")
    return without_values(build, shape, classes, places)


def _check_form(spec: str, build: partial[Module], shape: Shape, places: tuple[int, ...]) -> None:
    """Refuse a built-in model for other parts of inputs, or other labels, than it takes."""
    several = bool(shape) and isinstance(shape[0], tuple)
    if several != has_several_parts(build.func):
        wanted = "one part" if several else "several parts"
        raise InputError(
            f"--model {spec} takes inputs of {wanted}, not of {shown_shape(shape)}"
            f"{_choices(has_several_parts) if several else ''}"
        )
    if places and not has_places(build.func):
        raise InputError(
            f"--model {spec} predicts one label of an example, not {shown_shape(places)}"
            f"{_choices(has_places)}"
        )


def _choices(fits: Callable[[object], bool]) -> str:
    """Return the built-in models that fit, as the end of a message."""
    names = ", ".join(name for name, function in MODELS.items() if fits(function))
    return f": choose {names}, or give a module of your own" if names else ""


def make_modules(run: Run, components: Components, common: Arrays) -> tuple[Module, ...]:
    """Return the kinds of model of a run, mostly one, with the nets that only training uses.

    They are copies of the caller's modules, or the models that specs name or a file makes.

    Raises:
        InputError: a model that is no module with values, or that does not fit the data or the
            objective; or several kinds of model where all parameters are shared, that start from
            another run, or of which the mean is the goal.
    """
    shape, classes = shape_of(joined(common, "inputs")), int(common["classes"])
    places = common["labels"].shape[1:] if classes else ()
    modules: tuple[Module, ...]
    if isinstance(components.model, NamedModels):
        builds = components.model.builds
        for spec, build in zip(components.model.specs, builds, strict=True):
            _check_form(spec, build, shape, places)
        modules = tuple(make_module(build, shape, classes, places) for build in builds)
    elif isinstance(components.model, ModelFile):
        modules = components.model.build(shape, classes, run.seed)
    else:
        modules = _copies(components.model)
    if components.own_module:
        _check_values(modules)
    if len(modules) > 1 and (run.share == "all" or run.share_all_until or run.init_from):
        setting = (
            f"--share-all-until {run.share_all_until}"
            if run.share_all_until
            else f"--init-from {run.init_from}"
            if run.init_from
            else "--share all"
        )
        raise InputError(
            f"{setting} with {len(modules)} kinds of model: name with --share the part that they "
            "have in common, or nothing"
        )
    lack = {"accuracy_mean_model": "have no mean"}
    if run.share == "nothing":
        lack["consensus_distance"] = "share nothing"
    if len(modules) > 1 and run.goal is not None and run.goal.column in lack:
        raise InputError(
            f"--until {run.until} with {len(modules)} kinds of model, which "
            f"{lack[run.goal.column]}: choose another figure"
        )
    modules = _with_statistics(run, modules)
    objective = components.objective
    if objective is None:
        return modules
    if places or "inputs" not in common:
        raise InputError(
            "--auxiliary and --fairness-adversary need inputs of one part and one label of an "
            f"example, not inputs of {shown_shape(shape)} and labels of "
            f"{shown_shape(places or (1,))}"
        )
    return tuple(objective.around(each, common, run.seed) for each in modules)


def _with_statistics(run: Run, modules: tuple[Module, ...]) -> tuple[Module, ...]:
    """Return models whose running statistics are part of their rows, where the run takes such.

    Raises:
        InputError: the models have none, or there is an auxiliary task or an adversary, whose
            passes would count, too.
    """
    from dfl.models.normalization import batch_norms, converted

    if run.norm_stats == "refuse":
        return modules
    modules = tuple(converted(module) for module in modules)
    if not any(batch_norms(module) for module in modules):
        raise InputError(
            f"--norm-stats {run.norm_stats} has no part in --model {run.model}, which keeps no "
            "running statistics: leave it out"
        )
    for field in ("auxiliary", "fairness_adversary"):
        if (value := getattr(run, field)) != "none":
            raise InputError(
                f"{flag(field)} {value} passes through a model several times in a step, and "
                f"--norm-stats {run.norm_stats} is for one pass"
            )
    return modules


def check_tokens(run: Run, model: NamedModels, data: Data) -> None:
    """Refuse inputs that are no tokens, for a model that takes tokens.

    Raises:
        InputError: inputs of one part that are not whole numbers in range(classes) as they are, or
            labels that are no classes.
    """
    takers = [
        spec
        for spec, build in zip(model.specs, model.builds, strict=True)
        if has_tokens(build.func)
    ]
    halves = data.train_inputs, data.test_inputs
    inputs = [half for half in halves if isinstance(half, np.ndarray)]
    if not (takers and inputs):  # a model refuses or takes several parts by itself
        return
    if not data.classes:
        raise InputError(
            f"--model {takers[0]} predicts tokens, and labels of --dataset {run.dataset} are no "
            "classes: give a dfl.Data with their number, dfl.Data(..., classes=K)"
        )
    whole = all(half.dtype.kind in "iu" for half in inputs)
    scaled = np.any(np.not_equal(data.scale, 1)) or np.any(data.shift)
    least, most = min(half.min() for half in inputs), max(half.max() for half in inputs)
    if not whole or scaled or least < 0 or most >= data.classes:
        by = f", scaled by {shown(data.scale)} and {shown(data.shift)}" if scaled else ""
        raise InputError(
            f"--model {takers[0]} takes whole numbers in range({data.classes}) as inputs, and "
            f"those of --dataset {run.dataset} are {inputs[0].dtype} from {least:g} to {most:g}{by}"
        )


def _check_values(modules: Sequence[Module]) -> None:
    """Refuse a caller's modules with parameters or buffers on the meta device."""
    for module in modules:
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if value.is_meta:
                kind = "parameter" if isinstance(value, torch.nn.Parameter) else "buffer"
                raise InputError(
                    f"the model's {kind} {name} is on the meta device and has no values: build the "
                    "model on the cpu"
                )


def _copies(modules: Sequence[Module]) -> tuple[Module, ...]:
    """Return copies of a caller's modules: neither the run nor the caller sees the other's changes.

    Raises:
        InputError: a module cannot be copied.
    """
    try:
        return tuple(copy.deepcopy(module) for module in modules)
    except Exception as error:
        raise InputError(f"the model cannot be copied: {one_line(error)}") from error


def layouts_of(modules: Sequence[Module], run: Run) -> list[ParameterLayout]:
    """Return the parameter layouts of models of several kinds.

    Raises:
        InputError: the shared parameters or the dtypes of two kinds differ, or a dtype is neither
            float32 nor float64.
    """
    nets = nets_of(str(run.auxiliary), str(run.fairness_adversary))
    layouts = [ParameterLayout.of(module, run.share, nets, run.norm_stats) for module in modules]
    for module in modules:
        _check_dtype(module)
    common = [
        dict(zip(layout.shared_parameters, layout.shapes, strict=False)) for layout in layouts
    ]
    first = next(modules[0].parameters()).dtype
    for k, (module, shared) in enumerate(zip(modules, common, strict=True)):
        if list(shared.items()) != list(common[0].items()):
            raise InputError(
                f"--share {run.share}: the shared parameters of models 0 and {k} differ, "
                f"{common[0]} and {shared}"
            )
        if (dtype := next(module.parameters()).dtype) != first:
            raise InputError(
                f"models 0 and {k} are of {first} and {dtype}: peers must have one dtype"
            )
    return layouts


def _check_dtype(module: Module) -> None:
    """Refuse parameters that are not all float32 or all float64, and frozen ones without values.

    Raises:
        InputError: there is such a parameter.
    """
    first, *others = module.named_parameters()
    for name, value in (first, *others):
        found = str(value.dtype).removeprefix("torch.")
        if value.dtype not in (torch.float32, torch.float64):
            table = "" if value.requires_grad else f", or make a mask or a table {PLAIN}"
            raise InputError(
                f"the model's parameter {name} is of {found}: choose float32 or float64{table}"
            )
        if value.dtype != first[1].dtype:
            other = str(first[1].dtype).removeprefix("torch.")
            raise InputError(
                f"the model's parameters {first[0]} and {name} are of {other} and {found}: "
                "choose one of them for all"
            )
        if value.is_meta and not value.requires_grad:
            raise InputError(f"the model's parameter {name} is frozen and has no values")
