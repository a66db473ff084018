"""What methods assume of the graph, the learning rate, the faults and the attack of a run.

A method declares its assumptions in `Algorithm.requires` and `Algorithm.expects`. They are checked
before round 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scipy.sparse import csr_array

    from dfl.environment.faults import Fault

LEAST_RATE = 2.0**-126
"""The least normal number of float32: the inverse of a smaller one may be infinite there."""
RATES = 2**16
"""The most rounds whose learning rate is checked."""
ROUNDING = 1e-6
"""Weights, and sums of them, that differ by less are equal."""


@dataclass(frozen=True)
class Conditions:
    """The graph, the learning rate, the faults and the attack of a run.

    Attributes:
        weights: the mixing matrices (P, P); the first of them where every round draws another.
        endless: whether every round draws another.
        smallest: λ_min, the smallest eigenvalue of a mixing matrix; NaN where it is not computed.
        rate: round t -> learning rate.
        rounds: of the run.
        faults: the faults that have an effect.
        falsified: whether attackers falsify messages.
        clustered: whether the topology states the clusters of the peers.
    """

    weights: Sequence[csr_array]
    endless: bool
    smallest: float
    rate: Callable[[int], float]
    rounds: int
    faults: tuple[Fault, ...]
    falsified: bool
    clustered: bool = False


@dataclass(frozen=True)
class Assumption:
    """Something that a method assumes of a run.

    Attributes:
        text: the assumption, as tables and messages have it.
        setting: the field of `Run` that decides on it.
        holds: whether it holds under some conditions.
    """

    text: str
    setting: str
    holds: Callable[[Conditions], bool]


def _every(check: Callable[[csr_array], bool]) -> Callable[[Conditions], bool]:
    return lambda run: all(map(check, run.weights))


def _without(kind: str) -> Callable[[Conditions], bool]:
    return lambda run: all(fault.touches != kind for fault in run.faults)


def _some_of(rounds: int) -> Iterable[int]:
    """Return the rounds of a run; of more than `RATES`, so many from the first to the last."""
    if rounds <= RATES:
        return range(rounds)
    return (k * (rounds - 1) // (RATES - 1) for k in range(RATES))


def _is_tree(matrix: csr_array) -> bool:
    """Return whether the graph of a matrix is connected and has no cycle."""
    from scipy.sparse.csgraph import connected_components

    edges = matrix != 0
    edges.setdiag(False)
    edges.eliminate_zeros()
    few = edges.nnz == 2 * (matrix.shape[0] - 1) and (edges != edges.T).nnz == 0
    return bool(few and connected_components(edges, directed=False, return_labels=False) == 1)


STATIC = Assumption("a graph that does not change", "topology", lambda run: len(run.weights) == 1)
TREES = Assumption(
    "a tree or several",
    "topology",
    lambda run: not run.endless and all(map(_is_tree, run.weights)),
)
CLUSTERS = Assumption("a graph with clusters", "topology", lambda run: run.clustered)
UNDIRECTED = Assumption(
    "edges that go both ways",
    "topology",
    _every(lambda w: ((w != 0) != (w != 0).T).nnz == 0),
)
SYMMETRIC = Assumption(
    "a symmetric W", "topology", _every(lambda w: bool(abs(w - w.T).max() <= ROUNDING))
)
DOUBLY_STOCHASTIC = Assumption(
    "a doubly stochastic W",
    "topology",
    _every(lambda w: bool(abs(w.sum(axis=0) - 1).max() <= ROUNDING)),
)
ABOVE_MINUS_THIRD = Assumption(
    "lambda_min(W) > -1/3", "mixing", lambda run: not run.smallest <= -1 / 3 + ROUNDING
)
MESSAGES_ARRIVE = Assumption("links that lose no message", "faults", _without("links"))
PEERS_STAY = Assumption("peers that are always up", "faults", _without("peers"))
SYMMETRIC_OUTAGES = Assumption(
    "a symmetric W where peers are down",
    "faults",
    lambda run: PEERS_STAY.holds(run) or SYMMETRIC.holds(run),
)
FULL_WORK = Assumption("peers that do all their local steps", "faults", _without("work"))
HONEST_MESSAGES = Assumption(
    "messages that no attacker falsifies", "attack", lambda run: not run.falsified
)
NORMAL_RATE = Assumption(
    f"a learning rate of at least {LEAST_RATE:.2e}",
    "lr_schedule",
    lambda run: all(run.rate(t) >= LEAST_RATE for t in _some_of(run.rounds)),
)
