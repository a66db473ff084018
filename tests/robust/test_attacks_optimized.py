"""Krum chooses the Krum attack, and the adaptive attack harms FLTrust more than its start does."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.robust.attacks import ATTACKS, AttackView
from tests.support.attackers import Floats, rows_of, view_of

CASES = [(10, 2, 30), (15, 3, 400), (9, 1, 50), (20, 8, 200)]

# --- krum ----------------------------------------------------------------------------------------


def krum(rows: NDArray[Any], f: int) -> int:
    """Return the row with the smallest sum of squared distances to its n-f-2 nearest others."""
    scores = []
    for i, row in enumerate(rows):
        others = [float(np.sum((row - other) ** 2)) for j, other in enumerate(rows) if j != i]
        scores.append(sum(sorted(others)[: len(rows) - f - 2]))
    return scores.index(min(scores))


def largest(rows: Floats, attackers: list[int], length: float) -> float:
    """Return where the search for λ starts, by the formula of the paper."""
    n = len(rows)
    f = len(attackers)
    honest = [row for i, row in enumerate(rows) if i not in attackers]
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
    attackers = sorted(np.random.default_rng(seed).permutation(n)[:f].tolist())
    chosen = rows[krum(rows, f)]
    falsified = rows.copy()
    falsified[attackers] = ATTACKS["krum"]().falsify(view_of(rows, attackers))
    assert krum(falsified, f) in attackers
    assert np.array_equal(np.sign(falsified[attackers]), -np.sign(chosen) * np.ones((f, 1)))


@pytest.mark.parametrize(("n", "f", "d"), CASES)
def test_krum_does_not_choose_an_attacker_with_twice_the_size(n: int, f: int, d: int) -> None:
    rows = rows_of(n, d, dtype=np.float64, noise=3)
    attackers = list(range(f))
    sent = ATTACKS["krum"]().falsify(view_of(rows, attackers))
    halvings = np.log2(largest(rows, attackers, d**0.5) / np.abs(sent[0]))
    assert halvings == pytest.approx(np.full(d, round(halvings[0])), abs=1e-9)
    assert halvings[0] > 0.5
    falsified = rows.copy()
    falsified[attackers] = 2 * sent
    assert krum(falsified, f) not in attackers


def test_the_attackers_messages_differ_by_at_most_a_thousandth() -> None:
    rows = rows_of(15, 300, dtype=np.float64, noise=3)
    sent = [ATTACKS["krum"]().falsify(view_of(rows, [1, 2, 3], t=t)) for t in (3, 4)]
    size = abs(sent[0][0, 0])
    gaps = np.abs(sent[0][1:] - sent[0][0])
    assert 0.5e-3 * size < gaps.max() <= 1.0001e-3 * size
    assert len(np.unique(gaps)) == 600
    assert np.array_equal(sent[0][0], sent[1][0])
    assert not np.any(sent[0][1:] == sent[1][1:])


def test_a_coordinate_without_direction_stays_zero() -> None:
    rows = rows_of(12, 40, dtype=np.float64, noise=3)
    rows[:, 5:9] = 0
    sent = ATTACKS["krum"]().falsify(view_of(rows, [0, 7]))
    assert np.all(sent[0, 5:9] == 0)
    halvings = np.log2(largest(rows, [0, 7], 36**0.5) / abs(sent[0, 0]))
    assert halvings == pytest.approx(round(halvings), abs=1e-9)


def test_the_search_for_a_size_ends_below_its_least_value() -> None:
    """Where honest peers agree Krum chooses no attacker: the last size tried is below 10⁻⁵."""
    rows = np.ones((9, 20))
    sent = ATTACKS["krum"]().falsify(view_of(rows, [4]))
    assert 0.5e-5 <= abs(sent[0, 0]) < 1e-5


# --- adaptive ------------------------------------------------------------------------------------


def fltrust(rows: NDArray[Any], reference: NDArray[Any]) -> Floats:
    """Return FLTrust's aggregate, by the formula of the paper."""
    size = float(np.linalg.norm(reference))
    total = 0.0
    outcome = np.zeros(len(reference))
    for row in rows:
        score = max(float(row @ reference) / (float(np.linalg.norm(row)) * size), 0.0)
        outcome += score * size * row / np.linalg.norm(row)
        total += score
    return outcome / total


def harm(view: AttackView, sent: NDArray[Any]) -> float:
    """Return how far the aggregate is driven against its sign."""
    rows = view.updates.rows
    reference = view.updates.reference
    assert reference is not None
    before = fltrust(rows, reference)
    falsified = rows.copy()
    falsified[view.attackers] = sent
    return float(np.sign(before) @ (before - fltrust(falsified, reference)))


