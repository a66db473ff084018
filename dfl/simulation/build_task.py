"""Builds the learning problem of a rank before round 0: models, task and device."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core.arrays import Array, Arrays
from dfl.core.errors import InputError, in_one_line, one_line
from dfl.core.options import MOST
from dfl.core.parse import shown
from dfl.core.parts import Parts, Shape, joined, map_parts, parts_of, shape_of, shown_shape
from dfl.core.registry import flag
from dfl.datasets.data import Data
from dfl.models.model_file import ModelFile
from dfl.models.modules import convolutions, fill, frozen, is_recurrent
from dfl.models.parameter_layout import ParameterLayout
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
from dfl.training.batches import group_size, most_together, widths
from dfl.training.examples import Examples, as_tensor, normalize_floats
from dfl.training.losses import Loss
from dfl.training.precision import products
from dfl.training.problem import Captures
from dfl.training.solver import Solver
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.comm.mpi import World
else:
    from dfl.core.lazy import torch

SMALL = 2**20
"""Parameters, frozen ones too, times examples of a batch up to which any model but a convolutional
one gains from the batched engine.
"""


FEW_STATES = 2**15
"""Numbers of all states of a recurrent layer with a fused kernel, for a batch, up to which peers
train together on a processor.
"""
FEW_PARAMETERS = 2**17
"""Parameters of a model with such a layer, up to which a group of peers is large enough to gain."""
FEW_STEP_STATES = 2**13
"""Numbers of a state of a recurrent layer without a fused kernel, for a batch, up to which peers
train together on a processor.
"""
MOST_TRIED = 256
"""The most examples with the least or the largest number at some place that a model is tried on."""


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
    if len(modules) > 1 and run.goal is not None and run.goal.column == "accuracy_mean_model":
        raise InputError(
            f"--until {run.until} with {len(modules)} kinds of model, which have no mean: choose "
            "another figure"
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


def _copies(modules: Sequence[Module]) -> tuple[Module, ...]:
    """Return copies of a caller's modules: neither the run nor the caller sees the other's changes.

    Raises:
        InputError: something is no module, or a parameter has no values yet.
    """
    for name, value in (named for module in modules for named in module.named_parameters()):
        if value.is_meta:
            raise InputError(
                f"the model's parameter {name} is on the meta device and has no values"
            )
    try:
        return tuple(copy.deepcopy(module) for module in modules)
    except Exception as error:
        raise InputError(f"the model cannot be copied: {one_line(error)}") from error


def make_task(
    run: Run,
    components: Components,
    modules: Sequence[Module],
    common: Arrays,
    own: Arrays,
    peers: NDArray[np.int64],
    device: torch.device,
) -> Task:
    """Return the learning problem of a rank.

    Args:
        run: how to train.
        components: the components of the run.
        modules: the kinds of model, mostly one.
        common: what all ranks have.
        own: the examples of this rank's peers.
        peers: (p,), their numbers.
        device: of training.

    Raises:
        InputError: as `layouts_of`, or a server has all parameters of models of several kinds.
    """
    layouts = layouts_of(modules, run)
    whole = all(layout.shared == layout.d for layout in layouts)
    if len(layouts) > 1 and whole and components.algorithm.has_server:
        raise InputError(
            f"--share {run.share} with {len(layouts)} kinds of model shares all they have with the "
            "server: name with --share a part of them, or give one model"
        )
    sizes = common["sizes"][:, 0]
    for each in modules:
        fill(each, {name: value.to(device) for name, value in frozen(each).items()})
    module = modules[0]
    layout = replace(layouts[0], d=max(each.d for each in layouts))
    dtype = next(module.parameters()).dtype
    _check_precision(run.precision, modules, dtype, device)
    scale, shift = (
        map_parts(lambda factor: as_tensor(factor).to(device, dtype), joined(common, name))
        for name in ("scale", "shift")
    )
    inputs, labels = _on_device(own, "train ", device)
    solver = components.algorithm.solver(_solver(run, components.lr_schedule))
    padded = widths(sizes, solver.batch_size)
    examples = Examples.of(
        normalize_floats(inputs, scale, shift),
        labels,
        sizes[peers],
        _protected(own, "train ", device),
    )
    task = Task(
        module,
        layout,
        components.loss,
        peers,
        examples,
        padded[peers],
        int(common["classes"]),
        scale,
        shift,
        solver,
        run.seed,
        kinds=tuple(zip(modules, layouts, strict=True)) if len(modules) > 1 else (),
        augment=components.augment,
        objective=components.objective,
        by_model=device.type == "cpu" and any(map(_convolves, modules)),
        personal=torch.zeros(len(peers), layout.d - layout.shared, dtype=dtype, device=device),
        recomputes=run.norm_stats == "recompute",
    )
    widest = int(padded.max())
    batched = _is_batched(run, task, widest)
    size = 0
    if device.type != "cpu":
        training = components.algorithm.training_peers(len(sizes))
        size = group_size(training, most_together(task, widest))
    captures: Captures | None = None
    if device.type == "cuda" and _is_captured(task, modules):
        captures = Captures()
    solver = replace(task.solver, batched=batched, group_size=size)
    return replace(task, solver=solver, captures=captures)


def _is_captured(task: Task, modules: Sequence[Module]) -> bool:
    """Return whether a local step is the same operations every time: no dropout, no objective."""
    from dfl.models.layers import dropouts

    return task.objective is None and not any(dropouts(module) for module in modules)


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
            raise InputError(
                f"the model's parameter {name} is of {found}: choose float32 or float64"
            )
        if value.dtype != first[1].dtype:
            other = str(first[1].dtype).removeprefix("torch.")
            raise InputError(
                f"the model's parameters {first[0]} and {name} are of {other} and {found}: "
                "choose one of them for all"
            )
        if value.is_meta and not value.requires_grad:
            raise InputError(f"the model's parameter {name} is frozen and has no values")


def _check_precision(
    precision: str, modules: Sequence[Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a precision that the device or the models do not have.

    Raises:
        InputError: tf32 without a GPU, or bf16 of float64 models or of recurrent layers.
    """
    if precision == "tf32" and device.type == "cpu":
        raise InputError("--precision tf32 needs a GPU: choose float32 or bf16")
    if precision != "bf16":
        return
    if dtype != torch.float32:
        raise InputError(
            f"--precision bf16 is that of products of float32 models, and these are of "
            f"{str(dtype).removeprefix('torch.')}: choose float32"
        )
    for layer in (layer for each in modules for layer in each.modules()):
        if is_recurrent(layer):
            raise InputError(
                f"--precision bf16 does not reach the products inside a {type(layer).__name__}: "
                "choose float32"
            )


