"""Which examples make a batch, and which peers take it together?

Every epoch of every peer goes through its own examples in a random order of its own address; the
last batch of an epoch holds what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.training.batch import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.training.problem import Problem
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]

ROOM = {"cpu": 2**19, "cuda": 2**28}
"""Parameters, or numbers of a batch, of the peers that train together, by kind of device: what fits
into the cache of a processor, and what is a small part of a GPU's memory.
"""


def widths(sizes: Ints, batch_size: int) -> Ints:
    """How wide the batches of every peer are padded, (P,), from its own number of examples and the
    largest.

    A batch of everything is padded to a power of two or to the largest, so that peers with few
    examples do not pay for those with many, and still train together.
    """
    if batch_size:
        return np.full_like(sizes, min(batch_size, int(sizes.max())))
    powers: Ints = 2 ** np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    capped: Ints = np.minimum(powers, sizes.max())
    return capped


def groups(problem: Problem) -> list[Ints]:
    """Positions of the peers that train together, by falling number of steps; every peer alone if
    not batched.

    Batched products of one matrix and of several may round differently, and a peer's numbers must
    not depend on who shares its rank. So a group has two peers at every step: where one goes on
    alone, it trains beside its double, unless `Problem.alone` says that there is no need.
    """
    steps, padded = problem.steps, problem.padded
    order = np.lexsort((-problem.per_epoch, -steps, -padded))
    if not problem.solver.batched:
        return list(order[:, None])
    parts = []
    for members in (
        np.split(order, np.flatnonzero(np.diff(padded[order])) + 1) if len(order) else ()
    ):
        each = max(
            problem.parameter_layout.d,
            int(padded[members[0]]) * problem.examples.inputs[:1].numel(),
        )
        many = max(2, ROOM.get(problem.device.type, ROOM["cpu"]) // each)
        parts += np.split(members, range(many, len(members), many))
    return (
        parts
        if problem.alone
        else [np.insert(part, 0, part[0]) if _goes_on(steps[part]) else part for part in parts]
    )


def _goes_on(steps: Ints) -> bool:
    """Whether the first peer of a group takes steps after all others have done theirs."""
    return len(steps) == 1 or bool(steps[0] > steps[1])


def batches(problem: Problem, t: int, lanes: Ints) -> Iterator[Batch]:
    """The batches of a group in round t, step by step. Peers that have done their steps leave it
    from behind.

    Args:
        problem: the problem.
        t: the round.
        lanes: (a,) positions of the peers on this rank, as `groups` puts them together.
    """
    sizes, width, per_epoch, steps = (
        each[lanes]
        for each in (problem.examples.sizes, problem.width, problem.per_epoch, problem.steps)
    )
    alike = all(np.ptp(each) == 0 for each in (sizes, width, steps))
    starts = torch.from_numpy(problem.examples.starts[lanes, None]).to(problem.device)
    padded, peers, orders = (
        int(problem.padded[lanes[0]]),
        problem.peers[lanes],
        _Orders(problem, t, lanes),
    )
    for k in range(int(steps[0])):
        a = int(np.count_nonzero(steps > k))
        epochs, slot = np.divmod(k, per_epoch[:a])
        first, alive = slot * width[:a], orders.of(epochs)
        counts, address = np.minimum(sizes[:a] - first, width[:a]), (problem.seed, peers[:a], t, k)
        if alike and (counts[0] == padded or not problem.solver.batched):
            begin, count = int(first[0]), int(counts[0])
            weight = torch.full((1, count), 1 / count, dtype=problem.dtype, device=problem.device)
            yield Batch(starts + alive[0, :, begin : begin + count], weight, address)
        else:
            own, weight = _padded(alive, epochs - epochs.min(), first, (counts, padded))
            yield Batch(starts[:a] + own, weight.to(problem.dtype), address)


class _Orders:
    """In which order a group goes through its examples: drawn when an epoch begins, forgotten when
    all are past it.
    """

    def __init__(self, problem: Problem, t: int, lanes: Ints) -> None:
        self.address = (problem.seed, "order", problem.peers[lanes], t)
        self.sizes, self.device = problem.examples.sizes[lanes], problem.device
        self.first, self.drawn = 0, torch.empty(0)

    def of(self, epochs: Ints) -> Tensor:
        """(epochs, a, n), those from the earliest to the latest of the epochs in which the peers
        are.
        """
        low, high = int(epochs.min()), int(epochs.max())
        if (low, high) != (self.first, self.first + len(self.drawn) - 1):
            kept = list(self.drawn[low - self.first :])
            later = range(low + len(kept), high + 1)
            new = [
                randomness.permutations(*self.address, e, sizes=self.sizes, device=self.device)
                for e in later
            ]
            self.first, self.drawn = low, torch.stack([*kept, *new])
        return self.drawn


def _padded(
    orders: Tensor, epoch: Ints, first: Ints, size: tuple[Ints, int]
) -> tuple[Tensor, Tensor]:
    """Batches of unequal length: places (a, b) among each peer's examples, 0 behind its own, and
    weights (a, b).
    """
    (counts, b), (_, lanes, longest) = size, orders.shape
    real = np.arange(b) < counts[:, None]
    place = np.minimum(first[:, None] + np.arange(b), longest - 1)
    flat = (epoch * lanes + np.arange(len(counts)))[:, None] * longest + place
    mask, weight = (
        torch.from_numpy(each).to(orders.device) for each in (real, real / counts[:, None])
    )
    return orders.take(torch.from_numpy(flat).to(orders.device)) * mask, weight
