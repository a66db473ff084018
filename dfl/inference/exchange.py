"""What crosses between sites: means over all sites, and tables of what every site sent.

Sites are peers. They send to a centre (`Centre`), or only to their neighbours on a graph (`Graph`).
Every number crosses as a message of `dfl.comm`, whose bytes are counted. Tables of sites have the
axes (..., p, m); repetitions of a study travel in one message.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.algorithms.gossip.qdfedavgm import QDFedAvgM
from dfl.comm.exchange import Net
from dfl.comm.network import Network
from dfl.compression.exact import Exact
from dfl.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

    from dfl.algorithms.base import Algorithm
    from dfl.algorithms.protocols import Task
else:
    from dfl.core.lazy import torch

TRIES = 1000
"""The most times that a site, or the centre, sends a message again because it was lost."""
AGREED = 1e-13
"""The relative gap between peers at which they agree."""
MOST_ROUNDS = 20_000
"""The most gossip rounds of one mean."""

Change = Callable[["Tensor"], "Tensor"]


class NoConsensusError(InputError):
    """Consensus diverges."""


@dataclass
class Revealed:
    """What a site reveals under one name.

    Attributes:
        numbers: the numbers of a message.
        times: how often a site sends such numbers of its own: new ones, not what it passes on.
        rounds: the rounds of messages that this took.
        bytes: that the sites of this rank sent in them, of others' numbers as well.
    """

    numbers: int = 0
    times: int = 0
    rounds: int = 0
    bytes: int = 0


@dataclass
class Exchange(ABC):
    """What connects the sites.

    Attributes:
        network: the network.
        t: the next round.
        gap: the largest relative difference between peers after a mean, in the numbers that were
            not all 0 before it; 0 with a centre.
        revealed: what every site revealed, by name.
    """

    network: Network
    t: int = 0
    gap: float = 0.0
    revealed: dict[str, Revealed] = field(default_factory=dict)

    @abstractmethod
    def mean(self, rows: Tensor, what: str, of: Sequence[int] | None = None) -> Tensor:
        """Return the mean of rows (..., p, m) over sites, as each knows it.

        Args:
            rows: a row for each site of this rank; 0 where it is not among `of`.
            what: the name of what a site reveals.
            of: the sites, ascending; all where not given.

        Returns:
            (..., 1, m) where all sites know the same, else (..., p, m).
        """

    @abstractmethod
    def table(self, rows: Tensor, what: str, to: Sequence[int]) -> Tensor:
        """Return the rows of all sites one after the other, as some sites know them.

        They cross in float64, uncompressed: counts stay whole, and what peers pass on stays exact.

        Returns:
            (..., 1, K m) where these know the same, else (..., p, K m).
        """

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether a mean is exact but for rounding."""

    @property
    def count(self) -> int:
        """K, the number of sites."""
        return self.network.layout.peers

    @property
    def here(self) -> NDArray[np.int64]:
        """The numbers of this rank's sites, ascending."""
        return self.network.layout.hosted(self.network.transport.world.rank)

    def everywhere(self, here: bool) -> bool:
        """Return whether something holds on every rank."""
        (least,) = self.network.transport.world.minimum(int(here))
        return bool(least)

    def _net(self, clear: bool = False) -> Net:
        """Return the network in this round; a clear one compresses no message."""
        network = copy.copy(self.network) if clear else self.network
        if clear:
            network.threat_model = network.threat_model._replace(compressor=Exact())
        return Net(network, self.t, measured=False)

    @property
    def _compressed(self) -> bool:
        return not isinstance(self.network.threat_model.compressor, Exact)

    def _end_round(self) -> None:
        self.network.end_round(self.t)
        self.t += 1

    def _note(self, what: str, rows: Tensor, since: int) -> None:
        revealed = self.revealed.setdefault(what, Revealed())
        revealed.numbers = rows.shape[-1]
        revealed.times += 1
        revealed.rounds += self.t - since
        counted = sum(each.bytes for each in self.revealed.values())
        revealed.bytes += int(self.network.traffic.payload.sum()) - counted


