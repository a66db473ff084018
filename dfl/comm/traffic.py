"""Counters of what was sent and what arrived."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class Traffic:
    """What this rank and its p peers have sent and received since the run began.

    Attributes:
        payload: (p,) int64, bytes that each of this rank's peers has sent, whatever the ranks.
        downloaded: (p,) int64, bytes that the server has sent to each of them.
        wire: bytes that have arrived at this rank from other ranks by the verbs of `Net`: messages,
            and what attackers, aggregation rules and a server compute on several ranks; lengths are
            not counted. What several ranks receive counts for each of them.
        lost: messages that were sent by this rank's peers, or by the server to them, and lost.
        parameters: numbers sent to and by the server, as Table 1 of LG-FedAvg counts them: a
            broadcast goes to all P peers.
    """

    payload: NDArray[np.int64]
    downloaded: NDArray[np.int64]
    wire: int = 0
    lost: int = 0
    parameters: int = 0

    @classmethod
    def of(cls, peers: int) -> Traffic:
        """Start at zero for p peers."""
        return cls(np.zeros(peers, np.int64), np.zeros(peers, np.int64))
