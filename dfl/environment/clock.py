"""How long would it take in the field? From bytes said and steps taken to simulated seconds.

Every peer has a clock, and every rank has all of them, since they follow from what all ranks know. In a round a peer
takes its local steps, says its words one after the other, to its neighbours by ascending number, and is done when it
has said all of its own and heard all of theirs. So a slow peer slows its neighbours first, and everybody later. The
round of a server is over when all whom it told have heard it and it has heard all who answer. What is learned is the
same without a clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dfl.comm.plan import Arcs
    from dfl.comm.transport import Network

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Ways(Protocol):
    """How words get from node to node: 0 to P - 1 are the peers, P is a server."""

    def until(self, ready: Floats, words: tuple[Ints, Ints], size: int) -> Floats:
        """When every node has said all of its words and heard all that are for it, (P + 1,).

        Args:
            ready: (P + 1,) when each of them begins to speak, in seconds.
            words: (n,) who says each word, and (n,) to whom.
            size: bytes of a word.
        """


class Lines(NamedTuple):
    """A line of its own for every node, on which words follow one another, out and in.

    Attributes:
        up, down: (P + 1,) seconds that a byte takes to leave a node, and to enter it; 0 where nothing limits it.
        delay: (P + 1,) seconds that a word takes besides, at either end of its way.
    """

    up: Floats
    down: Floats
    delay: Floats

    def until(self, ready: Floats, words: tuple[Ints, Ints], size: int) -> Floats:
        """As in `Ways`; words leave by ascending receiver, and enter in the order in which they arrive."""
        order = np.lexsort(words[::-1])
        sender, receiver = (each[order] for each in words)
        done, left = ready.copy(), ready[sender] + _place(sender) * (size * self.up[sender])
        np.maximum.at(done, sender, left)
        arrived = left + self.delay[sender] + self.delay[receiver]
        order = np.lexsort(
            (-arrived, receiver)
        )  # the last one first: before it the others have had their turn
        receiver, arrived = receiver[order], arrived[order]
        np.maximum.at(done, receiver, arrived + _place(receiver) * (size * self.down[receiver]))
        return done


class Links(NamedTuple):
    """A line of its own for every directed edge between peers.

    Attributes:
        edges: (n,) sender * P + receiver, ascending.
        byte: (n,) seconds that a byte takes.
        delay: (n,) seconds that a word takes besides.
    """

    edges: Ints
    byte: Floats
    delay: Floats

    def until(self, ready: Floats, words: tuple[Ints, Ints], size: int) -> Floats:
        """As in `Ways`; no word waits for another."""
        sender, receiver = words
        at = np.searchsorted(self.edges, sender * (len(ready) - 1) + receiver)
        done, left = ready.copy(), ready[sender] + size * self.byte[at]
        np.maximum.at(done, sender, left)
        np.maximum.at(done, receiver, left + self.delay[at])
        return done


class Clock:
    """Simulated time, the same on every rank.

    Attributes:
        now: (P,) float64, seconds at which every peer was done with its last round: all that is remembered of the past.
        spent: (P,) seconds that this rank's peers have really trained in this round; None where nobody measures it.
    """

    def __init__(self, network: Network, ways: Ways, steps: Ints, pace: Floats | None) -> None:
        """Start at zero.

        Args:
            network: whose clock it is.
            ways: how words get from node to node.
            steps: (P,) local steps of every peer in a round.
            pace: (P,) seconds that each of them takes for a step; None to measure.
        """
        self.network, self.ways, self.steps, self.pace = network, ways, steps, pace
        self.now = np.zeros(network.layout.peers)
        self.spent = np.zeros(len(self.now)) if pace is None else None
        self._trained = False

    @property
    def seconds(self) -> float:
        """What it has taken so far: the time of the slowest peer."""
        return float(self.now.max())

    def share(self, arcs: Arcs, size: int, up: NDArray[np.bool_] | None = None) -> None:
        """Peers train, if they have not in this round, and say words of `size` bytes to their neighbours.

        Args:
            arcs: the edges that speak.
            size: bytes of a word.
            up: (P,) who takes part; the clocks of the others go along with the earliest of these. All where not given.
        """
        here = np.arange(len(self.now)) if up is None else np.flatnonzero(up)
        self._train(here)
        self.now = self._until((arcs.sender, arcs.receiver), size)[:-1]
        if up is not None and len(here):
            self.now[~up] = np.maximum(self.now[~up], self.now[here].min())

    def tell(self, size: int, to: Ints) -> None:
        """A server says a word of `size` bytes to some peers, by their numbers, when all are done."""
        self.now = self._until((np.full_like(to, len(self.now)), to), size)[:-1]

    def collect(self, size: int, group: Ints) -> None:
        """Some peers train, as in `share`, and answer the server; it waits for them, and all wait for it."""
        self._train(group)
        self.now[:] = self._until((group, np.full_like(group, len(self.now))), size).max()

    def turn(self, up: NDArray[np.bool_] | None = None) -> None:
        """End a round; where nobody has spoken, all have trained who are up (P,)."""
        self._train(np.arange(len(self.now)) if up is None else np.flatnonzero(up))
        self._trained = False

    def _until(self, words: tuple[Ints, Ints], size: int) -> Floats:
        return self.ways.until(np.append(self.now, self.now.max()), words, size)

    def _train(self, who: Ints) -> None:
        """Let some peers train, once in a round."""
        if not self._trained:
            self.now[who] += self._work()[who]
        self._trained = True

    def _work(self) -> Floats:
        """Seconds for which every peer trains, (P,)."""
        if self.pace is not None:
            return self.pace * self.steps
        assert self.spent is not None
        mine = self.network.layout.block(self.network.world.rank)
        everyone = self.network.world.everywhere(self.spent[mine.start : mine.stop].copy())
        self.spent[:] = 0
        return everyone


def _place(nodes: Ints) -> Ints:
    """Where each word stands among those of its node, from 1; words of a node lie one behind the other."""
    return np.arange(1, len(nodes) + 1) - np.searchsorted(nodes, nodes)
