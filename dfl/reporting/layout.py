"""Positions of the peers in a drawing of their graph; the same graph has the same positions."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import shortest_path

Floats = NDArray[np.float64]

FEW = 40
"""The most peers that are placed by the slow layout."""
PIVOTS = 50
"""The most peers from which the distances of all are computed."""
WORK = 2 * 10**7
"""About the most pairs of peers that the springs separate, which takes less than a second."""


def layout(receives: csr_array) -> Floats:
    """Return the positions (P, 2) of the peers in a drawing, from -1 to 1.

    A circulant graph is drawn on a circle. Otherwise few peers are placed by Kamada and Kawai's
    layout, and more by Brandes and Pich's PivotMDS, followed by as many spring steps as take a
    fraction of a second.

    Args:
        receives: (P, P), entry (i, j) where peer i receives from peer j; no diagonal.
    """
    peers = receives.shape[0]
    if _circulant(receives):
        angles = np.pi / 2 - 2 * np.pi * np.arange(peers) / peers
        return np.stack([np.cos(angles), np.sin(angles)], axis=1)
    both = csr_array(receives + receives.T)
    if peers <= FEW:
        import networkx as nx  # 80 ms, which most graphs do not need

        placed = nx.kamada_kawai_layout(nx.from_scipy_sparse_array(both), weight=None)
        places = np.array([placed[i] for i in range(peers)])
    else:
        places = _sprung(_pivots(both), both, min(50, WORK // peers**2))
    places -= (places.min(0) + places.max(0)) / 2
    return np.asarray(places / np.abs(places).max())


def _sprung(places: Floats, both: csr_array, steps: int) -> Floats:
    """Return positions after some steps of Fruchterman and Reingold's forces (1991).

    Args:
        places: (P, 2), where the peers are.
        both: (P, P), the graph without directions.
        steps: the number of steps.
    """
    peers = len(places)
    ends, others = both.tocoo().coords
    length = np.float32(np.sqrt(4 / peers))  # of an edge, for peers that fill the square
    x = places.T.astype(np.float32)
    for step in range(steps):
        gaps = x[:, :, None] - x[:, None]
        near = np.float32(1e-4) * length**2
        push = length**2 / np.maximum(gaps[0] ** 2 + gaps[1] ** 2, near)
        edges = x[:, ends] - x[:, others]
        pull = edges * (np.hypot(*edges) / length)
        force = np.stack([
            np.einsum("ij,ij->i", gaps[axis], push) - np.bincount(ends, pull[axis], peers)
            for axis in range(2)
        ])  # fmt: skip
        size = np.maximum(np.hypot(*force), 1e-9)
        x += (force / size * np.minimum(size, 0.2 * (1 - step / steps))).astype(np.float32)
    return x.T.astype(np.float64)


def _pivots(both: csr_array) -> Floats:
    """Return positions (P, 2) whose distances approximate those on the graph.

    They are computed from the distances to a few pivots (Brandes, Pich 2006, PivotMDS).

    Args:
        both: (P, P), the graph without directions.
    """
    peers = both.shape[0]
    chosen = np.unique(np.linspace(0, peers - 1, PIVOTS).astype(np.int64))
    steps = shortest_path(both, unweighted=True, indices=chosen)
    reached = np.isfinite(steps)
    squares = np.where(reached, steps, steps[reached].max() + 2) ** 2
    centred = squares - squares.mean(0) - squares.mean(1, keepdims=True) + squares.mean()
    _, modes = np.linalg.eigh(centred @ centred.T)
    places = centred.T @ modes[:, -2:]
    places /= np.abs(places).max()
    # Noise separates peers with the same distances to all pivots, as the leaves of a star.
    return np.asarray(places + np.random.default_rng(0).normal(0, 0.02, places.shape))


def _circulant(receives: csr_array) -> bool:
    """Return whether every peer i receives from i + s (mod P) for the same set of s."""
    peers = receives.shape[0]
    entries = receives.tocoo()
    counts = np.bincount((entries.col - entries.row) % peers, minlength=peers)
    return bool(np.isin(counts, (0, peers)).all())
