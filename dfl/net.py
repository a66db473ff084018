"""How do words travel? `share` speaks to neighbours; all that happens to a message happens in it.

A message is encoded, counted, sent and decoded here, in that order. What a method remembers about its messages
lives in the method's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from dfl import keys
from dfl.layout import Layout
from dfl.mixing import weigh
from dfl.plan import EdgePlan, PeerPlan, Union, edge_plan, peer_plan

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.compressors import Compressor
    from dfl.mpi import World
else:
    from dfl.lazy import torch


@dataclass(frozen=True)
class Heard:
    """What one `share` brought.

    Attributes:
        own: this rank's words as those who hear them decode them: (p, m), or (a, m) over the a edges that speak.
        far: (r, m), words from other ranks.
        plan: who said what to whom.
        error: (p,) float64, ||Q(x) - x||^2 / ||x||^2 of a peer's word, the worst of those over its edges; 0 for a word
            of zeros, NaN in a round that nobody looks at.
    """

    own: Tensor
    far: Tensor
    plan: PeerPlan | EdgePlan
    error: Tensor

    @property
    def words(self) -> Tensor:
        """(b, m), what was heard over each edge, in the order of `EdgePlan.into`."""
        assert isinstance(self.plan, EdgePlan)
        return (torch.cat([self.own, self.far]) if len(self.far) else self.own)[self.plan.arrange]

    def average(self) -> Tensor:
        """sum_j w_ij word_j over the closed neighbourhood, (p, m), added up in ascending peer id."""
        assert isinstance(self.plan, PeerPlan), "words over edges are weighed by the method itself"
        below, own, above = self.plan.weights
        cut = below.shape[1]
        return weigh((below, self.far[:cut]), (own, self.own), (above, self.far[cut:]))


class Route(NamedTuple):
    """Where messages of one width lie: which to put together first, if any; bytes and places to and from each rank."""

    gather: Tensor | None
    leaving: tuple[list[int], list[int]]
    arriving: tuple[list[int], list[int]]
    heard: int


class Network:
    """A sequence of mixing matrices, a compressor, and two counts of bytes.

    Attributes:
        payload: (p,) int64, bytes that each of this rank's peers has sent over its edges, whatever the ranks.
        wire: bytes that this rank has handed to MPI.
    """

    def __init__(self, weights: Sequence[csr_array], world: World, compressor: Compressor, seed: int) -> None:
        self.weights, self.world, self.compressor, self.seed = weights, world, compressor, seed
        self.layout = Layout(weights[0].shape[0], world.size)
        self.payload = np.zeros(len(self.layout.block(world.rank)), np.int64)
        self.wire = 0
        self._links: dict[int, Any] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    @cached_property
    def union(self) -> Union:
        """Every edge that any round uses."""
        return Union.of(self.weights, self.layout, self.world.rank)

    def at(self, t: int, seen: bool = True) -> Net:
        """The network as a method sees it in round t, and whether somebody looks at what the round leads to."""
        return Net(self, t, seen)

    def peer_plan(self, t: int) -> PeerPlan:
        """The plan of round t for one word per peer."""
        return self._peer_plans[t % len(self.weights)]

    def edge_plan(self, t: int) -> EdgePlan:
        """The plan of round t for one word per edge."""
        return self._edge_plans[t % len(self.weights)]

    def link(self, plan: PeerPlan | EdgePlan) -> Any:
        """What joins the ranks of a plan, made at its first use."""
        if id(plan) not in self._links:
            self._links[id(plan)] = self.world.link(plan.sends, plan.receives)
        return self._links[id(plan)]

    def carry(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Tensor:
        """Exchange messages (q, B) between ranks: (r, B), those from elsewhere. They leave the device at most once."""
        if self.world.size == 1:
            return messages[:0]
        route, leaving = self._route(plan, messages), messages.contiguous()
        if route.gather is not None:
            leaving = leaving.index_select(0, route.gather.to(messages.device))
        if not self.world.reads(messages.device.type):
            leaving = leaving.cpu()
        elif leaving.device.type == "cuda":
            torch.cuda.synchronize(leaving.device)  # MPI does not wait for what is still being computed
        arriving = leaving.new_empty((route.heard, messages.shape[1]))
        self.world.exchange(self.link(plan), (_flat(leaving), *route.leaving), (_flat(arriving), *route.arriving))
        self.wire += sum(route.leaving[0])
        return arriving.to(messages.device)

    def _route(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Route:
        """Where messages of one width go and come from; worked out once."""
        wide, near = messages.shape[1], self.world.reads(messages.device.type)
        if (id(plan), wide) not in self._routes:
            sends, receives = (np.array(list(rows.values()), np.int64) for rows in (plan.sends, plan.receives))
            behind = np.cumsum(sends) - sends
            # As they lie, if the messages for each rank follow one another, and no further than some MPI can point.
            runs = plan.runs if near and messages.numel() < 2**31 else None
            self._routes[id(plan), wide] = Route(
                None if runs is not None else torch.from_numpy(plan.send),
                ((sends * wide).tolist(), ((behind if runs is None else runs) * wide).tolist()),
                ((receives * wide).tolist(), ((np.cumsum(receives) - receives) * wide).tolist()),
                int(receives.sum()),
            )
        return self._routes[id(plan), wide]

    def close(self) -> None:
        """Give the links between ranks back to MPI, on every rank at a time."""
        for link in self._links.values():
            if link is not None:
                link.Free()
        self._links.clear()

    @cached_property
    def _peer_plans(self) -> list[PeerPlan]:
        return [peer_plan(matrix, self.layout, self.world.rank) for matrix in self.weights]

    @cached_property
    def _edge_plans(self) -> list[EdgePlan]:
        return [edge_plan(matrix, self.layout, self.world.rank, self.union) for matrix in self.weights]


@dataclass(frozen=True)
class Net:
    """The network in round t."""

    network: Network
    t: int
    seen: bool

    @property
    def fixed(self) -> bool:
        """Whether every round has the same graph."""
        return len(self.network.weights) == 1

    @property
    def union(self) -> Union:
        """Every edge that any round uses, which is what memory per edge is sorted by."""
        return self.network.union

    @property
    def edges(self) -> EdgePlan:
        """The edges that speak in this round."""
        return self.network.edge_plan(self.t)

    def pull(self, heard: Tensor) -> Tensor:
        """sum_j w_ij y_(j->i) over the edges that speak to peer i in this round; heard is (e', m), the sum (p, m)."""
        return weigh((self.edges.pull, heard))

    def push(self, said: Tensor) -> Tensor:
        """sum_k w_ki y_(i->k) over the edges that peer i speaks on in this round; said is (e, m), the sum (p, m)."""
        return weigh((self.edges.push, said))

    def share(self, words: Tensor, edges: EdgePlan | None = None, slot: str = "x") -> Heard:
        """Say something to the neighbours of this round and hear what they say.

        Args:
            words: (p, m), one row per peer of this rank; or (a, m), one row per edge that speaks.
            edges: `net.edges` where there is a row per edge.
            slot: names this share where a round has several; it is part of every random address.
        """
        network = self.network
        plan = edges or network.peer_plan(self.t)
        kind = "edges" if edges else "peers"

        def draw(rows: slice, places: slice) -> Tensor:
            address = (network.seed, f"quantize {kind}", plan.ids[rows], self.t, slot)
            return keys.bits(*address, n=places, device=words.device)

        messages = network.compressor.encode(words, draw)
        network.payload += plan.copies * messages.shape[1]
        own, far = (
            network.compressor.decode(each, words.shape[1], words.dtype)
            for each in (messages, network.carry(plan, messages))
        )
        return Heard(own, far, plan, _error(words, own, plan) if self.seen else _nan(len(plan.copies)))


def _error(said: Tensor, own: Tensor, plan: PeerPlan | EdgePlan) -> Tensor:
    """||Q(x) - x||^2 / ||x||^2, the worst of each peer's words, (p,)."""
    if own.data_ptr() == said.data_ptr():  # said as they are
        return torch.zeros(len(plan.copies), dtype=torch.float64)
    worst, owner = np.zeros(len(plan.copies)), plan.owner if isinstance(plan, EdgePlan) else np.arange(len(said))
    few = max(1, 2**18 // max(1, said.shape[1]))
    for first in range(0, len(said), few):
        rows = slice(first, first + few)
        lost, whole = _squares(own[rows] - said[rows]), _squares(said[rows])
        with np.errstate(invalid="ignore"):  # of a peer that diverged
            np.maximum.at(worst, owner[rows], lost / np.maximum(whole, 1e-300))
    return torch.from_numpy(worst)


def _squares(words: Tensor) -> NDArray[np.float64]:
    """||word||^2 of every row, by numpy: torch splits a lone row among its threads, and rounds otherwise."""
    values: NDArray[np.float64] = np.square(words.cpu().numpy(), dtype=np.float64).sum(1)
    return values


def _nan(n: int) -> Tensor:
    return torch.full((n,), math.nan, dtype=torch.float64)


def _flat(messages: Tensor) -> Any:
    """The bytes of messages as MPI takes them."""
    flat = messages.view(-1)
    return flat.numpy() if flat.device.type == "cpu" else flat
