"""Transport: rows of tensors between ranks, by plan, and turned from rows of peers into columns."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.comm.traffic import Traffic
from dfl.core.layout import Group, columns
from dfl.core.profiling import in_phase
from dfl.robust.aggregators import Rows, Updates

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.comm.mpi import Link, World
else:
    from dfl.core.lazy import torch


class Route(NamedTuple):
    """Where the messages of a plan lie, for messages of one width.

    Attributes:
        gather: positions of the messages to put together before they leave; None where they lie as
            MPI needs them.
        leaving, arriving: bytes to and from each other rank, and where they begin.
        rows: messages that arrive.
    """

    gather: Tensor | None
    leaving: tuple[list[int], list[int]]
    arriving: tuple[list[int], list[int]]
    rows: int


LINKS = 64
"""The communicators that are kept, of the plans used last."""


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
        traffic: counts the bytes that are handed to MPI.
    """

    def __init__(self, world: World, traffic: Traffic) -> None:
        self.world = world
        self.traffic = traffic
        self._lanes: OrderedDict[int, Lane] = OrderedDict()

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
            (r, B), the messages from other ranks.
        """
        if self.world.size == 1:
            return messages[:0]
        route = self._route(plan, messages)
        leaving = messages.contiguous()
        if route.gather is not None:
            leaving = leaving.index_select(0, route.gather.to(messages.device))
        if not self.world.reads(messages.device.type):
            leaving = leaving.cpu()
        elif leaving.device.type == "cuda":
            torch.cuda.synchronize(leaving.device)  # MPI does not wait for its computation
        arriving = leaving.new_empty((route.rows, messages.shape[1]))
        self.world.exchange(
            self.lane(plan).link,
            (_flat(leaving), *route.leaving),
            (_flat(arriving), *route.arriving),
        )
        self.traffic.wire += sum(route.leaving[0])
        return arriving.to(messages.device)

    def _route(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Route:
        """Return the route of messages of this width, computed once."""
        width = messages.shape[1]
        routes = self.lane(plan).routes
        if width not in routes:
            readable = self.world.reads(messages.device.type)
            sends = np.array(list(plan.sends.values()), np.int64)
            receives = np.array(list(plan.receives.values()), np.int64)
            # Displacements of some MPI libraries have 32 bits.
            runs = plan.runs if readable and messages.numel() < 2**31 else None
            begins = np.cumsum(sends) - sends if runs is None else runs
            routes[width] = Route(
                gather=torch.from_numpy(plan.send) if runs is None else None,
                leaving=((sends * width).tolist(), (begins * width).tolist()),
                arriving=(
                    (receives * width).tolist(),
                    ((np.cumsum(receives) - receives) * width).tolist(),
                ),
                rows=int(receives.sum()),
            )
        return routes[width]

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
            weights: (n,), the weight of each sender, adding up to 1.
            reference: (1, m), the receiver's own row, where it has one.
        """
        cut = columns(rows.shape[1], self.world.size)
        rank = self.world.rank
        mine = slice(cut[rank].start, cut[rank].stop)
        return Updates(
            self.world.columns(rows.cpu().numpy(), cut, group.counts),
            weights,
            None if reference is None else reference[0, mine].cpu().numpy(),
            lambda parts: np.add.reduce(self.world.all_gather(parts), axis=0),
        )

    @in_phase("send")
    def to_rows(self, columns_here: Rows, like: Tensor, counts: list[int]) -> Tensor:
        """Return the rows of this rank; the inverse of `to_columns`.

        Args:
            columns_here: (n, c), the coordinates of this rank.
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
    """Free the communicator of a plan, on all ranks at a time."""
    if lane.link is not None:
        lane.link.Free()


def _flat(messages: Tensor) -> NDArray[np.uint8] | Tensor:
    """Return the bytes of messages as MPI takes them."""
    flat = messages.view(-1)
    return flat.numpy() if flat.device.type == "cpu" else flat
