"""Which examples make a batch, and which peers take it together?

Every epoch of every peer goes through its own examples in a random order of its own address; the last batch of an
epoch holds what is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl import keys

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.task import Task
else:
    from dfl.lazy import torch

Ints = NDArray[np.int64]

LANES = 2**19
"""Parameters, or numbers of a batch, of the peers that train together: bounds memory, and fits the cache."""


@dataclass(frozen=True)
class Batch:
    """One local step of the first a peers of a group, those that still have one to do.

    Attributes:
        index: (a, b) int64 into the rank's examples; places behind a peer's own are padding.
        weight: (a, b) of an example in its peer's mean loss, 0 on padding; (1, b) where it is the same for all.
    """

    index: Tensor
    weight: Tensor


def widths(sizes: Ints, batch_size: int) -> Ints:
    """How wide the batches of every peer are padded, (P,), from its own number of examples and the largest.

    A batch of everything is padded to a power of two or to the largest, so that peers with few examples do not pay
    for those with many, and still train together.
    """
    if batch_size:
        return np.full_like(sizes, min(batch_size, int(sizes.max())))
    powers: Ints = 2 ** np.ceil(np.log2(np.maximum(sizes, 1))).astype(np.int64)
    capped: Ints = np.minimum(powers, sizes.max())
    return capped


def groups(task: Task) -> list[Ints]:
    """Positions of the peers that train together, by falling number of steps; every peer alone if not batched.

    Batched products of one matrix and of several may round differently, and a peer's numbers must not depend on who
    shares its rank. So a group has two peers at every step: where one goes on alone, it trains beside its double,
    unless `Task.alone` says that there is no need.
    """
    steps, wide = task.steps, task.wide
    order = np.lexsort((-steps, -wide))
    if not task.solver.batched:
        return list(order[:, None])
    parts = []
    for members in np.split(order, np.flatnonzero(np.diff(wide[order])) + 1) if len(order) else ():
        each = max(task.spec.d, int(wide[members[0]]) * task.train.inputs[:1].numel())
        parts += np.split(members, range(max(2, LANES // each), len(members), max(2, LANES // each)))
    return parts if task.alone else [np.insert(part, 0, part[0]) if _goes_on(steps[part]) else part for part in parts]


def _goes_on(steps: Ints) -> bool:
    """Whether the first peer of a group takes steps after all others have done theirs."""
    return len(steps) == 1 or bool(steps[0] > steps[1])


def batches(task: Task, t: int, lanes: Ints) -> Iterator[Batch]:
    """The batches of a group in round t, step by step. Peers that have done their steps leave it from behind.

    Args:
        task: the problem.
        t: the round.
        lanes: (a,) positions of the peers on this rank, as `groups` puts them together.
    """
    sizes, width, per_epoch, steps = (
        each[lanes] for each in (task.train.sizes, task.width, task.per_epoch, task.steps)
    )
    alike = all(np.ptp(each) == 0 for each in (sizes, width, steps))
    starts = torch.from_numpy(task.train.starts[lanes, None]).to(task.device)
    orders = _orders(task, t, lanes, int((-(-steps // per_epoch)).max()))
    wide = int(task.wide[lanes[0]])
    for k in range(int(steps[0])):
        epoch, first = k // int(per_epoch[0]), k % int(per_epoch[0]) * int(width[0])
        count = min(int(width[0]), int(sizes[0]) - first)
        if alike and (count == wide or not task.solver.batched):
            weight = torch.full((1, count), 1 / count, dtype=task.dtype, device=task.device)
            yield Batch(starts + orders[epoch, :, first : first + count], weight)
        else:
            a = int(np.count_nonzero(steps > k))
            epochs, slot = np.divmod(k, per_epoch[:a])
            own, weight = _padded(orders, (epochs, slot * width[:a]), (sizes[:a], width[:a]), wide)
            yield Batch(starts[:a] + own, weight.to(task.dtype))


def _orders(task: Task, t: int, lanes: Ints, epochs: int) -> Tensor:
    """(epochs, a, n): every peer's examples in a new order for every epoch."""
    peers, sizes = task.peers.start + lanes, task.train.sizes[lanes]
    return torch.stack(
        [
            keys.permutations(task.seed, "order", peers, t, epoch, sizes=sizes, device=task.device)
            for epoch in range(epochs)
        ]
    )


def _padded(orders: Tensor, begin: tuple[Ints, Ints], size: tuple[Ints, Ints], b: int) -> tuple[Tensor, Tensor]:
    """Batches of unequal length: places (a, b) among each peer's examples, 0 behind its own, and weights (a, b)."""
    (epoch, first), (_, lanes, longest), (sizes, width) = begin, orders.shape, size
    counts = np.minimum(sizes - first, width)
    real = np.arange(b) < counts[:, None]
    place = np.minimum(first[:, None] + np.arange(b), longest - 1)
    flat = ((epoch * lanes + np.arange(len(counts)))[:, None]) * longest + place
    mask, weight = torch.from_numpy(real).to(orders.device), torch.from_numpy(real / counts[:, None])
    return orders.take(torch.from_numpy(flat).to(orders.device)) * mask, weight.to(orders.device)