def tried(run: Run, task: Task, common: Arrays, given: bool) -> Task:
    """Differentiate every kind of model on two test examples, and refuse what cannot be trained.

    Models and losses with an operation that rounds by place are computed one after the other on a
    processor; see `dfl.training.rounding`.

    Args:
        run: the settled run, with its `engine`.
        task: the learning problem.
        common: what all ranks have.
        given: whether the modules are the caller's own; models of the zoo need no trial.

    Returns:
        The task. Under `engine="auto"` its peers train one after the other where torch.func.vmap
        cannot take the model, or gains nothing since models are computed one after the other.

    Raises:
        InputError: the model or the loss raises, draws from torch's own generator, returns a shape
            other than (n, outputs) or (n,), or computes a result of an example from others; or the
            model changes its inputs in place.
    """
    from dfl.training.rounding import recorded

    two = [0, len(common["labels"]) - 1]
    tests = map_parts(as_tensor, joined(common, "inputs"))
    inputs = _inputs(task, map_parts(lambda part: part[two], tests))
    labels = as_tensor(common["labels"][two]).to(task.device)
    places = tuple(labels.shape[1:]) if task.is_sequence else ()
    kinds = task.kinds or ((task.module, task.parameter_layout),)
    batched, on_cpu = task.solver.batched, task.device.type == "cpu"
    found: list[Tensor] = []
    if not given:
        shape = (len(two), *places, task.classes)
        numbers = torch.arange(math.prod(shape), dtype=task.dtype).cos()
        found = [numbers.view(shape).to(task.device)]
    generator = torch.get_rng_state()
    try:
        for module, layout in kinds if given else ():
            part = replace(task, module=module, parameter_layout=layout, kinds=(), by_model=True)
            row = layout.row(module).to(task.device)
            exact = [layer for layer in module.modules() if getattr(layer, "together", False)]
            with recorded(exact) as by_place:
                found.append(_try_model(part, row, inputs, (len(two), *places)))
            if by_place and on_cpu:
                task = replace(task, by_model=True)
            _check_examples_apart(part, row, inputs, found[-1], (len(two), *places))
            _try_indices(part, row, tests, places)
            batched = batched and (run.engine == "batched" or not task.by_model)
            if not batched or task.by_model:
                continue
            try:
                with recorded(exact) as by_place:
                    together = replace(part, by_model=False)
                    _try_model(together, row, inputs, (len(two), *places), models=2)
            except InputError:
                if run.engine == "batched":
                    raise
                batched = False
            if by_place and on_cpu:
                task = replace(task, by_model=True)
                batched = run.engine == "batched"
        outputs = found[0].flatten(0, len(places))
        if places:
            labels = labels.flatten().clamp_min(0)
        task = replace(task, loss_by_model=_try_loss(task.loss, outputs, labels) and on_cpu)
    finally:
        torch.set_rng_state(generator)
    _check_shapes([tuple(each.shape) for each in found])
    return replace(task, solver=replace(task.solver, batched=batched))


