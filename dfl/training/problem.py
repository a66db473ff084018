"""The problem of local training: the peers' examples, the model, the loss and the solver."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dfl.models.modules import Dense, dense_layers
from dfl.training.augmentation import AS_THEY_ARE, Augment
from dfl.training.batch import Batch
from dfl.training.examples import Examples, normal
from dfl.training.losses import Loss
from dfl.training.solver import Solver

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from dfl.models.layers import Dropout
    from dfl.models.parameter_layout import ParameterLayout
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]
Parameters = dict[str, "Tensor"]
"""Name -> (a, *shape), the same parameter of several peers."""


def _cut(work: Any, here: Ints) -> Any:
    """The work of peers at some positions, where it is not the same for all."""
    return work[here] if isinstance(work, np.ndarray) else work


class Objective(Protocol):
    """What a local step descends in place of the loss of the model alone."""

    def turns(self, names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
        """Return the parameters that move together, in the order in which they do."""

    def slopes(
        self,
        moving: Collection[str],
        y: Parameters,
        problem: Problem,
        seen: tuple[Tensor, Tensor, Batch],
    ) -> Parameters:
        """Return the gradients (a, *shape) that the parameters which move now follow, by name.

        Args:
            moving: one of the turns.
            y: the models, name -> (a, *shape).
            problem: the problem.
            seen: inputs as the model sees them, labels, and the batch.
        """


@dataclass(frozen=True)
class Problem:
    """A learning problem as one rank sees it.

    Attributes:
        module: the model; its parameters are never read, a peer's row stands in for them.
        parameter_layout: where each parameter lies in a row.
        loss: (outputs, labels) -> (n,), the loss of every example.
        peers: (p,), global ids of this rank's peers, ascending.
        examples: their training examples.
        padded: (p,), how wide each peer's batches are padded when peers train together; not a
            matter of the ranks.
        classes: number of labels; 0 where labels are no classes.
        scale, shift: float(x) * scale + shift is what the model sees; they carry the dtype and the
            device of it all.
        solver: how a peer trains.
        seed: the run's seed.
        kinds: where peers have models of several kinds, each with the layout of its rows, which all
            begin with the same shared coordinates: peer i has the kind i mod their number, and rows
            are as long as the longest.
        augment: what becomes of training examples before a peer learns from them.
        objective: what a step descends besides the loss, if anything.
        spent: (P,) seconds that this rank's peers have trained, to which training adds; None where
            nobody measures it.
    """

    module: Module
    parameter_layout: ParameterLayout
    loss: Loss
    peers: Ints
    examples: Examples
    padded: Ints
    classes: int
    scale: Tensor
    shift: Tensor
    solver: Solver
    seed: int
    kinds: tuple[tuple[Module, ParameterLayout], ...] = ()
    augment: Augment = AS_THEY_ARE
    objective: Objective | None = None
    spent: NDArray[np.float64] | None = None

    def parts(self) -> Iterator[tuple[Ints, Self]]:
        """The peers of every kind, by their positions on this rank, and their problem."""
        for k, (module, parameter_layout) in enumerate(self.kinds):
            here = np.flatnonzero(self.peers % len(self.kinds) == k)
            yield (
                here,
                replace(
                    self.only(here), module=module, parameter_layout=parameter_layout, kinds=()
                ),
            )

    def only(self, here: Ints, work: Ints | None = None) -> Self:
        """The problem of some of the peers.

        Args:
            here: (a,) their positions on this rank, ascending.
            work: (a,) their epochs, or their steps where steps are counted; those of the solver
                where not given.
        """
        examples, solver = self.examples, self.solver
        examples = examples.only(here)
        cut = {name: _cut(getattr(solver, name), here) for name in ("epochs", "steps", "most")}
        solver = replace(solver, **cut)
        if work is not None:
            solver = (
                replace(solver, steps=work)
                if np.any(solver.steps)
                else replace(solver, epochs=work)
            )
        return replace(
            self, peers=self.peers[here], examples=examples, padded=self.padded[here], solver=solver
        )

    def paced(self, share: NDArray[np.float64] | None) -> Self:
        """Return the same problem with fewer local steps for some peers.

        Args:
            share: (p,) share of its steps that each peer does, but one step at least if it is not
                0; None for all.
        """
        if share is None:
            return self
        most = np.maximum(np.rint(share * self.steps), share > 0).astype(np.int64)
        return replace(self, solver=replace(self.solver, most=most))

    @property
    def dtype(self) -> torch.dtype:
        """Of the models."""
        return self.scale.dtype

    @property
    def device(self) -> torch.device:
        """Where the models and the examples are."""
        return self.scale.device

    @cached_property
    def dense(self) -> tuple[Dense, ...]:
        """The layers of the model if it is a plain stack of dense ones, else nothing."""
        return dense_layers(self.module, self.examples.inputs.shape[1:])

    @cached_property
    def dropouts(self) -> dict[str, Dropout]:
        """The layers of the model that leave units out, by name."""
        from dfl.models.layers import dropouts

        return dropouts(self.module)

    @property
    def _one_thread(self) -> bool:
        return self.device.type == "cpu" and torch.get_num_threads() == 1

    @cached_property
    def alone(self) -> bool:
        """Whether a peer that trains alone gets the very numbers that it would among others.

        On one thread torch's batched products of one matrix are bit-equal to those of several,
        unless a dimension is one, when a product becomes one of a matrix and a vector; so it was on
        700 shapes, and in the layout tests.
        """
        widths = [
            n
            for layer in self.dense
            for n in self.parameter_layout.shapes[self.parameter_layout.names.index(layer.weight)]
        ]
        return bool(widths) and min(*widths, *self.padded) > 1 and self._one_thread

    def inputs(self, raw: Tensor) -> Tensor:
        """What the model sees of examples: float(x) * scale + shift, unless they were floats and
        set-up has done it.
        """
        return raw if raw.is_floating_point() else normal(raw, self.scale, self.shift)

    @cached_property
    def zero(self) -> Tensor:
        """What a raw number of zero is among the training examples."""
        inputs = self.examples.inputs
        return self.shift if inputs.is_floating_point() else inputs.new_zeros(())

    @cached_property
    def turns(self) -> tuple[tuple[str, ...], ...]:
        """The parameters that move together in a local step, turn by turn; without an adversary
        there is one turn.
        """
        return (
            self.objective.turns(self.parameter_layout.names)
            if self.objective
            else (self.parameter_layout.names,)
        )

    def outputs(
        self, parameters: dict[str, Tensor], inputs: Tensor, each: bool = True, part: str = ""
    ) -> Tensor:
        """What models say.

        A lone model is computed twice in a batch of its own, for the reason that
        `dfl.training.batches.groups` gives.

        Args:
            parameters: name -> (a, *shape), one model per row.
            inputs: (a, n, *shape), each model's own; or (n, *shape), the same for all.
            each: whether inputs are each model's own.
            part: of which part of the models, where they were taken apart.

        Returns:
            (a, n, ...).
        """
        a = len(next(iter(parameters.values())))
        say = partial(self.output, part=part) if part else self.output
        if not self.solver.batched:
            rows = ({name: value[i] for name, value in parameters.items()} for i in range(a))
            return torch.stack(
                [say(row, inputs[i] if each else inputs) for i, row in enumerate(rows)]
            )
        if a == 1:
            parameters = {
                name: value.expand(2, *value.shape[1:]) for name, value in parameters.items()
            }
            inputs = inputs.expand(2, *inputs.shape[1:]) if each else inputs
        out: Tensor = torch.func.vmap(say, in_dims=(0, 0 if each else None))(parameters, inputs)
        return out[:a]

    def output(self, parameters: dict[str, Tensor], inputs: Tensor, part: str = "") -> Tensor:
        """What one model, or a part of it, says of inputs (n, *shape), (n, ...)."""
        out: Tensor = torch.func.functional_call(
            self.module, parameters, (inputs, part) if part else (inputs,)
        )
        return out

    @cached_property
    def steps(self) -> Ints:
        """(p,), the local steps of this round."""
        asked, most = self.solver.steps_for(self.examples.sizes), self.solver.most
        return asked if most is None else np.minimum(asked, most)

    @cached_property
    def width(self) -> Ints:
        """(p,), examples in a peer's full batch."""
        sizes = self.examples.sizes
        return np.full_like(sizes, self.solver.batch_size) if self.solver.batch_size else sizes

    @cached_property
    def per_epoch(self) -> Ints:
        """(p,), batches in one pass over a peer's own data."""
        return -(-self.examples.sizes // self.width)
