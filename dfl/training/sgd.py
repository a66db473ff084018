"""Local training: heavy-ball SGD of every peer of a rank on its own examples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dfl.core import profiling
from dfl.core.rows import flat_rows
from dfl.training.batch import Batch
from dfl.training.batches import batches, groups
from dfl.training.capture import captured_tensors, take_captured
from dfl.training.gradients import update_velocity
from dfl.training.problem import Parameters, Problem, Step

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Models = tuple[Parameters, Parameters, Parameters, Parameters]
"""Of the peers of a group, name -> (a, *shape) each: velocities v; models y; the shared parameters
where the round began, empty without a proximal term; and η c, empty without a correction.
"""
NO_GRADIENT = 1e-12
"""The norm below which a gradient is taken to have this norm."""


def sgd(x: Tensor, problem: Problem, t: int, correction: Tensor | None = None) -> Tensor:
    """K_i local steps of heavy-ball SGD from x, with a fresh momentum in every round.

        y^{k+1} = y^k - η g^k + θ (y^k - y^{k-1}),   y^0 = y^{-1} = x
        g^k = ∇f(y^k) + λ y^k + μ (y^k - x) + c

    (Sun, Li, Wang 2023, Algorithm 1; the same as torch's SGD with a new buffer and no dampening.
    The term with μ is that of FedProx, Li et al. 2020, eq. 2, on the shared parameters; c is a
    method's own. With ρ > 0, ∇f + λ y is taken at y + ρ g / ||g||; see `_ascended`.)

    Args:
        x: (p, d), where each peer starts.
        problem: the problem, whose solver has η, θ, λ, μ, ρ, batch size and K.
        t: the round, part of the address of the random order of the examples.
        correction: (p, d), c; None for 0.

    Returns:
        (p, d), z = y^K; x is not changed.
    """
    return _descend(x, None, problem, t, correction)[0]


def sgd_with_momentum(
    x: Tensor, momentum: Tensor, problem: Problem, t: int, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """K_i local steps as `sgd` takes them, from x and a momentum that has been kept.

        m^{k+1} = θ m^k + g^k,   y^{k+1} = y^k - η m^{k+1}

    m is in the unit of a gradient, so a learning rate that changes does not rescale it.

    Args:
        x: (p, d), where each peer starts.
        momentum: (p, d), m^0.
        problem: the problem.
        t: the round.
        correction: (p, d), c; None for 0.

    Returns:
        (p, d), z = y^K; and (p, d), m^K.
    """
    return _descend(x, momentum, problem, t, correction)


def _descend(
    x: Tensor, momentum: Tensor | None, problem: Problem, t: int, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return z, and m^K; where no momentum is kept, the latter is not defined.

    Steps are taken with the velocity v = -η m, or -m in a round in which η is 0.
    """
    if problem.kinds:
        return _by_kind(x, momentum, problem, t, correction)
    z = torch.empty_like(x)
    layout, rate = problem.parameter_layout, problem.solver.lr(t)
    unit = rate or 1.0
    kept = z if momentum is None else torch.empty_like(x)
    for group in groups(problem):
        begun = time.perf_counter()
        y = layout.take(x, group)
        if momentum is None:
            v = {name: torch.zeros_like(value) for name, value in y.items()}
        else:
            v = {name: m * -unit for name, m in layout.some(momentum, group).items()}
        begin = layout.some(x, group) if problem.solver.prox_mu else {}
        start = {name: value for name, value in begin.items() if name in layout.shared_parameters}
        shift = {}
        if correction is not None:
            shift = {name: c * unit for name, c in layout.some(correction, group).items()}
        take: Callable[..., None] = _step
        if problem.captures is not None:
            v, y, start, shift = captured_tensors(problem.captures, v, y, start, shift)
            take = partial(take_captured, problem.captures, _step)
        trained = _Group((v, y, start, shift))
        for step in profiling.each("batches", _steps(problem, t, group)):
            trained.leave(step.batch)
            take(trained.computed, step, unit, moves=rate > 0)
        trained.end()
        layout.put(y, z, group)
        if momentum is not None:
            layout.put({name: value.div_(-unit) for name, value in v.items()}, kept, group)
        if problem.train_seconds is not None:
            _add_seconds(problem.train_seconds, problem, group, begun)
    return z, kept


class _Group:
    """The models of a group that trains.

    Attributes:
        computed: those of the peers for which a step is computed.
    """

    def __init__(self, models: Models) -> None:
        self.computed: Models = models
        self._whole = models[:2]
        self._moving = len(next(iter(models[1].values()), ()))
        self._done: list[tuple[slice, list[Parameters]]] = []

    def leave(self, batch: Batch) -> None:
        """Leave out the peers that do not take the step of a batch. In a group of fixed size it is
        computed for them, too, and their models and velocities are put aside.
        """
        a, before = batch.moving, self._moving
        self._moving = a
        if a == before:
            return
        if a == len(batch.index):
            v, y, start, shift = self.computed
            self.computed = (_first(a, v), _first(a, y), _first(a, start), _first(a, shift))
            return
        rows = slice(a, before)
        copies = [
            {name: value[rows].clone() for name, value in each.items()} for each in self._whole
        ]
        self._done.append((rows, copies))

    def end(self) -> None:
        """Put back what was put aside."""
        for rows, copies in self._done:
            for whole, done in zip(self._whole, copies, strict=True):
                for name, value in done.items():
                    whole[name][rows] = value


def _steps(problem: Problem, t: int, group: NDArray[np.int64]) -> Iterator[Step]:
    """Yield the examples of the local steps of a group in round t."""
    for batch in batches(problem, t, group):
        yield Step.of(problem, batch)


def _add_seconds(
    train_seconds: NDArray[np.float64], problem: Problem, group: NDArray[np.int64], begun: float
) -> None:
    """Add the seconds since `begun`, in equal shares, to the peers of a group."""
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    peers = np.unique(problem.peers[group])
    train_seconds[peers] += (time.perf_counter() - begun) / len(peers)


def _by_kind(
    x: Tensor, momentum: Tensor | None, problem: Problem, t: int, correction: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `_descend` for models of several kinds; rows are zero after the end of a shorter."""
    z, kept = torch.zeros_like(x), torch.zeros_like(x)
    for here, same_kind in problem.by_kind():
        d = same_kind.parameter_layout.d
        m, c = (each if each is None else each[here, :d] for each in (momentum, correction))
        z[here, :d], kept[here, :d] = _descend(x[here, :d], m, same_kind, t, c)
    return z, kept


def _step(models: Models, step: Step, rate: float | Tensor, *, moves: bool) -> None:
    """Take one local step, turn by turn; in a turn only its own parameters and velocities change.

    Args:
        models: velocities and models, which are overwritten, and what belongs to them.
        step: the examples, and their problem.
        rate: η.
        moves: whether models move by the velocities.
    """
    v, y, start, shift = models
    solver = step.problem.solver
    for names in step.problem.turns:
        moving = {name: v[name] for name in names}
        with profiling.phase("forward and backward"):
            at = _ascended(y, names, step) if solver.sam_rho else y
            update_velocity(moving, at, step, rate)
        with profiling.phase("update"):
            _proximal(moving, y, start, rate * solver.prox_mu)
            _move(y, moving, shift, moves=moves)


def _ascended(y: Parameters, names: Sequence[str], step: Step) -> Parameters:
    """Return models y + ρ g / ||g||, where g is the gradient of a turn at y, over its parameters
    (Foret et al. 2021, eq. 2).

    The gradient is that of the same batch, weight decay included. Running statistics stay those of
    the batch at y.
    """
    g = {name: torch.zeros_like(y[name]) for name in names}
    update_velocity(g, y, step, -1.0)
    norms = torch.stack([torch.linalg.vector_norm(flat_rows(each), dim=1) for each in g.values()])
    factor = step.problem.solver.sam_rho / norms.square_().sum(0).sqrt_().clamp_min_(NO_GRADIENT)
    statistics = {name: y[name].clone() for name in step.problem.parameter_layout.statistics}
    ascended = {
        name: each.mul_(factor.view(-1, *[1] * (each.dim() - 1))).add_(y[name])
        for name, each in g.items()
    }
    return y | statistics | ascended


def _proximal(v: Parameters, y: Parameters, start: Parameters, factor: float | Tensor) -> None:
    """v <- v - η μ (y - x), for the parameters in `start`."""
    for name in v.keys() & start.keys():
        v[name].sub_((y[name] - start[name]) * factor)


def _move(y: Parameters, v: Parameters, shift: Parameters, *, moves: bool) -> None:
    """v <- v - η c, where there is a correction; y <- y + v, where models move.

    Args:
        y: models, name -> (a, *shape); overwritten.
        v: velocities of some of the parameters; overwritten.
        shift: η c of all parameters; empty without a correction.
        moves: whether models move by the velocities.
    """
    models, velocities = [y[name] for name in v], list(v.values())
    corrections = [shift[name] for name in v] if shift else []
    if corrections and moves:
        # Both in one pass over the models: v <- 1 v - ηc and y <- y + 1 v.
        torch._fused_sgd_(
            models, corrections, velocities, weight_decay=0.0, momentum=1.0, lr=-1.0,
            dampening=0.0, nesterov=False, maximize=True, is_first_step=False,
        )  # fmt: skip
    elif corrections:
        torch._foreach_sub_(velocities, corrections)
    elif moves and models:
        torch._foreach_add_(models, velocities)


def _first(a: int, values: Parameters) -> Parameters:
    """Return the parameters of the first a peers of a group; the others have done their steps."""
    return {name: value[:a] for name, value in values.items()}