def _check_shapes(shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse kinds of model with outputs of different shapes."""
    for k, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise InputError(
                f"models 0 and {k} return outputs of different shapes, {shapes[0]} and {shape}"
            )


def _inputs(task: Task, raw: Parts) -> Parts:
    """Return the inputs of a model for examples as files have them."""
    raw = map_parts(lambda part: part.to(task.device), raw)
    return task.inputs(normalize_floats(raw, task.scale, task.shift))


def _try_indices(task: Task, row: Tensor, tests: Parts, places: tuple[int, ...]) -> None:
    """Try a model with embeddings on examples with the least and the largest number at some place.

    A single model refuses an index beyond the rows of an embedding. Several are not tried, since
    torch.func.vmap then reads a row of another model.
    """
    if not any(isinstance(layer, torch.nn.Embedding) for layer in task.module.modules()):
        return
    for half, inputs_of in ((tests, partial(_inputs, task)), (task.examples.inputs, task.inputs)):
        found = set[int]()
        if not len(parts_of(half)[0]):  # a rank without peers
            continue
        for part in parts_of(half):
            flat = part.reshape(len(part), -1)
            found |= {*flat.argmin(0).tolist(), *flat.argmax(0).tolist()}
        some = sorted(found)[:MOST_TRIED]
        inputs = inputs_of(map_parts(lambda part, some=some: part[some], half))
        _try_model(task, row, inputs, (len(some), *places))


def _try_model(
    task: Task, row: Tensor, inputs: Parts, places: tuple[int, ...], models: int = 1
) -> Tensor:
    """Return a model's outputs for labels of shape `places`, (n,) or (n, *places), after
    differentiating it, and as many more models with the same weights, on them.

    Dropout layers keep all units.
    """
    generator = torch.get_rng_state()
    name = type(task.module).__name__
    shape = " and ".join(str(tuple(part.shape)) for part in parts_of(inputs))
    leaves = {
        key: value.detach().expand(models, *value.shape).clone().requires_grad_()
        for key, value in task.parameter_layout.views(row).items()
    }
    masks = {
        f"{key}.mask": torch.ones(models, places[0], layer.units).to(row)
        for key, layer in task.dropouts.items()
    }
    try:
        with products(task.solver.precision, task.device):
            own = map_parts(lambda part: part.expand(models, *part.shape), inputs)
            outputs = task.outputs(leaves | masks, own)[0]
            shared = map_parts(torch.clone, inputs)  # by all models, as in an evaluation
            with torch.no_grad():
                task.outputs(leaves, shared, each=False)
    except Exception as error:
        raise InputError(
            f"the model {name} fails on inputs of shape {shape}: {one_line(error)}"
        ) from error
    if any(part._version for part in parts_of(shared)):
        raise InputError(
            f"the model {name} changes its inputs in place, but other models and later "
            "evaluations read them: let it begin with a copy, x.clone()"
        )
    form = tuple(outputs.shape)
    k = len(places)
    if form[:k] != places or (task.classes and (len(form) != k + 1 or form[k] < task.classes)):
        wanted = str((*places, task.classes)) if task.classes else f"({places[0]}, ...)"
        raise InputError(
            f"the model {name} returns {form} for inputs of shape {shape}, not {wanted}"
        )
    if not outputs.requires_grad:
        raise InputError(
            f"the model {name} has outputs that do not depend on its trained parameters"
        )
    try:
        torch.autograd.grad(outputs.sum(), list(leaves.values()), materialize_grads=True)
    except Exception as error:
        raise InputError(f"the model {name} cannot be differentiated: {one_line(error)}") from error
    _check_draws(generator)
    return outputs.detach()


def _check_draws(before: Tensor) -> None:
    """Refuse a model or a loss that drew random numbers since torch's generator had a state."""
    if not torch.equal(before, torch.get_rng_state()):
        raise InputError(
            "the model or the loss draws from torch's own generator, which no seed of the run "
            "decides: take dfl.models.layers.Dropout for dropout"
        )


def _check_examples_apart(
    task: Task, row: Tensor, inputs: Parts, outputs: Tensor, places: tuple[int, ...]
) -> None:
    """Refuse a model with other outputs for its inputs where the first one is repeated."""
    found = _try_model(task, row, map_parts(_repeated, inputs), (places[0] + 1, *places[1:]))
    if not _agree(found[1:], outputs):
        raise InputError(
            f"the model {type(task.module).__name__} computes the outputs of an example from other "
            "examples of its batch: the first axis must be that of examples, and BatchNorm must "
            "keep running statistics"
        )


def _repeated(examples: Tensor) -> Tensor:
    """Return (n + 1, ...), examples (n, ...) after the first of them."""
    return torch.cat([examples[:1], examples])


def _agree(found: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal but for rounding, that of products in bfloat16 too."""
    most = float(wanted.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(found, wanted, rtol=0.01, atol=0.01 * most, equal_nan=True)


def _try_loss(loss: Loss, outputs: Tensor, labels: Tensor) -> bool:
    """Differentiate a loss by outputs (n, ...), and return whether it rounds by place."""
    from dfl.training.rounding import recorded

    generator = torch.get_rng_state()
    leaf = outputs.clone().requires_grad_()
    with recorded() as by_place:
        losses = _losses(loss, leaf, labels)
        try:
            torch.autograd.grad(losses.sum(), leaf)
        except Exception as error:
            raise InputError(
                f"the loss cannot be differentiated by the outputs: {one_line(error)}"
            ) from error
    _check_draws(generator)
    if not _agree(_losses(loss, _repeated(outputs), _repeated(labels))[1:], losses.detach()):
        raise InputError("the loss of an example depends on other examples of its batch")
    return bool(by_place)


def _losses(loss: Loss, outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the losses of examples, (n,), and refuse what is no loss of each example."""
    n = len(labels)
    shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}"
    with in_one_line(f"the loss fails on {shapes}, {labels.dtype}"):
        losses = loss(outputs, labels)
    if not isinstance(losses, torch.Tensor) or losses.shape != (n,):
        found = (
            f"shape {tuple(losses.shape)}" if isinstance(losses, torch.Tensor) else shown(losses)
        )
        raise InputError(
            f"the loss must return one number for each example, shape ({n},), not {found}: "
            'torch\'s own do with reduction="none"'
        )
    return losses


def with_server(
    task: Task, data: Arrays, sizes: NDArray[np.int64], pools: bool, own: Callable[[Solver], Solver]
) -> Task:
    """Return the task with one of the server's own, on rank 0, with a model of the first kind.

    Args:
        task: the learning problem of this rank's peers.
        data: inputs and labels of the server's examples.
        sizes: (P,), training examples of every peer.
        pools: whether the server has the examples of all peers, and makes as many local epochs as a
            peer; else it makes as many local steps as the peer that makes most.
        own: returns the solver of the server, given that of the peers.
    """
    inputs, labels = _on_device(data, "", task.device)
    held = np.array([len(labels)])
    solver = task.solver
    if not pools:
        most = solver.epochs * -(-sizes.max() // (solver.batch_size or MOST))
        solver = replace(solver, steps=int(solver.steps or most))
    solver = own(replace(solver, group_size=min(1, solver.group_size)))
    protected = _protected(data, "", task.device)
    examples = Examples.of(
        normalize_floats(inputs, task.scale, task.shift), labels, held, protected
    )
    module, layout = task.kinds[0] if task.kinds else (task.module, task.parameter_layout)
    server = replace(
        task,
        module=module,
        parameter_layout=layout,
        kinds=(),
        peers=np.array([len(sizes)]),  # its address, after those of all peers
        examples=examples,
        padded=widths(held, solver.batch_size),
        solver=solver,
        personal=torch.zeros(1, layout.d - layout.shared, dtype=task.dtype, device=task.device),
    )
    return replace(task, server=server)


def _solver(run: Run, schedule: Callable[[int, int], float]) -> Solver:
    return Solver(
        lr=partial(_rate, run, schedule),
        momentum=run.momentum,
        weight_decay=run.weight_decay,
        batch_size=run.batch_size,
        epochs=run.local_epochs or 1,
        steps=run.local_steps or 0,
        precision=run.precision,
    )


def _is_batched(run: Run, task: Task, widest: int) -> bool:
    """Return whether a rank trains its peers together, by the model and the batches alone.

    It does not depend on the number of peers on a rank. Dense layers always gain from it, and on a
    GPU all layers do. Other models gain while they are small; convolutions do not, nor do large
    models on several threads, which one peer keeps busy. Recurrent layers gain while their states
    are few; where torch has a fused kernel for one peer, those of all steps, and their parameters.

    Raises:
        InputError: the run requires it of a model with recurrent layers that cannot.
    """
    modules = [module for module, _ in task.kinds] or [task.module]
    recurrent = [layer for each in modules for layer in each.modules() if is_recurrent(layer)]
    alone = _alone(recurrent, run.threads)
    if alone and run.engine == "batched":
        raise InputError(f"--engine batched{alone}: choose loop or auto")
    if run.engine != "auto" or alone:
        return run.engine == "batched"
    if recurrent:
        return task.device.type != "cpu" or all(_gains(each, task, widest) for each in recurrent)
    small = (task.parameter_layout.d + task.frozen_numbers) * widest <= SMALL
    return (
        task.device.type != "cpu"
        or bool(task.dense and run.threads == 1)
        or (small and not task.by_model)
    )


def _convolves(module: Module) -> bool:
    return any(isinstance(layer, convolutions()) for layer in module.modules())


def _gains(layer: Module, task: Task, widest: int) -> bool:
    """Return whether a recurrent layer of several peers is faster at once, on a processor.

    A fused kernel of one peer saves most of what is saved at once, but for the start of a batch.
    Without one every step costs several calls.
    """
    if getattr(layer, "fused", True):
        states = widest * task.recurrent_states
        return states <= FEW_STATES and task.parameter_layout.d <= FEW_PARAMETERS
    return widest * int(getattr(layer, "hidden_size", 0)) <= FEW_STEP_STATES


def _alone(recurrent: Sequence[Module], threads: int) -> str:
    """Return why recurrent layers are computed for one peer after the other; "" if they are not."""
    if recurrent and threads > 1:
        return (
            f" with --threads {threads}: recurrent layers of several peers are computed on one "
            "thread"
        )
    for layer in recurrent:
        if not getattr(layer, "together", False):
            return f": no {type(layer).__name__} of several peers is computed at once"
    return ""


def device(name: str, world: World) -> torch.device:
    """Return the device of training on this rank; ranks on one machine take its GPUs in turn.

    Args:
        name: the value of `--device`.
        world: the ranks.

    Raises:
        InputError: on every rank, if some rank lacks the GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    _, colon, number = name.partition(":")
    (found,) = world.minimum(torch.cuda.device_count())
    index = int(number) if colon else world.local_rank % max(found, 1)
    if index < found:
        return torch.device("cuda", index)
    if name == "auto":
        return torch.device("cpu")
    raise InputError(f"--device {name}: every rank can have {found} GPUs here; choose cpu or auto")


def _rate(run: Run, factor: Callable[[int, int], float], t: int) -> float:
    return float(run.lr * factor(t, run.rounds))


def _on_device(arrays: Arrays, which: str, device: torch.device) -> tuple[Parts, Tensor]:
    """Return inputs and labels of some examples as tensors."""

    def moved(values: Array) -> Tensor:
        return as_tensor(values).to(device)

    return map_parts(moved, joined(arrays, f"{which}inputs")), moved(arrays[f"{which}labels"])


def _protected(arrays: Arrays, which: str, device: torch.device) -> Tensor | None:
    """Return the protected attributes of some examples; None where there are none."""
    name = f"{which}protected"
    return as_tensor(arrays[name]).to(device) if name in arrays else None
