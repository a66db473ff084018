"""Placement: which rank hosts which peer, so that few messages cross between ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array, csr_matrix

from dfl.comm.plan import all_edges
from dfl.core.layout import Layout

GAIN = 0.1
"""The least share of the crossing messages that another order must save: with it, sums by ascending
peer take several passes over the messages of other ranks and of this one.
"""


def placed(matrices: Sequence[csr_array], peers: int, ranks: int) -> Layout:
    """Return a layout for the mixing matrices of a run.

    Ranks host consecutive peers, or as many in reverse Cuthill-McKee order (Cuthill, McKee 1969;
    George 1971), which keeps neighbours close to each other, where fewer messages then cross
    between ranks. Results do not depend on it.

    Args:
        matrices: (P, P) each; none where peers have no neighbours.
        peers: P.
        ranks: R.
    """
    consecutive = Layout(peers, ranks)
    if not matrices or not 1 < ranks < peers:
        return consecutive
    sender, receiver = np.divmod(all_edges(matrices, peers), peers)
    if len(sender) == peers:  # in a checkpoint the number of rows separates peers from edges
        return consecutive
    other = close_together(sender, receiver, consecutive)
    now, then = (crossing(each, sender, receiver) for each in (consecutive, other))
    return other if then <= (1 - GAIN) * now else consecutive


def close_together(
    sender: NDArray[np.int64], receiver: NDArray[np.int64], layout: Layout
) -> Layout:
    """Return a layout with as many peers on each rank, in reverse Cuthill-McKee order.

    Args:
        sender, receiver: (k,), the ends of each directed edge.
        layout: of consecutive peers.
    """
    from scipy.sparse.csgraph import reverse_cuthill_mckee  # late: with it scipy.linalg is imported

    shape = (layout.peers, layout.peers)
    graph = csr_matrix((np.ones(len(sender), bool), (receiver, sender)), shape=shape)
    order = reverse_cuthill_mckee(csr_matrix(graph + graph.T), symmetric_mode=True)
    parts = np.split(order.astype(np.int64), layout.starts[1:-1])
    return Layout(layout.peers, layout.ranks, np.concatenate([np.sort(part) for part in parts]))


def crossing(layout: Layout, sender: NDArray[np.int64], receiver: NDArray[np.int64]) -> int:
    """Return how many messages cross between ranks where every edge is used.

    A message crosses to a rank once for each sending peer with a neighbour there.

    Args:
        layout: which peers are on which rank.
        sender, receiver: (k,), the ends of each directed edge.
    """
    here, there = layout.ranks_of(sender), layout.ranks_of(receiver)
    between = here != there
    return len(np.unique(sender[between] * layout.ranks + there[between]))
