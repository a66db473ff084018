"""FedSGD: a server descends the gradient on all examples of some peers (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.server.fedavg import FedAvg
from dfl.core.errors import InputError

if TYPE_CHECKING:
    from dfl.training.solver import Solver


@ALGORITHMS.register("fedsgd")
@dataclass(frozen=True, kw_only=True)
class FedSGD(FedAvg):
    """FedAvg with one local step of every peer on all of its examples, whatever the batch size
    (McMahan et al. 2017, section 2).

        w <- w - η sum_{k in S_t} n_k grad F_k(w) / sum_{k in S_t} n_k

    With C = 1 it is gradient descent on all examples.
    """

    def solver(self, solver: Solver) -> Solver:
        """Take one step on all examples of a peer.

        Raises:
            InputError: the run gives other numbers of steps or epochs.
        """
        if solver.steps or solver.epochs != 1:
            raise InputError(
                "--algorithm fedsgd takes one step on all of a peer's examples: leave "
                "--local-steps, --local-epochs out"
            )
        return replace(solver, batch_size=0)
