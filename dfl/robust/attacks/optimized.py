"""Attacks that search for the message that does most harm to one aggregation rule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.registry import example_with
from dfl.robust.aggregators import Rows, Updates
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Floats
from dfl.robust.attacks.omniscient import Trim

_LEAST = 1e-5
"""The smallest λ that is tried against Krum."""
_NOISE = 1e-3
"""How far the coordinates of the other attackers' messages are moved, in units of λ."""
_TRIALS = 100
"""Directions that are tried against FLTrust, V Q of the source."""
_GAMMA = 0.005
"""gamma: how far a direction is tried."""
_ETA = 0.01
"""eta: how far a direction is followed."""
_SPREAD = 0.5
"""The standard deviation of a direction."""


@ATTACKS.register("krum")
@dataclass(frozen=True, kw_only=True)
class Krum(Attack):
    """Make Krum choose a message against the common direction: -λs with the largest such λ.

    s is the sign of the row that Krum, with its f the number of attackers, would choose if all n
    senders were honest. λ starts from the largest value that can succeed and is halved until Krum
    chooses an attacker or λ < 10⁻⁵; the start is, over the honest i,

        min_i Σ_{j of the n-f-2 nearest to i} ‖v_i - v_j‖ / ((n-2f-1) ‖s‖) + max_i ‖v_i‖ / ‖s‖

    where ‖s‖ is √d unless a coordinate of s is 0. One attacker sends -λs, and the others send it
    with every coordinate moved by up to λ/1000. Squared distances to -λs, ‖v_i‖² + 2λ⟨v_i, s⟩ +
    λ²‖s‖², are computed from inner products alone.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020), section 4.2, full knowledge.
    """

    def falsify(self, view: AttackView) -> Rows:
        """Return the same message for all attackers, with a little noise, (f, c)."""
        sent = view.updates.rows[view.attackers]
        if not len(sent):
            return sent
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            s, size = _accepted_by_krum(view.by_sender)
            noise = 2 * view.uniform("krum") - 1
            noise[view.ids == view.ids[0]] = 0
            sent[:] = -size * (s + _NOISE * noise)
        return sent


def _accepted_by_krum(view: AttackView) -> tuple[Rows, float]:
    """Return s, (c,), and λ."""
    updates = view.updates
    n = len(updates.rows)
    f = len(view.attackers)
    gram = updates.gram[:n, :n]
    near = max(n - f - 2, 1)
    squares = np.diag(gram)
    squared = np.maximum(squares[:, None] + squares - 2 * gram, 0)
    s = np.sign(updates.rows[np.argmin(_nearest(squared, near))])
    products = updates.dots(updates.rows, s[None])[:, 0]
    length = math.sqrt(updates.dots(s[None], s[None])[0, 0]) or 1.0
    distances = np.sqrt(squared[np.ix_(view.imitated, view.imitated)])
    size = float(np.min(_nearest(distances, near))) / max(n - 2 * f - 1, 1)
    size = (size + math.sqrt(np.max(squares[view.imitated]))) / length
    while _LEAST <= size < math.inf:
        to_message = squares + 2 * size * products + (size * length) ** 2
        if _krum_chooses(squared, to_message, view.attackers, near):
            break
        size /= 2
    return s, size


def _nearest(distances: Floats, near: int) -> Floats:
    """Return Krum's score of each of k, the sum of distances to the `near` nearest others, (k,)."""
    n = len(distances)
    others = np.sort(distances + np.diag(np.full(n, np.inf)), axis=1)
    return np.asarray(others[:, : min(near, n - 1)].sum(1))


def _krum_chooses(
    squared: Floats, to_message: Floats, attackers: NDArray[np.int64], near: int
) -> bool:
    """Return whether Krum prefers a message that all attackers send to every honest message.

    Args:
        squared: (k, k), the squared distances between honest messages.
        to_message: (k,), their squared distances to the message.
        attackers: (f,), the positions of the attackers.
        near: how many others Krum adds up.
    """
    falsified = squared.copy()
    falsified[attackers] = to_message
    falsified[:, attackers] = to_message[:, None]
    falsified[np.ix_(attackers, attackers)] = 0
    scores = _nearest(falsified, near)
    return bool(np.all(np.delete(scores, attackers) > scores[attackers].min()))


