"""Transport: rows of tensors between ranks, by plan, and turned from rows of peers into columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfl.comm.plan import EdgePlan, PeerPlan
from dfl.comm.traffic import Traffic
from dfl.core.layout import Group, columns
from dfl.robust.aggregators import Updates

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


class Transport:
    """Moves rows between the ranks of a job.

    Attributes:
        world: the ranks.
        traffic: counts the bytes that are handed to MPI.
    """

    def __init__(self, world: World, traffic: Traffic) -> None:
        self.world = world
        self.traffic = traffic
        self._links: dict[int, Link] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    def link(self, plan: PeerPlan | EdgePlan) -> Link:
        """Return the communicator of a plan, made at its first use.

        Faults do not change it.
        """
        if id(plan.send) not in self._links:
            self._links[id(plan.send)] = self.world.link(plan.sends, plan.receives)
        return self._links[id(plan.send)]

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
            self.link(plan), (_flat(leaving), *route.leaving), (_flat(arriving), *route.arriving)
        )
        self.traffic.wire += sum(route.leaving[0])
        return arriving.to(messages.device)

    def _route(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Route:
        """Return the route of messages of this width, computed once."""
        width = messages.shape[1]
        key = id(plan.send), width
        if key not in self._routes:
            readable = self.world.reads(messages.device.type)
            sends = np.array(list(plan.sends.values()), np.int64)
            receives = np.array(list(plan.receives.values()), np.int64)
            # Displacements of some MPI libraries have 32 bits.
            runs = plan.runs if readable and messages.numel() < 2**31 else None
            begins = np.cumsum(sends) - sends if runs is None else runs
            self._routes[key] = Route(
                gather=torch.from_numpy(plan.send) if runs is None else None,
                leaving=((sends * width).tolist(), (begins * width).tolist()),
                arriving=(
                    (receives * width).tolist(),
                    ((np.cumsum(receives) - receives) * width).tolist(),
                ),
                rows=int(receives.sum()),
            )
        return self._routes[key]

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

    def to_rows(self, columns_here: NDArray[Any], like: Tensor, counts: list[int]) -> Tensor:
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
        for link in self._links.values():
            if link is not None:
                link.Free()
        self._links.clear()


def _flat(messages: Tensor) -> NDArray[np.uint8] | Tensor:
    """Return the bytes of messages as MPI takes them."""
    flat = messages.view(-1)
    return flat.numpy() if flat.device.type == "cpu" else flat
