"""What does a step descend besides the loss of the model? That of an auxiliary net, and less that
of an adversary.

The model is taken apart, y = g(f(x)), and both nets look at the representation h = f(x) (LG-FedAvg,
Liang et al. 2020, Algorithm 1 and appendix 6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from dfl.core.errors import InputError
from dfl.core.options import Count, NotNegative
from dfl.core.registry import Registry
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import Widths
from dfl.training.auxiliaries import Auxiliary
from dfl.training.gradients import masks
from dfl.training.losses import cross_entropy, mean_loss
from dfl.training.problem import Parameters, Problem

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.models.layers import Split
    from dfl.training.batch import Batch
else:
    from dfl.core.lazy import torch

Seen = tuple["Tensor", "Tensor", "Batch"]
Say = Callable[..., "Tensor"]


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """A net r on the representation that predicts every protected attribute, and that f is to
    deceive.

    Its loss L_r is the binary cross entropy of a sigmoid, the mean over the attributes.

    Attributes:
        lambda_local: how much it weighs against the auxiliary loss, eq. 24.
        lambda_global: how much it weighs against the loss of the model, eq. 25.
        hidden: the widths of its hidden layers, with ReLU between them.
        head_layers: how many of the model's layers with parameters lie behind the representation.
    """

    lambda_local: NotNegative = 0.0
    lambda_global: NotNegative = 0.0
    hidden: Widths = (32, 32, 32)
    head_layers: Count = 1

    flag: ClassVar[str] = "--fairness-adversary adversary"

    def loss(self, said: Tensor, wanted: Tensor) -> Tensor:
        """The loss (n,) of what is said (n, k) of k attributes.

        As a softmax of two, 0 and s, whose rows are worked out alike wherever they lie: torch's
        sigmoid rounds differently at the end of an array, and where that is depends on who trains
        together.
        """
        each = cross_entropy(
            torch.stack([torch.zeros_like(said), said], 2).flatten(0, 1), wanted.flatten()
        )
        return each.view(said.shape).mean(1)


def none() -> None:
    """No adversary."""


ADVERSARIES: Registry[Callable[..., Adversary | None]] = Registry(
    "fairness_adversary", "dfl.adversaries"
)
"""Name -> frozen dataclass whose fields are the options; nothing for none."""

ADVERSARIES.register("none")(none)
ADVERSARIES.register("adversary")(Adversary)


def objective(
    auxiliary: Auxiliary | None, adversary: Adversary | None
) -> RepresentationObjective | None:
    """What a step descends besides the loss of the model, if anything.

    Raises:
        InputError: the nets look at two representations, or the adversary weighs against a loss
            that there is not.
    """
    if adversary and auxiliary and auxiliary.head_layers != adversary.head_layers:
        raise InputError(
            f"{auxiliary.flag}: head_layers={auxiliary.head_layers} and "
            f"{adversary.flag}: head_layers={adversary.head_layers} look at "
            "different layers: give both the same"
        )
    if adversary and not auxiliary and adversary.lambda_local:
        raise InputError(
            f"{adversary.flag}: lambda_local={adversary.lambda_local} weighs against the loss of an auxiliary net: "
            "give --auxiliary, or lambda_global"
        )
    return RepresentationObjective(auxiliary, adversary) if auxiliary or adversary else None


@dataclass(frozen=True)
class RepresentationObjective:
    """Losses on what f says, and what every part of a model learns from them, at least one of the
    two.

        f:  L_g + weight L_a - (λ_local + λ_global) L_r      g:  L_g      a:  L_a      r:  L_r

    Where there is an adversary a step has two halves on the same batch, eq. 21 to 23: first f, g
    and a move, then r, at the new f. Algorithm 1 moves f twice, in lines 16 and 18; here it takes
    one step on the sum. As in line 17 `weight` is no matter of a, nor λ one of r.
    """

    auxiliary: Auxiliary | None
    adversary: Adversary | None

    @property
    def strength(self) -> float:
        """How much the adversary's loss weighs in what f learns from."""
        return self.adversary.lambda_local + self.adversary.lambda_global if self.adversary else 0.0

    def around(self, module: Module, common: Mapping[str, Any], seed: int) -> Split:
        """Take a model apart and put the nets to it, which start by address as the rest of a model
        does.

        Args:
            module: the model; its layers are shared.
            common: what everyone was told of the data.
            seed: the run's seed.

        Raises:
            InputError: a model that cannot be taken apart there, or data of which the nets can say
                nothing.
        """
        from dfl.models.layers import split

        shape, sizes, first = common["inputs"].shape[1:], {}, self.auxiliary or self.adversary
        if self.auxiliary:
            said = self.auxiliary.outputs(shape, int(common["classes"]))
            sizes["auxiliary"] = (*(self.auxiliary.hidden or ()), said)
        if self.adversary:
            sizes["adversary"] = (*self.adversary.hidden, _attributes(common, self.adversary.flag))
        assert first is not None
        whole, nets = split(module, first.head_layers, sizes, (shape, first.flag))
        if not any(
            value.is_meta for value in module.parameters()
        ):  # the caller's own, whose values are the start
            spec = ParameterLayout.of(nets)
            row = draw(nets, spec, seed, [0])[0].to(next(module.parameters()).dtype)
            nets.load_state_dict(spec.views(row), assign=True)
        return whole

    def turns(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Which parameters move together, in the order in which they do."""
        if self.adversary is None:
            return (tuple(names),)
        answers = tuple(name for name in names if name.startswith("adversary."))
        return tuple(name for name in names if name not in answers), answers

    def slopes(
        self, moving: Collection[str], y: Parameters, problem: Problem, seen: Seen
    ) -> Parameters:
        """The gradients (a, *shape) that the parameters which move now follow downhill, by name.

        Args:
            moving: one of the turns.
            y: the models, name -> (a, *shape).
            problem: the problem.
            seen: inputs as the model sees them, labels, and the batch.
        """
        leaves = {name: value.detach().requires_grad_() for name, value in y.items()}
        say = partial(problem.outputs, leaves | masks(problem, seen[2]))
        if set(moving).isdisjoint(_parts(problem)["f"]):
            with torch.no_grad():
                point = say(seen[0], part="f")
            return _back(
                self._deception(say, point, problem, seen), leaves, _parts(problem)["adversary"]
            )[0]
        return self._descent(say, leaves, problem, seen)

    def _descent(self, say: Say, leaves: Parameters, problem: Problem, seen: Seen) -> Parameters:
        """The gradients of f, g and a: each loss as far back as h, and from there their sum through
        f.
        """
        (inputs, labels, batch), parts = seen, _parts(problem)
        h = say(inputs, part="f")
        point = h.detach().requires_grad_()
        loss = mean_loss(say(point, part="g"), labels, batch.weight, problem.loss)
        found, slope = _back(loss, leaves, parts["g"], point)
        felt = [(h, slope)]
        if self.auxiliary:
            posed, wanted = self.auxiliary.pose(inputs, labels, batch)
            shown = h if posed is inputs else say(posed, part="f")
            other = shown.detach().requires_grad_()
            loss = mean_loss(
                say(other, part="auxiliary"), wanted, batch.weight, self.auxiliary.loss
            )
            more, slope = _back(loss, leaves, parts["auxiliary"], other)
            found |= more
            felt.append((shown, slope * self.auxiliary.weight))
        if self.strength:
            _, slope = _back(self._deception(say, point, problem, seen), leaves, (), point)
            felt.append((h, slope * -self.strength))
        ends, slopes = zip(*felt, strict=True)
        inner = torch.autograd.grad(ends, [leaves[name] for name in parts["f"]], slopes)
        return found | dict(zip(parts["f"], inner, strict=True))

    def _deception(self, say: Say, point: Tensor, problem: Problem, seen: Seen) -> Tensor:
        """The adversary's loss at h."""
        assert self.adversary is not None
        assert problem.examples.protected is not None
        wanted = problem.examples.protected[seen[2].index]
        return mean_loss(say(point, part="adversary"), wanted, seen[2].weight, self.adversary.loss)


def _back(
    loss: Tensor, leaves: Parameters, names: Sequence[str], *points: Tensor
) -> tuple[Parameters, Tensor]:
    """The gradients of a loss by some parameters, and by a point."""
    found = torch.autograd.grad(loss, [*(leaves[name] for name in names), *points])
    return dict(zip(names, found, strict=False)), found[-1]


def _parts(problem: Problem) -> dict[str, tuple[str, ...]]:
    """The parameters of every part of the model."""
    parts: dict[str, tuple[str, ...]] = problem.module.parts  # type: ignore[assignment]
    return parts


def _attributes(common: Mapping[str, Any], flag: str) -> int:
    """How many protected attributes there are."""
    if "protected" not in common:
        raise InputError(f"{flag} needs data with protected attributes, and these have none")
    return int(common["protected"].shape[1])
