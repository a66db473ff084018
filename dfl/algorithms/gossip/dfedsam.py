"""DFedSAM: DFedAvgM with sharpness-aware local steps (Shi et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.core.options import NotNegative

if TYPE_CHECKING:
    from dfl.training.solver import Solver


@ALGORITHMS.register("dfedsam")
@dataclass(frozen=True, kw_only=True)
class DFedSAM(DFedAvgM):
    """DFedAvgM with sharpness-aware steps (arXiv 2302.04083, Algorithm 1, one exchange a round).

        z_i = K heavy-ball steps from x_i with the gradients g_i(y + ρ g_i(y) / ||g_i(y)||)
        x_i <- sum_j w_ij z_j

    Both gradients of a step are of the same batch, so a step costs two. With ρ = 0 it is DFedAvgM.

    Attributes:
        rho: ρ.
    """

    rho: NotNegative = 0.01

    def solver(self, solver: Solver) -> Solver:
        """Take sharpness-aware steps."""
        return replace(solver, sam_rho=self.rho)
