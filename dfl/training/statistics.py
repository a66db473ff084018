"""Running statistics of peers' models, computed anew on their own examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dfl.core.parts import map_parts
from dfl.training.gradients import batch_norm_inputs
from dfl.training.problem import Parameters, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

CHUNK = 512
"""The most examples of a batch; fixed, since the results depend on it."""


def recompute(models: Tensor, problem: Problem) -> None:
    """Overwrite the running statistics of models by means over each peer's training examples.

    The examples go through a model in batches of CHUNK, in the order of the data. The statistics
    are the means of those of the batches, weighted by their examples. A peer without examples keeps
    its own.

    Args:
        models: (p, d), the models of the problem's peers.
        problem: the problem.

    Source:
        Wu and Johnson, "Rethinking 'Batch' in BatchNorm", 2021, section 3.
    """
    if problem.kinds:
        for here, same_kind in problem.by_kind():
            rows = models[here]
            recompute(rows[:, : same_kind.parameter_layout.d], same_kind)
            models[here] = rows
        return
    layout, examples = problem.parameter_layout, problem.examples
    for i, (start, size) in enumerate(zip(examples.starts, examples.sizes, strict=True)):
        y = layout.take(models, np.array([i]))
        model = _first(y)
        for first in range(0, int(size), CHUNK):
            n = min(CHUNK, int(size) - first)
            index = torch.arange(start + first, start + first + n, device=problem.device)
            raw, _ = examples.at(index[None])
            weight = torch.full((1, n), 1 / n, dtype=problem.dtype, device=problem.device)
            given = _first(batch_norm_inputs(problem, weight, rate=n / (first + n)))
            inputs = map_parts(lambda part: part[0], problem.inputs(raw))
            problem.output(model | given, inputs)
        layout.put(y, models, np.array([i]))


def _first(values: Parameters) -> Parameters:
    """Return the values of the first model."""
    return {name: value[0] for name, value in values.items()}
