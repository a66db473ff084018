"""Spectra of mixing matrices: the gap, the smallest eigenvalue, the rounds that halve disagreement.

There are three algorithms, by the kind of weights:

- circulant (ring, complete, exponential): the Fourier transform of the first column is the
  spectrum, at any size;
- reversible, pi_i w_ij = pi_j w_ji (every rule on an undirected graph): the matrix is similar to a
  symmetric one. Few peers: dense. Many: Lanczos, and where that is slow, shift and invert. Lanczos
  is slow on graphs with small cuts (chain, grid), whose factors stay sparse. It is also slow on
  very large random graphs, whose gap is wide; their factors would fill the memory, so Lanczos
  continues for longer there;
- neither (a directed file, other sequences): dense, up to `DENSE_GENERAL` peers.

For more peers, and for more than `ITERATED` of a reversible matrix, the answer is NaN.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import expm1, inf, log, log1p, nan

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import eigvals, eigvalsh
from scipy.sparse import csc_array, csr_array, diags_array, eye_array
from scipy.sparse.csgraph import breadth_first_order, connected_components
from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigsh, splu

Floats = NDArray[np.float64]

DENSE_REVERSIBLE = 512
"""The most peers for which a reversible matrix is dense."""
DENSE_GENERAL = 1000
"""The most peers for which the spectrum of any other matrix is computed, densely."""
ITERATED = 2**17
"""The most peers for which eigenvectors of a reversible matrix are computed: with 100,000 they take
12 s, and as much for each 100,000 more.
"""
RESTARTS = 40
"""Lanczos restarts, of 20 products each, before a matrix is factored instead."""
WIDE = 0.01
"""The gap above which a graph has no small cuts, and its factors are not sparse (Cheeger's
inequality).
"""
PROBES = 8
"""The random values per peer whose disagreement is measured where every round is drawn anew."""
LOOKED_AT = 4
"""The rounds of such a sequence whose smallest eigenvalue is computed."""
TOLERANCE = 1e-6
"""The accepted distance of a sum of weights from 1: a file may have single precision."""
ROUNDING = 1e-12
"""A modulus or gap below this is rounding error about 0."""


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of a mixing matrix that decide on the speed of agreement; NaN where not
    computed.

    Attributes:
        second: the second largest modulus, the factor by which disagreement shrinks a round in the
            long run. For a sequence of T matrices, sigma^(1/T), sigma being the second singular
            value of their product; where one of them is not doubly stochastic, the second largest
            modulus of an eigenvalue of their product takes its place.
        smallest: the smallest eigenvalue. Where eigenvalues may be complex, that of (W + W') / 2,
            which is a lower bound of all real parts; for a sequence, the least over its rounds.
        gap: 1 - second, accurate also where it is tiny (1.3e-7 on a ring of 10,000).
        half_rounds: rounds that halve disagreement, log(1/2) / log(second); infinite if second is
            1.
    """

    second: float
    smallest: float
    gap: float
    half_rounds: float


def spectrum(weights: Sequence[csr_array]) -> Spectrum:
    """Return the spectrum of T row-stochastic matrices (P, P), used in turn; T is 1 for a static
    graph.

    Of column-stochastic ones it is that of their transposes in reverse order: the columns of their
    product become proportional as fast as the rows of its transpose become equal.
    """
    if any(abs(w.sum(axis=1) - 1).max() > TOLERANCE for w in weights):
        weights = [csr_array(w.T) for w in reversed(weights)]
    peers = weights[0].shape[0]
    columns = [_circulant(w) for w in weights]
    iterated = len(weights) == 1 and peers <= ITERATED
    stationary = _stationary(weights[0]) if iterated else None
    if peers == 1:
        gap, smallest = 1.0, 1.0
    elif all(column is not None for column in columns):
        gap, smallest = _by_fourier(np.array(columns))
    elif stationary is not None:
        gap, smallest = _by_symmetry(weights[0], stationary)
    elif peers <= DENSE_GENERAL:
        gap, smallest = _by_force([w.toarray() for w in weights])
    else:
        gap, smallest = nan, nan
    return _spectrum(gap, smallest)


