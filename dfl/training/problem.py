"""The problem of local training: the peers' examples, the model, the loss and the solver."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.core.parts import Parts, map_parts, parts_of, shape_of
from dfl.core.rows import filled
from dfl.models.modules import (
    Dense,
    dense_layers,
    frozen,
    is_causal,
    is_recurrent,
    stacked_models,
)
from dfl.training.augmentation import NO_AUGMENTATION, Augment
from dfl.training.batch import Batch
from dfl.training.examples import Examples, normalize
from dfl.training.losses import Loss, place_weights
from dfl.training.solver import Solver

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.models.layers import Dropout
    from dfl.models.normalization import BatchNorm
    from dfl.models.parameter_layout import ParameterLayout
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]
Parameters = dict[str, "Tensor"]
"""Name -> (a, *shape), the same parameter of several peers."""


Work = TypeVar("Work", int, "int | Ints", "Ints | None")


EVALUATED = 16
"""The most models that a GPU evaluates at once."""


def _select(work: Work, here: Ints) -> Work:
    """Return the work of the peers at some positions; one number is that of all."""
    return work[here] if isinstance(work, np.ndarray) else work


@dataclass(eq=False)
class Captures:
    """What a GPU has captured of local steps; see `dfl.training.capture`.

    Attributes:
        models: by shape, the tensors on which captured steps work.
        steps: by shape, the captured steps.
        memory: of the intermediate results of all steps; None before the first.
        failed: ids of the modules whose steps cannot be captured.
    """

    models: dict[Hashable, tuple[Parameters, ...]] = field(default_factory=dict)
    steps: dict[Hashable, Any] = field(default_factory=dict)
    memory: Any = None
    failed: set[int] = field(default_factory=set)


class Objective(Protocol):
    """An objective of local training that takes the place of the loss of the model alone."""

    def turns(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the turns of a local step: the parameters that move together, in order."""

    def gradients(self, moving: Collection[str], y: Parameters, step: Step) -> Parameters:
        """Return the gradients (a, *shape) of the parameters that move in a turn, by name.

        Args:
            moving: the parameters of the turn.
            y: the models, name -> (a, *shape).
            step: the examples of the local step, and their problem.
        """


@dataclass(frozen=True)
class Step:
    """The examples of a local step of several peers.

    Attributes:
        problem: their problem.
        batch: the examples; it draws their random numbers.
        inputs: (a, b, *shape), the batch as the model sees it; or a tuple of such parts.
        labels: (a, b, ...).
        weight: (a, b) or (1, b), the weight of each example in its peer's mean loss; (a, b,
            *places), that of every place of a sequence. It is 0 on padding.
    """

    problem: Problem
    batch: Batch
    inputs: Parts
    labels: Tensor
    weight: Tensor

    @classmethod
    def of(cls, problem: Problem, batch: Batch) -> Step:
        """Return the examples of a batch, augmented; rows end at the last label where they may."""
        raw, labels = problem.examples.at(batch.index)
        inputs = problem.inputs(problem.augment.of_parts(raw, batch, problem.zero))
        if not problem.is_sequence:
            return cls(problem, batch, inputs, labels, batch.weight)
        if problem.cuts_rows:
            end = int((labels >= 0).flatten(0, 1).any(0).nonzero()[-1]) + 1
            inputs = map_parts(lambda part: part[:, :, :end], inputs)
            labels = labels[:, :, :end]
        weight = place_weights(labels, batch.weight)
        return cls(problem, batch, inputs, labels.clamp_min(0), weight)


