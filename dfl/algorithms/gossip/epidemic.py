"""Epidemic learning: every round has other neighbours, drawn at random (de Vos et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from dfl.algorithms.base import ALGORITHMS
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.core.options import Count


@ALGORITHMS.register("epidemic")
@dataclass(frozen=True, kw_only=True)
class Epidemic(DFedAvgM):
    """Epidemic learning (de Vos et al., NeurIPS 2023, arXiv 2310.01972, Algorithm 1).

        x_i <- (z_i + sum_{j in S_i} z_j) / (1 + |S_i|)

    z_i are K local steps from x_i, and S_i the peers that send to i. It is DFedAvgM with uniform
    weights on a graph that every round draws anew.

    Attributes:
        s: the peers to which a peer sends; ceil(log2 P) where not given, and for oracle one more
            where that is odd and P as well.
        form: local, every peer draws s others by itself, so that |S_i| differs and the mean over
            peers is not kept; or oracle, the graph of a round is a random one in which every peer
            has s neighbours, and the mean is kept.
    """

    s: Count | None = None
    form: Literal["local", "oracle"] = "local"

    default_mixing: ClassVar[str] = "uniform"

    @property
    def topology(self) -> str:
        """The graph that is drawn."""
        name = "random_out" if self.form == "local" else "random_regular"
        return name if self.s is None else f"{name}:s={self.s}"
