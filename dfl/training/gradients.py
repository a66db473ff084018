"""How do several peers take a gradient step at once?

A plain stack of dense layers is differentiated here, by batched matrix products that add the
gradient to the velocity as they go; any other module by torch's autograd, under vmap where peers
train together.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dfl.training.batch import Batch
from dfl.training.losses import cross_entropy, mean_loss
from dfl.training.problem import Parameters, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


def accelerate(v: Parameters, y: Parameters, problem: Problem, batch: Batch, rate: float) -> None:
    """v <- θ v - η (∇f(y) + λ y), where f_i is the mean loss over peer i's own batch.

    Where the problem has an objective, it says what stands for ∇f.

    Args:
        v: velocities of the parameters that move, name -> (a, *shape); overwritten.
        y: models, name -> (a, *shape).
        problem: the problem; its solver says θ and λ.
        batch: the examples.
        rate: η.
    """
    raw, labels = problem.examples.at(batch.index)
    inputs, decay = (
        problem.inputs(problem.augment(raw, batch, problem.zero)),
        problem.solver.weight_decay,
    )
    if problem.dense:
        _by_products(v, y, problem, (inputs, labels, batch), rate)
    else:
        slopes = problem.objective.slopes if problem.objective else _slopes
        # One rounding per operation: a fused multiply-add may differ between the body and the tail
        # of a row. Not in place: two parameters may share one gradient.
        for name, g in slopes(v, y, problem, (inputs, labels, batch)).items():
            v[name].mul_(problem.solver.momentum).sub_(g * rate)
    for name in v if decay else ():
        v[name].sub_(y[name] * (rate * decay))


def _by_products(
    v: Parameters, y: Parameters, problem: Problem, seen: tuple[Tensor, Tensor, Batch], rate: float
) -> None:
    """Forward and backward through dense layers; a product with the batch adds each gradient to its
    velocity.
    """
    inputs, labels, batch = seen
    theta, out = problem.solver.momentum, [inputs.flatten(2)]
    for layer in problem.dense:
        x, w = out[-1], y[layer.weight].mT
        said = torch.baddbmm(y[layer.bias].unsqueeze(1), x, w) if layer.bias else torch.bmm(x, w)
        out.append(said.relu_() if layer.relu else said)
    slope = _slope(out[-1], labels, batch.weight * -rate, problem)
    for k, layer in reversed(list(enumerate(problem.dense))):
        if layer.relu:
            slope = torch.ops.aten.threshold_backward(slope, out[k + 1], 0)
        v[layer.weight].baddbmm_(slope.mT, out[k], beta=theta)
        if layer.bias:
            v[layer.bias].mul_(theta).add_(slope.sum(1))
        if k:
            slope = torch.bmm(slope, y[layer.weight])


def _slope(out: Tensor, labels: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    """The gradient of every peer's mean loss by its outputs (a, b, ...)."""
    if problem.classes and problem.loss is cross_entropy:
        slope = torch.softmax(out, 2)
        at = labels.unsqueeze(2)
        return slope.scatter_add_(2, at, slope.new_full((1, 1, 1), -1.0).expand_as(at)).mul_(
            weight.unsqueeze(2)
        )
    out = out.detach().requires_grad_()
    (slope,) = torch.autograd.grad(mean_loss(out, labels, weight, problem.loss), out)
    return slope


def _slopes(
    moving: Collection[str], y: Parameters, problem: Problem, seen: tuple[Tensor, Tensor, Batch]
) -> dict[str, Tensor]:
    """The gradients of all parameters, by torch."""
    inputs, labels, batch = seen
    leaves = {name: value.detach().requires_grad_() for name, value in y.items()}
    loss = mean_loss(
        problem.outputs(leaves | masks(problem, batch), inputs), labels, batch.weight, problem.loss
    )
    slopes = torch.autograd.grad(
        loss, list(leaves.values()), materialize_grads=True
    )  # zeros for an unused parameter
    return dict(zip(leaves, slopes, strict=True))


def masks(problem: Problem, batch: Batch) -> Parameters:
    """What replaces the masks (a, b, units) of Dropout layers in a step, drawn for each layer,
    example and unit.
    """
    drawn = (
        (name, layer.rate, batch.draw(f"dropout {name}", layer.units))
        for name, layer in problem.dropouts.items()
    )
    return {
        f"{name}.mask": (numbers >= rate).to(problem.dtype).div_(1 - rate)
        for name, rate, numbers in drawn
    }
