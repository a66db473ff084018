"""One batch of several peers, and the random numbers of its examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness

if TYPE_CHECKING:
    from torch import Tensor

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """The examples of one local step of the first a peers of a group: those with steps left, or all
    peers of a group of fixed size.

    Attributes:
        index: (a, b) int64, positions among the rank's examples; those after a peer's own examples
            are padding.
        weight: (a, b), the weight of an example in its peer's mean loss, 0 on padding; (1, b) where
            it is the same for all.
        seed: the run's seed.
        peers: (a,), the global ids of the peers.
        t: the round.
        k: the local step.
        moving: the number of peers with steps left, which come first.
    """

    index: Tensor
    weight: Tensor
    seed: int
    peers: Ints
    t: int
    k: int
    moving: int

    def draw(self, purpose: str, *shape: int) -> Tensor:
        """Return uniform random numbers in [0, 1) for every example, (a, b, *shape) float32.

        They depend on seed, purpose, peer, round, step and position in the batch, and not on which
        peers train together, on the padding, or on other draws.

        Args:
            purpose: the purpose; two purposes never share numbers.
            shape: of the numbers of one example.
        """
        a, b = self.index.shape
        numbers = randomness.uniform(
            self.seed,
            purpose,
            self.peers,
            self.t,
            self.k,
            n=b * math.prod(shape),
            device=self.index.device,
        )
        return numbers.view(a, b, *shape)
