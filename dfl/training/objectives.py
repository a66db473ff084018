"""Objectives with losses on a representation: an auxiliary net, and an adversary for fairness.

The model is split, y = g(f(x)), and both nets take the representation h = f(x) (LG-FedAvg, Liang et
al. 2020, Algorithm 1 and appendix 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from dfl.core.arrays import Array
from dfl.core.errors import InputError
from dfl.core.options import Count, NotNegative
from dfl.core.registry import Registry, example_with
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import Widths
from dfl.training.auxiliaries import Auxiliary
from dfl.training.gradients import layer_inputs
from dfl.training.losses import cross_entropy, mean_loss
from dfl.training.problem import Parameters, Problem, Step

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.models.layers import SplitModel
else:
    from dfl.core.lazy import torch

Forward = Callable[..., "Tensor"]
"""(inputs, part=...) -> the outputs of a part of the models."""


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """A net r on the representation that predicts every protected attribute; f learns to prevent
    it.

    Its loss L_r is the binary cross entropy of a sigmoid, averaged over the attributes.

    Attributes:
        lambda_local: the weight of L_r against the auxiliary loss, eq. 24.
        lambda_global: the weight of L_r against the loss of the model, eq. 25.
        hidden: the widths of its hidden layers, with ReLU between them.
        head_layers: the number of the model's layers with parameters after the representation.
    """

    lambda_local: NotNegative = 0.0
    lambda_global: NotNegative = 0.0
    hidden: Widths = (32, 32, 32)
    head_layers: Count = 1

    flag: ClassVar[str] = "--fairness-adversary adversary"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss (n,) of outputs (n, k) for k attributes.

        It is computed as a softmax of 0 and the output, which gives every row the same bits
        wherever it lies. Torch's sigmoid rounds differently at the end of an array, and the
        position of that end depends on which peers train together.
        """
        pairs = torch.stack([torch.zeros_like(outputs), outputs], 2)
        each = cross_entropy(pairs.flatten(0, 1), targets.flatten())
        return each.view(outputs.shape).mean(1)


def none() -> None:
    """Add no adversary."""


ADVERSARIES: Registry[Callable[..., Adversary | None]] = Registry(
    "fairness_adversary", "dfl.adversaries"
)
"""Name -> frozen dataclass whose fields are the options; `none` gives None."""

ADVERSARIES.register("none")(none)
ADVERSARIES.register("adversary")(example_with("--dataset adult")(Adversary))


def objective(
    auxiliary: Auxiliary | None, adversary: Adversary | None
) -> RepresentationObjective | None:
    """Return the objective with an auxiliary loss and an adversary; None without either.

    Raises:
        InputError: the nets take two different representations, or the adversary has a weight
            against the auxiliary loss and there is none.
    """
    if adversary and auxiliary and auxiliary.head_layers != adversary.head_layers:
        raise InputError(
            f"{auxiliary.flag}: head_layers={auxiliary.head_layers} and "
            f"{adversary.flag}: head_layers={adversary.head_layers} must be the same"
        )
    if adversary and not auxiliary and adversary.lambda_local:
        raise InputError(
            f"{adversary.flag}: lambda_local={adversary.lambda_local} needs an auxiliary loss: "
            "give --auxiliary, or lambda_global in place of lambda_local"
        )
    return RepresentationObjective(auxiliary, adversary) if auxiliary or adversary else None


