"""The network as a method sees it in one round, a `Net`: `exchange`, `aggregate`, `collect`,
`broadcast`, and `at_server`, by which nothing is sent.

All that happens to a message happens in them, in this order: it is attacked, encoded, counted,
sent, dropped where faults take it away, and decoded. What a method remembers about its messages is
in the method's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from typing import TYPE_CHECKING, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np

from dfl.comm.falsify import falsified, falsified_per_edge
from dfl.comm.network import Network
from dfl.comm.plan import EdgePlan, PeerPlan, Union
from dfl.comm.received import Received, error, without_lost
from dfl.comm.weighting import weighted_sum
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.forms import require_form
from dfl.core.layout import Group
from dfl.core.profiling import in_phase, phase
from dfl.robust.aggregators import Aggregate

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.environment.fault_effects import FaultEffects
else:
    from dfl.core.lazy import torch


T = TypeVar("T")
P = ParamSpec("P")


def _counted(verb: Callable[Concatenate[Net, P], T]) -> Callable[Concatenate[Net, P], T]:
    """Return a verb of the network that adds what it moves between ranks to `Traffic.wire`."""

    @wraps(verb)
    def counted(net: Net, /, *args: P.args, **kwargs: P.kwargs) -> T:
        world = net.network.transport.world
        before = world.arrived
        result = verb(net, *args, **kwargs)
        net.network.traffic.wire += world.arrived - before
        return result

    return counted


class ServerAggregate(NamedTuple):
    """What a server made of the updates that it received.

    Attributes:
        row: (1, m).
        scores: (p,) the rule's score of each peer; NaN for those that it did not judge.
    """

    row: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Net:
    """The network in round t, as `dfl.algorithms.protocols.Net` documents it for methods.

    Attributes:
        network: the network of the run.
        t: the round.
        measured: whether the state after the round is evaluated or kept, so that the error of its
            messages is computed.
        graph: the number of the graph that is used, modulo that of all; None for that of round t.
    """

    network: Network
    t: int
    measured: bool = True
    graph: int | None = None

    @_counted
    def exchange(
        self,
        messages: Tensor,
        start: Tensor | None = None,
        per_edge: bool = False,
        slot: str = "x",
    ) -> Received:
        """Send messages to the neighbours of this round and return what was received.

        Raises:
            InputError: on every rank, if messages of some rank have another form; only the first
                exchange of a slot is checked.
        """
        traffic = self.network.traffic
        transport = self.network.transport
        intended = self.edges if per_edge else self.network.peer_plan(self.t, self.graph)
        self._check_form(messages, len(intended.ids), slot)
        plan, attacked = self._attack(messages, intended, start, slot)
        encoded = self._encode(attacked, plan.kind, plan.ids, slot)
        traffic.payload += plan.copies * encoded.shape[1]
        traffic.lost += plan.lost  # they are sent, and the plan keeps them from being received
        self.network.time_exchange(self.t, encoded.shape[1], self.graph)
        arrived = transport.carry(plan, encoded)
        sent = self._decode(encoded, messages)
        far = self._decode(arrived, messages)
        if attacked is messages:
            own = sent
        else:
            honest = self._encode(messages, intended.kind, intended.ids, slot)
            own = self._decode(honest, messages)
        ratio = error(messages, own, intended) if self.measured else _nan(self.hosted)
        if isinstance(intended, EdgePlan) and intended.arrives is not None:
            own = without_lost(own, intended.arrives[0])
        return Received(own, sent, far, plan, ratio, start)

    @_counted
    def aggregate(
        self,
        updates: Tensor,
        group: Group,
        weights: NDArray[np.float64],
        reference: Tensor | None = None,
        slot: str = "x",
    ) -> ServerAggregate:
        """Send updates to the server and return their aggregate.

        Every rank aggregates a block of coordinates of all updates.

        Raises:
            InputError: on every rank, if updates of some rank have another form; only the first
                aggregation of a slot is checked.
        """
        network = self.network
        world = network.transport.world
        encoded = self._upload(updates, group, reference, slot)
        arrives, group = self._arriving(group)
        scores = _nan(self.hosted)
        if not len(group.ids):
            return ServerAggregate(updates.new_zeros(1, updates.shape[1]), scores)
        with phase("wait"):  # for the ranks that train longer
            gathered = world.all_gather(np.asarray(weights, np.float64)[arrives])
        everyone = group.ascending(gathered)
        received = self._decode(encoded[arrives], updates)
        columns = network.transport.to_columns(
            received, group, everyone / everyone.sum(), reference
        )
        with phase("mix"):
            aggregate = network.threat_model.aggregator(columns)
        with phase("send"):
            own = torch.from_numpy(aggregate.row).to(updates.dtype)  # as the peers receive it
            row = torch.from_numpy(world.all_gather(own.numpy())).to(updates)
        if aggregate.scores is not None:
            scores[group.here] = torch.from_numpy(aggregate.scores[group.mine])
        return ServerAggregate(row[None], scores)

    @_counted
    def collect(
        self, messages: Tensor, group: Group, slot: str = "x"
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Send messages to the server and return those that arrive, on every rank.

        Args:
            messages: (a, m), one row per member of the group on this rank.
            group: the senders.
            slot: names this exchange where a round has several.

        Returns:
            The messages (k, m), and the numbers of their senders (k,), ascending.
        """
        world = self.network.transport.world
        encoded = self._upload(messages, group, None, slot)
        arrives, group = self._arriving(group)
        received = self._decode(encoded[arrives], messages)
        with phase("send"):
            everyone = group.ascending(world.all_gather(received.cpu().numpy()))
        return torch.from_numpy(everyone).to(messages), group.ids

    def broadcast(self, row: Tensor, to: Group) -> Tensor:
        """Send the server's row to a group and return it; every rank has it already."""
        network = self.network
        traffic = network.traffic
        size = row.shape[1] * row.element_size()
        traffic.parameters += self.peers * row.shape[1]
        if self._effects is not None:
            to = self.group(self.present(to.ids))
            traffic.lost += len(to.here) - len(self.reached(to).here)
        traffic.downloaded[to.here] += size
        if network.clock:
            network.clock.broadcast(size, to.ids)
        return row

    @_counted
    def at_server(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return a row (1, m) that the server computes by itself, on every rank.

        Ranks receive it from rank 0. No peer does, and it is not counted as payload.
        """
        world = self.network.transport.world
        if world.size == 1:
            return compute()
        row = world.from_root(lambda: compute().cpu().numpy().tobytes())
        return torch.frombuffer(bytearray(row), dtype=like.dtype)[None].to(like.device)

    @property
    def peers(self) -> int:
        """P."""
        return self.network.layout.peers

    @property
    def hosted(self) -> int:
        """p."""
        return len(self.network.traffic.payload)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self.network.seed

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of the parameters of a model; the first of them are those that are sent."""
        return self.network.shapes

    @property
    def everyone(self) -> Group:
        """All peers."""
        return self.network.schedule.everyone

    @property
    def aggregator(self) -> partial[Aggregate]:
        """The aggregation rule of the run."""
        return self.network.threat_model.aggregator

    @property
    def fixed(self) -> bool:
        """Whether the graph is the same in every round, and no fault takes edges or peers away."""
        steady = all(
            each.touches not in ("links", "peers") for each in self.network.threat_model.faults
        )
        return len(self.network.schedule.weights) == 1 and steady

    @property
    def graphs(self) -> Sequence[Net]:
        """The network of this round on the graph of each mixing matrix of the run."""
        return [replace(self, graph=k) for k in range(len(self.network.schedule.weights))]

    @property
    def union(self) -> Union:
        """Every edge that any round uses, by which memory per edge is sorted."""
        return self.network.schedule.union

    @cached_property
    def edges(self) -> EdgePlan:
        """The edges of this round."""
        return self.network.edge_plan(self.t, self.graph)

    def pull(self, received: Tensor) -> Tensor:
        """Return sum_j w_ij y_(j->i), (p, m), over the incoming edges of this round."""
        return weighted_sum(self.edges.pull, received)

    def push(self, sent: Tensor) -> Tensor:
        """Return sum_k v_ik y_(i->k), (p, m), over the outgoing edges; v: see `EdgePlan.push`.

        Raises:
            InputError: on every rank, if there is no v in this round.
        """
        push = self.edges.push
        if push is None:
            raise InputError(
                f"--topology, round {self.t}: over some edge no way leads back, and no average of "
                "all peers is kept, which copies per edge need: choose --algorithm dfedavgm"
            )
        return weighted_sum(push, sent)

    def sum_incoming(self, messages: Tensor) -> Tensor:
        """Return sum_j y_(j->i), (p, m), over the messages that peers receive in this round."""
        return weighted_sum(self.edges.sums, messages)

    @property
    def work(self) -> NDArray[np.float64] | None:
        """(p,) share of its local steps that each peer of this rank does in this round; 0 if down.

        None where no fault limits the work of peers.
        """
        if all(each.touches == "links" for each in self.network.threat_model.faults):
            return None
        assert self._effects is not None
        return self._effects.work[self.network.layout.hosted(self.network.transport.world.rank)]

    def group(self, ids: NDArray[np.int64]) -> Group:
        """Return some peers, by their numbers."""
        return self.network.schedule.group(ids)

    def present(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of some peers that are up in this round, in their order."""
        return ids if self._effects is None else ids[self._effects.up[ids]]

    def reached(self, group: Group) -> Group:
        """Return those of a group that receive the server's message in this round."""
        if self._effects is None:
            return group
        return self.group(group.ids[self._effects.arrive(self.peers, group.ids)])

    @cached_property
    def _effects(self) -> FaultEffects | None:
        return self.network.fault_effects(self.t)

    def _check_form(self, messages: Tensor, rows: int, slot: str) -> None:
        """Refuse messages of a method that do not have a row for each sender on this rank.

        All ranks take part in the check, so it is made once for each slot in a process.

        Raises:
            InputError: on every rank.
        """
        if slot not in self.network.checked:
            self.network.checked.add(slot)
            with self.network.transport.world.agreed():
                what = "--algorithm: the messages that round sends"
                require_form(what, messages, torch.Tensor, (rows, "m"))

    def _attack(
        self, messages: Tensor, plan: PeerPlan | EdgePlan, start: Tensor | None, slot: str
    ) -> tuple[PeerPlan | EdgePlan, Tensor]:
        """Return the messages that are sent, some of them falsified, and their plan."""
        network = self.network
        if network.threat_model.attack.per_edge:
            owner = self.edges.owner
            return self.edges, falsified_per_edge(network, self.t, slot, messages, owner)
        if not network.threat_model.falsifies:
            return plan, messages
        by_edge = isinstance(plan, EdgePlan)
        entry = self.t if self.graph is None else self.graph
        senders = network.schedule.senders_on_edges(entry) if by_edge else self.everyone
        effects = self._effects
        if effects is None or effects.up.all():
            return plan, falsified(network, self.t, slot, messages, senders, start)
        # Attackers see what is sent: nothing comes from or goes to a peer that is down.
        sends = effects.used(senders.ids) if by_edge else effects.up
        senders = network.schedule.subset(senders, sends)
        here = torch.from_numpy(senders.here).to(messages.device)
        rows = messages[here]
        begin = None if start is None else start[here]
        sent = falsified(network, self.t, slot, rows, senders, begin)
        return plan, messages if sent is rows else messages.index_copy(0, here, sent)

    def _upload(
        self, messages: Tensor, group: Group, reference: Tensor | None, slot: str
    ) -> Tensor:
        """Return the messages of a group to the server as bytes, falsified, counted and timed."""
        network = self.network
        self._check_form(messages, len(group.here), slot)
        if network.threat_model.falsifies:
            messages = falsified(network, self.t, slot, messages, group, reference=reference)
        encoded = self._encode(messages, "peers", group.ids[group.mine], slot)
        network.traffic.payload[group.here] += encoded.shape[1]
        network.traffic.parameters += len(group.ids) * messages.shape[1]
        if network.clock:
            network.clock.aggregate(encoded.shape[1], group.ids)
        return encoded

    @in_phase("encode")
    def _encode(self, messages: Tensor, kind: str, ids: NDArray[np.int64], slot: str) -> Tensor:
        """Return messages as bytes.

        Args:
            messages: (a, m).
            kind: "peers" or "edges", part of the address of the compressor's random numbers.
            ids: (a,), what addresses those of each message.
            slot: names the exchange.
        """
        if not len(messages):  # a row of zeros gives B: a compressor of the caller may need one
            blank = messages.new_zeros(1, messages.shape[1])
            return self._encode(blank, kind, np.zeros(1, np.int64), slot)[:0]
        address = (self.network.seed, f"quantize {kind}", ids, self.t, slot)
        draw = randomness.draws(*address, device=messages.device)
        return self.network.threat_model.compressor.encode(messages, draw)

    @in_phase("decode")
    def _decode(self, encoded: Tensor, like: Tensor) -> Tensor:
        """Return the messages that bytes hold, of the coordinates and the type of `like`."""
        if not len(encoded):  # a compressor of the caller may need a row
            return like.new_empty((0, like.shape[1]))
        return self.network.threat_model.compressor.decode(encoded, like.shape[1], like.dtype)

    def _arriving(self, group: Group) -> tuple[slice | NDArray[np.int64], Group]:
        """Return which of a group's messages here reach the server, and whose do anywhere."""
        if self._effects is None:
            return slice(None), group
        arrives = self._effects.arrive(group.ids, self.peers)
        here = arrives[group.mine]
        self.network.traffic.lost += int(np.count_nonzero(~here))
        return np.flatnonzero(here), self.group(group.ids[arrives])


def _nan(n: int) -> Tensor:
    return torch.full((n,), math.nan, dtype=torch.float64)