def searched(view: AttackView, mirrored: bool) -> Floats:
    """Return the best message of a search with whole vectors, where h runs FLTrust."""
    rows = view.updates.rows
    reference = view.updates.reference
    assert reference is not None
    size = float(np.linalg.norm(reference))
    message = ATTACKS["trim"]().falsify(view)[0].astype(np.float64)
    message = message / np.linalg.norm(message)
    if mirrored and message @ reference < 0:
        message = message - 2 * (message @ reference) * reference / size**2
    best = message

    def h(vector: Floats) -> float:  # FLTrust would normalise the vector; the search does not
        e0 = reference / size
        before = fltrust(rows, reference)
        units = [row / np.linalg.norm(row) for row in rows]
        for i in view.attackers:
            units[i] = vector
        scores = [max(float(unit @ e0), 0.0) for unit in units]
        after = sum(score * unit for score, unit in zip(scores, units, strict=True)) / sum(scores)
        return float(np.sign(before) @ (before - size * after))

    for k in range(100):
        u = np.array([0.5 * NormalDist().inv_cdf(float(p)) for p in view.uniform("adaptive", k)[0]])
        message = message + 0.01 * (h(message + 0.005 * u) - h(message)) / 0.005 * u
        message = message / np.linalg.norm(message)
        best = message if h(message) > h(best) else best
    return np.asarray(size * best)


def trusting(
    n: int, d: int, attackers: list[int], seed: int = 0, dtype: Any = np.float64
) -> AttackView:
    rows = rows_of(n + 1, d, seed, dtype)
    return view_of(rows[:n], attackers, 0.5 * rows[n])


@pytest.mark.parametrize(
    ("n", "attackers", "d"), [(8, [2, 5], 6), (12, [0, 1, 11], 40), (5, [3], 100)]
)
@pytest.mark.parametrize("mirrored", [True, False])
def test_adaptive_is_the_search_with_whole_vectors(
    n: int, attackers: list[int], d: int, mirrored: bool
) -> None:
    view = trusting(n, d, attackers)
    sent = ATTACKS["adaptive"](mirrored=mirrored).falsify(view)
    assert sent == pytest.approx(
        np.tile(searched(view, mirrored), (len(attackers), 1)), rel=1e-4, abs=1e-7
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_adaptive_does_more_harm_than_its_start(seed: int, dtype: Any) -> None:
    view = trusting(20, 60, [1, 5, 9, 13], seed, dtype)
    sent = ATTACKS["adaptive"]().falsify(view)
    reference = view.updates.reference
    assert reference is not None
    size = np.linalg.norm(reference)
    assert np.linalg.norm(sent, axis=1) == pytest.approx(np.full(4, size), rel=1e-5)
    start = ATTACKS["trim"]().falsify(view)[0].astype(np.float64)
    mirror = start - 2 * min(start @ reference, 0) * reference / size**2
    assert harm(view, sent) > harm(view, np.tile(mirror, (4, 1))) + 1e-6
    assert harm(view, sent) > harm(view, np.tile(start, (4, 1))) + 1e-6
    assert harm(view, sent) > harm(view, view.updates.rows[view.attackers]) + 1e-6


def test_adaptive_as_published_gets_no_trust() -> None:
    """Its start points away from the reference row, and h is flat there."""
    view = trusting(20, 60, [1, 5, 9, 13], seed=1)
    sent = ATTACKS["adaptive"](mirrored=False).falsify(view)[0]
    start = ATTACKS["trim"]().falsify(view)[0]
    assert sent @ start == pytest.approx(np.linalg.norm(sent) * np.linalg.norm(start))
    assert view.updates.reference is not None
    assert start @ view.updates.reference < 0


def test_adaptive_draws_by_address() -> None:
    view = trusting(8, 50, [2, 5])
    later = replace(view, t=4)
    sent = [ATTACKS["adaptive"]().falsify(each) for each in (view, view, later)]
    assert np.array_equal(sent[0], sent[1])
    assert not np.any(sent[0] == sent[2])


def test_adaptive_needs_a_trusted_row() -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS["adaptive"]().falsify(view_of(rows_of(5, 10), [1]))
    assert str(raised.value).startswith("--attack adaptive ")
    assert str(raised.value).endswith(" --algorithm fltrust")
    assert "\n" not in str(raised.value)


def test_adaptive_where_the_server_trusts_no_peer() -> None:
    """The aggregate is zero whatever is sent, and the start is as good as any message."""
    rows = np.abs(rows_of(6, 30, dtype=np.float64))
    reference = -rows.sum(0)
    sent = ATTACKS["adaptive"]().falsify(view_of(rows, [0, 1], reference))
    assert np.linalg.norm(sent, axis=1) == pytest.approx(np.full(2, np.linalg.norm(reference)))
    assert np.all(ATTACKS["adaptive"]().falsify(view_of(rows, [0, 1], np.zeros(30))) == 0)
