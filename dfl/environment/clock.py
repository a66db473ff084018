"""The simulated clock: from bytes sent and local steps taken to seconds in the field.

Every peer has a clock, and every rank has all of them, since they follow from what all ranks know.
In a round a peer takes its local steps, sends its messages one after the other, to its neighbours
by ascending number, and is done when it has sent all of its own and received all of theirs. So a
slow peer delays its neighbours first, and all peers later. The round of a server is over when all
peers to which it broadcast have received its model and it has received all their updates. Training
gives the same models without a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Connections(Protocol):
    """How messages get from node to node: 0 to P - 1 are the peers, P is the server."""

    def finish_times(self, ready: Floats, sender: Ints, receiver: Ints, size: int) -> Floats:
        """Return when every node has sent and received all of its messages, (P + 1,).

        Args:
            ready: (P + 1,) seconds at which each node begins to send.
            sender, receiver: (k,) the two ends of each message.
            size: bytes of a message.
        """


class AccessLines(NamedTuple):
    """A line of its own for every node, on which messages follow one another, out and in.

    Attributes:
        up, down: (P + 1,) seconds that a byte takes to leave a node, and to enter it; 0 where
            nothing limits it.
        delay: (P + 1,) seconds that a message takes besides, at either end of its way.
    """

    up: Floats
    down: Floats
    delay: Floats

    def finish_times(self, ready: Floats, sender: Ints, receiver: Ints, size: int) -> Floats:
        """See `Connections`. Messages leave by ascending receiver and enter in order of arrival."""
        order = np.lexsort((receiver, sender))
        sender, receiver = sender[order], receiver[order]
        done = ready.copy()
        left = ready[sender] + _place(sender) * (size * self.up[sender])
        np.maximum.at(done, sender, left)
        arrived = left + self.delay[sender] + self.delay[receiver]
        # The last to arrive comes first: the others enter before it.
        order = np.lexsort((-arrived, receiver))
        receiver, arrived = receiver[order], arrived[order]
        np.maximum.at(done, receiver, arrived + _place(receiver) * (size * self.down[receiver]))
        return done


class EdgeLinks(NamedTuple):
    """A link of its own for every directed edge between peers.

    Attributes:
        edges: (k,) sender * P + receiver, ascending.
        byte: (k,) seconds that a byte takes.
        delay: (k,) seconds that a message takes besides.
    """

    edges: Ints
    byte: Floats
    delay: Floats

    def finish_times(self, ready: Floats, sender: Ints, receiver: Ints, size: int) -> Floats:
        """See `Connections`. No message waits for another."""
        at = np.searchsorted(self.edges, sender * (len(ready) - 1) + receiver)
        done = ready.copy()
        left = ready[sender] + size * self.byte[at]
        np.maximum.at(done, sender, left)
        np.maximum.at(done, receiver, left + self.delay[at])
        return done


class Clock:
    """Simulated time, the same on every rank.

    Attributes:
        now: (P,) float64, seconds at which every peer was done with its last round; this is all
            that is remembered of the past.
    """

    def __init__(
        self, peers: int, connections: Connections, train_seconds: Callable[[], Floats]
    ) -> None:
        """Start at zero.

        Args:
            peers: P.
            connections: how messages get from node to node.
            train_seconds: returns the seconds for which every peer trains in a round, (P,); called
                once a round, on all ranks.
        """
        self.connections = connections
        self.train_seconds = train_seconds
        self.now = np.zeros(peers)
        self._trained = False

    @property
    def seconds(self) -> float:
        """The time of the slowest peer."""
        return float(self.now.max())

    def exchange(
        self, sender: Ints, receiver: Ints, size: int, up: NDArray[np.bool_] | None = None
    ) -> None:
        """Peers train, if they have not in this round, and send messages to their neighbours.

        Args:
            sender, receiver: (k,) the directed edges over which messages are sent.
            size: bytes of a message.
            up: (P,) who takes part; the clocks of the others follow the earliest of these. All take
                part where not given.
        """
        here = np.arange(len(self.now)) if up is None else np.flatnonzero(up)
        self._train(here)
        self.now = self._after(sender, receiver, size)[:-1]
        if up is not None and len(here):
            self.now[~up] = np.maximum(self.now[~up], self.now[here].min())

    def broadcast(self, size: int, clients: Ints) -> None:
        """The server sends a message of `size` bytes to some peers when all peers are done."""
        self.now = self._after(np.full_like(clients, len(self.now)), clients, size)[:-1]

    def aggregate(self, size: int, clients: Ints) -> None:
        """Some peers train, as in `exchange`, and send to the server.

        The server waits for all of them, and all peers wait for the server.
        """
        self._train(clients)
        self.now[:] = self._after(clients, np.full_like(clients, len(self.now)), size).max()

    def end_round(self, up: NDArray[np.bool_] | None = None) -> None:
        """End a round. Where nothing was sent, all peers have trained that are up (P,)."""
        self._train(np.arange(len(self.now)) if up is None else np.flatnonzero(up))
        self._trained = False

    def _after(self, sender: Ints, receiver: Ints, size: int) -> Floats:
        ready = np.append(self.now, self.now.max())
        return self.connections.finish_times(ready, sender, receiver, size)

    def _train(self, peers: Ints) -> None:
        """Let some peers train, once in a round."""
        if not self._trained:
            self.now[peers] += self.train_seconds()[peers]
        self._trained = True


def _place(nodes: Ints) -> Ints:
    """Return the place of each message among those of its node, from 1; `nodes` is ascending."""
    return np.arange(1, len(nodes) + 1) - np.searchsorted(nodes, nodes)
