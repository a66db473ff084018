"""The mixing matrix of the largest spectral gap on a graph."""

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve, eigh, eigvalsh
from scipy.sparse import csr_array

from topologies.errors import GraphError
from topologies.mixings import metropolis, mixing

Floats = NDArray[np.float64]

LARGEST = 200
"""The most peers for which the fastest weights are computed; 100 peers take some 5 s."""
STEPS = 2000
"""Steps of the solver."""
STEP = 0.1
"""Its penalty on the distance between the three parts."""
RELAXED = 1.7
"""Its over-relaxation, with which as many steps come nearer (Boyd et al. 2011, section 3.4.3)."""
CHECKED = 25
"""Steps between the candidates that are compared."""


@mixing
def fastest(adjacency: csr_array) -> csr_array:
    """Symmetric weights of nearly the largest spectral gap, on an undirected graph of up to 200
    peers (Boyd, Diaconis, Xiao 2004).

    They minimise ||W - 11'/P|| over symmetric W >= 0 on the edges and the diagonal whose rows sum
    to 1. The alternating direction method of multipliers (Boyd et al. 2011, section 7) splits this
    into the norm, the sums and the signs; the best of its candidates, or metropolis, is returned.
    """
    peers = adjacency.shape[0]
    if (adjacency != adjacency.T).nnz:
        raise GraphError("fastest needs edges that go both ways: choose another --mixing")
    if peers > LARGEST:
        raise GraphError(
            f"fastest is computed for at most {LARGEST} peers, not {peers}: choose another --mixing"
        )
    if not adjacency.nnz:
        return metropolis(adjacency)
    edges = adjacency.toarray().astype(np.float64)
    sums = cho_factor(np.eye(peers) + np.diag(edges.sum(axis=1)) / 2 + edges / 2)
    best = z = metropolis(adjacency).toarray()
    least = _second(best)
    duals = np.zeros((3, peers, peers))
    for step in range(1, STEPS + 1):
        summing = _summing((z - duals[1]) * (edges + np.eye(peers)), edges, sums)
        parts = np.stack([_small_norm(z - duals[0]), summing, np.maximum(z - duals[2], 0)])
        parts = RELAXED * parts + (1 - RELAXED) * z
        z = (parts + duals).mean(axis=0)
        duals += parts - z
        if step % CHECKED == 0:
            weights = np.maximum(summing * edges, 0)
            weights /= max(1.0, float(weights.sum(axis=1).max()))
            weights += np.diag(np.maximum(1 - weights.sum(axis=1), 0))
            if (found := _second(weights)) < least - 1e-12:
                best, least = weights, found
    return csr_array((best + best.T) / 2)


def _second(weights: Floats) -> float:
    """Return ||W - 11'/P||."""
    return float(np.abs(eigvalsh(weights - 1 / len(weights))).max())


def _small_norm(matrix: Floats) -> Floats:
    """Return the X of least ||X - 11'/P|| + STEP / 2 ||X - matrix||_F^2."""
    values, vectors = eigh(matrix - 1 / len(matrix))
    kept = values - _in_ball(values, 1 / STEP)
    return np.asarray((vectors * kept) @ vectors.T + 1 / len(matrix))


def _in_ball(values: Floats, radius: float) -> Floats:
    """Return the nearest point at which absolute values sum to at most `radius` (Duchi et al.
    2008).
    """
    sizes = np.sort(np.abs(values))[::-1]
    if sizes.sum() <= radius:
        return values
    excess = (np.cumsum(sizes) - radius) / np.arange(1, len(sizes) + 1)
    threshold = excess[np.flatnonzero(sizes > excess)[-1]]
    return np.asarray(np.sign(values) * np.maximum(np.abs(values) - threshold, 0))


def _summing(matrix: Floats, edges: Floats, sums: tuple[Floats, bool]) -> Floats:
    """Return the nearest matrix on the edges and the diagonal whose rows sum to 1."""
    shift = cho_solve(sums, 1 - matrix.sum(axis=1))
    return np.asarray(matrix + edges * (shift[:, None] + shift) / 2 + np.diag(shift))