def spectrum_of_draws(rounds: Sequence[csr_array]) -> Spectrum:
    """Return the spectrum of matrices that are drawn anew in every round, from the first of them.

    `second` is measured: the geometric mean, over the second half of these rounds, of the factor
    by which averaging shrinks the disagreement of `PROBES` random values of the peers, which the
    rounds before have turned to where it shrinks least. A round that leaves no disagreement is
    not counted, and new values follow it: some matchings in turn average exactly by chance.
    `smallest` is the least of `LOOKED_AT` rounds.
    """
    peers = rounds[0].shape[0]
    if peers == 1:
        return _spectrum(1.0, 1.0)
    by_column = any(abs(w.sum(axis=1) - 1).max() > TOLERANCE for w in rounds)
    if by_column:
        rounds = [csr_array(w.T) for w in reversed(rounds)]
    rng = np.random.default_rng(0)
    values, averaged = np.empty((peers, PROBES)), True
    logs = []
    for matrix in rounds:
        if averaged:
            values = rng.standard_normal((peers, PROBES))
            values /= np.linalg.norm(values - values.mean(axis=0))
        values = matrix @ (values - values.mean(axis=0))
        shrunk = float(np.linalg.norm(values - values.mean(axis=0)))
        averaged = shrunk < ROUNDING
        if not averaged:
            logs.append(log(shrunk))
            values /= shrunk
    if not logs:
        return _spectrum(1.0, _least(rounds))
    return _spectrum(1 - float(np.exp(np.mean(logs[len(logs) // 2 :]))), _least(rounds))


def _least(rounds: Sequence[csr_array]) -> float:
    """Return the smallest eigenvalue of (W + W') / 2 over a few rounds; NaN for many peers."""
    if rounds[0].shape[0] > DENSE_REVERSIBLE:
        return nan
    some = [w.toarray() for w in rounds[:LOOKED_AT]]
    return min(float(eigvalsh((w + w.T) / 2)[0]) for w in some)


def _spectrum(gap: float, smallest: float) -> Spectrum:
    gap = 0.0 if gap < ROUNDING else 1.0 if gap > 1 - ROUNDING else float(gap)
    half_rounds = inf if gap == 0 else 0.0 if gap == 1 else log(0.5) / log1p(-gap)
    smallest = 0.0 if abs(smallest) < ROUNDING else float(smallest)
    return Spectrum(1 - gap, smallest, gap, half_rounds)


def _circulant(weights: csr_array) -> Floats | None:
    """Return the first column (P,) of a circulant matrix; None for any other matrix."""
    peers = weights.shape[0]
    size = np.diff(weights.indptr)
    if (size != size[0]).any():
        return None
    hops = (np.arange(peers)[:, None] - weights.indices.reshape(peers, -1)) % peers
    order = np.argsort(hops, axis=1)
    hops = np.take_along_axis(hops, order, axis=1)
    values = np.take_along_axis(weights.data.reshape(peers, -1), order, axis=1)
    if (hops != hops[0]).any() or (values != values[0]).any():
        return None
    column = np.zeros(peers)
    column[hops[0]] = values[0]
    return column


def _by_fourier(columns: Floats) -> tuple[float, float]:
    """Return the gap and the smallest eigenvalue of circulant matrices, by their columns (T, P).

    They share their eigenvectors, so the eigenvalues of their product are products.
    """
    eigenvalues = np.fft.fft(columns, axis=1)
    moduli = np.abs(eigenvalues[:, 1:])
    smallest = float(eigenvalues.real.min())
    if len(columns) == 1:
        return 1 - float(moduli.max()), smallest
    with np.errstate(divide="ignore"):  # logarithms, since a product of many moduli is tiny
        logs = np.log(np.where(moduli < ROUNDING, 0, moduli)).mean(axis=0)
    return -float(np.expm1(logs.max())), smallest


def stationary(weights: csr_array) -> Floats | None:
    """Return pi (P,) > 0 with pi W = pi, the weights of the average that averaging by W keeps.

    It is 1 for every peer where W is doubly stochastic. Where W has several closed parts, each part
    has its own scale. None where no such pi exists: some peers receive from a part of the graph
    that does not receive from them.
    """
    if abs(weights.sum(axis=0) - 1).max() <= TOLERANCE:
        return np.ones(weights.shape[0])
    parts, labels = connected_components(weights, directed=True, connection="strong")
    if connected_components(weights, directed=False)[0] < parts:
        return None
    found = np.empty(weights.shape[0])
    for part in range(parts):
        own = np.flatnonzero(labels == part)
        among = csr_array(weights[own][:, own])
        balanced = _stationary(among)
        found[own] = _invariant(among) if balanced is None else balanced
    return found


def _invariant(weights: csr_array) -> Floats:
    """Return pi (P,) with pi W = pi for strongly connected W, from the equations of all peers but
    the first.
    """
    if weights.shape[0] == 1:
        return np.ones(1)
    flow = csc_array(eye_array(weights.shape[0]) - weights.T)
    rest = np.atleast_1d(splu(csc_array(flow[1:, 1:])).solve(-flow[1:, [0]].toarray()[:, 0]))
    found = np.append(1.0, rest)
    return np.asarray(found / found.max())


def _stationary(weights: csr_array) -> Floats | None:
    """Return pi (P,), largest entry 1, with pi_i w_ij = pi_j w_ji for all i, j, if there is one."""
    peers = weights.shape[0]
    back = weights.T.tocsr()
    if abs(weights - back).max() < ROUNDING:
        return np.ones(peers)
    order, parent = breadth_first_order(weights, 0)
    if len(order) < peers or ((weights != 0) != (back != 0)).nnz:
        return None
    down = weights[parent[order[1:]], order[1:]]
    up = weights[order[1:], parent[order[1:]]]
    stationary = np.zeros(peers)
    for i, ratio in zip(order[1:], np.log(down) - np.log(up), strict=True):
        stationary[i] = stationary[parent[i]] + ratio
    stationary = np.exp(stationary - stationary.max())
    flow = diags_array(stationary) @ weights
    balanced = abs(flow - flow.T).max() < ROUNDING and stationary.min() > ROUNDING
    return stationary if balanced else None


def _by_symmetry(weights: csr_array, stationary: Floats) -> tuple[float, float]:
    """Return the gap and the smallest eigenvalue of a reversible matrix W.

    S = pi^(1/2) W pi^(-1/2) is symmetric and has the eigenvalues of W; sqrt(pi) belongs to 1.
    """
    root = np.sqrt(stationary)
    symmetric = csr_array(diags_array(root) @ weights @ diags_array(1 / root))
    if len(root) <= DENSE_REVERSIBLE:
        eigenvalues = eigvalsh(symmetric.toarray())
        return min(1 - eigenvalues[-2], 1 + eigenvalues[0]), float(eigenvalues[0])
    top = root / np.linalg.norm(root)
    upper = _top_vector(symmetric, top, bound=1.0)
    gershgorin = float((1 - 2 * weights.diagonal()).max())
    lower = _top_vector(-symmetric, 0 * top, bound=gershgorin)
    below, above = (
        _energy(weights, stationary, v / root, sign) for v, sign in ((upper, -1), (lower, 1))
    )
    return min(below, above), above - 1


def _energy(weights: csr_array, stationary: Floats, u: Floats, sign: int) -> float:
    """Return sum_ij pi_i w_ij (u_i ± u_j)^2 / (2 sum_i pi_i u_i^2).

    That is 1 ± the eigenvalue of u, without cancellation.
    """
    rows = np.repeat(np.arange(len(u)), np.diff(weights.indptr))
    terms = stationary[rows] * weights.data * (u[rows] + sign * u[weights.indices]) ** 2
    return float(terms.sum() / (2 * (stationary * u**2).sum()))


def _top_vector(symmetric: csr_array, top: Floats, bound: float) -> Floats:
    """Return the eigenvector (P,) of the largest eigenvalue other than that of `top`.

    `bound` is an upper bound of all eigenvalues.
    """
    shape = symmetric.shape
    start = np.random.default_rng(0).standard_normal(len(top))
    start -= top * (top @ start)
    deflated = LinearOperator(
        shape, lambda x: symmetric @ x - 2 * top * (top @ x), dtype=np.float64
    )
    try:
        _, vectors = eigsh(deflated, k=1, which="LA", v0=start, ncv=40, maxiter=RESTARTS, tol=1e-8)
        return np.asarray(vectors[:, 0])
    except ArpackNoConvergence:
        (rough,), vectors = eigsh(deflated, k=1, which="LA", v0=start, ncv=40, tol=WIDE / 10)
    if rough < bound - WIDE:
        _, vectors = eigsh(deflated, k=1, which="LA", v0=vectors[:, 0], ncv=40, tol=1e-8)
    else:
        inverse = _inverse((bound + ROUNDING) * eye_array(len(top)) - symmetric, top)
        _, vectors = eigsh(inverse, k=1, which="LA", v0=start, tol=1e-8)
    return np.asarray(vectors[:, 0])


def _inverse(matrix: csr_array, top: Floats) -> LinearOperator:
    """Return the inverse of a symmetric positive definite matrix, off the direction `top`."""
    symmetric = {
        "permc_spec": "MMD_AT_PLUS_A",
        "diag_pivot_thresh": 0.0,
        "options": {"SymmetricMode": True},
    }
    factors = splu(csc_array(matrix), **symmetric)

    def solve(x: Floats) -> Floats:
        y: Floats = factors.solve(x)
        return y - top * (top @ y)

    return LinearOperator(matrix.shape, solve, dtype=np.float64)


def _by_force(weights: list[Floats]) -> tuple[float, float]:
    """Return the gap and the smallest eigenvalue of dense matrices."""
    peers = len(weights[0])
    smallest = min(float(eigvalsh((w + w.T) / 2)[0]) for w in weights)
    if len(weights) == 1:  # W - 11'/P has the eigenvalues of W, but 0 for that of 1 (Brauer 1952)
        return 1 - float(np.abs(eigvals(weights[0] - 1 / peers)).max()), smallest
    product, scale = np.eye(peers) - 1 / peers, 0.0
    for w in weights:
        product = w @ product
        product -= product.mean(axis=0)
        size = float(np.linalg.norm(product))
        if size < ROUNDING:  # an exact average
            return 1.0, smallest
        product /= size
        scale += log(size)
    if all(abs(w.sum(axis=0) - 1).max() <= TOLERANCE for w in weights):
        modulus = float(np.linalg.norm(product, 2))
    else:
        modulus = float(np.abs(eigvals(product)).max())
    if modulus < ROUNDING:
        return 1.0, smallest
    return -expm1((scale + log(modulus)) / len(weights)), smallest
