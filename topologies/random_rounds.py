"""Graphs that every round draws anew."""

from numpy.random import Generator
from scipy.sparse import csr_array

from topologies.graphs import from_pairs, topology
from topologies.sequences import Drawn, drawn


@topology
def random_matching(peers: int, rng: Generator) -> Drawn:
    """Time-varying: in every round the peers form pairs at random; with P odd, one is alone."""

    def draw(rng: Generator) -> csr_array:
        order = rng.permutation(peers)[: peers // 2 * 2].reshape(-1, 2)
        return from_pairs(peers, order[:, 0], order[:, 1])

    return drawn(draw, rng)
