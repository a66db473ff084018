"""Aggregation rules, `AGGREGATORS`: one row from the messages of several senders.

A rule is a plain function of `Updates`: the messages, the weight of each sender, and a reference
row of the receiver. A server, and a peer of a graph, aggregate by the same rules. On a server each
rank aggregates its own block of coordinates of all updates, so that no rank holds them all. A
coordinate-wise rule needs no more than its block; any other rule needs inner products over all
coordinates, `Updates.dots`, and returns a weighted sum of rows, `Updates.mix`. A rule that needs
more senders to outvote its attackers than there are raises; every rule is called once before the
run starts. In the formulas of rules n is the number of senders, as in their sources.

An attacker may send values that are not finite. The mean of such rows is not finite either. A
coordinate-wise rule takes such a value for a very large number, NaN for the largest of all. Any
other rule leaves such a row out, and returns 0 where no row is left, so that the receiver stays
where it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.options import Count, Index, Positive
from dfl.core.registry import Registry, example_with

Floats = NDArray[np.float64]
Rows = NDArray[np.floating]
"""Messages, or one of them, in float32 or float64."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _quiet(f: _F) -> _F:
    """Let a function compute with values that are not finite, as attackers send them, silently."""
    return np.errstate(over="ignore", invalid="ignore", divide="ignore")(f)


def _here(parts: Floats) -> Floats:
    """Return the sum of the blocks, in block order, where one rank has all of them."""
    return np.asarray(np.add.reduce(parts, axis=0))


@dataclass(frozen=True)
class Updates:
    """The messages of k senders, by ascending id, in the c coordinates that this rank works on.

    On a graph there is one for each peer i, with all coordinates: the senders are its closed
    neighbourhood, i itself among them, the weights are w_ij, and the rows are message_j - start_i,
    where start_i is the `start` of the receiver i in `Net.exchange`, 0 without one. The message of
    i itself is the one that it sends as an honest peer. At a server the rows are the updates of the
    clients.

    Attributes:
        rows: (k, c) float32 or float64.
        weights: (k,) the weight of each sender, adding up to 1; rules that treat all senders alike
            ignore it.
        reference: (c,) the row that rules compare the others with: a peer's own on a graph, the
            server's own update (g_0 of FLTrust) or the one that it expects; None where there is
            none.
        total: adds up the values of every block of coordinates, (blocks, ...) -> (...), over all
            ranks and in block order.
    """

    rows: Rows
    weights: Floats
    reference: Rows | None = None
    total: Callable[[Floats], Floats] = _here

    @_quiet
    def dots(self, left: Rows, right: Rows) -> Floats:
        """Return the inner products over all coordinates of rows (i, c) and (j, c), (i, j).

        They are the same on every rank.
        """
        cut = blocks(self.rows.shape[1])
        parts = np.zeros((len(cut), len(left), len(right)))
        for part, block in zip(parts, cut, strict=True):
            first = left[:, block].astype(np.float64)
            second = first if right is left else right[:, block].astype(np.float64)
            np.matmul(first, second.T, out=part)
        return self.total(parts)

    @cached_property
    def gram(self) -> Floats:
        """The inner products of all rows, (k, k).

        With a reference row they are (k + 1, k + 1), and it is the last.
        """
        among = self.dots(self.rows, self.rows)
        if self.reference is None:
            return among
        own = self.reference[None]
        side = self.dots(self.rows, own)
        return np.block([[among, side], [side.T, self.dots(own, own)]])

    @_quiet
    def distances(self, centre: Rows | None = None) -> Floats:
        """Return the distance of each row to a centre over all coordinates, (k,).

        It is inf where it is not finite.

        Args:
            centre: (c,); 0 where not given.
        """
        centre = np.zeros(self.rows.shape[1]) if centre is None else centre
        cut = blocks(self.rows.shape[1])
        parts = np.zeros((len(cut), len(self.rows)))
        for part, block in zip(parts, cut, strict=True):
            gaps = self.rows[:, block].astype(np.float64) - centre[block]
            np.square(gaps, out=gaps).sum(axis=1, out=part)
        squares = self.total(parts)
        return np.sqrt(np.where(np.isfinite(squares), squares, np.inf))

    @_quiet
    def mix(self, coefficients: Floats) -> Floats:
        """Return sum_i coefficients_i row_i, (c,), summed in float64 by ascending id.

        A row with coefficient 0 is left out, whatever it holds.
        """
        total = np.zeros(self.rows.shape[1])
        for coefficient, row in zip(coefficients.tolist(), self.rows, strict=True):
            if coefficient:
                total += coefficient * row.astype(np.float64)
        return total


