"""Builds the learning problem of a rank, and of the server, before round 0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.core.options import MOST
from dfl.core.parts import Parts, joined, map_parts
from dfl.models.modules import fill, frozen
from dfl.simulation.components import Components
from dfl.simulation.engine import check_precision, convolves, is_batched, is_captured
from dfl.simulation.make_models import layouts_of
from dfl.training.batches import group_size, most_together, widths
from dfl.training.examples import Examples, as_tensor, loaded
from dfl.training.problem import Captures
from dfl.training.solver import Solver
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch


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
    check_precision(run.precision, modules, dtype, device)
    scale, shift = (
        map_parts(lambda factor: as_tensor(factor).to(device, dtype), joined(common, name))
        for name in ("scale", "shift")
    )
    examples = _examples(own, "train ", sizes[peers], scale, shift, device)
    solver = components.algorithm.solver(_solver(run, components.lr_schedule))
    padded = widths(sizes, solver.batch_size)
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
        by_model=device.type == "cpu" and any(map(convolves, modules)),
        personal=torch.zeros(len(peers), layout.d - layout.shared, dtype=dtype, device=device),
        recomputes=run.norm_stats == "recompute",
    )
    widest = int(padded.max())
    batched = is_batched(run, task, widest)
    size = 0
    if device.type != "cpu":
        training = components.algorithm.training_peers(len(sizes))
        size = group_size(training, most_together(task, widest))
    captures: Captures | None = None
    if device.type == "cuda" and is_captured(task, modules):
        captures = Captures()
    solver = replace(task.solver, batched=batched, group_size=size)
    return replace(task, solver=solver, captures=captures)


def with_server(
    task: Task, data: Arrays, sizes: NDArray[np.int64], pools: bool, own: Callable[[Solver], Solver]
) -> Task:
    """Return the task with one of the server's own, on rank 0, with a model of the first kind.

    Args:
        task: the learning problem of this rank's peers.
        data: inputs and labels of the server's examples.
        sizes: (P,), training examples of every peer.
        pools: whether the server has copies of the peers' examples, and makes as many local epochs
            as a peer; else it makes as many local steps as the peer that makes most.
        own: returns the solver of the server, given that of the peers.
    """
    held = np.array([len(data["labels"])])
    solver = task.solver
    if not pools:
        most = solver.epochs * -(-sizes.max() // (solver.batch_size or MOST))
        solver = replace(solver, steps=int(solver.steps or most))
    solver = own(replace(solver, group_size=min(1, solver.group_size)))
    examples = _examples(data, "", held, task.scale, task.shift, task.device)
    module, layout = task.every_kind[0]
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


def _rate(run: Run, factor: Callable[[int, int], float], t: int) -> float:
    return float(run.lr * factor(t, run.rounds))


def _examples(
    arrays: Arrays,
    which: str,
    sizes: NDArray[np.int64],
    scale: Parts,
    shift: Parts,
    device: torch.device,
) -> Examples:
    """Return the examples, of sizes (p,), whose arrays have names that begin with `which`."""
    inputs, labels = joined(arrays, f"{which}inputs"), arrays[f"{which}labels"]
    protected = arrays.get(f"{which}protected")
    attributes = None if protected is None else as_tensor(protected).to(device)
    return Examples.of(*loaded(inputs, labels, scale, shift, device), sizes, attributes)
