"""Transport: rows of tensors between ranks, by plan, and turned from rows of peers into columns.

Messages are not copied on a rank where MPI can take them from where they lie, and those that arrive
are written to memory that is used again: memory that is new costs more than to send what it holds.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.core.layout import Group, columns
from dfl.core.profiling import in_phase
from dfl.robust.aggregators import Rows, Updates

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.comm.mpi import Datatype, Link, World
else:
    from dfl.core.lazy import torch


class Route(NamedTuple):
    """Where the messages of a plan lie, for messages of one width.

    Attributes:
        gather: positions of the messages to put together before they leave; None where MPI takes
            them from where they lie.
        leaving, arriving: for each other rank the type of its messages in the memory of all.
        rows: messages that arrive.
    """

    gather: Tensor | None
    leaving: list[Datatype]
    arriving: list[Datatype]
    rows: int


LINKS = 64
"""The communicators that are kept, of the plans used last."""
RUNS = 16
"""The most runs of messages for another rank that MPI takes from where they lie. A library takes
longer for many of them than a copy does.
"""


class Inbox:
    """Memory for messages that arrive, which is used again once nothing refers to those before."""

    def __init__(self) -> None:
        self._memory = np.zeros(0, np.uint8)
        self._lent: weakref.ref[NDArray[np.uint8]] | None = None

    def lend(self, rows: int, width: int) -> Tensor:
        """Return memory for messages, (rows, width) uint8."""
        size = rows * width
        if self._lent and self._lent() is not None:
            return torch.empty((rows, width), dtype=torch.uint8)
        if len(self._memory) < size:
            self._memory = np.zeros(0, np.uint8)  # freed first
            self._memory = np.empty(size, np.uint8)  # in large pages, unlike a tensor
        lent = self._memory[:size].reshape(rows, width)
        self._lent = weakref.ref(lent)  # a tensor of this memory, and its views, keep this array
        return torch.from_numpy(lent)


@dataclass(frozen=True)
class Lane:
    """What is kept of a plan.

    Attributes:
        send: `Plan.send`, by whose identity the plan is known; kept, so that no other has it.
        link: the communicator.
        routes: the routes of messages, by their width.
    """

    send: NDArray[np.int64]
    link: Link
    routes: dict[int, Route] = field(default_factory=dict)


class Transport:
    """Moves rows between the ranks of a job.

    Attributes:
        world: the ranks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._lanes: OrderedDict[int, Lane] = OrderedDict()
        self._inbox = Inbox()

    def lane(self, plan: PeerPlan | EdgePlan) -> Lane:
        """Return the communicator and the routes of a plan, made at its first use.

        Faults do not change it. All ranks use the same plans in the same order, so they make and
        free the same communicators.
        """
        key = id(plan.send)
        if key not in self._lanes:
            self._lanes[key] = Lane(plan.send, self.world.link(plan.sends, plan.receives))
            if len(self._lanes) > LINKS:
                _free(self._lanes.popitem(last=False)[1])
        self._lanes.move_to_end(key)
        return self._lanes[key]

    @in_phase("send")
    def carry(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Tensor:
        """Exchange messages between ranks.

        Args:
            plan: which messages go to which rank.
            messages: (q, B), those of this rank. They leave their device at most once.

        Returns:
            (q', B), the messages from other ranks.
        """
        if self.world.size == 1:
            return messages[:0]
        lane = self.lane(plan)
        route = lane.routes.get(messages.shape[1]) or self._add_route(lane, plan, messages)
        if route.gather is not None:
            leaving = messages.index_select(0, route.gather.to(messages.device))
        else:
            leaving = messages.contiguous()
        kind = messages.device.type
        if not self.world.reads(kind):
            leaving = leaving.cpu()
        elif kind == "cuda":
            torch.cuda.synchronize(leaving.device)  # MPI does not wait for its computation
        if leaving.device.type == "cpu":
            arriving = self._inbox.lend(route.rows, messages.shape[1])
        else:
            arriving = leaving.new_empty((route.rows, messages.shape[1]))
        self.world.exchange(
            lane.link, (_memory(leaving), route.leaving), (_memory(arriving), route.arriving)
        )
        return arriving if kind == "cpu" else arriving.to(messages.device)

    def _add_route(self, lane: Lane, plan: PeerPlan | EdgePlan, messages: Tensor) -> Route:
        """Return the route of messages of this width, and keep it."""
        width = messages.shape[1]
        in_place = messages.device.type == "cpu" and plan.most_runs <= RUNS
        runs = plan.runs if in_place else _one_after_another(plan.sends)
        leaving, arriving = (
            [self.world.rows_type(each, width) for each in of]
            for of in (runs, _one_after_another(plan.receives))
        )
        route = lane.routes[width] = Route(
            None if in_place else torch.from_numpy(plan.send),
            leaving,
            arriving,
            rows=sum(plan.receives.values()),
        )
        return route

    @in_phase("send")
    def to_columns(
        self,
        rows: Tensor,
        group: Group,
        weights: NDArray[np.float64],
        reference: Tensor | None = None,
    ) -> Updates:
        """Return the rows of all members of a group in the coordinates of this rank.

        Args:
            rows: (a, m), those of the members on this rank.
            group: the senders.
            weights: (k,), the weight of each sender, adding up to 1.
            reference: (1, m), the receiver's own row, where it has one.
        """
        cut = columns(rows.shape[1], self.world.size)
        rank = self.world.rank
        mine = slice(cut[rank].start, cut[rank].stop)
        return Updates(
            group.ascending(self.world.columns(rows.cpu().numpy(), cut, group.counts)),
            weights,
            None if reference is None else reference[0, mine].cpu().numpy(),
            lambda parts: np.add.reduce(self.world.all_gather(parts), axis=0),
        )

    @in_phase("send")
    def to_rows(self, columns_here: Rows, like: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of this rank; the inverse of `to_columns`.

        Args:
            columns_here: (k, c), the coordinates of this rank, rank by rank of the rows.
            like: (..., m), a tensor of the rows' dtype and device.
            counts: rows on each rank.
        """
        cut = columns(like.shape[1], self.world.size)
        dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
        rows = self.world.rows(columns_here.astype(dtype), cut, counts)
        return torch.from_numpy(rows).to(like.device)

    def close(self) -> None:
        """Free the communicators, on all ranks at a time."""
        for lane in self._lanes.values():
            _free(lane)
        self._lanes.clear()


def _free(lane: Lane) -> None:
    """Free the communicator and the types of a plan, on all ranks at a time."""
    for route in lane.routes.values():
        for each in (*route.leaving, *route.arriving):
            each.Free()
    if lane.link is not None:
        lane.link.Free()


def _memory(messages: Tensor) -> NDArray[np.uint8] | Tensor:
    """Return the bytes of messages as MPI takes them."""
    return messages.numpy() if messages.device.type == "cpu" else messages


def _one_after_another(counts: dict[int, int]) -> list[list[range]]:
    """Return the rows of every other rank, where those of one lie after those of another."""
    ends = accumulate(counts.values())
    return [[range(end - n, end)] for end, n in zip(ends, counts.values(), strict=True)]
