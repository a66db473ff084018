"""Gradients of several peers at once, and the update of their velocities.

A plain stack of dense layers is differentiated here, by batched matrix products that add the
gradients to the velocities. Any other module is differentiated by torch's autograd, under vmap
where peers train together.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from dfl.training.batch import Batch
from dfl.training.losses import cross_entropy, mean_loss
from dfl.training.precision import operand_dtype, products
from dfl.training.problem import Parameters, Problem, Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch


def update_velocity(v: Parameters, y: Parameters, step: Step, rate: float | Tensor) -> None:
    """v <- θ v - η (∇f(y) + λ y), where f_i is the mean loss over peer i's own batch.

    Where the problem has an objective, its gradients take the place of ∇f.

    Args:
        v: velocities of the parameters that move, name -> (a, *shape); overwritten.
        y: models, name -> (a, *shape).
        step: the examples, and the problem, whose solver has θ and λ.
        rate: η.
    """
    problem = step.problem
    decay = problem.solver.weight_decay
    if problem.dense:
        with products(problem.solver.precision, problem.device, rounded=True):
            _by_products(v, y, step, rate)
    else:
        gradients = problem.objective.gradients if problem.objective else _by_autograd
        with products(problem.solver.precision, problem.device):
            found = gradients(v, y, step)
        if found:
            _accumulate(
                [v[name] for name in found], list(found.values()), problem.solver.momentum, rate
            )
    if decay and v:
        torch._foreach_sub_(list(v.values()), _times([y[name] for name in v], rate * decay))


def _accumulate(
    velocities: list[Tensor], gradients: list[Tensor], momentum: float, rate: float | Tensor
) -> None:
    """v <- θ v - η g, for each v. Gradients are not changed: two parameters may share one."""
    if momentum:
        # One rounding per operation: a fused multiply-add may differ between the body and the tail
        # of a row.
        torch._foreach_mul_(velocities, momentum)
        torch._foreach_sub_(velocities, _times(gradients, rate))
        return
    factor = _rounded(-rate, gradients[0])
    for velocity, gradient in zip(velocities, gradients, strict=True):
        # In one pass; to_dense returns itself but for a sparse gradient of an embedding.
        torch.mul(gradient.to_dense(), factor, out=velocity)


def _times(values: list[Tensor], factor: float | Tensor) -> tuple[Tensor, ...]:
    return torch._foreach_mul(values, _rounded(factor, values[0]))


def _rounded(factor: float | Tensor, value: Tensor) -> float | Tensor:
    """Return a factor, rounded to the dtype of the tensor that it multiplies."""
    return factor.to(value.dtype) if isinstance(factor, torch.Tensor) else factor


def _by_products(v: Parameters, y: Parameters, step: Step, rate: float | Tensor) -> None:
    """Go forward and backward through dense layers, and update the velocities by θ v - η ∇f(y).

    The operands of products have the dtype of the run's precision. In that of the models, the
    matrix product that computes a gradient also adds it to its velocity.

    Args:
        v: velocities, name -> (a, *shape); overwritten.
        y: models, name -> (a, *shape).
        step: the examples.
        rate: η.
    """
    problem = step.problem
    theta = problem.solver.momentum
    dtype = operand_dtype(problem.solver.precision, problem.dtype)
    activations = [step.inputs.flatten(2).to(dtype)]
    weights = [y[layer.weight].to(dtype) for layer in problem.dense]
    for layer, w in zip(problem.dense, weights, strict=True):
        x = activations[-1]
        if layer.bias:
            out = torch.baddbmm(y[layer.bias].to(dtype).unsqueeze(1), x, w.mT)
        else:
            out = torch.bmm(x, w.mT)
        activations.append(out.relu_() if layer.relu else out)
    weight = step.weight * -rate
    g = _output_gradient(activations[-1].to(problem.dtype), step.labels, weight, problem).to(dtype)
    for k, layer in reversed(list(enumerate(problem.dense))):
        if layer.relu:
            g = torch.ops.aten.threshold_backward(g, activations[k + 1], 0)
        if dtype == problem.dtype:
            v[layer.weight].baddbmm_(g.mT, activations[k], beta=theta)
        else:
            v[layer.weight].mul_(theta).add_(torch.bmm(g.mT, activations[k]))
        if layer.bias:
            v[layer.bias].mul_(theta).add_(g.sum(1, dtype=problem.dtype))
        if k:
            g = torch.bmm(g, weights[k])


def _output_gradient(out: Tensor, labels: Tensor, weight: Tensor, problem: Problem) -> Tensor:
    """Return the gradient of every peer's weighted loss with respect to its outputs (a, b, ...)."""
    if problem.classes and problem.loss is cross_entropy:
        g = torch.softmax(out, 2)
        at = labels.unsqueeze(2)
        return g.scatter_add_(2, at, g.new_full((1, 1, 1), -1.0).expand_as(at)).mul_(
            weight.unsqueeze(2)
        )
    out = out.detach().requires_grad_()
    loss = mean_loss(out, labels, weight, problem.loss, problem.loss_by_model)
    (g,) = torch.autograd.grad(loss, out)
    return g


def _by_autograd(moving: Collection[str], y: Parameters, step: Step) -> Parameters:
    """Return the gradients of all parameters, by torch's autograd; see `Objective.gradients`.

    The forward pass overwrites the running statistics in y.
    """
    problem = step.problem
    leaves = {n: y[n].detach().requires_grad_() for n in problem.parameter_layout.trained}
    out = problem.outputs(y | leaves | layer_inputs(problem, step.batch), step.inputs)
    loss = mean_loss(out, step.labels, step.weight, problem.loss, problem.loss_by_model)
    # Zeros for a parameter that the model does not use.
    found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def layer_inputs(problem: Problem, batch: Batch) -> Parameters:
    """Return what layers take in a step besides their parameters, by name.

    These are the masks (a, b, units) of Dropout layers, drawn for each layer, example and unit; and
    the weights (a, b) of the examples and the rate (a,) of BatchNorm layers.
    """
    drawn = (
        (name, layer.rate, batch.draw(f"dropout {name}", layer.units))
        for name, layer in problem.dropouts.items()
    )
    masks = {
        f"{name}.mask": (numbers >= rate).to(problem.dtype).div_(1 - rate)
        for name, rate, numbers in drawn
    }
    return masks | batch_norm_inputs(problem, batch.weight.expand(batch.index.shape))


def batch_norm_inputs(problem: Problem, weight: Tensor, rate: float | None = None) -> Parameters:
    """Return what the model's BatchNorm layers take in training, by name.

    Args:
        problem: the problem.
        weight: (a, b), the weights of the examples of a batch.
        rate: how far running statistics move to those of the batch; None for each layer's own.
    """
    found: Parameters = {}
    for name, layer in problem.batch_norms.items():
        prefix = f"{name}." if name else ""
        found[f"{prefix}example_weight"] = weight
        found[f"{prefix}rate"] = weight.new_full(
            (len(weight),), layer.momentum if rate is None else rate
        )
    return found
