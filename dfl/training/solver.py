"""The solver of local training: learning rate, momentum, batch size and number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Solver:
    """The options of local training between two exchanges.

    Attributes:
        lr: round t -> learning rate η.
        momentum: θ of the heavy ball.
        weight_decay: λ, added to the gradient as λx.
        batch_size: examples per step; 0 for all that a peer has.
        epochs: passes over a peer's own data per round, E; one number, or (p,).
        steps: steps per round in place of epochs, likewise; 0 counts epochs.
        max_steps: (p,), the most steps of each peer in this round; None for no limit.
        prox_mu: μ of FedProx, the weight of the proximal term.
        sam_rho: ρ of sharpness-aware minimization; 0 for the gradient itself.
        outer_momentum: the run's momentum, where the method applies it to what an exchange brings
            and the local steps have none.
        batched: whether this rank's peers train together, or one after the other.
        group_size: the number of models in every group that trains together, where the bits of a
            model depend on it, as on a GPU; 0 where they do not.
        precision: of products in local training, see `dfl.training.precision`.
    """

    lr: Callable[[int], float]
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch_size: int = 10
    epochs: int | Ints = 1
    steps: int | Ints = 0
    max_steps: Ints | None = None
    prox_mu: float = 0.0
    sam_rho: float = 0.0
    outer_momentum: float = 0.0
    batched: bool = True
    group_size: int = 0
    precision: str = "float32"

    def steps_for(self, sizes: Ints) -> Ints:
        """Return the local steps of a round, (p,): K_i = E * ceil(n_i / b), or a fixed number.

        Args:
            sizes: (p,), n_i, the training examples of each peer.
        """
        if np.any(self.steps):
            return np.full_like(sizes, self.steps)
        steps: Ints = self.epochs * -(-sizes // (self.batch_size or np.maximum(sizes, 1)))
        return steps
