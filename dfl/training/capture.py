"""Local steps that a GPU repeats by itself, as CUDA graphs.

A step of small models is a hundred operations, each of which takes a GPU less time than it takes a
processor to start it. The operations of a step are captured once for each shape of models and
batches; then one call starts all of them, on the same tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.core import profiling
from dfl.core.parts import map_parts, parts_of
from dfl.training.problem import Captures, Parameters, Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

LOG = logging.getLogger("dfl")


@dataclass(frozen=True)
class Captured:
    """A step that a GPU repeats.

    Attributes:
        graph: its operations.
        step: the tensors from which they take the batch.
        rate: (), the tensor from which they take the learning rate.
        models: the models and what belongs to them, which they read and overwrite.
    """

    graph: torch.cuda.CUDAGraph
    step: Step
    rate: Tensor
    models: tuple[Parameters, ...]

    def replay(self, step: Step, rate: float) -> None:
        """Take a step with the examples of a batch."""
        map_parts(lambda part, other: part.copy_(other), self.step.inputs, step.inputs)
        self.step.labels.copy_(step.labels)
        self.step.weight.copy_(step.weight)
        if self.step.batch.weight is not self.step.weight:
            self.step.batch.weight.copy_(step.batch.weight)
        self.rate.fill_(rate)
        self.graph.replay()


def captured_tensors(captures: Captures, *values: Parameters) -> tuple[Parameters, ...]:
    """Return models and what belongs to them, copied to the tensors on which captured steps
    work.
    """
    key = tuple(_shapes(each) for each in values)
    tensors = captures.models.get(key)
    if tensors is None:
        tensors = captures.models[key] = tuple(_copies(each) for each in values)
        return tensors
    for own, each in zip(tensors, values, strict=True):
        if each:
            torch._foreach_copy_(list(own.values()), [each[name] for name in own])
    return tensors


def take_captured(
    captures: Captures,
    take: Callable[..., None],
    models: tuple[Parameters, ...],
    step: Step,
    rate: float,
    *,
    moves: bool,
) -> None:
    """Take a step, take(models, step, rate, moves=moves), on tensors that `captured_tensors`
    returned.

    It is captured the first time that its shapes occur. A model or a loss that waits for the GPU
    cannot be: after a first failure its steps are taken operation by operation.

    Args:
        captures: what has been captured; the step is added.
        take: takes a step, with a rate that is a number or a tensor ().
        models: what the step reads and overwrites.
        step: the examples, and their problem.
        rate: η.
        moves: whether models move.
    """
    problem, solver = step.problem, step.problem.solver
    key = (
        *(id(each) for each in (*models, problem.module)),
        *(tuple(each.shape) for each in (step.labels, *parts_of(step.inputs))),
        solver.momentum, solver.weight_decay, solver.prox_mu, solver.sam_rho, moves,
    )  # fmt: skip
    captured: Captured | None = captures.steps.get(key)
    if captured is None and id(problem.module) not in captures.failed:
        captured = _capture(captures, take, models, step, moves=moves)
        if captured:
            captures.steps[key] = captured
        else:
            captures.failed.add(id(problem.module))
    if captured is None:
        take(models, step, rate, moves=moves)
    else:
        with profiling.phase("forward and backward"):
            captured.replay(step, rate)


def _capture(
    captures: Captures,
    take: Callable[..., None],
    models: tuple[Parameters, ...],
    step: Step,
    *,
    moves: bool,
) -> Captured | None:
    """Capture a step, after one on copies, in which libraries prepare themselves; None where it
    cannot be.

    All steps share the memory of their intermediate results, of which a replay reads none that
    another left.
    """
    batch, device = step.batch, step.problem.device
    weight = batch.weight.expand(batch.index.shape).clone()
    own = replace(
        step,
        batch=replace(batch, index=batch.index.clone(), weight=weight),
        inputs=map_parts(lambda part: part.clone(), step.inputs),
        labels=step.labels.clone(),
        weight=weight if step.weight is batch.weight else step.weight.clone(),
    )
    rate = torch.zeros((), dtype=torch.float64, device=device)  # as a float of Python
    graph = torch.cuda.CUDAGraph()
    if captures.memory is None:
        captures.memory = torch.cuda.graph_pool_handle()
    current = torch.cuda.current_stream(device)
    try:
        with torch.cuda.device(device), profiling.profiled(None):
            aside = torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                take(tuple(_copies(each) for each in models), own, rate, moves=moves)
            current.wait_stream(aside)
            with torch.cuda.graph(graph, pool=captures.memory):
                take(models, own, rate, moves=moves)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        torch.cuda.set_stream(current)  # a capture that failed leaves its own
        torch.cuda.synchronize(device)
        captures.memory = None  # what a capture that failed has of it is not given back
        cause: BaseException = error
        while cause.__context__ is not None:  # the end of a capture that failed is an error too
            cause = cause.__context__
        reason = str(cause).partition("\n")[0]
        LOG.info("local steps are not captured as a CUDA graph, and are slower: %s", reason)
        return None
    return Captured(graph, own, rate, models)


def _shapes(values: Parameters) -> Hashable:
    return tuple((name, tuple(value.shape)) for name, value in values.items())


def _copies(values: Parameters) -> Parameters:
    return {
        name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()
    }