@dataclass
class Centre(Exchange):
    """Sites send to a coordinating centre, which adds up and sends the result to sites.

    A message that is lost is sent again in the next round.
    """

    def mean(self, rows: Tensor, what: str, of: Sequence[int] | None = None) -> Tensor:
        """See `Exchange`. The order of the sum is that of the sites, and only these send."""
        since = self.t
        senders = np.arange(self.count) if of is None else np.array(of, np.int64)
        received = self._collect(_flat(rows), senders)
        total = received.sum(0, keepdim=True) / len(senders)
        self._broadcast(total, np.arange(self.count))
        self._note(what, rows, since)
        return _unflat(total, rows)

    def table(self, rows: Tensor, what: str, to: Sequence[int]) -> Tensor:
        """See `Exchange`."""
        since = self.t
        received = self._collect(_flat(rows), np.arange(self.count), clear=True)
        self._broadcast(received.reshape(1, -1), np.array(to, np.int64))
        self._note(what, rows, since)
        return _unflat(received, rows).flatten(-2)[..., None, :]

    @property
    def exact(self) -> bool:
        """See `Exchange`."""
        return not self._compressed

    def _collect(self, rows: Tensor, missing: NDArray[np.int64], clear: bool = False) -> Tensor:
        """Return the rows of all sites, (K, m), 0 for those that were not missing.

        They are sent until all have arrived.
        """
        everyone = rows.new_zeros(self.count, rows.shape[1])
        for attempt in range(TRIES):
            if attempt:
                self._end_round()
            net = self._net(clear)
            group = net.group(net.present(missing))
            received, ids = net.collect(rows[group.here], group)
            everyone[torch.from_numpy(ids)] = received
            missing = np.setdiff1d(missing, ids)
            if not len(missing):
                return everyone
        raise InputError(f"--faults: no message of site {missing[0]} arrives in {TRIES} rounds")

    def _broadcast(self, row: Tensor, missing: NDArray[np.int64]) -> None:
        """Send a row to some sites until all have it, and end the round."""
        for _ in range(TRIES):
            net = self._net()
            group = net.group(missing)
            net.broadcast(row, group)
            up = net.group(net.present(missing))
            missing = np.setdiff1d(missing, net.reached(up).ids)
            self._end_round()
            if not len(missing):
                return
        raise InputError(f"--faults: no message reaches site {missing[0]} in {TRIES} rounds")


