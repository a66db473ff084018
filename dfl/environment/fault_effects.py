"""The effects of a run's faults on one round: which peers are up, their work, what arrives.

A peer that is down neither trains nor sends nor receives. A lossy link drops a message after it was
sent: it counts as payload but is not delivered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from dfl.environment.faults import Fault, RoundKey

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class FaultEffects:
    """The effects of some faults on all peers and links in a round, known to every rank."""

    faults: tuple[Fault, ...]
    round_key: RoundKey

    @cached_property
    def up(self) -> Bools:
        """Which peers are up, (P,)."""
        down: Bools = np.any([each.down(self.round_key) for each in self.faults], axis=0)
        return ~down

    @cached_property
    def work(self) -> NDArray[np.float64]:
        """Share of its local steps that every peer does, (P,): 0 for those that are down."""
        share: NDArray[np.float64] = np.min(
            [each.pace(self.round_key) for each in self.faults], axis=0
        )
        return share * self.up

    def arrive(self, sender: Ints | int, receiver: Ints | int) -> Bools:
        """Return which messages from sender to receiver arrive, (k,); number P is the server.

        Args:
            sender, receiver: (k,) peers, or one for all messages.
        """
        links = np.atleast_1d(sender * (self.round_key.peers + 1) + np.asarray(receiver, np.int64))
        lost: Bools = np.any([each.loses(links, self.round_key) for each in self.faults], axis=0)
        return ~lost

    def on_edges(self, edges: Ints) -> tuple[Bools, Bools]:
        """Return which edges are used, (k,), and over which of them a message arrives, (k,).

        Args:
            edges: (k,) sender * P + receiver.
        """
        used = self.used(edges)
        return used, used & self.arrive(*np.divmod(edges, self.round_key.peers))

    def used(self, edges: Ints) -> Bools:
        """Return which edges are used, (k,): those with both ends up.

        Args:
            edges: (k,) sender * P + receiver.
        """
        sender, receiver = np.divmod(edges, self.round_key.peers)
        return self.up[sender] & self.up[receiver]
