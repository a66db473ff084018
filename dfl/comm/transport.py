"""What joins the peers: who speaks to whom, over which ranks, in what manner, and how many bytes it has cost so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from dfl.comm.plan import Arcs, EdgePlan, PeerPlan, Union, edge_plan, peer_plan
from dfl.core.layout import Group, Layout, columns
from dfl.environment.fault_effects import FaultEffects, fault_effects
from dfl.environment.faults import Fault, RoundKey
from dfl.robust.aggregators import Aggregate, Updates, mean
from dfl.robust.attacks import Attack, Honest

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.comm.mpi import World
    from dfl.compression.compressors import Compressor
    from dfl.environment.clock import Clock
else:
    from dfl.core.lazy import torch


class Route(NamedTuple):
    """Where messages of one width lie: which to put together first, if any; bytes and places to and from each rank."""

    gather: Tensor | None
    leaving: tuple[list[int], list[int]]
    arriving: tuple[list[int], list[int]]
    heard: int


class ThreatModel(NamedTuple):
    """What becomes of words.

    Attributes:
        compressor: how they are put in bytes.
        rule: what a listener makes of those of several.
        attack: how liars falsify theirs.
        liars: who they are, ascending.
        faults: what keeps them from being said or heard.
    """

    compressor: Compressor
    rule: partial[Aggregate] = partial(mean)
    attack: Attack = Honest()
    attackers: NDArray[np.int64] = np.zeros(0, np.int64)
    faults: tuple[Fault, ...] = ()

    @property
    def lies(self) -> bool:
        """Whether somebody lies in messages."""
        return self.attack.speaks and len(self.attackers) > 0


class Network:
    """Who speaks to whom, and counts of bytes.

    Attributes:
        weights: the sequence of mixing matrices; none where peers only speak to a server.
        stationary: (P,) pi with pi W = pi for each of them; None where all are alike.
        payload: (p,) int64, bytes that each of this rank's peers has said, whatever the ranks.
        told: (p,) int64, bytes that the server has said to each of them.
        wire: bytes that this rank has handed to MPI.
        lost: messages that links have lost, of those that this rank's peers said or a server said to them.
        parameters: numbers said to and by a server, as LG-FedAvg's Table 1 counts: what it says goes to all P peers.
        clock: how long it would take in the field; None where nobody asks.
    """

    def __init__(
        self,
        layout: Layout,
        weights: Sequence[csr_array],
        world: World,
        threat_model: ThreatModel,
        seed: int,
        stationary: Sequence[NDArray[np.float64] | None] = (),
    ) -> None:
        self.layout, self.weights, self.world, self.threat_model, self.seed = (
            layout,
            weights,
            world,
            threat_model,
            seed,
        )
        self.stationary = stationary or [None] * len(weights)
        self.payload, self.told = np.zeros((2, len(layout.block(world.rank))), np.int64)
        self.wire = self.parameters = self.lost = 0
        self.clock: Clock | None = None
        self._links: dict[int, Any] = {}
        self._routes: dict[tuple[int, int], Route] = {}

    @cached_property
    def union(self) -> Union:
        """Every edge that any round uses."""
        return Union.of(self.weights, self.layout, self.world.rank)

    def fault_effects(self, t: int) -> FaultEffects:
        """What the faults do to round t."""
        return fault_effects(self.threat_model.faults, RoundKey(self.layout.peers, self.seed, t))

    def peer_plan(self, t: int) -> PeerPlan:
        """The plan of round t for one word per peer."""
        plan = self._peer_plans[t % len(self.weights)]
        return (
            self.fault_effects(t).on_peers(plan, self.edge_plan(t))
            if self.threat_model.faults
            else plan
        )

    def edge_plan(self, t: int) -> EdgePlan:
        """The plan of round t for one word per edge."""
        plan = self._edge_plans[t % len(self.weights)]
        return self.fault_effects(t).on_edges(plan) if self.threat_model.faults else plan

    def matrix(self, t: int) -> csr_array:
        """The mixing matrix of round t."""
        return self.weights[t % len(self.weights)]

    def speaking(self, t: int) -> tuple[Arcs, NDArray[np.bool_] | None]:
        """The edges, of all peers, that speak in round t; and (P,) who is up, None where all are."""
        arcs = Arcs.of(self.matrix(t))
        if not self.threat_model.faults:
            return arcs, None
        up = self.fault_effects(t).up
        both = up[arcs.sender] & up[arcs.receiver]
        return Arcs(arcs.sender[both], arcs.receiver[both], arcs.weight[both]), up

    def edgewise(self, t: int) -> Group:
        """Everybody who speaks where edges do: edges by owner * P + other, as `EdgePlan` orders them."""
        layout, arcs = self.layout, Arcs.of(self.matrix(t))
        ids = np.sort(arcs.sender * layout.peers + arcs.receiver)
        counts = np.bincount(layout.ranks_of(ids // layout.peers), minlength=layout.ranks).tolist()
        return Group(ids, np.arange(counts[self.world.rank]), counts, ids // layout.peers)

    def link(self, plan: PeerPlan | EdgePlan) -> Any:
        """What joins the ranks of a plan, made at its first use; it is the same whatever the weather."""
        if id(plan.send) not in self._links:
            self._links[id(plan.send)] = self.world.link(plan.sends, plan.receives)
        return self._links[id(plan.send)]

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
            torch.cuda.synchronize(
                leaving.device
            )  # MPI does not wait for what is still being computed
        arriving = leaving.new_empty((route.heard, messages.shape[1]))
        self.world.exchange(
            self.link(plan), (_flat(leaving), *route.leaving), (_flat(arriving), *route.arriving)
        )
        self.wire += sum(route.leaving[0])
        return arriving.to(messages.device)

    def _route(self, plan: PeerPlan | EdgePlan, messages: Tensor) -> Route:
        """Where messages of one width go and come from; worked out once."""
        wide, near = messages.shape[1], self.world.reads(messages.device.type)
        if (id(plan.send), wide) not in self._routes:
            sends, receives = (
                np.array(list(rows.values()), np.int64) for rows in (plan.sends, plan.receives)
            )
            behind = np.cumsum(sends) - sends
            # As they lie, if the messages for each rank follow one another, and no further than some MPI can point.
            runs = plan.runs if near and messages.numel() < 2**31 else None
            self._routes[id(plan.send), wide] = Route(
                None if runs is not None else torch.from_numpy(plan.send),
                ((sends * wide).tolist(), ((behind if runs is None else runs) * wide).tolist()),
                ((receives * wide).tolist(), ((np.cumsum(receives) - receives) * wide).tolist()),
                int(receives.sum()),
            )
        return self._routes[id(plan.send), wide]

    @cached_property
    def everyone(self) -> Group:
        """All peers."""
        return self.layout.group(np.arange(self.layout.peers), self.world.rank)

    def words(
        self,
        said: Tensor,
        group: Group,
        weights: NDArray[np.float64],
        trusted: Tensor | None = None,
    ) -> Updates:
        """What a group says, said (a, m) here, in the coordinates that this rank adds up; trusted is (1, m)."""
        cut, rank = columns(said.shape[1], self.world.size), self.world.rank
        mine = slice(cut[rank].start, cut[rank].stop)
        rows = self.world.columns(said.cpu().numpy(), cut, group.counts)
        known = None if trusted is None else trusted[0, mine].cpu().numpy()
        return Updates(
            rows, weights, known, lambda parts: np.add.reduce(self.world.everywhere(parts), axis=0)
        )

    def rows(self, words: NDArray[Any], like: Tensor, counts: list[int]) -> Tensor:
        """The inverse: columns (m, c) to the rows of this rank, as many as `counts` says, where and as `like` is."""
        cut = columns(like.shape[1], self.world.size)
        kind = torch.empty(0, dtype=like.dtype).numpy().dtype
        return torch.from_numpy(self.world.rows(words.astype(kind), cut, counts)).to(like.device)

    def turn(self, t: int) -> None:
        """End round t."""
        if self.clock:
            self.clock.turn(self.fault_effects(t).up if self.threat_model.faults else None)

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
        both = zip(self.weights, self.stationary, strict=True)
        return [
            edge_plan(matrix, self.layout, self.world.rank, self.union, pi) for matrix, pi in both
        ]


def _flat(messages: Tensor) -> Any:
    """The bytes of messages as MPI takes them."""
    flat = messages.view(-1)
    return flat.numpy() if flat.device.type == "cpu" else flat