@ATTACKS.register("adaptive")
@example_with("--algorithm fltrust")
@dataclass(frozen=True, kw_only=True)
class Adaptive(Attack):
    """Search for the message that drives FLTrust's aggregate furthest against its honest direction.

    e_i are unit vectors of what all senders would have sent honestly, e_0 that of the server's
    update g_0, c_i = ⟨e_i, e_0⟩, and s is the sign of FLTrust's aggregate without attackers. The f
    attackers look for a unit vector e' with a large

        h(e') = ‖g_0‖ s·(Σ_i ReLU(c_i) e_i / Σ_i ReLU(c_i) - the same with e' and its c' in place of
        the attackers' own)

    from e', the message of a Trim attack: e' ← normalise(e' + η (h(e' + γu) - h(e')) / γ u), 100
    times, each with its own u ~ N(0, 0.5²) in every coordinate, γ = 0.005, η = 0.01. What is sent
    is the best e' on the way, times ‖g_0‖.

    Where peers agree at all, a Trim attack points away from e_0, FLTrust gives it no weight, h is
    flat around it, and the search never leaves it. So the search starts from the mirror image of
    such a message, e' - 2c' e_0, unless `mirrored` is false, as published.

    All attackers send the same, where the source has a vector for each: h depends on their sum
    alone, and a search for each would take f times as long. As e' is a sum of g_0, the start and
    the directions, h is computed from the inner products of these, which are made once.

    Source: Cao et al., "FLTrust" (NDSS 2021), section V, algorithm 3; the deviation of u is that of
        released code.

    Attributes:
        mirrored: whether the search starts from the mirror image of a Trim attack.
    """

    mirrored: bool = True

    def falsify(self, view: AttackView) -> Rows:
        """Return one message for all attackers, (f, c).

        Raises:
            InputError: the receiver has no reference row.
        """
        updates = view.updates
        if updates.reference is None:
            raise InputError(
                "--attack adaptive is made for a server with an update of its own: "
                "it needs --algorithm fltrust"
            )
        sent = updates.rows[view.attackers]
        if len(sent):
            with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
                vectors, harm = _harm(view, updates.reference)
                found = harm.size * _search(harm, self.mirrored)
                sent[:] = replace(updates, rows=vectors).mix(found)
        return sent


class _Harm(NamedTuple):
    """h as a function of the coefficients of e' as a sum of m vectors, up to a constant.

    Attributes:
        gram: (m, m), the inner products of the vectors.
        with_trusted: (m,), their inner products with e_0.
        with_sign: (m,), their inner products with s.
        honest_sum: s·Σ ReLU(c_i) e_i of the honest senders.
        honest_trust: Σ ReLU(c_i) of the honest senders.
        f: the number of attackers.
        size: ‖g_0‖.
    """

    gram: Floats
    with_trusted: Floats
    with_sign: Floats
    honest_sum: float
    honest_trust: float
    f: int
    size: float

    def __call__(self, mixed: Floats) -> float:
        """Return h for coefficients (m,), up to a constant."""
        trust = self.f * max(float(mixed @ self.with_trusted), 0.0)
        total = self.honest_sum + trust * float(mixed @ self.with_sign)
        total_trust = self.honest_trust + trust
        return -self.size * total / total_trust if total_trust > 0 else 0.0


def _harm(view: AttackView, reference: Rows) -> tuple[Rows, _Harm]:
    """Return g_0, the start and the directions, (m, c), and h."""
    from scipy.special import ndtri  # 35 ms at every start, for this attack only

    updates = view.updates
    rows = updates.rows
    one = replace(view, attackers=view.attackers[:1])
    lengths = np.sqrt(_squares(updates))
    size = math.sqrt(updates.dots(reference[None], reference[None])[0, 0])
    trust = np.maximum(_over(updates.dots(rows, reference[None])[:, 0], lengths * size), 0)
    shares = _over(trust, lengths)
    honest = np.isin(np.arange(len(rows)), view.attackers, invert=True)
    rest = updates.mix(shares * honest)
    s = np.sign(rest + updates.mix(shares * ~honest))
    vectors = np.empty((4 + _TRIALS, rows.shape[1]), rows.dtype)
    vectors[0] = rest
    vectors[1] = s
    vectors[2] = reference
    vectors[3] = Trim().falsify(one)[0]
    for k in range(_TRIALS):
        vectors[4 + k] = _SPREAD * ndtri(one.uniform("adaptive", k)[0])
    gram = updates.dots(vectors, vectors)
    harm = _Harm(
        gram=gram[2:, 2:],
        with_trusted=gram[2, 2:] / (size or 1.0),
        with_sign=gram[1, 2:],
        honest_sum=float(gram[0, 1]),
        honest_trust=float(trust[honest].sum()),
        f=len(view.attackers),
        size=size,
    )
    return vectors[2:], harm


def _search(harm: _Harm, mirrored: bool) -> Floats:
    """Return the coefficients of the best e' that the search finds, (m,).

    They are those of g_0, of the start, and of m - 2 directions.
    """
    steps = np.eye(len(harm.gram))
    mixed = _unit(steps[1], harm.gram)
    if mirrored:
        mixed -= 2 * min(float(mixed @ harm.with_trusted), 0.0) / (harm.size or 1.0) * steps[0]
    best = mixed
    for step in steps[2:]:
        change = harm(mixed + _GAMMA * step) - harm(mixed)
        mixed = _unit(mixed + _ETA * change / _GAMMA * step, harm.gram)
        best = max(best, mixed, key=harm.__call__)
    return best


def _unit(mixed: Floats, gram: Floats) -> Floats:
    """Return the coefficients (m,) of the unit vector in the direction of a sum of m vectors."""
    return _over(mixed, np.sqrt(np.maximum(mixed @ gram @ mixed, 0)))


def _squares(updates: Updates) -> Floats:
    """Return ‖v_i‖² of every sender, (k,)."""
    cut = blocks(updates.rows.shape[1])
    parts = np.zeros((len(cut), len(updates.rows)))
    for part, block in zip(parts, cut, strict=True):
        part[:] = np.square(updates.rows[:, block], dtype=np.float64, order="C").sum(1)
    return updates.total(parts)


def _over(values: Floats, by: Floats | float) -> Floats:
    """Return values / by, and 0 where `by` is 0."""
    return np.asarray(np.divide(values, by, out=np.zeros_like(values), where=by > 0))
