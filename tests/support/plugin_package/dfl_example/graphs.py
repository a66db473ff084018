"""Graphs."""

import networkx as nx
from numpy.random import Generator
from scipy.sparse import csr_array

from topologies import pattern


def wheel(peers: int, rng: Generator) -> csr_array:
    """Return a ring whose peers are all linked to one more peer."""
    return pattern(nx.wheel_graph(peers))