@dataclass(frozen=True)
class Problem:
    """The learning problem of the peers of a rank.

    Attributes:
        module: the model. Its own parameters are never read: each peer's row takes their place.
        parameter_layout: where each parameter lies in a row.
        loss: (outputs, labels) -> (n,), the loss of every example, or of every place of a sequence.
        peers: (p,), global ids of this rank's peers, ascending.
        examples: their training examples.
        padded: (p,), the width to which each peer's batches are padded when peers train together;
            it does not depend on the ranks.
        classes: number of labels; 0 where labels are no classes.
        scale, shift: the model's inputs are float(x) * scale + shift, or so for each part. Their
            dtype and device are those of the models.
        solver: the solver of local training.
        seed: the run's seed.
        kinds: where peers have models of several kinds, the module and the row layout of each. All
            rows begin with the same shared coordinates. Peer i has kind i mod their number, and
            rows are as long as the longest.
        augment: the augmentation of training examples.
        objective: the objective that takes the place of the loss; None where there is none.
        by_model: whether models are computed one after the other, also those of peers that train
            together, for a reason given in `dfl.training.rounding`.
        loss_by_model: whether the losses of models are, for such a reason.
        activations: the most numbers that an operation of a caller's model computes for an example;
            0 for models of the zoo.
        captures: the local steps that a GPU has captured; None where none are.
        train_seconds: (P,) seconds that this rank's peers have trained, to which training adds;
            None where they are not measured.
    """

    module: Module
    parameter_layout: ParameterLayout
    loss: Loss
    peers: Ints
    examples: Examples
    padded: Ints
    classes: int
    scale: Parts
    shift: Parts
    solver: Solver
    seed: int
    kinds: tuple[tuple[Module, ParameterLayout], ...] = ()
    augment: Augment = NO_AUGMENTATION
    objective: Objective | None = None
    by_model: bool = False
    loss_by_model: bool = False
    activations: int = 0
    captures: Captures | None = None
    train_seconds: NDArray[np.float64] | None = None

    def by_kind(self) -> Iterator[tuple[Ints, Self]]:
        """Yield, for each kind of model, the positions of its peers on this rank and their
        problem.
        """
        for k, (module, parameter_layout) in enumerate(self.kinds):
            here = np.flatnonzero(self.peers % len(self.kinds) == k)
            problem = replace(
                self.only(here), module=module, parameter_layout=parameter_layout, kinds=()
            )
            yield here, problem

    def only(self, here: Ints, work: Ints | None = None) -> Self:
        """Return the problem of some of the peers.

        Args:
            here: (a,) their positions on this rank, ascending.
            work: (a,) their epochs, or their steps where steps are counted; None for those of the
                solver.
        """
        solver = replace(
            self.solver,
            epochs=_select(self.solver.epochs, here),
            steps=_select(self.solver.steps, here),
            max_steps=_select(self.solver.max_steps, here),
        )
        if work is not None and np.any(solver.steps):
            solver = replace(solver, steps=work)
        elif work is not None:
            solver = replace(solver, epochs=work)
        return replace(
            self,
            peers=self.peers[here],
            examples=self.examples.only(here),
            padded=self.padded[here],
            solver=solver,
        )

    def paced(self, share: NDArray[np.float64] | None) -> Self:
        """Return the same problem with fewer local steps for some peers.

        Args:
            share: (p,) share of its steps that each peer does, at least one step where it is above
                0; None for all steps.
        """
        if share is None:
            return self
        steps = np.maximum(np.rint(share * self.steps), share > 0).astype(np.int64)
        return replace(self, solver=replace(self.solver, max_steps=steps))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the models."""
        dtype: torch.dtype = parts_of(self.scale)[0].dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """The device of the models and the examples."""
        device: torch.device = parts_of(self.scale)[0].device
        return device

    @cached_property
    def is_sequence(self) -> bool:
        """Whether an example has a label at each of several places."""
        return bool(self.classes) and self.examples.labels.dim() > 1

    @cached_property
    def cuts_rows(self) -> bool:
        """Whether the places after the last label of a batch are left out.

        The model must be causal. Peers that train together have batches of one length.
        """
        one_axis = self.is_sequence and self.examples.labels.dim() == 2
        one_by_one = not self.solver.batched and not self.dropouts  # whose masks have all places
        return one_axis and one_by_one and is_causal(self.module)

    @cached_property
    def dense(self) -> tuple[Dense, ...]:
        """The layers of the model if it is a plain stack of dense layers, else ()."""
        if isinstance(self.examples.inputs, tuple):
            return ()
        return dense_layers(self.module, shape_of(self.examples.inputs))

    @property
    def every_kind(self) -> tuple[tuple[Module, ParameterLayout], ...]:
        """The module and the row layout of every kind of model, mostly one."""
        return self.kinds or ((self.module, self.parameter_layout),)

    @cached_property
    def dropouts(self) -> dict[str, Dropout]:
        """The Dropout layers of the model, by name."""
        from dfl.models.layers import dropouts

        return dropouts(self.module)

    @cached_property
    def batch_norms(self) -> dict[str, BatchNorm]:
        """The BatchNorm layers of the model, by name."""
        from dfl.models.normalization import batch_norms

        return batch_norms(self.module)

    @cached_property
    def frozen(self) -> dict[str, Tensor]:
        """The parameters that are not trained, by name: all peers of the rank have these."""
        return frozen(self.module)

    @cached_property
    def frozen_numbers(self) -> int:
        """How many numbers are not trained, of all kinds of model."""
        modules = [module for module, _ in self.every_kind]
        return sum(value.numel() for module in modules for value in frozen(module).values())

    @cached_property
    def recurrent_states(self) -> int:
        """The numbers of all states of the widest recurrent layer for an example; 0 without one.

        As many steps are assumed as the longest side of an input has.
        """
        modules = [module for module, _ in self.every_kind]
        layers = (layer for module in modules for layer in module.modules() if is_recurrent(layer))
        widest = max((int(getattr(layer, "hidden_size", 0)) for layer in layers), default=0)
        sides = [side for part in parts_of(self.examples.inputs) for side in part.shape[1:]]
        return widest * max(sides, default=1)

    @cached_property
    def layer_numbers(self) -> int:
        """The most numbers that a layer computes for an example: `activations`, or those of the
        layers that state them by `numbers`.
        """
        modules = [module for module, _ in self.every_kind]
        layers = (layer for module in modules for layer in module.modules())
        stated = (getattr(layer, "numbers", 0) for layer in layers)
        return max([self.activations, *(each for each in stated if isinstance(each, int))])

    @property
    def _one_thread(self) -> bool:
        return self.device.type == "cpu" and torch.get_num_threads() == 1

    @cached_property
    def bit_equal_alone(self) -> bool:
        """Whether a peer that trains alone gets the same bits as in a group.

        On one thread torch's batched products of one matrix are bit-equal to those of several,
        unless a dimension is one and the product becomes one of a matrix and a vector. This was
        found on 700 shapes of float32, and in the layout tests. Where models are computed one after
        the other, it always does.
        """
        if self._alone:
            return True
        names = self.parameter_layout.names
        widths = [
            n
            for layer in self.dense
            for n in self.parameter_layout.shapes[names.index(layer.weight)]
        ]
        exact = self.solver.precision == "float32" and self._one_thread
        return exact and bool(widths) and min(*widths, *self.padded) > 1

    def inputs(self, raw: Parts) -> Parts:
        """Return the model's inputs, float(x) * scale + shift.

        Floats are returned as they are: they were normalized during set-up.
        """

        def normalized(part: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return part if part.is_floating_point() else normalize(part, scale, shift)

        return map_parts(normalized, raw, self.scale, self.shift)

    @cached_property
    def zero(self) -> Parts:
        """The value that a raw zero has among the training examples."""

        def zero(part: Tensor, shift: Tensor) -> Tensor:
            return shift if part.is_floating_point() else part.new_zeros(())

        return map_parts(zero, self.examples.inputs, self.shift)

    @cached_property
    def turns(self) -> tuple[tuple[str, ...], ...]:
        """The turns of a local step: the parameters that move together, in order.

        There is one turn, except with an adversary.
        """
        if self.objective:
            return self.objective.turns(self.parameter_layout.trained)
        return (self.parameter_layout.trained,)

    def outputs(
        self, parameters: dict[str, Tensor], inputs: Parts, each: bool = True, part: str = ""
    ) -> Tensor:
        """Return the outputs of models.

        Where models are computed together, a single one is computed with a duplicate of itself, and
        on a GPU fewer than `models_at_once` with duplicates of the first, for the reason given in
        `dfl.training.batches.groups`. Frozen parameters are expanded to one for each model, without
        a copy: a product with the rows of all models at once would round by their number.

        Args:
            parameters: name -> (a, *shape), one model per row.
            inputs: (a, n, *shape), each model's own; or (n, *shape), the same for all; or a tuple
                of such parts.
            each: whether inputs are each model's own.
            part: the part of a `SplitModel` of `dfl.models.layers` to evaluate; all of it if empty.

        Returns:
            (a, n, ...).
        """
        a = len(next(iter(parameters.values())))
        forward = partial(self.output, part=part) if part else self.output
        if self._alone and a == 1:
            # No index, whose gradient is a copy of the parameter's.
            row = {name: value.squeeze(0) for name, value in parameters.items()}
            own = map_parts(lambda part: part.squeeze(0), inputs) if each else inputs
            return forward(row, own).unsqueeze(0).to(self.dtype)
        if self._alone:
            rows = ({name: value[i] for name, value in parameters.items()} for i in range(a))
            return torch.stack(
                [
                    forward(row, map_parts(itemgetter(i), inputs) if each else inputs)
                    for i, row in enumerate(rows)
                ]
            ).to(self.dtype)
        models = max(a, self.models_at_once or 2)
        own = {name: filled(value, models) for name, value in parameters.items()}
        fixed = {name: value.expand(models, *value.shape) for name, value in self.frozen.items()}
        if each:
            inputs = map_parts(lambda part: filled(part, models), inputs)
        stacked = torch.func.vmap(forward, in_dims=(0, 0 if each else None))
        with stacked_models():
            out: Tensor = stacked(own | fixed, inputs)
        return out[:a].to(self.dtype)

    @property
    def models_at_once(self) -> int:
        """The number of models that are evaluated at once, where it is fixed; 0 elsewhere.

        It is at most the number of models that train together.
        """
        return min(EVALUATED, self.solver.group_size)

    @property
    def _alone(self) -> bool:
        return self.by_model or not self.solver.batched

    def output(self, parameters: dict[str, Tensor], inputs: Parts, part: str = "") -> Tensor:
        """Return the outputs (n, ...) of one model, or of a part of it, for inputs (n, *shape)."""
        arguments = parts_of(inputs)
        tied = {name: parameters[first] for name, first in self.tied.items() if first in parameters}
        out: Tensor = torch.func.functional_call(
            self.module,
            parameters | tied,
            (*arguments, part) if part else arguments,
            tie_weights=False,  # which torch would look for in every call
        )
        return out

    @cached_property
    def tied(self) -> dict[str, str]:
        """The further names of tensors that have several names, and the first name of each.

        A layer with several names is replaced under its first one only: torch would take the tensor
        that it puts there for the layer's own, and leave it in the layer.
        """
        found: dict[str, str] = {}
        first: dict[int, str] = {}
        for path, layer in self.module.named_modules():
            own = (
                *layer.named_parameters(path, recurse=False, remove_duplicate=False),
                *layer.named_buffers(path, recurse=False, remove_duplicate=False),
            )
            for name, value in own:
                if first.setdefault(id(value), name) != name:
                    found[name] = first[id(value)]
        return found

    @cached_property
    def steps(self) -> Ints:
        """(p,), the local steps of this round."""
        steps = self.solver.steps_for(self.examples.sizes)
        max_steps = self.solver.max_steps
        return steps if max_steps is None else np.minimum(steps, max_steps)

    @cached_property
    def width(self) -> Ints:
        """(p,), examples in a peer's full batch."""
        sizes = self.examples.sizes
        return np.full_like(sizes, self.solver.batch_size) if self.solver.batch_size else sizes

    @cached_property
    def per_epoch(self) -> Ints:
        """(p,), batches in one pass over a peer's own data."""
        return -(-self.examples.sizes // self.width)
