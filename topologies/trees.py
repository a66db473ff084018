"""Trees: graphs without a cycle, as methods that relay messages need them. `path` and `star` in
`graphs` are trees too.
"""

import numpy as np
from numpy.random import Generator
from scipy.sparse import csr_array

from topologies.errors import GraphError
from topologies.graphs import from_pairs, topology


@topology
def tree(peers: int, rng: Generator, *, branches: int = 2) -> csr_array:
    """A tree with root 0, whose levels are filled in order: peer i has the parent (i - 1) //
    branches.
    """
    if branches < 1:
        raise GraphError(f"tree needs branches of at least 1, not {branches}")
    child = np.arange(1, peers)
    return from_pairs(peers, child, (child - 1) // branches)
