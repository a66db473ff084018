"""Functions that partitions share: owners of examples, Dirichlet proportions, minimum sizes."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.ragged import Ragged
from dfl.datasets.partitions.base import Indices


def by_owner(owner: Indices, peers: int) -> Ragged:
    """Return the ascending indices of every peer's examples, given the owner (n,) of each."""
    return Ragged(np.argsort(owner, kind="stable"), np.bincount(owner, minlength=peers))


def dirichlet_proportions(
    rng: np.random.Generator, shape: tuple[int, int], alpha: float
) -> NDArray[np.float64]:
    """Return rows drawn from a symmetric Dirichlet distribution.

    They are computed by logarithms, since gamma variates of a small alpha all underflow to 0.0:
    Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), where -log U is exponential.
    """
    power = rng.standard_exponential(shape)
    with np.errstate(over="ignore"):  # a tiny alpha gives -inf
        logs = (
            np.log(rng.standard_gamma(alpha + 1, shape))
            - (power - power.min(axis=1, keepdims=True)) / alpha
        )
    weights = np.exp(logs - logs.max(axis=1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def ensure_minimum(parts: Ragged, minimum: int) -> Ragged:
    """Move examples from the largest parts to those with fewer than `minimum`; sort all parts."""
    small = np.flatnonzero(parts.sizes < minimum).tolist()
    if not small:
        return parts.sorted()
    moved = [part.tolist() for part in parts]
    largest_first = [(-len(part), peer) for peer, part in enumerate(moved)]
    heapify(largest_first)
    for peer in small:
        while len(moved[peer]) < minimum:
            size, largest = heappop(largest_first)
            if -size == len(moved[largest]):  # else an entry from before a move
                moved[peer].append(moved[largest].pop())
                heappush(largest_first, (-len(moved[largest]), largest))
                heappush(largest_first, (-len(moved[peer]), peer))
    return Ragged.of([np.array(part, dtype=np.int64) for part in moved]).sorted()


def check_enough(partition: str, option: str, per_peer: int, peers: int, n: int) -> None:
    """Raise an error unless n training examples are `per_peer` for each of P peers.

    Args:
        partition: the name of the partition, for the message.
        option: the name of the option that requires `per_peer`.
        per_peer: examples that every peer needs.
        peers: the number of peers P.
        n: the number of training examples.

    Raises:
        InputError: there are fewer.
    """
    needed = peers * per_peer
    if needed > n:
        raise InputError(
            f"--partition {partition}: {peers} peers with {option}={per_peer} need {needed} "
            f"training examples, there are {n}"
        )
