"""Graphs of epidemic learning: in every round each peer has s neighbours at random (de Vos et al.
2023).
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array

from topologies.errors import GraphError
from topologies.graphs import affordable, pattern, topology
from topologies.sequences import Drawn, drawn

if TYPE_CHECKING:
    import networkx as nx
else:
    from topologies.lazy import nx


@topology
def random_out(peers: int, rng: Generator, *, s: int | None = None) -> Drawn:
    """Directed, time-varying: in every round each peer sends to s others at random, by default
    ceil(log2 P) (EL-Local). Peers receive from different numbers of others, in some rounds from
    none.
    """
    count = _several("random_out", peers, s)
    affordable("random_out", peers, count * peers)

    def draw(rng: Generator) -> csr_array:
        receivers = _others(peers, count, rng).ravel()
        senders = np.repeat(np.arange(peers), count)
        ones = np.ones(len(senders), dtype=bool)
        return csr_array((ones, (receivers, senders)), shape=(peers, peers))

    return drawn(draw, rng, one_way=count < peers - 1)


@topology
def random_regular(peers: int, rng: Generator, *, s: int | None = None) -> Drawn:
    """Time-varying: every round has a random graph in which each peer has s neighbours, by default
    ceil(log2 P), or one more where that is odd and P as well (EL-Oracle).
    """
    count = _several("random_regular", peers, s)
    count += s is None and count * peers % 2
    if count * peers % 2:
        raise GraphError(f"random_regular needs s*peers even: s={count}, peers={peers}")
    affordable("random_regular", peers, count * peers)

    def draw(rng: Generator) -> csr_array:
        # For large s, rejection is slow.
        sparse = 2 * count < peers
        degree = count if sparse else peers - 1 - count
        graph = nx.random_regular_graph(degree, peers, int(rng.integers(2**31)))
        return pattern(graph if sparse else nx.complement(graph))

    return drawn(draw, rng)


def _several(name: str, peers: int, s: int | None) -> int:
    """Return the number of neighbours, ceil(log2 P) by default."""
    if s is None:
        return (peers - 1).bit_length()
    if not 1 <= s < peers:
        raise GraphError(f"{name} needs 1 <= s < peers: s={s}, peers={peers}")
    return s


def _others(peers: int, s: int, rng: Generator) -> NDArray[np.int64]:
    """Return s different peers for each peer, other than itself, (P, s), each set equally likely.

    By the algorithm of Floyd (Bentley, Floyd 1987): a number that was drawn before is replaced by
    the largest that may be drawn.
    """
    chosen = np.empty((peers, s), np.int64)
    for k in range(s):
        most = peers - 1 - s + k
        number = rng.integers(most + 1, size=peers)
        taken = (chosen[:, :k] == number[:, None]).any(axis=1)
        chosen[:, k] = np.where(taken, most, number)
    return chosen + (chosen >= np.arange(peers)[:, None])
