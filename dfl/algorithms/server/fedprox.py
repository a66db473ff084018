"""FedProx: FedAvg with a proximal term, where stragglers do less work (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.server.fedavg import FedAvg
from dfl.core.options import NotNegative

if TYPE_CHECKING:
    from dfl.training.solver import Solver


@ALGORITHMS.register("fedprox")
@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    """Federated optimization in heterogeneous networks (Li et al., MLSys 2020, Algorithm 2).

    Peer k minimizes F_k(z) + μ/2 ||z - w||^2; with μ = 0 it is FedAvg. Where peers keep a part of
    the model, the term covers the shared parameters only; the server has no others. The server
    aggregates the updates of stragglers, which do less work.

    Attributes:
        mu: μ.
    """

    mu: NotNegative = 0.01
    straggler_policy: Literal["drop", "fewer"] = "fewer"

    def solver(self, solver: Solver) -> Solver:
        """Add the proximal term."""
        return replace(solver, prox_mu=self.mu)
