"""Does Krum believe the Krum attack, and does the adaptive attack do FLTrust more harm than what it
starts from?
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.robust.attacks import ATTACKS, AttackView
from tests.support.attackers import Floats, rows_of, seen

CASES = [(10, 2, 30), (15, 3, 400), (9, 1, 50), (20, 8, 200)]

# --- krum -----------------------------------------------------------------------------------------
# --------------------


def krum(rows: NDArray[Any], f: int) -> int:
    """The row with the smallest sum of squared distances to its n-f-2 nearest others, by the
    book.
    """
    scores = []
    for i, row in enumerate(rows):
        others = [float(np.sum((row - other) ** 2)) for j, other in enumerate(rows) if j != i]
        scores.append(sum(sorted(others)[: len(rows) - f - 2]))
    return scores.index(min(scores))


def largest(rows: Floats, bad: list[int], length: float) -> float:
    """Where the search for λ starts, by the book."""
    n, f = len(rows), len(bad)
    honest = [row for i, row in enumerate(rows) if i not in bad]
    sums = []
    for i, row in enumerate(honest):
        gaps = sorted(
            float(np.linalg.norm(row - other)) for j, other in enumerate(honest) if j != i
        )
        sums.append(sum(gaps[: n - f - 2]))
    return (
        min(sums) / ((n - 2 * f - 1) * length)
        + max(float(np.linalg.norm(row)) for row in honest) / length
    )


@pytest.mark.parametrize(("n", "f", "d"), CASES)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_krum_chooses_an_attacker(n: int, f: int, d: int, seed: int, dtype: Any) -> None:
    rows = rows_of(n, d, seed, dtype, noise=3)
    bad = sorted(np.random.default_rng(seed).permutation(n)[:f].tolist())
    chosen = rows[krum(rows, f)]
    lied = rows.copy()
    lied[bad] = ATTACKS["krum"]().say(seen(rows, bad))
    assert krum(lied, f) in bad
    assert np.array_equal(np.sign(lied[bad]), -np.sign(chosen) * np.ones((f, 1)))


@pytest.mark.parametrize(("n", "f", "d"), CASES)
def test_krum_would_not_believe_twice_as_much(n: int, f: int, d: int) -> None:
    rows, bad = rows_of(n, d, dtype=np.float64, noise=3), list(range(f))
    said = ATTACKS["krum"]().say(seen(rows, bad))
    halvings = np.log2(largest(rows, bad, d**0.5) / np.abs(said[0]))
    assert halvings == pytest.approx(np.full(d, round(halvings[0])), abs=1e-9)
    assert halvings[0] > 0.5
    lied = rows.copy()
    lied[bad] = 2 * said
    assert krum(lied, f) not in bad


def test_copies_of_a_lie_differ_a_little() -> None:
    rows = rows_of(15, 300, dtype=np.float64, noise=3)
    said = [ATTACKS["krum"]().say(seen(rows, [1, 2, 3], t=t)) for t in (3, 4)]
    size = abs(said[0][0, 0])
    apart = np.abs(said[0][1:] - said[0][0])
    assert 0.5e-3 * size < apart.max() <= 1.0001e-3 * size
    assert len(np.unique(apart)) == 600
    assert np.array_equal(said[0][0], said[1][0])
    assert not np.any(said[0][1:] == said[1][1:])


def test_a_coordinate_without_direction_stays_out() -> None:
    rows = rows_of(12, 40, dtype=np.float64, noise=3)
    rows[:, 5:9] = 0
    said = ATTACKS["krum"]().say(seen(rows, [0, 7]))
    assert np.all(said[0, 5:9] == 0)
    halvings = np.log2(largest(rows, [0, 7], 36**0.5) / abs(said[0, 0]))
    assert halvings == pytest.approx(round(halvings), abs=1e-9)


def test_krum_attackers_give_up_at_last() -> None:
    """Honest peers that agree leave no room for a lie: the last size tried is below 10⁻⁵."""
    rows = np.ones((9, 20))
    said = ATTACKS["krum"]().say(seen(rows, [4]))
    assert 0.5e-5 <= abs(said[0, 0]) < 1e-5


# --- adaptive -------------------------------------------------------------------------------------
# --------------------


def fltrust(rows: NDArray[Any], trusted: NDArray[Any]) -> Floats:
    """FLTrust's outcome, by the book."""
    size, total, outcome = float(np.linalg.norm(trusted)), 0.0, np.zeros(len(trusted))
    for row in rows:
        score = max(float(row @ trusted) / (float(np.linalg.norm(row)) * size), 0.0)
        outcome += score * size * row / np.linalg.norm(row)
        total += score
    return outcome / total


def harm(view: AttackView, said: NDArray[Any]) -> float:
    """How far the outcome is driven against its sign."""
    rows, trusted = view.words.rows, view.words.trusted
    assert trusted is not None
    lied, before = rows.copy(), fltrust(rows, trusted)
    lied[view.bad] = said
    return float(np.sign(before) @ (before - fltrust(lied, trusted)))


