"""How does a peer train alone? Heavy-ball SGD on its own examples, for all peers of a rank."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from dfl.training.batch import Batch
from dfl.training.batches import batches, groups
from dfl.training.gradients import accelerate
from dfl.training.problem import Parameters, Problem

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
else:
    from dfl.core.lazy import torch


def sgd(x: Tensor, problem: Problem, t: int) -> Tensor:
    """K_i local steps of heavy-ball SGD from x, with a fresh momentum in every round.

        y^{k+1} = y^k - η (∇f(y^k) + λ y^k + μ (y^k - x)) + θ (y^k - y^{k-1}),   y^0 = y^{-1} = x

    (Sun, Li, Wang 2023, Algorithm 1; the same as torch's SGD with a new buffer and no dampening.
    The term of μ is that of FedProx, Li et al. 2020, eq. 2; it holds on to what is shared.)

    Args:
        x: (p, d), where each peer starts.
        problem: the problem; its solver says η, θ, λ, μ, batch size and K.
        t: the round, which addresses the order of the examples.

    Returns:
        (p, d), z = y^K; x is left as it was.
    """
    if problem.kinds:
        return _by_kind(x, problem, t)
    z, rate = torch.empty_like(x), problem.solver.lr(t)
    for lanes in groups(problem):
        begun = time.perf_counter()
        whole = y = problem.parameter_layout.take(x, lanes)
        v = {name: torch.zeros_like(value) for name, value in y.items()}
        start = problem.parameter_layout.take(x, lanes) if problem.solver.prox_mu else {}
        origin = {
            name: value for name, value in start.items() if name in problem.parameter_layout.common
        }
        for batch in batches(problem, t, lanes):
            y, v, origin = (_first(len(batch.index), values) for values in (y, v, origin))
            _step((v, y, origin), problem, batch, rate)
        problem.parameter_layout.put(whole, z, lanes)
        if problem.spent is not None:
            _note(problem.spent, problem, lanes, begun)
    return z


def _note(
    spent: NDArray[np.float64], problem: Problem, lanes: NDArray[np.int64], begun: float
) -> None:
    """Share the seconds since `begun` among the peers that trained together."""
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)
    who = np.unique(problem.peers[lanes])
    spent[who] += (time.perf_counter() - begun) / len(who)


def _by_kind(x: Tensor, problem: Problem, t: int) -> Tensor:
    """`sgd` for models of several kinds; what is behind a shorter one stays zero."""
    z = torch.zeros_like(x)
    for here, part in problem.parts():
        z[here, : part.parameter_layout.d] = sgd(x[here, : part.parameter_layout.d], part, t)
    return z


def _step(
    held: tuple[Parameters, Parameters, Parameters], problem: Problem, batch: Batch, rate: float
) -> None:
    """Move velocities and models, turn by turn; what does not move in a turn keeps its velocity,
    too.
    """
    v, y, origin = held
    for names in problem.turns:
        moving = {name: v[name] for name in names}
        accelerate(moving, y, problem, batch, rate)
        _proximal(moving, y, origin, rate * problem.solver.prox_mu)
        _move(y, moving)


def _proximal(v: Parameters, y: Parameters, origin: Parameters, factor: float) -> None:
    """v <- v - η μ (y - x), where there is something to hold on to."""
    for name in v.keys() & origin.keys():
        v[name].sub_((y[name] - origin[name]) * factor)


def _move(y: Parameters, v: Parameters) -> None:
    for name, velocity in v.items():
        y[name].add_(velocity)


def _first(a: int, values: Parameters) -> Parameters:
    """The first a peers of a group: the others have done their steps."""
    return {name: value if len(value) == a else value[:a] for name, value in values.items()}
