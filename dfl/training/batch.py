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
    """One local step of the first a peers of a group, those that still have one to do.

    Attributes:
        index: (a, b) int64 into the rank's examples; places behind a peer's own are padding.
        weight: (a, b) of an example in its peer's mean loss, 0 on padding; (1, b) where it is the
            same for all.
        address: the run's seed, the numbers (a,) of the peers among all, the round t and the local
            step k.
    """

    index: Tensor
    weight: Tensor
    address: tuple[int, Ints, int, int]

    def draw(self, purpose: str, *shape: int) -> Tensor:
        """Uniform numbers in [0, 1) for every example, (a, b, *shape) float32: a peer's own in
        every step.

        They do not depend on who trains together, on how wide the batch is padded, or on who else
        draws.

        Args:
            purpose: what the numbers are for; two purposes never share numbers.
            shape: of the numbers that one example needs.
        """
        (seed, peers, t, k), (a, b) = self.address, self.index.shape
        n = b * math.prod(shape)
        return randomness.uniform(seed, purpose, peers, t, k, n=n, device=self.index.device).view(
            a, b, *shape
        )
