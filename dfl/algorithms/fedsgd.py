"""FedSGD: a server follows the gradient on all the examples of some peers (McMahan et al. 2017, section 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.fedavg import FedAvg
from dfl.core.errors import InputError

if TYPE_CHECKING:
    from dfl.training.solver import Solver


@ALGORITHMS.register("fedsgd")
@dataclass(frozen=True, kw_only=True)
class FedSGD(FedAvg):
    """FedAvg with one step of every peer on all of its examples: with C = 1 it is gradient descent on all data.

    w <- w - η sum_{k in S_t} n_k grad F_k(w) / sum_{k in S_t} n_k
    """

    def solver(self, asked: Solver) -> Solver:
        """One step on everything.

        Raises:
            InputError: other numbers of steps or epochs were asked for.
        """
        if asked.steps or asked.epochs != 1:
            raise InputError(
                "--algorithm fedsgd takes one step on all of a peer's examples: leave --local-steps, --local-epochs out"
            )
        return replace(asked, batch_size=0)
