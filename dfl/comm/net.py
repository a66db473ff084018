"""How do words travel? `share` speaks to neighbours, `collect` to a server, and `tell` is what the server says.

All that happens to a message happens in them: it is falsified, encoded, counted, sent, decoded, and lost where faults
will have it so, in that order. What a method remembers about its messages lives in the method's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfl.comm.plan import EdgePlan, PeerPlan, Union
from dfl.comm.received import Received, error, silenced
from dfl.comm.transport import Network
from dfl.comm.weighting import weighted_sum
from dfl.core import randomness
from dfl.core.layout import Group
from dfl.robust.aggregators import Aggregate, Updates
from dfl.robust.attacks import AttackView

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.environment.fault_effects import FaultEffects
else:
    from dfl.core.lazy import torch


class ServerAggregate(NamedTuple):
    """What a server made of words: a row (1, m), and a score (p,) of each peer, NaN for those that it did not judge."""

    row: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Net:
    """The network as a method sees it in round t.

    Attributes:
        network: what there is.
        t: the round.
        seen: whether somebody looks at what the round leads to.
    """

    network: Network
    t: int
    seen: bool = True

    @property
    def peers(self) -> int:
        """P."""
        return self.network.layout.peers

    @property
    def everyone(self) -> Group:
        """All peers."""
        return self.network.everyone

    @property
    def hosted(self) -> int:
        """p."""
        return len(self.network.payload)

    @property
    def rule(self) -> partial[Aggregate]:
        """What listeners make of the words of several."""
        return self.network.threat_model.rule

    @property
    def fixed(self) -> bool:
        """Whether everybody hears from the same others in every round."""
        steady = all(
            each.touches not in ("links", "peers") for each in self.network.threat_model.faults
        )
        return len(self.network.weights) == 1 and steady

    @property
    def union(self) -> Union:
        """Every edge that any round uses, which is what memory per edge is sorted by."""
        return self.network.union

    @cached_property
    def edges(self) -> EdgePlan:
        """The edges that speak in this round."""
        return self.network.edge_plan(self.t)

    def pull(self, heard: Tensor) -> Tensor:
        """sum_j w_ij y_(j->i) over the edges that speak to peer i in this round; heard is (e', m), the sum (p, m)."""
        return weighted_sum((self.edges.pull, heard))

    def push(self, said: Tensor) -> Tensor:
        """sum_k v_ik y_(i->k) over the edges on which peer i speaks in this round; said is (e, m), the sum (p, m).

        v is W reversed in time; see `EdgePlan.push`.
        """
        return weighted_sum((self.edges.push, said))

    def exchange(
        self,
        words: Tensor,
        origin: Tensor | None = None,
        edges: EdgePlan | None = None,
        slot: str = "x",
    ) -> Received:
        """Say something to the neighbours of this round and hear what they say.

        Args:
            words: (p, m), one row per peer of this rank; or (a, m), one row per edge that speaks.
            origin: (p, m), where the peers stood, if words are where they went from there: lies are told, and rules
                applied, to the steps between.
            edges: `net.edges` where there is a row per edge.
            slot: names this share where a round has several; it is part of every random address.
        """
        network = self.network
        meant = spoken = edges or network.peer_plan(self.t)
        if network.threat_model.attack.per_edge:
            spoken, lied = self.edges, self._tell_lies(words, slot)
        else:
            lied = self._lie(words, None if edges else network.everyone, slot, origin=origin)
        messages = self._encode(lied, spoken, slot)
        network.payload += spoken.copies * messages.shape[1]
        network.lost += spoken.lost
        if network.clock:
            arcs, up = network.speaking(self.t)
            network.clock.share(arcs, messages.shape[1], up)
        said, far = (
            self._decode(each, words) for each in (messages, network.carry(spoken, messages))
        )
        own = said if lied is words else self._decode(self._encode(words, meant, slot), words)
        off = error(words, own, meant) if self.seen else _nan(len(meant.copies))
        if isinstance(meant, EdgePlan) and meant.arrives is not None:
            own = silenced(own, meant.arrives[0])
        return Received(own, said, far, spoken, off, origin)

    @property
    def work(self) -> NDArray[np.float64] | None:
        """(p,) share of its local steps that each peer of this rank does in this round; 0 if it is down.

        None where no fault limits the work of peers.
        """
        if all(each.touches == "links" for each in self.network.threat_model.faults):
            return None
        here = self.network.layout.block(self.network.world.rank)
        return self._fault_effects.work[here.start : here.stop]

    def group(self, ids: NDArray[np.int64]) -> Group:
        """Some peers, by their numbers."""
        return self.network.layout.group(ids, self.network.world.rank)

    def present(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some peers who are up in this round, in their order."""
        return ids[self._fault_effects.up[ids]] if self.network.threat_model.faults else ids

    def reached(self, group: Group) -> Group:
        """Those of a group whom the server's words reach in this round."""
        if not self.network.threat_model.faults:
            return group
        return self.group(group.ids[self._fault_effects.arrive(self.peers, group.ids)])

    def broadcast(self, row: Tensor, to: Group) -> Tensor:
        """What the server says to a group, a row (1, m), as it arrives at each of them."""
        self.network.parameters += self.peers * row.shape[1]
        if self.network.threat_model.faults:
            to = self.group(self.present(to.ids))
            self.network.lost += len(to.here) - len(self.reached(to).here)
        self.network.told[to.here] += row.shape[1] * row.element_size()
        if self.network.clock:
            self.network.clock.tell(row.shape[1] * row.element_size(), to.ids)
        return row

    def aggregate(
        self,
        words: Tensor,
        group: Group,
        weights: NDArray[Any],
        trusted: Tensor | None = None,
        slot: str = "x",
    ) -> ServerAggregate:
        """Let a group say something to the server, whose rule makes one row of it.

        Args:
            words: (a, m), one row per member of the group on this rank: always a step z - w, never a model.
            group: who speaks.
            weights: (a,), how much each of them counts.
            trusted: (1, m), the server's own step, where it has one.
            slot: names this collect where a round has several.
        """
        network = self.network
        words = self._lie(words, group, slot, trusted=trusted)
        messages = self._encode(words, group.ids[self._span(group.counts)], slot)
        network.payload[group.here] += messages.shape[1]
        if network.clock:
            network.clock.collect(messages.shape[1], group.ids)
        network.parameters += len(group.ids) * words.shape[1]
        scores = torch.full((len(network.payload),), math.nan, dtype=torch.float64)
        come, group = self._uploaded(group)
        if not len(group.ids):
            return ServerAggregate(words.new_zeros(1, words.shape[1]), scores)
        everyone = network.world.everywhere(np.asarray(weights, np.float64)[come])
        heard = network.words(
            self._decode(messages[come], words), group, everyone / everyone.sum(), trusted
        )
        outcome = network.threat_model.rule(heard)
        if network.world.size > 1:  # others' coordinates of these words, and the row in these
            network.wire += (
                len(words) * (words.shape[1] - len(outcome.row)) * words.element_size()
                + outcome.row.nbytes
            )
        row = torch.from_numpy(network.world.everywhere(outcome.row)).to(words)
        if outcome.scores is not None:
            scores[group.here] = torch.from_numpy(outcome.scores[self._span(group.counts)])
        return ServerAggregate(row[None], scores)

    def at_server(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return what the server computes by itself, a row (1, d), on every rank.

        It is computed on rank 0. It is not sent to any peer and not counted as payload.

        Args:
            compute: returns the row; called on rank 0 only.
            like: a tensor of the row's dtype and device.
        """
        if self.network.world.size == 1:
            return compute()
        row = self.network.world.from_root(lambda: compute().cpu().numpy().tobytes())
        self.network.wire += len(row) if self.network.world.rank == 0 else 0
        return torch.frombuffer(bytearray(row), dtype=like.dtype)[None].to(like.device)

    @property
    def _fault_effects(self) -> FaultEffects:
        return self.network.fault_effects(self.t)

    def _uploaded(self, group: Group) -> tuple[slice | NDArray[np.int64], Group]:
        """Which of a group's words here come to the server, and whose words do anywhere."""
        if not self.network.threat_model.faults:
            return slice(None), group
        come = self._fault_effects.arrive(group.ids, self.peers)
        here = come[self._span(group.counts)]
        self.network.lost += int(np.count_nonzero(~here))
        return np.flatnonzero(here), self.group(group.ids[come])

    def _encode(
        self, words: Tensor, who: PeerPlan | EdgePlan | NDArray[np.int64], slot: str
    ) -> Tensor:
        """Messages of those whose random numbers a plan addresses, or of some peers."""
        kind, ids = ("peers", who) if isinstance(who, np.ndarray) else (who.kind, who.ids)

        def draw(rows: slice, places: slice) -> Tensor:
            address = (self.network.seed, f"quantize {kind}", ids[rows], self.t, slot)
            return randomness.bits(*address, n=places, device=words.device)

        return self.network.threat_model.compressor.encode(words, draw)

    def _decode(self, messages: Tensor, words: Tensor) -> Tensor:
        return self.network.threat_model.compressor.decode(messages, words.shape[1], words.dtype)

    def _lie(
        self,
        words: Tensor,
        group: Group | None,
        slot: str,
        origin: Tensor | None = None,
        trusted: Tensor | None = None,
    ) -> Tensor:
        """The words (a, m) of a group, or of all edges, those of liars falsified; what liars learn is not counted."""
        network = self.network
        if not network.threat_model.lies:
            return words
        group = group or self.network.edgewise(self.t)
        bad = np.flatnonzero(np.isin(group.owners, self.present(network.threat_model.attackers)))
        if not len(bad):
            return words
        n, steps = len(group.ids), words if origin is None else words - origin
        knows = network.words(steps, group, np.full(n, 1 / n), trusted)
        said = network.threat_model.attack.say(self._seen(knows, bad, group.ids[bad], slot))
        return self._replaced(words, said, bad, group.counts, origin)

    def _tell_lies(self, words: Tensor, slot: str) -> Tensor:
        """What peers say over their edges (a, m) where liars tell each neighbour something else; words is (p, m)."""
        network, attackers, group = (
            self.network,
            self.network.threat_model.attackers,
            self.network.edgewise(self.t),
        )
        bad = np.flatnonzero(np.isin(group.owners, attackers))
        pairs = np.stack(np.divmod(group.ids[bad], self.peers), axis=1)
        knows = network.words(words, network.everyone, np.full(self.peers, 1 / self.peers))
        said = network.threat_model.attack.tell(
            self._seen(knows, attackers, attackers, slot), network.matrix(self.t), pairs
        )
        return self._replaced(words[self.edges.owner], said, bad, group.counts)

    def _seen(
        self, knows: Updates, bad: NDArray[np.int64], ids: NDArray[np.int64], slot: str
    ) -> AttackView:
        network, c = self.network, knows.rows.shape[1]
        first = int(network.world.everywhere(np.array([c]))[: network.world.rank].sum())
        return AttackView(knows, bad, ids, slice(first, first + c), (network.seed, self.t, slot))

    def _replaced(
        self,
        words: Tensor,
        said: NDArray[Any],
        bad: NDArray[np.int64],
        counts: list[int],
        origin: Tensor | None = None,
    ) -> Tensor:
        """The words (a, m) here, with what the members `bad` of a group say, (f, c), in the place of theirs."""
        network, rank = self.network, self.network.world.rank
        ranks = np.repeat(np.arange(len(counts)), counts)[bad]
        rows = network.rows(said, words, np.bincount(ranks, minlength=len(counts)).tolist())
        here = torch.from_numpy(bad[ranks == rank] - sum(counts[:rank])).to(words.device)
        return words.index_copy(0, here, rows if origin is None else rows + origin[here])

    def _span(self, counts: list[int]) -> slice:
        """Where the members of a group that are on this rank stand among all of its members."""
        rank = self.network.world.rank
        return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def _nan(n: int) -> Tensor:
    return torch.full((n,), math.nan, dtype=torch.float64)