@dataclass(frozen=True)
class RepresentationObjective:
    """Losses on the representation, and the loss that each part of a model minimizes.

        f:  L_g + weight L_a - (λ_local + λ_global) L_r      g:  L_g      a:  L_a      r:  L_r

    With an adversary a step has two turns on the same batch, eq. 21 to 23: first f, g and a move,
    then r, at the new f. Algorithm 1 moves f twice, in lines 16 and 18; here it takes one step on
    the sum. As in line 17, `weight` does not scale the loss of a, nor λ that of r.

    Attributes:
        auxiliary: gives a and L_a; None where there is none.
        adversary: gives r and L_r; None where there is none. At least one of the two is given.
    """

    auxiliary: Auxiliary | None
    adversary: Adversary | None

    @property
    def strength(self) -> float:
        """The weight of the adversary's loss in the objective of f."""
        return self.adversary.lambda_local + self.adversary.lambda_global if self.adversary else 0.0

    def around(self, module: Module, common: Mapping[str, Array], seed: int) -> SplitModel:
        """Split a model, and add the nets, whose initial values are drawn as those of a model.

        Args:
            module: the model; the result uses its layers.
            common: arrays of the data that all ranks have.
            seed: the run's seed.

        Raises:
            InputError: the model cannot be split there, or the data have no targets for the nets.
        """
        from dfl.models.layers import split_model

        shape = common["inputs"].shape[1:]
        sizes: dict[str, tuple[int, ...]] = {}
        first = self.auxiliary or self.adversary
        if self.auxiliary:
            outputs = self.auxiliary.output_size(shape, int(common["classes"]))
            sizes["auxiliary"] = (*(self.auxiliary.hidden or ()), outputs)
        if self.adversary:
            sizes["adversary"] = (*self.adversary.hidden, _attributes(common, self.adversary.flag))
        assert first is not None
        whole, nets = split_model(module, first.head_layers, sizes, shape=shape, flag=first.flag)
        # A module of the caller has values, which are the initial model; others are on meta.
        if not any(value.is_meta for value in module.parameters()):
            spec = ParameterLayout.of(nets)
            row = draw(nets, spec, seed, [0])[0].to(next(module.parameters()).dtype)
            nets.load_state_dict(spec.views(row), assign=True)
        return whole

    def turns(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the turns of a step: f, g and a, and then r where there is an adversary."""
        if self.adversary is None:
            return (tuple(names),)
        of_r = tuple(name for name in names if name.startswith("adversary."))
        return tuple(name for name in names if name not in of_r), of_r

    def gradients(self, moving: Collection[str], y: Parameters, step: Step) -> Parameters:
        """Return the gradients of f, g and a, or those of r, as `Objective` states."""
        leaves = {name: value.detach().requires_grad_() for name, value in y.items()}
        forward = partial(step.problem.outputs, leaves | layer_inputs(step.problem, step.batch))
        parts = _parts(step.problem)
        if not set(moving).isdisjoint(parts["f"]):
            return self._gradients_of_f_g_a(forward, leaves, step)
        with torch.no_grad():
            h = forward(step.inputs, part="f")
        loss = self._adversary_loss(forward, h, step)
        of_r = torch.autograd.grad(loss, [leaves[name] for name in parts["adversary"]])
        return dict(zip(parts["adversary"], of_r, strict=True))

    def _gradients_of_f_g_a(self, forward: Forward, leaves: Parameters, step: Step) -> Parameters:
        """Return the gradients of f, g and a.

        Each loss is differentiated back to h, and the weighted sum of the results through f.
        """
        problem, weight = step.problem, step.batch.weight
        parts = _parts(problem)
        h = forward(step.inputs, part="f")
        point = h.detach().requires_grad_()
        out = forward(point, part="g")
        loss = mean_loss(out, step.labels, weight, problem.loss, problem.loss_by_model)
        found, at_h = _gradients(loss, leaves, parts["g"], point)
        outputs_of_f, their_gradients = [h], [at_h]
        if self.auxiliary:
            own_inputs, targets = self.auxiliary.inputs_and_targets(
                step.inputs, step.labels, step.batch
            )
            own_h = h if own_inputs is step.inputs else forward(own_inputs, part="f")
            own_point = own_h.detach().requires_grad_()
            out = forward(own_point, part="auxiliary")
            loss = mean_loss(out, targets, weight, self.auxiliary.loss)
            of_a, at_h = _gradients(loss, leaves, parts["auxiliary"], own_point)
            found |= of_a
            outputs_of_f.append(own_h)
            their_gradients.append(at_h * self.auxiliary.weight)
        if self.strength:
            loss = self._adversary_loss(forward, point, step)
            _, at_h = _gradients(loss, leaves, (), point)
            outputs_of_f.append(h)
            their_gradients.append(at_h * -self.strength)
        of_f = torch.autograd.grad(
            outputs_of_f,
            [leaves[name] for name in parts["f"]],
            their_gradients,
            materialize_grads=True,
        )
        return found | dict(zip(parts["f"], of_f, strict=True))

    def _adversary_loss(self, forward: Forward, h: Tensor, step: Step) -> Tensor:
        """Return L_r at a representation h."""
        assert self.adversary is not None
        assert step.problem.examples.protected is not None
        targets = step.problem.examples.protected[step.batch.index]
        out = forward(h, part="adversary")
        return mean_loss(out, targets, step.batch.weight, self.adversary.loss)


def _gradients(
    loss: Tensor, leaves: Parameters, names: Sequence[str], point: Tensor
) -> tuple[Parameters, Tensor]:
    """Return the gradients of a loss with respect to some parameters, and to a point; zeros for a
    parameter that the model does not use.
    """
    ends = [*(leaves[name] for name in names), point]
    *found, at_point = torch.autograd.grad(loss, ends, materialize_grads=True)
    return dict(zip(names, found, strict=True)), at_point


def _parts(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Return the names of the parameters of each part of the model."""
    parts: dict[str, tuple[str, ...]] = problem.module.parts  # type: ignore[assignment]
    return parts


def _attributes(common: Mapping[str, Array], flag: str) -> int:
    """Return the number of protected attributes of the data."""
    if "protected" not in common:
        raise InputError(f"{flag} needs data with protected attributes, and these have none")
    return int(common["protected"].shape[1])
