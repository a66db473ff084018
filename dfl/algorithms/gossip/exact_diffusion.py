"""Exact diffusion: D2 with half of every average left out (Yuan et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.algorithms.assumptions import FULL_WORK, STATIC, SYMMETRIC, Assumption
from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.gossip.d2 import D2

if TYPE_CHECKING:
    from torch import Tensor

    from dfl.algorithms.protocols import Net


@ALGORITHMS.register("exact_diffusion")
@dataclass(frozen=True, kw_only=True)
class ExactDiffusion(D2):
    """Exact diffusion (arXiv 1702.05122, Algorithm 1): D2 with (W + I) / 2 in place of W.

    The eigenvalues of (W + I) / 2 are at least 0 for every symmetric, doubly stochastic W.
    """

    expects: ClassVar[Mapping[Assumption, str]] = {
        each: D2.expects[each] for each in (STATIC, SYMMETRIC, FULL_WORK)
    }

    def mixed(self, sent: Tensor, start: Tensor, net: Net) -> Tensor:
        """Return (sum_j w_ij sent_j + sent_i) / 2."""
        return (super().mixed(sent, start, net) + sent) / 2
