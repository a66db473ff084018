"""Trials of a caller's models and loss on a few examples before round 0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl.config import Run
from dfl.core import generators
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError, in_one_line, one_line
from dfl.core.parse import shown
from dfl.core.parts import Parts, joined, map_parts, parts_of
from dfl.training.examples import as_tensor, normalize_floats
from dfl.training.gradients import batch_norm_inputs
from dfl.training.losses import Loss
from dfl.training.precision import products
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

MOST_TRIED = 256
"""The most examples with the least or the largest number at some place that a model is tried on."""

ROUNDING = 1e-3
"""The most that rounding in float32 changes outputs, relative to the largest."""


def tried(run: Run, task: Task, common: Arrays, own_module: bool, training: bool = True) -> Task:
    """Differentiate every kind of model on two test examples, and refuse what cannot be trained.

    Models and losses with an operation that several of them would compute otherwise are computed
    one after the other; see `dfl.training.rounding`.

    Args:
        run: the settled run, with its `engine`.
        task: the learning problem.
        common: what all ranks have.
        own_module: whether the modules are the caller's own; models of the zoo need no trial.
        training: whether the modules are in training; else the models are evaluated only, and the
            loss is not tried.

    Returns:
        The task. Under `engine="auto"` its peers train one after the other where torch.func.vmap
        cannot take the model, or gains nothing since models are computed one after the other.

    Raises:
        InputError: the model or the loss raises, draws from a global generator, returns another
            shape than (n, outputs) or (n,), or computes a result of an example from others; or the
            model changes its inputs in place.
    """
    from dfl.training.rounding import are_by_model

    two = [0, len(common["labels"]) - 1]
    tests = map_parts(as_tensor, joined(common, "inputs"))
    inputs = _inputs(task, map_parts(lambda part: part[two], tests))
    labels = as_tensor(common["labels"][two]).to(task.device)
    places = tuple(labels.shape[1:]) if task.is_sequence else ()
    found: list[Tensor] = []
    with generators.restored():
        for module, layout in task.every_kind if own_module else ():
            part = replace(task, module=module, parameter_layout=layout, kinds=())
            outputs, by_model, batched = _try_kind(run, part, inputs, tests, places, training)
            found.append(outputs)
            solver = replace(task.solver, batched=batched)
            numbers = _activations(replace(part, by_model=by_model, solver=solver), inputs)
            task = replace(
                task,
                by_model=by_model,
                solver=solver,
                activations=max(task.activations, numbers),
            )
        _check_shapes([tuple(each.shape) for each in found])
        if not training:
            return task
        outputs = found[0] if found else _outputs(task, (len(two), *places, task.classes))
        if places:
            labels = labels.flatten().clamp_min(0)
        operations = _try_loss(task.loss, outputs.flatten(0, len(places)), labels)
    return replace(task, loss_by_model=are_by_model(operations, task.device))


def lone_examples(run: Run, task: Task, common: Arrays) -> tuple[str, ...]:
    """Return a warning of batches of one example where a BatchNorm layer has one value of each
    channel for it, which is then equal to the mean of the batch.

    Args:
        run: the settled run.
        task: the learning problem.
        common: what all ranks have.
    """
    sizes, solver = common["sizes"][:, 0], task.solver
    width = np.full_like(sizes, solver.batch_size) if solver.batch_size else sizes
    per_epoch = -(-sizes // np.maximum(width, 1))
    reached = (width == 1) | (solver.steps_for(sizes) >= per_epoch)
    alone = (sizes > 0) & (sizes - (per_epoch - 1) * width == 1) & reached
    one = _inputs(task, map_parts(lambda part: as_tensor(part[:1]), joined(common, "inputs")))
    kinds = len(task.every_kind)
    for k, (module, layout) in enumerate(task.every_kind):
        peers = int(alone[k::kinds].sum())
        part = replace(task, module=module, parameter_layout=layout, kinds=())
        if peers and (name := _without_places(part, one)):
            whose = "1 peer has" if peers == 1 else f"{peers} peers have"
            return (
                f"--batch-size {run.batch_size}: {whose} a batch of one example, which the "
                f"BatchNorm layer {name} maps to its bias whatever the example is (torch refuses "
                "it): choose another --batch-size",
            )
    return ()


def _without_places(task: Task, inputs: Parts) -> str | None:
    """Return the name of the first BatchNorm layer that has one value of each channel for an
    example; None where there is none.
    """
    found: list[str] = []

    def see(name: str, x: Tensor) -> None:
        if x[0, 0].numel() == 1:
            found.append(name)

    with _each_batch_norm(task, see), torch.no_grad():
        if task.batch_norms:
            blank = torch.zeros(task.parameter_layout.d, dtype=task.dtype, device=task.device)
            task.output(task.parameter_layout.views(blank), inputs)
    return found[0] if found else None


@contextmanager
def _each_batch_norm(task: Task, see: Callable[[str, Tensor], None]) -> Iterator[None]:
    """Call see(name, inputs) whenever a BatchNorm layer is computed, while the context is open."""

    def hook(name: str, _: torch.nn.Module, given: tuple[Tensor, ...]) -> None:
        see(name, given[0])

    with ExitStack() as hooks:
        for name, layer in task.batch_norms.items():
            hooks.callback(layer.register_forward_pre_hook(partial(hook, name)).remove)
        yield


def _check_first_axis(n: int, name: str, x: Tensor) -> None:
    """Refuse inputs of a BatchNorm layer, for n examples, whose first axis is not theirs."""
    if len(x) != n:
        raise InputError(
            f"the model's layer {name} normalizes an array of shape {tuple(x.shape)} for {n} "
            "examples: its first axis must be that of examples, and places come after channels, "
            "(n, channels, ...)"
        )


def _try_kind(
    run: Run, task: Task, inputs: Parts, tests: Parts, places: tuple[int, ...], training: bool
) -> tuple[Tensor, bool, bool]:
    """Try models of one kind: a single one, and then two together where peers train together.

    Args:
        run: the settled run.
        task: the learning problem of peers with this kind of model.
        inputs: of the two examples on which it is tried.
        tests: the inputs of all test examples, as files have them.
        places: the shape of an example's labels; () where it has one.
        training: as in `tried`.

    Returns:
        The model's outputs; whether models are computed one after the other; and whether peers
        train together.
    """
    from dfl.training.rounding import BY_FREQUENCY, are_by_model, recorded

    required = run.engine == "batched"
    labelled = (len(parts_of(inputs)[0]), *places)
    row = task.parameter_layout.row(task.module).to(task.device)
    exact = [layer for layer in task.module.modules() if getattr(layer, "together", False)]
    alone = replace(task, by_model=True)
    with recorded(exact) as operations:
        outputs, gradients = _try_model(alone, row, inputs, labelled, training)
    _check_each_example(alone, row, inputs, outputs, labelled, training)
    _try_indices(alone, row, tests, places, training)
    if required and BY_FREQUENCY in operations:
        raise InputError(
            "--engine batched fills batches up with repeated examples, which an embedding with "
            "scale_grad_by_freq=True counts: choose loop or auto"
        )
    by_model = task.by_model or are_by_model(operations, task.device)
    batched = task.solver.batched and (required or not by_model)
    if by_model or not batched:
        return outputs[0], by_model, batched
    try:
        with recorded(exact) as operations:
            found = _try_model(task, row, inputs, labelled, training, models=2)
        if not (_agree(found[0], outputs) and _agree(found[1], gradients)):
            raise InputError(
                f"--engine batched: several models {type(task.module).__name__} at once have other "
                "outputs or gradients than each alone: choose loop or auto"
            )
    except InputError:
        if required:
            raise
        batched = False
    if are_by_model(operations, task.device):
        return outputs[0], True, required
    return outputs[0], False, batched


def _activations(task: Task, inputs: Parts) -> int:
    """Return the most numbers that an operation of a model computes for an example.

    They are what an operation computes for two examples more than for one.
    """
    from dfl.training.activations import counted

    models = max(2, task.models_at_once) if task.solver.batched and not task.by_model else 1
    row = task.parameter_layout.row(task.module).to(task.device)
    values = {
        name: value.expand(models, *value.shape)
        for name, value in task.parameter_layout.views(row).items()
    }
    one, two = (map_parts(lambda part, n=n: part[:n], inputs) for n in (1, 2))
    with torch.no_grad(), counted() as fewer:
        task.outputs(values, one, each=False)
    with torch.no_grad(), counted() as more:
        task.outputs(values, two, each=False)
    return max((b - a for a, b in zip(fewer, more, strict=False)), default=0) // models


def _outputs(task: Task, shape: Sequence[int]) -> Tensor:
    """Return some numbers in the place of the outputs of a model, or of their gradients."""
    numbers = torch.arange(math.prod(shape), dtype=task.dtype).cos()
    return numbers.view(*shape).to(task.device)


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


def _try_indices(
    task: Task, row: Tensor, tests: Parts, places: tuple[int, ...], training: bool
) -> None:
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
        _try_model(task, row, inputs, (len(some), *places), training)


def _try_model(
    task: Task,
    row: Tensor,
    inputs: Parts,
    places: tuple[int, ...],
    training: bool,
    models: int = 1,
) -> tuple[Tensor, Tensor]:
    """Evaluate and differentiate some models with the same weights.

    Dropout layers keep all units, and BatchNorm layers normalize by the batch where the models are
    differentiated.

    Args:
        task: the learning problem of peers with this kind of model.
        row: the weights.
        inputs: the examples.
        places: the shape of the labels, (n,) or (n, *places).
        training: whether they are differentiated; else they have no gradients.
        models: the number of models.

    Returns:
        The outputs (models, n, ...) of an evaluation, and the gradients (models, d') of a weighted
        sum of those in training, both in float32 whatever the precision.
    """
    states = generators.states()
    name = type(task.module).__name__
    shape = " and ".join(str(tuple(part.shape)) for part in parts_of(inputs))
    values = {
        key: value.detach().expand(models, *value.shape).clone()
        for key, value in task.parameter_layout.views(row).items()
    }
    leaves = {key: values[key].requires_grad_() for key in task.parameter_layout.trained}
    masks = {
        f"{key}.mask": torch.ones(models, places[0], layer.units).to(row)
        for key, layer in task.dropouts.items()
    }
    weight = row.new_full((models, places[0]), 1 / places[0])
    with (
        in_one_line(f"the model {name} fails on inputs of shape {shape}"),
        products(task.solver.precision, task.device),
        _each_batch_norm(task, partial(_check_first_axis, places[0])),
    ):
        shared = map_parts(torch.clone, inputs)  # by all models, as in an evaluation
        with torch.no_grad():
            evaluated = task.outputs(values, shared, each=False)
        own = map_parts(lambda part: part.expand(models, *part.shape), inputs)
        outputs = task.outputs(values | masks | batch_norm_inputs(task, weight), own)
    if any(part._version for part in parts_of(shared)):
        raise InputError(
            f"the model {name} changes its inputs in place, but other models and later "
            "evaluations read them: let it begin with a copy, x.clone()"
        )
    form = tuple(outputs.shape[1:])
    k = len(places)
    if form[:k] != places or (task.classes and (len(form) != k + 1 or form[k] < task.classes)):
        wanted = str((*places, task.classes)) if task.classes else f"({places[0]}, ...)"
        raise InputError(
            f"the model {name} returns {form} for inputs of shape {shape}, not {wanted}"
        )
    if training and not outputs.requires_grad:
        raise InputError(
            f"the model {name} has outputs that do not depend on its trained parameters"
        )
    found: Sequence[Tensor] = ()
    try:
        if training:
            # Where gradients of the outputs are given, torch imports sympy: half a second.
            total = (outputs * _outputs(task, form)).sum()
            found = torch.autograd.grad(total, [*leaves.values()], materialize_grads=True)
    except Exception as error:
        raise InputError(f"the model {name} cannot be differentiated: {one_line(error)}") from error
    _check_draws(states)
    if task.solver.precision != "float32":  # whose rounding would hide what is looked for
        full = replace(task, solver=replace(task.solver, precision="float32"))
        return _try_model(full, row, inputs, places, training, models)
    every = [each.to_dense().reshape(models, -1) for each in found]
    gradients = torch.cat([row.new_zeros(models, 0), *every], dim=1)
    return evaluated, gradients


def _check_draws(before: generators.States) -> None:
    """Refuse a model or a loss that drew random numbers since generators had some states."""
    if whose := generators.drawn_since(before):
        raise InputError(
            f"the model or the loss draws from {whose} own generator, which no seed of the run "
            "decides: take dfl.models.layers.Dropout for dropout"
        )


def _check_each_example(
    task: Task,
    row: Tensor,
    inputs: Parts,
    outputs: Tensor,
    places: tuple[int, ...],
    training: bool,
) -> None:
    """Refuse a model that fails on one example alone, or has other outputs for it."""
    for i in range(places[0]):
        one = map_parts(lambda part, i=i: part[i : i + 1], inputs)
        try:
            found, _ = _try_model(task, row, one, (1, *places[1:]), training)
        except InputError as error:
            raise InputError(
                f"{error}; an example may be alone in its batch: squeeze() must name an axis, and "
                "BatchNorm must keep running statistics"
            ) from error
        if not _agree(found, outputs[:, i : i + 1]):
            raise InputError(
                f"the model {type(task.module).__name__} computes the outputs of an example from "
                "other examples of its batch: the first axis must be that of examples, and nothing "
                "may be taken over it, as a mean, a maximum or the first"
            )


def _agree(found: Tensor, wanted: Tensor) -> bool:
    """Return whether numbers are equal but for rounding."""
    most = float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 0.0
    return torch.allclose(found, wanted, rtol=ROUNDING, atol=ROUNDING * most, equal_nan=True)


def _try_loss(loss: Loss, outputs: Tensor, labels: Tensor) -> set[str]:
    """Differentiate a loss by outputs (n, ...), and return its operations that several losses
    would compute otherwise.
    """
    from dfl.training.rounding import recorded

    states = generators.states()
    leaf = outputs.clone().requires_grad_()
    with recorded() as operations:
        losses = _losses(loss, leaf, labels)
        try:
            torch.autograd.grad(losses.sum(), leaf)
        except Exception as error:
            raise InputError(
                f"the loss cannot be differentiated by the outputs: {one_line(error)}"
            ) from error
    _check_draws(states)
    first, last = slice(1), slice(len(labels) - 1, None)
    alone = torch.cat([_losses(loss, outputs[each], labels[each]) for each in (first, last)])
    if not _agree(alone, torch.cat([losses[first], losses[last]]).detach()):
        raise InputError(
            "the loss of an example depends on other examples of its batch: it must return the "
            "same number for an example alone"
        )
    return operations


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
