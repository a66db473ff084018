"""The schedule: the mixing matrix of every round, and the plans made from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.plan import Arcs, EdgePlan, PeerPlan, Union, all_edges, edge_plan, peer_plan
from dfl.core.errors import InputError
from dfl.core.layout import Group, Layout
from dfl.core.options import MOST

SAMPLED = 64
"""The rounds of a sequence without a period that are looked at before a run."""
MOST_EDGES = 2**24
"""The most directed edges that memory is kept for where any two peers may be neighbours."""


class MixingMatrices(NamedTuple):
    """The mixing matrices of a run, entry t modulo their number for round t.

    Attributes:
        weights: the matrices (P, P); none where peers only exchange with a server.
        stationary: (P,) pi with pi W = pi for each of them. None where there is none; rank 0 does
            not send a uniform one either, so that it is None on ranks that were sent the matrices.
        possible: (P, P) bool, every edge that a round of a sequence without a period may have; None
            where it may be any.
    """

    weights: Sequence[csr_array] = ()
    stationary: Sequence[NDArray[np.float64] | None] = ()
    possible: csr_array | None = None

    @property
    def endless(self) -> bool:
        """Whether the sequence has no period: it is as long as a run can be."""
        return len(self.weights) == MOST

    @property
    def sample(self) -> Sequence[csr_array]:
        """All matrices; the first `SAMPLED` where the sequence has no period."""
        return self.weights[:SAMPLED] if self.endless else self.weights


class Schedule:
    """The mixing matrix of every round, and the plans of one rank.

    A sequence without a period makes a matrix when it is asked for, and only the plans of the last
    round are kept.

    Attributes:
        matrices: the mixing matrices.
        layout, rank: which peers are on which rank, and on which rank this is.
    """

    def __init__(self, matrices: MixingMatrices, layout: Layout, rank: int) -> None:
        self.matrices = matrices
        self.layout = layout
        self.rank = rank
        kept = 1 if matrices.endless else None
        self._peer_plan = lru_cache(kept)(self._make_peer_plan)
        self._edge_plan = lru_cache(kept)(self._make_edge_plan)

    @property
    def weights(self) -> Sequence[csr_array]:
        """The mixing matrices (P, P); none where peers only exchange with a server."""
        return self.matrices.weights

    @property
    def patterns(self) -> Sequence[csr_array]:
        """Matrices (P, P) that together have every edge that any round uses.

        Raises:
            InputError: on every rank, if these are all pairs of too many peers.
        """
        if not self.matrices.endless:
            return self.weights
        if self.matrices.possible is not None:
            return [self.matrices.possible]
        peers = self.layout.peers
        if (edges := peers * (peers - 1)) > MOST_EDGES:
            raise InputError(
                f"--topology draws any edge in any round: memory for each of {edges:,} directed "
                f"edges is too much, at most {MOST_EDGES:,} are accepted: choose fewer peers or a "
                "graph with a period, such as base_graph"
            )
        return [csr_array(~np.eye(peers, dtype=bool))]

    @property
    def edges(self) -> NDArray[np.int64] | None:
        """Sender * P + receiver of every edge that any round uses, ascending; None without a graph.

        Raises:
            InputError: on every rank, as for `patterns`.
        """
        return all_edges(self.patterns, self.layout.peers) if self.weights else None

    @cached_property
    def union(self) -> Union:
        """Every edge that any round uses.

        Raises:
            InputError: on every rank, as for `patterns`.
        """
        return Union.of(self.patterns, self.layout, self.rank)

    @cached_property
    def everyone(self) -> Group:
        """All peers."""
        return self.group(np.arange(self.layout.peers))

    def group(self, ids: NDArray[np.int64]) -> Group:
        """Return some peers, by their numbers."""
        return self.layout.group(ids, self.rank)

    def subset(self, group: Group, kept: NDArray[np.bool_]) -> Group:
        """Return the members of a group for which `kept` (k,) is true."""
        return self.layout.subset(group, kept, self.rank)

    def matrix(self, t: int) -> csr_array:
        """Return the mixing matrix of round t."""
        return self.weights[t % len(self.weights)]

    def peer_plan(self, t: int) -> PeerPlan:
        """Return the plan of round t for one message per peer."""
        return self._peer_plan(t % len(self.weights))

    def edge_plan(self, t: int) -> EdgePlan:
        """Return the plan of round t for one message per edge."""
        return self._edge_plan(t % len(self.weights))

    def senders_on_edges(self, t: int) -> Group:
        """Return the directed edges of round t, by owner * P + other, as `EdgePlan` orders them."""
        arcs = Arcs.of(self.matrix(t))
        layout = self.layout
        ids = np.sort(arcs.sender * layout.peers + arcs.receiver)
        owners = ids // layout.peers
        counts, by_rank, mine = layout.members(owners, self.rank)
        return Group(ids, np.arange(counts[self.rank]), counts, owners, by_rank, mine)

    def _make_peer_plan(self, k: int) -> PeerPlan:
        return peer_plan(self.weights[k], self.layout, self.rank)

    def _make_edge_plan(self, k: int) -> EdgePlan:
        matrix = self.weights[k]
        pi = self.matrices.stationary[k] if self.matrices.stationary else None
        # Without a period, a method that has not asked for the union has no memory per edge.
        alone = self.matrices.endless and "union" not in vars(self)
        union = Union.of([matrix], self.layout, self.rank) if alone else self.union
        return edge_plan(matrix, self.layout, self.rank, union, pi)