class Aggregate(NamedTuple):
    """The result of a rule.

    Attributes:
        row: (c,).
        scores: (k,) a score of each sender, 0 for a message that is not used; None from a rule that
            does not judge senders. Those of a server's rule are given to the method
            (`ServerAggregate.scores`); those of a peer's rule are not kept.
    """

    row: Floats
    scores: Floats | None = None


AGGREGATORS: Registry[Callable[..., Aggregate]] = Registry("aggregator", "dfl.aggregators")
"""Name -> f(updates, *, options) -> Aggregate. A rule states as an attribute
`needs_reference = True` that it works only with a reference row, `Updates.reference`, and as
`ignores_weights = True` that `Updates.weights` do not count.
"""


def needs_reference(rule: Callable[..., Aggregate]) -> bool:
    """Return whether a rule states that it needs a reference row.

    Args:
        rule: an aggregation rule, without its options bound: one of `AGGREGATORS`, or an object.
    """
    return bool(getattr(rule, "needs_reference", False))


def _needing_reference(rule: _F) -> _F:
    """State that a rule needs a reference row."""
    setattr(rule, "needs_reference", True)  # noqa: B010  a function's type has no such attribute
    return rule


def ignores_weights(rule: Callable[..., Aggregate]) -> bool:
    """Return whether a rule states that the weights of senders do not count.

    Args:
        rule: as for `needs_reference`.
    """
    return bool(getattr(rule, "ignores_weights", False))


def _ignoring_weights(rule: _F) -> _F:
    """State that the weights of senders do not count."""
    setattr(rule, "ignores_weights", True)  # noqa: B010  as above
    return rule


@AGGREGATORS.register("mean")
def mean(updates: Updates) -> Aggregate:
    """The weighted mean, which a single attacker can move anywhere."""
    return Aggregate(updates.mix(updates.weights))


