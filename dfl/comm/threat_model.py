"""The threat model: attackers, the rule against them, faults, and how messages are encoded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dfl.environment.faults import Fault
from dfl.robust.aggregators import Aggregate, mean
from dfl.robust.attacks import Attack, Honest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dfl.compression import Compressor


class ThreatModel(NamedTuple):
    """What happens to messages between sender and receiver.

    Attributes:
        compressor: encodes messages as bytes.
        aggregator: aggregates the messages of several senders.
        attack: falsifies the messages of attackers.
        attackers: their numbers, ascending.
        faults: take peers or messages away.
    """

    compressor: Compressor
    aggregator: partial[Aggregate] = partial(mean)
    attack: Attack = Honest()
    attackers: NDArray[np.int64] = np.zeros(0, np.int64)
    faults: tuple[Fault, ...] = ()

    @property
    def falsifies(self) -> bool:
        """Whether some messages are falsified."""
        return self.attack.falsifies and len(self.attackers) > 0