@dataclass
class Graph(Exchange):
    """Sites send to their neighbours alone.

    A mean is a consensus, x_i <- sum_j w_ij x_j, for doubly stochastic W: exact after a period of a
    sequence of graphs whose product is the mean, geometric elsewhere. Under faults, and with
    messages of few bits, it is the averaging of public copies of quantized DFedAvgM, which keeps
    the mean whatever is lost. A table is flooded.

    Attributes:
        rounds: gossip rounds of a mean; None until the peers agree, which a simulation can see.
    """

    rounds: int | None = None

    def mean(self, rows: Tensor, what: str, of: Sequence[int] | None = None) -> Tensor:
        """See `Exchange`. All sites pass on messages."""
        share = 1.0 if of is None else len(of) / self.count
        return self.gossip(rows, None, self.rounds, what) / share

    def gossip(self, rows: Tensor, local: Change | None, rounds: int | None, what: str) -> Tensor:
        """Let peers change their rows and average them with their neighbours, round by round.

        Args:
            rows: (..., p, m).
            local: what each peer makes of its rows (..., p, m) before it sends them.
            rounds: how many; None until the peers agree, which is checked after every round.
            what: the name of what a site reveals.
        """
        since = self.t
        self._wait_for_period()
        flat = _flat(rows)
        change = _Local(rows, local)
        method = self._method
        state = method.init(flat, torch.zeros_like(flat), self._net())
        scale = self._most(flat.abs())
        for _ in range(MOST_ROUNDS if rounds is None else rounds):
            state = method.round(state, _as_task(change), self._net())
            self._end_round()
            if rounds is None and not self._gap(state.x, scale) > AGREED:
                break
        gap = self._gap(state.x, scale)
        self.gap = max(self.gap, gap)
        if not math.isfinite(gap):
            raise NoConsensusError(
                f"{what}: consensus diverges: give messages more bits, or choose another graph"
            )
        self._note(what, rows, since)
        return _unflat(state.x, rows)

    def table(self, rows: Tensor, what: str, to: Sequence[int]) -> Tensor:
        """See `Exchange`: every peer passes on what it knows until all know everything."""
        since, flat = self.t, _flat(rows)
        known = flat.new_zeros(len(flat), self.count, flat.shape[1] + 1)  # 1, then the numbers
        own = torch.arange(len(flat))
        known[own, torch.from_numpy(self.here)] = torch.cat([flat.new_ones(len(flat), 1), flat], 1)
        for _ in range(MOST_ROUNDS):
            if self.everywhere(bool((known[..., 0] > 0).all())):
                break
            self._spread(known)
        else:
            raise InputError(f"--faults: a site receives no table in {MOST_ROUNDS} rounds")
        self._note(what, rows, since)
        return torch.cat([_unflat(known[:, k, 1:], rows) for k in range(self.count)], -1)

    def _spread(self, known: Tensor) -> None:
        """Add to what each peer knows what its neighbours knew, in a round."""
        net = self._net(clear=True)
        edges = net.edges
        received = net.exchange(known.flatten(1)[edges.owner], per_edge=True)
        messages = received.messages.unflatten(1, known.shape[1:])
        receivers = np.searchsorted(self.here, edges.received % self.count)
        for receiver, message in zip(receivers.tolist(), messages, strict=True):
            new = (known[receiver, :, 0] == 0) & (message[:, 0] > 0)
            known[receiver, new] = message[new]
        self._end_round()

    @property
    def exact(self) -> bool:
        """See `Exchange`: peers agree on it, whatever is lost or rounded on the way."""
        return self.rounds is None

    @property
    def _method(self) -> Algorithm[Any]:
        copies = self._compressed or self.network.threat_model.faults
        return QDFedAvgM() if copies else DFedAvgM()

    def _wait_for_period(self) -> None:
        """Go on to the beginning of a period of the sequence of graphs."""
        matrices = self.network.schedule.matrices
        self.t += 0 if matrices.endless else -self.t % len(matrices.weights)

    def _gap(self, x: Tensor, scale: Tensor) -> float:
        """Return the largest gap relative to scales (m,), of numbers finite and not 0 at first."""
        gaps = ((self._most(x) + self._most(-x)) / scale)[scale.isfinite() & (scale > 0)]
        return float(gaps.max()) if len(gaps) else 0.0

    def _most(self, x: Tensor) -> Tensor:
        """Return the largest of all peers' numbers in each coordinate, (m,)."""
        everyone = self.network.transport.world.all_gather(x.numpy())
        return torch.from_numpy(everyone.max(0))


@dataclass(frozen=True)
class _Local:
    """The local training of a round of gossip: what each peer makes of its rows.

    Attributes:
        like: (..., p, m), tables of the shape of the rows.
        change: see `Graph.gossip`.
    """

    like: Tensor
    change: Change | None

    def train(self, x: Tensor, t: int) -> Tensor:
        """Return the changed rows, (p, m), in new memory."""
        changed = x if self.change is None else _flat(self.change(_unflat(x, self.like)))
        return changed.clone()  # a method may overwrite it


def _as_task(change: _Local) -> Task:
    return change  # type: ignore[return-value]  # a method that only averages uses nothing else


def _flat(rows: Tensor) -> Tensor:
    """Return tables (..., p, m) as one message per site, (p, M)."""
    return rows.movedim(-2, 0).flatten(1).contiguous()


def _unflat(flat: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `_flat` for messages (k, M) of tables like (..., p, m): (..., k, m)."""
    return flat.reshape(len(flat), *like.shape[:-2], like.shape[-1]).movedim(0, -2)