@AGGREGATORS.register("median")
@_ignoring_weights
def median(updates: Updates) -> Aggregate:
    """The median of every coordinate; weights do not count.

    For an even n it is the mean of the two middle values.

    Source: Yin et al., "Byzantine-robust distributed learning" (ICML 2018), Definition 1.
    """
    return Aggregate(_middle(updates, (len(updates.rows) - 1) // 2))


@AGGREGATORS.register("trimmed_mean")
@_ignoring_weights
def trimmed_mean(updates: Updates, *, f: Index = 1) -> Aggregate:
    """The mean of every coordinate without its f smallest and its f largest; weights do not count.

    Source: Yin et al., "Byzantine-robust distributed learning" (ICML 2018), Definition 2, by count
        and not by share.

    Args:
        updates: the messages.
        f: the number of values to leave out at either end.

    Raises:
        InputError: not n > 2f >= 0.
    """
    _outvoted("trimmed_mean", f, 2 * f, updates)
    return Aggregate(_middle(updates, f))


@_quiet
def _middle(updates: Updates, f: int) -> Floats:
    """Return the mean of every coordinate without its f smallest and f largest, (c,) float64."""
    n = len(updates.rows)
    row = np.empty(updates.rows.shape[1])
    for block in blocks(len(row)):
        # Short contiguous lists are the quickest to sort.
        values = np.array(updates.rows[:, block].T, order="C")
        values.sort(axis=1)
        row[block] = values[:, f : n - f].mean(axis=1, dtype=np.float64)
    return row


def _outvoted(name: str, f: int, few: int, updates: Updates) -> None:
    """Refuse a number of attackers f with which the rule needs more than `few` messages."""
    n = len(updates.rows)
    if n <= few:
        there = f"there {'is' if n == 1 else 'are'} {n}"
        raise InputError(f"--aggregator {name}: f={f} needs more than {few} messages, {there}")


@AGGREGATORS.register("krum")
@example_with("--topology torus")
@_ignoring_weights
def krum(updates: Updates, *, f: Index = 1) -> Aggregate:
    """The row that is closest to most others; weights do not count.

    It has the least sum of ||v_k - v_j||^2 over the n - f - 2 others j that are nearest to it, or
    over all others where fewer are finite. Ties go to the lowest id.

    Source: Blanchard et al., "Machine learning with adversaries" (NeurIPS 2017), section 4.

    Args:
        updates: the messages.
        f: the number of attackers to withstand.

    Raises:
        InputError: not n > 2f + 2 >= 2.
    """
    _outvoted("krum", f, 2 * f + 2, updates)
    return _best(updates, f, 1)


@AGGREGATORS.register("multi_krum")
@example_with("--topology torus")
@_ignoring_weights
def multi_krum(updates: Updates, *, f: Index = 1, m: Count | None = None) -> Aggregate:
    """The mean of the m rows with the lowest scores of `krum`; weights do not count.

    Source: Blanchard et al., "Machine learning with adversaries" (NeurIPS 2017), section 4; the
        largest m: Damaskinos et al., "AggregaThor" (MLSys 2019), section 2.

    Args:
        updates: the messages.
        f: the number of attackers to withstand.
        m: rows to average; n - f - 2 where not given, which is the most.

    Raises:
        InputError: not n > 2f + 2 >= 2, or not 1 <= m <= n - f - 2.
    """
    _outvoted("multi_krum", f, 2 * f + 2, updates)
    most = len(updates.rows) - f - 2
    if m is not None and m > most:
        raise InputError(
            f"--aggregator multi_krum: m={m} is more than {most}, the messages less f + 2"
        )
    return _best(updates, f, most if m is None else m)


def _best(updates: Updates, f: int, m: int) -> Aggregate:
    """Return the mean of the m rows with the lowest scores, and the share of each row in it."""
    n = len(updates.rows)
    shares = np.zeros(n)
    scores = krum_scores(squares(updates.gram[:n, :n]), f)
    chosen = [k for k in np.argsort(scores, kind="stable")[:m] if np.isfinite(scores[k])]
    shares[chosen] = 1 / max(1, len(chosen))
    return Aggregate(updates.mix(shares), shares)


@_quiet
def squares(gram: Floats) -> Floats:
    """Return the squared distances of k rows, (k, k), from their inner products.

    They are inf where they are not finite.
    """
    own = gram.diagonal()
    distances = np.add.outer(own, own) - 2 * gram
    return np.where(np.isfinite(distances), np.maximum(distances, 0.0), np.inf)


def krum_scores(distances: Floats, f: int) -> Floats:
    """Return the sums of squared distances (k, k) over the k - f - 2 nearest others, (k,).

    A row at an infinite distance to itself is left out: its score is inf. The sums are over all
    others that are left where these are fewer.
    """
    n = len(distances)
    kept = np.isfinite(distances.diagonal())
    nearest = min(n - f - 2, int(kept.sum()) - 1)
    others = np.sort(np.where(np.eye(n, dtype=bool), np.inf, distances), axis=1)
    return np.where(kept, others[:, : max(nearest, 0)].sum(axis=1), np.inf)


@AGGREGATORS.register("geometric_median")
def geometric_median(updates: Updates) -> Aggregate:
    """The row z with the least sum of w_k ||v_k - z||.

    The smoothed Weiszfeld iteration starts from the weighted mean:

        z <- sum_k b_k v_k / sum_k b_k,   b_k = w_k / max(1e-6, ||v_k - z||)

    Attackers can move the mean so far that 1,000 iterations do not come back. Where the iteration
    does not converge, it starts again from the weighted mean of the rows that are nearest to the
    row with the least sum of w_k ||v_k - z|| and have more than half of the weight together.
    Every z is a mean of the rows, so it is computed from their inner products alone. A row whose
    squared norm exceeds 1e300 is left out, like one that is not finite.

    Source: Pillutla, Kakade, Harchaoui, "Robust aggregation for federated learning" (arXiv
        1912.13445), Algorithm 2.
    """
    n = len(updates.rows)
    gram = updates.gram[:n, :n]
    weights = updates.weights * (gram.diagonal() <= 1e300)
    shares = weights
    if weights.any():
        shares = _weiszfeld(np.where(np.outer(weights, weights) > 0, gram, 0.0), weights)
    return Aggregate(updates.mix(shares), shares)


def _weiszfeld(gram: Floats, weights: Floats) -> Floats:
    """Return the share of every row in the geometric median, (k,), from inner products (k, k)."""
    shares, converged = _iterated(gram, weights, weights / weights.sum())
    if not converged:
        central = _central(np.sqrt(squares(gram)), weights)
        shares, _ = _iterated(gram, weights, central)
    return shares


def _iterated(gram: Floats, weights: Floats, shares: Floats) -> tuple[Floats, bool]:
    """Return the shares of the rows after at most 1,000 iterations, and whether they converged."""
    for _ in range(1000):
        products = gram @ shares
        distances = gram.diagonal() - 2 * products + shares @ products
        pulls = weights / np.sqrt(np.maximum(distances, 1e-12))
        before = shares
        shares = pulls / pulls.sum()
        if (np.abs(shares - before) <= 1e-10 * shares).all():
            return shares, True
    return shares, False


def _central(distances: Floats, weights: Floats) -> Floats:
    """Return the shares of rows in the mean of those that are nearest to the most central row and
    have more than half of the weight together, (k,), from distances (k, k).
    """
    sums = np.where(weights > 0, distances @ weights, np.inf)
    order = np.argsort(np.where(weights > 0, distances[sums.argmin()], np.inf), kind="stable")
    half = np.searchsorted(weights[order].cumsum(), weights.sum() / 2, side="right") + 1
    near = np.zeros(len(weights))
    near[order[:half]] = weights[order[:half]]
    return np.asarray(near / near.sum())


@AGGREGATORS.register("fltrust")
@_needing_reference
@_ignoring_weights
@_quiet
def fltrust(updates: Updates) -> Aggregate:
    """The mean, weighted by trust, of the rows scaled to the norm of the reference row g_0.

    Weights do not count. The scores are the trust TS_k of each row:

        TS_k = ReLU(cos(g_k, g_0)),   g = sum_k TS_k (||g_0|| / ||g_k||) g_k / sum_k TS_k

    g is 0 where all TS_k are 0. A row of zeros has no direction, and its trust is 0. g is NaN where
    g_0 is not finite.

    Source: Cao et al., "FLTrust" (NDSS 2021), Algorithm 2.

    Raises:
        InputError: there is no reference row.
    """
    if updates.reference is None:
        where = "the server's with --algorithm fltrust, or a peer's own on a graph"
        raise InputError(f"--aggregator fltrust needs a reference row: {where}")
    own = updates.reference[None]
    lengths = updates.distances()
    length = np.sqrt(updates.dots(own, own)[0, 0])
    cosines = updates.dots(updates.rows, own)[:, 0] / (lengths * length)
    scores = np.where(np.isfinite(cosines), np.clip(cosines, 0.0, 1.0), 0.0)
    if not np.isfinite(length):
        return Aggregate(np.full(own.shape[1], np.nan), scores)
    shares = np.where(scores > 0, scores * (length / lengths), 0.0) / (scores.sum() or 1.0)
    return Aggregate(updates.mix(shares), scores)


@AGGREGATORS.register("clipping")
def clipping(updates: Updates, *, f: Index = 1, tau: Positive | None = None) -> Aggregate:
    """Clipping around a centre c: c + sum_k w_k s_k (v_k - c), s_k = min(1, tau / ||v_k - c||).

    The centre is the reference row, or 0 without one; with a peer's own row this is self-centred
    clipping. The scores are the s_k.

    Source: Karimireddy, He, Jaggi, "Learning from history for Byzantine robust optimization" (ICML
        2021), with one iteration; He, Karimireddy, Jaggi, "Byzantine-robust decentralized learning
        via ClippedGossip" (arXiv 2202.01545).

    Args:
        updates: the messages.
        f: the number of attackers to withstand, where there is no tau.
        tau: the radius. Without it, it is the (f + 1)-th largest of the distances ||v_k - c||, so
            that f attackers stretch it no further than an honest sender does.

    Raises:
        InputError: tau is not above 0, f is negative, or there is no tau and not n > f.
    """
    _outvoted("clipping", f, f if tau is None else 0, updates)
    distances = updates.distances(updates.reference)
    radius = np.sort(distances)[len(distances) - 1 - f] if tau is None else tau
    factors = np.isfinite(distances).astype(np.float64)
    np.divide(radius, distances, out=factors, where=distances > radius)
    row = updates.mix(updates.weights * factors)
    if updates.reference is not None:
        row += (1 - updates.weights @ factors) * updates.reference.astype(np.float64)
    return Aggregate(row, factors)
