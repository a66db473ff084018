"""Groups of peers that train together, and their batches.

In every epoch a peer goes through its examples in a random order, addressed by seed, peer, round
and epoch. The last batch of an epoch holds the examples that are left.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.parts import numbers_of
from dfl.core.rows import filled
from dfl.training.batch import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.training.problem import Problem
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]

GROUP_NUMBERS = {"cpu": 2**19, "cuda": 2**25}
"""The most parameters, or numbers of a batch or of a layer's outputs for it, of a group, by kind of
device.

They fit into the cache of a processor, and keep all of a GPU busy.
"""


def widths(sizes: Ints, batch_size: int) -> Ints:
    """Return the width (P,) to which the batches of every peer are padded.

    It depends on the peer's own number of examples and on the largest number. A full batch
    (`batch_size` 0) is padded to a power of two or to the largest number, so that peers with few
    examples do not pay for those with many, and still train together.

    Args:
        sizes: (P,), training examples of every peer.
        batch_size: examples per step; 0 for all that a peer has.
    """
    if batch_size:
        return np.full_like(sizes, min(batch_size, int(sizes.max())))
    powers: Ints = 2 ** np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    capped: Ints = np.minimum(powers, sizes.max())
    return capped


def groups(problem: Problem) -> list[Ints]:
    """Return the groups of peers that train together, by falling number of steps.

    A group holds positions of peers on this rank. Without batched training every peer is a group.

    Batched products of one matrix and of several may round differently, and a peer's numbers must
    not depend on the other peers of its rank. So a group has two peers at every step: a peer that
    would go on alone trains beside a duplicate of itself, unless `Problem.bit_equal_alone`. On a
    GPU, where products of three and of four matrices differ too, all groups have the solver's
    `group_size`; one of fewer peers begins with duplicates.
    """
    steps, padded = problem.steps, problem.padded
    order = np.lexsort((-problem.per_epoch, -steps, -padded))
    if not problem.solver.batched:
        return list(order[:, None])
    if not len(order):
        return []
    size = problem.solver.group_size
    found: list[Ints] = []
    for same_width in np.split(order, np.flatnonzero(np.diff(padded[order])) + 1):
        most = size or most_together(problem, int(padded[same_width[0]]))
        found += np.split(same_width, range(most, len(same_width), most))
    if size:
        return [np.pad(group, (size - len(group), 0), mode="edge") for group in found]
    if problem.bit_equal_alone:
        return found
    return [
        np.insert(group, 0, group[0]) if _first_goes_on(steps[group]) else group for group in found
    ]


def most_together(problem: Problem, width: int) -> int:
    """Return the most peers of a group with batches of a width, at least two."""
    capacity = GROUP_NUMBERS.get(problem.device.type, GROUP_NUMBERS["cpu"])
    example = max(
        numbers_of(problem.examples.inputs), problem.layer_numbers, problem.recurrent_states
    )
    return max(2, capacity // max(problem.parameter_layout.d, width * example))


def group_size(peers: int, most: int) -> int:
    """Return the size of groups of equal size, at most `most`, that hold some peers."""
    return -(-peers // -(-peers // most))


def _first_goes_on(steps: Ints) -> bool:
    """Return whether the first peer of a group has more steps than all others."""
    return len(steps) == 1 or bool(steps[0] > steps[1])


def batches(problem: Problem, t: int, group: Ints) -> Iterator[Batch]:
    """Yield the batches of a group in round t, step by step.

    Peers that have done their steps leave it from the end. In a group of fixed size they train
    on, with the examples of the first peer, and what they train is discarded.

    Args:
        problem: the problem.
        t: the round.
        group: (a,) positions of peers on this rank, as `groups` returns them.
    """
    sizes, width = problem.examples.sizes[group], problem.width[group]
    per_epoch, steps = problem.per_epoch[group], problem.steps[group]
    same = all(np.ptp(each) == 0 for each in (sizes, width, steps))
    padded = int(problem.padded[group[0]])
    peers = problem.peers[group]
    orders = _Orders(problem, t, group)

    @cache
    def equal(count: int) -> Tensor:
        return torch.full((1, count), 1 / count, dtype=problem.dtype, device=problem.device)

    every_step = np.arange(steps[0])[:, None]
    moving = np.count_nonzero(steps > every_step, axis=1).tolist()
    epochs, number = np.divmod(every_step, per_epoch)
    first = number * width
    counts = np.minimum(sizes - first, width)
    for k, a in enumerate(moving):
        if same and (counts[k, 0] == padded or not problem.solver.batched):
            epoch, begin, count = (int(each[k, 0]) for each in (epochs, first, counts))
            index, weight = orders.of(epoch, epoch)[0, :, begin : begin + count], equal(count)
        else:
            own = epochs[k, :a]
            low, high = int(own.min()), int(own.max())
            drawn = orders.of(low, high)
            index, weight = _padded(drawn, own - low, first[k, :a], counts[k, :a], padded)
            weight = weight.to(problem.dtype)
        taking = peers[:a]
        if problem.solver.group_size and a < len(group):
            index, weight = (filled(each, len(group)) for each in (index, weight))
            taking = np.pad(taking, (0, len(group) - a), constant_values=taking[0])
        yield Batch(index, weight, problem.seed, taking, t, k, a)


class _Orders:
    """The orders in which a group goes through its examples.

    An order is drawn when its epoch begins, and dropped when all peers have finished the epoch.
    """

    def __init__(self, problem: Problem, t: int, group: Ints) -> None:
        self.address = (problem.seed, "order", problem.peers[group], t)
        self.sizes = problem.examples.sizes[group]
        self.device = problem.device
        self.starts = torch.from_numpy(problem.examples.starts[group, None]).to(problem.device)
        self.first = 0
        self.drawn = torch.empty(0)

    def of(self, low: int, high: int) -> Tensor:
        """Return the orders of some epochs, from the earliest to the latest, as positions
        (epochs, a, n) among the rank's examples.
        """
        if (low, high) != (self.first, self.first + len(self.drawn) - 1):
            kept = list(self.drawn[low - self.first :])
            new = [
                randomness.permutations(
                    *self.address, e, sizes=self.sizes, device=self.device
                ).add_(self.starts)
                for e in range(low + len(kept), high + 1)
            ]
            self.first = low
            self.drawn = torch.stack([*kept, *new])
        return self.drawn


def _padded(
    orders: Tensor, epoch: Ints, first: Ints, counts: Ints, b: int
) -> tuple[Tensor, Tensor]:
    """Return batches of unequal length, padded to b examples.

    Args:
        orders: (epochs, peers, n), the orders of the examples.
        epoch: (a,), the epoch of each peer, as an index of `orders`.
        first: (a,), where its batch begins in that order.
        counts: (a,), the number of its examples in the batch.
        b: the width.

    Returns:
        Positions (a, b) of examples, on padding that of the batch's first, and weights (a, b).
    """
    _, peers, longest = orders.shape
    real = np.arange(b) < counts[:, None]
    place = first[:, None] + np.arange(b) * real
    flat = (epoch * peers + np.arange(len(counts)))[:, None] * longest + place
    weight = torch.from_numpy(real / counts[:, None]).to(orders.device)
    return orders.take(torch.from_numpy(flat).to(orders.device)), weight
