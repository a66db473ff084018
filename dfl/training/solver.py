"""The solver of local training: learning rate, momentum, batch size and number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Solver:
    """How a peer trains between two exchanges.

    Attributes:
        lr: round t -> learning rate η.
        momentum: θ of the heavy ball.
        weight_decay: λ, added to the gradient as λx.
        batch_size: examples per step; 0 is all that a peer has.
        epochs: passes over a peer's own data per round, E; one number, or one for every peer.
        steps: steps per round in place of epochs, likewise; 0 counts epochs.
        most: (p,), steps for which every peer has the time in this round; None where all have as
            much as they like.
        prox_mu: μ of FedProx, which holds a peer near the point where its round began.
        batched: train this rank's peers together or one after the other.
    """

    lr: Callable[[int], float]
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 10
    epochs: int | Ints = 1
    steps: int | Ints = 0
    most: Ints | None = None
    prox_mu: float = 0.0
    batched: bool = True

    def steps_for(self, sizes: Ints) -> Ints:
        """Local steps of a round for peers with so many examples, (p,): K_i = E * ceil(n_i / b), or
        a fixed number.
        """
        if np.any(self.steps):
            return np.full_like(sizes, self.steps)
        steps: Ints = self.epochs * -(-sizes // (self.batch_size or np.maximum(sizes, 1)))
        return steps
