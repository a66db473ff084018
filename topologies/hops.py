"""Graphs whose edges are hops between the numbers of the peers: exponential graphs, hypercubes,
EquiTopo.
"""

from math import gcd

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array, eye_array

from topologies.errors import GraphError
from topologies.graphs import (
    TRIES,
    Graph,
    affordable,
    from_pairs,
    from_senders,
    topology,
)
from topologies.sequences import Drawn, drawn

Ints = NDArray[np.int64]


@topology
def hypercube(peers: int, rng: Generator) -> csr_array:
    """Peers whose binary numbers differ in one bit: log2 P neighbours each."""
    bits = _bits("hypercube", peers)
    return from_senders(np.arange(peers)[:, None] ^ (1 << np.arange(bits)))


@topology
def one_peer_hypercube(peers: int, rng: Generator) -> list[csr_array]:
    """Time-varying: in round t peers average with the one whose number differs in bit t mod log2 P.

    With weights 1/2, 1/2 the log2 P rounds average exactly.
    """
    bits = _bits("one_peer_hypercube", peers)
    everyone = np.arange(peers)[:, None]
    return [from_senders(everyone ^ (1 << bit)) for bit in range(bits)] or [_alone()]


@topology
def exponential(peers: int, rng: Generator) -> csr_array:
    """Directed: peer i sends to i + 1, i + 2, i + 4, … (mod P) every round (Ying et al. 2021)."""
    hops = _powers(peers)
    affordable("exponential", peers, peers * len(hops))
    return _ahead(peers, hops)


@topology
def one_peer_exponential(peers: int, rng: Generator) -> list[csr_array]:
    """Directed, time-varying: in round t peer i sends only to i + 2^(t mod ceil(log2 P)) (mod P)
    (Ying et al. 2021).

    With weights 1/2, 1/2 and P a power of two, log2 P rounds average exactly.
    """
    hops = _powers(peers)
    affordable("one_peer_exponential", peers, peers * len(hops))
    return [_ahead(peers, hops[[t]]) for t in range(len(hops))] or [_alone()]


@topology
def directed_exponential(peers: int, rng: Generator, *, k: int = 1) -> list[csr_array]:
    """Directed, time-varying: in round t peer i sends to i + j (k+1)^t (mod P) for j from 1 to k,
    up to the last power of k + 1 below P, then from 1 again (Assran et al. 2019).

    With k = 1 it is one_peer_exponential. With weights 1/(k+1) and P a power of k + 1 a period
    averages exactly.
    """
    if k < 1:
        raise GraphError(f"directed_exponential needs k of at least 1, not {k}")
    rounds, power = [], 1
    while power < peers:
        hops = np.arange(1, min(k, peers) + 1) * power
        rounds.append(hops[hops < peers])
        power *= k + 1
    affordable("directed_exponential", peers, peers * sum(map(len, rounds)))
    return [_ahead(peers, hops) for hops in rounds] or [_alone()]


@topology
def equitopo(
    peers: int,
    rng: Generator,
    *,
    m: int | None = None,
    directed: bool = False,
    one_peer: bool = False,
) -> Graph:
    """EquiTopo (Song et al. 2022): m basis graphs at random, each of one hop a: i sends to i + a.

    Without `one_peer` it is the mean of these graphs, with its weights: (P-1)/P on the hop, 1/P on
    the peer itself; undirected, half of each on the way back. Its spectral gap depends on m and
    hardly on P. With `one_peer` every round draws one of the basis graphs; undirected, it pairs
    peers i and i + a, as many as possible from a random peer on.

    Args:
        peers, rng: as of every topology.
        m: the basis graphs; by default ceil(log2 P), and with `one_peer` one for every hop.
        directed: whether messages go one way only.
        one_peer: whether every round draws one basis graph.
    """
    if m is not None and m < 1:
        raise GraphError(f"equitopo needs m of at least 1, not m={m}")
    if peers == 1:
        return _alone()
    if one_peer and m is None:
        return _one_hop(peers, rng, None, directed)
    several = m or len(_powers(peers))
    affordable("equitopo", peers, peers * several * (1 if directed else 2))
    hops = _basis(peers, rng, several)
    if one_peer:
        return _one_hop(peers, rng, hops, directed)
    receiver = np.repeat(np.arange(peers), len(hops))
    sender = (receiver - np.tile(hops, peers)) % peers
    values = np.full(len(sender), (peers - 1) / peers / len(hops))
    ahead = csr_array((values, (receiver, sender)), shape=(peers, peers))
    mean = ahead + eye_array(peers, format="csr") / peers
    return csr_array(mean if directed else (mean + mean.T) / 2)


def _one_hop(peers: int, rng: Generator, hops: Ints | None, directed: bool) -> Drawn:
    """Return the sequence that draws one hop in every round, from some or all of 1 to P - 1."""

    def draw(rng: Generator) -> csr_array:
        hop = int(rng.integers(1, peers) if hops is None else rng.choice(hops))
        if directed:
            return _ahead(peers, np.array([hop]))
        return _pairs_at(peers, hop, int(rng.integers(peers)))

    if hops is None:
        return drawn(draw, rng)
    ahead = _ahead(peers, np.unique(hops))
    return drawn(draw, rng, ahead if directed else csr_array(ahead + ahead.T))


def _pairs_at(peers: int, hop: int, start: int) -> csr_array:
    """Return the pairs (i, i + hop) that are formed from peer `start` on, of peers still alone."""
    free = np.ones(peers, dtype=bool)
    pairs = []
    for i in (*range(start, peers), *range(start)):
        j = (i + hop) % peers
        if free[i] and free[j]:
            free[[i, j]] = False
            pairs.append((i, j))
    ends = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    return from_pairs(peers, ends[:, 0], ends[:, 1])


def _basis(peers: int, rng: Generator, m: int) -> Ints:
    """Return m hops at random, from 1 to P - 1, with which every peer reaches every other."""
    for _ in range(TRIES):
        hops = rng.integers(1, peers, size=m)
        if gcd(peers, *hops.tolist()) == 1:
            return hops
    raise GraphError(
        f"equitopo:m={m} of {peers} peers: none of {TRIES} random graphs was connected; a larger m "
        "likely connects"
    )


def _ahead(peers: int, hops: Ints) -> csr_array:
    """Return the directed graph in which peer i sends to i + hop (mod P) for every hop."""
    return from_senders((np.arange(peers)[:, None] - hops) % peers)


def _alone() -> csr_array:
    """Return the graph of one peer."""
    return csr_array((1, 1), dtype=bool)


def _bits(name: str, peers: int) -> int:
    """Return log2 P, which must be whole."""
    bits = peers.bit_length() - 1
    if peers != 1 << bits:
        raise GraphError(
            f"{name} needs a power of two peers, such as {1 << bits} or {2 << bits}, not {peers}"
        )
    return bits


def _powers(peers: int) -> Ints:
    """Return the hops 1, 2, 4, … below the number of peers: ceil(log2 P) of them."""
    return 1 << np.arange((peers - 1).bit_length(), dtype=np.int64)
