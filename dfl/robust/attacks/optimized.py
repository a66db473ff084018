"""Which lies are searched for, so that one certain rule believes them?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.robust.aggregators import Updates
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Floats
from dfl.robust.attacks.omniscient import Trim

_LEAST = 1e-5  # the smallest λ that is tried against Krum
_NOISE = 1e-3  # how far the coordinates of a lie's copies are moved, in units of λ
_TRIALS = 100  # directions that are tried against FLTrust, V Q of the source
_GAMMA, _ETA, _SPREAD = (
    0.005,
    0.01,
    0.5,
)  # how far a direction is tried, how far it is followed, its deviation


@ATTACKS.register("krum")
@dataclass(frozen=True, kw_only=True)
class Krum(Attack):
    """Make Krum choose a word that points where nobody would go: -λs, with λ as large as Krum
    believes.

    s is the sign of what Krum, told of f attackers, would have chosen of what all n would have said
    honestly. λ starts from the largest that can succeed and is halved until Krum chooses an
    attacker or λ < 10⁻⁵; over the honest i,

        min_i Σ_{j of the n-f-2 nearest to i} ‖v_i - v_j‖ / ((n-2f-1) ‖s‖) + max_i ‖v_i‖ / ‖s‖

    where ‖s‖ is √d unless a coordinate of s is 0. One attacker says -λs and the others say it with
    every coordinate moved by up to λ/1000. Squared distances to -λs, ‖v_i‖² + 2λ⟨v_i, s⟩ + λ²‖s‖²,
    take no more than inner products.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020),
    section 4.2, full knowledge.
    """

    speaks: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """The same word with a little noise, (f, c)."""
        rows, f = seen.words.rows, len(seen.bad)
        said = rows[seen.bad]
        if not f:
            return said
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            s, size = _believable(seen)
            moved = 2 * seen.uniform("krum") - 1
            moved[0] = 0
            said[:] = -size * (s + _NOISE * moved)
        return said


def _believable(seen: AttackView) -> tuple[NDArray[Any], float]:
    """s, (c,), and λ."""
    words, n, f = seen.words, len(seen.words.rows), len(seen.bad)
    gram, near = words.gram[:n, :n], max(n - f - 2, 1)
    squares = np.diag(gram)
    apart = np.maximum(squares[:, None] + squares - 2 * gram, 0)
    s = np.sign(words.rows[np.argmin(_nearest(apart, near))])
    along = words.dots(words.rows, s[None])[:, 0]
    length = math.sqrt(words.dots(s[None], s[None])[0, 0]) or 1.0
    size = float(np.min(_nearest(np.sqrt(apart[np.ix_(seen.models, seen.models)]), near))) / max(
        n - 2 * f - 1, 1
    )
    size = (size + math.sqrt(np.max(squares[seen.models]))) / length
    while _LEAST <= size < math.inf:
        far = squares + 2 * size * along + (size * length) ** 2
        if _chosen(apart, far, seen.bad, near):
            break
        size /= 2
    return s, size


def _nearest(apart: Floats, near: int) -> Floats:
    """Krum's score of each of n, the sum of the distances to the `near` nearest others, (n,)."""
    others = np.sort(apart + np.diag(np.full(len(apart), np.inf)), axis=1)
    return np.asarray(others[:, : min(near, len(apart) - 1)].sum(1))


def _chosen(apart: Floats, far: Floats, bad: NDArray[np.int64], near: int) -> bool:
    """Whether Krum prefers a word that all attackers say, at squared distances `far` (n,), to every
    honest one.
    """
    lied = apart.copy()
    lied[bad], lied[:, bad] = far, far[:, None]
    lied[np.ix_(bad, bad)] = 0
    scores = _nearest(lied, near)
    return bool(np.all(np.delete(scores, bad) > scores[bad].min()))


