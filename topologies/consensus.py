"""Averaging on a graph: how disagreement shrinks, round by round."""

import numpy as np
from numpy.typing import NDArray

from topologies import WeightedGraph

VALUES = 16
"""The random values of a peer that are averaged."""


def disagreement(graph: WeightedGraph, rounds: int, seed: int = 0) -> NDArray[np.float64]:
    """Return the disagreement of the peers after 0, 1, … rounds of averaging, (rounds + 1,).

    It is the root mean square distance of the peers' values from their mean, as a share of that at
    the start, where they are standard normal; 0 for one peer. Where only the columns of the weights
    sum to 1, the values are those of push-sum.
    """
    peers = len(graph.degrees)
    values = np.random.default_rng(seed).standard_normal((peers, VALUES))
    share = np.ones((peers, 1))
    start = _spread(values)
    found = [1.0 if start else 0.0]
    for t in range(rounds):
        matrix = graph.weights[t % len(graph.weights)]
        values, share = matrix @ values, share if graph.rows_sum else matrix @ share
        found.append(_spread(values / share) / start if start else 0.0)
    return np.array(found)


def rounds_until(disagreements: NDArray[np.float64], least: float) -> int | None:
    """Return after how many rounds disagreement stays at most `least`; None where it does not."""
    above = np.flatnonzero(disagreements > least)
    first = int(above[-1]) + 1 if len(above) else 0
    return first if first < len(disagreements) else None


def messages_per_round(graph: WeightedGraph) -> float:
    """Return the messages of all peers in a round, the mean over rounds."""
    sent = [w.nnz - np.count_nonzero(w.diagonal()) for w in graph.examples]
    return float(np.mean(sent))


def degree(graph: WeightedGraph) -> int:
    """Return the most other peers that a peer sends to in a round."""
    return max(
        int((np.bincount(w.indices, minlength=w.shape[0]) - (w.diagonal() != 0)).max())
        for w in graph.examples
    )


def _spread(values: NDArray[np.float64]) -> float:
    return float(np.sqrt(np.mean((values - values.mean(axis=0)) ** 2)))