def by_the_book(view: AttackView, mirrored: bool) -> Floats:
    """The search with whole vectors, h by running FLTrust; the best unit vector on the way."""
    rows, trusted = view.words.rows, view.words.trusted
    assert trusted is not None
    size = float(np.linalg.norm(trusted))
    word = ATTACKS["trim"]().say(view)[0].astype(np.float64)
    word = word / np.linalg.norm(word)
    if mirrored and word @ trusted < 0:
        word = word - 2 * (word @ trusted) * trusted / size**2
    best = word

    def h(vector: Floats) -> float:  # FLTrust itself would normalise; the search does not
        e0, before = trusted / size, fltrust(rows, trusted)
        units = [row / np.linalg.norm(row) for row in rows]
        for i in view.bad:
            units[i] = vector
        scores = [max(float(unit @ e0), 0.0) for unit in units]
        after = sum(score * unit for score, unit in zip(scores, units, strict=True)) / sum(scores)
        return float(np.sign(before) @ (before - size * after))

    for k in range(100):
        u = np.array([0.5 * NormalDist().inv_cdf(float(p)) for p in view.uniform("adaptive", k)[0]])
        word = word + 0.01 * (h(word + 0.005 * u) - h(word)) / 0.005 * u
        word = word / np.linalg.norm(word)
        best = word if h(word) > h(best) else best
    return np.asarray(size * best)


def trusting(n: int, d: int, bad: list[int], seed: int = 0, dtype: Any = np.float64) -> AttackView:
    rows = rows_of(n + 1, d, seed, dtype)
    return seen(rows[:n], bad, 0.5 * rows[n])


@pytest.mark.parametrize(("n", "bad", "d"), [(8, [2, 5], 6), (12, [0, 1, 11], 40), (5, [3], 100)])
@pytest.mark.parametrize("mirrored", [True, False])
def test_adaptive_follows_its_search(n: int, bad: list[int], d: int, mirrored: bool) -> None:
    view = trusting(n, d, bad)
    said = ATTACKS["adaptive"](mirrored=mirrored).say(view)
    assert said == pytest.approx(
        np.tile(by_the_book(view, mirrored), (len(bad), 1)), rel=1e-4, abs=1e-7
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adaptive_beats_what_it_starts_from(seed: int, dtype: Any) -> None:
    view = trusting(20, 60, [1, 5, 9, 13], seed, dtype)
    said, trusted = ATTACKS["adaptive"]().say(view), view.words.trusted
    assert trusted is not None
    size = np.linalg.norm(trusted)
    assert np.linalg.norm(said, axis=1) == pytest.approx(np.full(4, size), rel=1e-5)
    start = ATTACKS["trim"]().say(view)[0].astype(np.float64)
    mirror = start - 2 * min(start @ trusted, 0) * trusted / size**2
    assert harm(view, said) > harm(view, np.tile(mirror, (4, 1))) + 1e-6
    assert harm(view, said) > harm(view, np.tile(start, (4, 1))) + 1e-6
    assert harm(view, said) > harm(view, view.words.rows[view.bad]) + 1e-6


def test_adaptive_as_published_is_not_listened_to() -> None:
    """Its start points away from what the server trusts, and h is flat there."""
    view = trusting(20, 60, [1, 5, 9, 13], seed=1)
    said, start = ATTACKS["adaptive"](mirrored=False).say(view)[0], ATTACKS["trim"]().say(view)[0]
    assert said @ start == pytest.approx(np.linalg.norm(said) * np.linalg.norm(start))
    assert view.words.trusted is not None
    assert start @ view.words.trusted < 0


def test_adaptive_draws_by_address() -> None:
    view = trusting(8, 50, [2, 5])
    later = AttackView(view.words, view.bad, view.ids, view.places, (7, 4, "x"))
    said = [ATTACKS["adaptive"]().say(each) for each in (view, view, later)]
    assert np.array_equal(said[0], said[1])
    assert not np.any(said[0] == said[2])


def test_adaptive_needs_what_the_server_trusts() -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS["adaptive"]().say(seen(rows_of(5, 10), [1]))
    assert str(raised.value).endswith("it needs --algorithm fltrust")
    assert "\n" not in str(raised.value)


def test_adaptive_where_the_server_trusts_nobody() -> None:
    """Then the outcome is zero whatever is said, and the start is as good as anything."""
    rows = np.abs(rows_of(6, 30, dtype=np.float64))
    trusted = -rows.sum(0)
    said = ATTACKS["adaptive"]().say(seen(rows, [0, 1], trusted))
    assert np.linalg.norm(said, axis=1) == pytest.approx(np.full(2, np.linalg.norm(trusted)))
    assert np.all(ATTACKS["adaptive"]().say(seen(rows, [0, 1], np.zeros(30))) == 0)