@ATTACKS.register("adaptive")
@dataclass(frozen=True, kw_only=True)
class Adaptive(Attack):
    """Search for the word that drives FLTrust's outcome furthest against where it would go.

    With unit vectors e_i of what all would have said honestly, e_0 that of the server's update g_0,
    c_i = ⟨e_i, e_0⟩ and s the sign of FLTrust's outcome if nobody lied, f attackers look for a unit
    vector e' with a large

        h(e') = ‖g_0‖ s·(Σ_i ReLU(c_i) e_i / Σ_i ReLU(c_i) - the same with e' and its c' in place of
        the attackers' own)

    from e', the word of a Trim attack: e' ← normalise(e' + η (h(e' + γu) - h(e')) / γ u), 100
    times, each with its own u ~ N(0, 0.5²) in every coordinate, γ = 0.005, η = 0.01. What is said
    is the best e' on the way, times ‖g_0‖.

    Where peers agree at all, a Trim attack points away from e_0, FLTrust does not listen to it, h
    is flat around it and the search never leaves it. So it starts from the mirror image of such a
    word, e' - 2c' e_0, unless `mirrored` is false, as published.

    All attackers say the same, where the source has a vector for each: h knows them by their sum,
    and a search for each would take f times as long. As e' is a sum of g_0, the start and the
    directions, h takes no more than the inner products of these, which are made once.

    Source: Cao et al., "FLTrust" (NDSS 2021), section V, algorithm 3; the deviation of u is that of
        released code.
    """

    mirrored: bool = True

    speaks: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """One word for all, (f, c).

        Raises:
            InputError: a listener that trusts nothing.
        """
        words, f = seen.words, len(seen.bad)
        if words.trusted is None:
            raise InputError(
                "--attack adaptive is made for a server that trusts an update: it needs --algorithm fltrust"
            )
        said = words.rows[seen.bad]
        if f:
            with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
                tried, aim = _harm(seen, words.trusted)
                said[:] = replace(words, rows=tried).mix(aim.size * _search(aim, self.mirrored))
        return said


class _Harm(NamedTuple):
    """What h depends on where e' is a sum of m vectors, but for what no e' changes.

    Attributes:
        gram: (m, m), the inner products of the vectors.
        along: (m,), theirs with e_0.
        ahead: (m,), theirs with s.
        honest: s·Σ ReLU(c_i) e_i and Σ ReLU(c_i) of the honest.
        f: the attackers.
        size: ‖g_0‖.
    """

    gram: Floats
    along: Floats
    ahead: Floats
    honest: tuple[float, float]
    f: int
    size: float

    def __call__(self, mixed: Floats) -> float:
        """h for coefficients (m,), up to a constant."""
        trust = self.f * max(float(mixed @ self.along), 0.0)
        pushed, trusted = self.honest[0] + trust * float(mixed @ self.ahead), self.honest[1] + trust
        return -self.size * pushed / trusted if trusted > 0 else 0.0


def _harm(seen: AttackView, trusted: NDArray[Any]) -> tuple[NDArray[Any], _Harm]:
    """g_0, the start and the directions, (m, c), and h."""
    words, one = seen.words, replace(seen, bad=seen.bad[:1], ids=seen.ids[:1])
    rows = words.rows
    lengths = np.sqrt(_squares(words))
    size = math.sqrt(words.dots(trusted[None], trusted[None])[0, 0])
    trust = np.maximum(_over(words.dots(rows, trusted[None])[:, 0], lengths * size), 0)
    shares = _over(trust, lengths)
    honest = np.isin(np.arange(len(rows)), seen.bad, invert=True)
    rest = words.mix(shares * honest)
    s = np.sign(rest + words.mix(shares * ~honest))
    vectors = np.empty((4 + _TRIALS, rows.shape[1]), rows.dtype)
    vectors[:4] = rest, s, trusted, Trim().say(one)[0]
    for k in range(_TRIALS):
        vectors[4 + k] = _SPREAD * ndtri(one.uniform("adaptive", k)[0])
    gram = words.dots(vectors, vectors)
    sums = float(gram[0, 1]), float(trust[honest].sum())
    along = gram[2, 2:] / (size or 1.0)
    return vectors[2:], _Harm(gram[2:, 2:], along, gram[1, 2:], sums, len(seen.bad), size)


def _search(harm: _Harm, mirrored: bool) -> Floats:
    """The coefficients (m,) of the best e' that the search comes by, of g_0, the start and m - 2
    directions.
    """
    steps = np.eye(len(harm.gram))
    mixed = _unit(steps[1], harm.gram)
    if mirrored:
        mixed -= 2 * min(float(mixed @ harm.along), 0.0) / (harm.size or 1.0) * steps[0]
    best = mixed
    for step in steps[2:]:
        mixed = _unit(
            mixed + _ETA * (harm(mixed + _GAMMA * step) - harm(mixed)) / _GAMMA * step, harm.gram
        )
        best = max(best, mixed, key=harm.__call__)
    return best


def _unit(mixed: Floats, gram: Floats) -> Floats:
    return _over(mixed, np.sqrt(np.maximum(mixed @ gram @ mixed, 0)))


def _squares(words: Updates) -> Floats:
    """‖v_i‖² of every speaker, (n,)."""
    cut = blocks(words.rows.shape[1])
    parts = np.zeros((len(cut), len(words.rows)))
    for part, block in zip(parts, cut, strict=True):
        part[:] = np.square(words.rows[:, block], dtype=np.float64, order="C").sum(1)
    return words.total(parts)


def _over(values: Floats, by: Any) -> Floats:
    """values / by, and 0 where that is 0."""
    return np.asarray(np.divide(values, by, out=np.zeros_like(values), where=by > 0))
