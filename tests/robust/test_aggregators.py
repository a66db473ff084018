"""Aggregation rules agree with references that are computed another way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.stats import trim_mean

from dfl.core.errors import InputError
from dfl.robust.aggregators import (
    AGGREGATORS,
    Aggregate,
    Floats,
    Updates,
    ignores_weights,
    krum_scores,
    needs_reference,
    squares,
)

Rows = NDArray[Any]
WIDTH = 37


def updates(
    rows: Rows, reference: Rows | None = None, weights: list[float] | None = None
) -> Updates:
    n = len(rows)
    return Updates(rows, np.full(n, 1 / n) if weights is None else np.asarray(weights), reference)


def normal(n: int, c: int = WIDTH, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((n, c)).astype(np.float32)


def tied(n: int, c: int = WIDTH) -> Rows:
    """Return small integers: exact ties between coordinates, rows and distances."""
    return np.random.default_rng(n).integers(-1, 2, (n, c)).astype(np.float32)


def opposite(n: int, c: int = WIDTH) -> Rows:
    """Return rows in pairs of the same length and distances, and some of them twice."""
    half = tied(n)[: -(-n // 2), :c]
    return np.concatenate([half, -half])[:n]


def huge(n: int, c: int = WIDTH) -> Rows:
    rows = normal(n, c)
    rows[::4] *= np.float32(1e37)
    return rows


def alike(n: int, c: int = WIDTH) -> Rows:
    """Return equal rows, but for a third of them, which equal each other."""
    rows = np.repeat(normal(1, c), n, axis=0)
    rows[: n // 3] = -100 * rows[0]
    return rows


def scores(outcome: Aggregate) -> Floats:
    assert outcome.scores is not None
    return outcome.scores


KINDS: list[Callable[[int], Rows]] = [normal, tied, opposite, huge, alike]
SIZES = (1, 2, 3, 4, 5, 6, 7, 11, 20, 21)
kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("n", SIZES)


@kinds
@sizes
def test_median_is_that_of_numpy(kind: Callable[[int], Rows], n: int) -> None:
    rows = kind(n)
    np.testing.assert_array_equal(
        AGGREGATORS["median"](updates(rows)).row, np.median(rows.astype(np.float64), axis=0)
    )


@kinds
@sizes
def test_trimmed_mean_is_that_of_scipy(kind: Callable[[int], Rows], n: int) -> None:
    rows = kind(n)
    for f in range((n + 1) // 2):
        expected = trim_mean(rows.astype(np.float64), (f + 0.1) / n, axis=0)
        size = np.abs(np.sort(rows, axis=0)[f : n - f]).max()
        row = AGGREGATORS["trimmed_mean"](updates(rows), f=f).row
        np.testing.assert_allclose(row, expected, rtol=1e-14, atol=1e-14 * size)


def test_trimmed_mean_with_f_0_is_the_unweighted_mean() -> None:
    rows = normal(6)
    weights = [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    plain = AGGREGATORS["mean"](updates(rows)).row
    assert plain == pytest.approx(rows.astype(np.float64).mean(axis=0), abs=1e-15)
    assert AGGREGATORS["trimmed_mean"](updates(rows, weights=weights), f=0).row == pytest.approx(
        plain, abs=1e-15
    )
    weighted = AGGREGATORS["mean"](updates(rows, weights=weights)).row
    assert weighted == pytest.approx(np.asarray(weights) @ rows.astype(np.float64), abs=1e-15)


def blanchard(rows: Rows, f: int) -> tuple[list[int], list[float]]:
    """Return ids from the best to the worst, and the scores, as in section 4 of the paper."""
    values = rows.astype(np.float64)
    sums = []
    for i in range(len(values)):
        away = sorted(sum((values[i] - values[j]) ** 2) for j in range(len(values)) if j != i)
        sums.append(sum(away[: len(values) - f - 2]))
    return sorted(range(len(values)), key=lambda i: (sums[i], i)), sums


@pytest.mark.parametrize("kind", [normal, tied, opposite])
@pytest.mark.parametrize("n", [3, 5, 6, 7, 11, 20])
def test_krum_is_that_of_the_paper(kind: Callable[[int], Rows], n: int) -> None:
    rows = kind(n)
    for f in range((n - 1) // 2):
        best, sums = blanchard(rows, f)
        outcome = AGGREGATORS["krum"](updates(rows), f=f)
        np.testing.assert_array_equal(outcome.row, rows[best[0]])
        np.testing.assert_array_equal(scores(outcome), np.arange(n) == best[0])
        np.testing.assert_allclose(krum_scores(squares(updates(rows).gram), f), sums, rtol=1e-9)
        for m in (1, 2, n - f - 2, None):
            few = n - f - 2 if m is None else min(m, n - f - 2)
            row = AGGREGATORS["multi_krum"](updates(rows), f=f, m=m and few).row
            np.testing.assert_allclose(
                row, rows[sorted(best[:few])].astype(np.float64).mean(axis=0), atol=1e-14
            )


@pytest.mark.parametrize("kind", [huge, alike])
def test_krum_chooses_no_attacker_among_a_few(kind: Callable[[int], Rows]) -> None:
    rows = kind(11)
    attackers = np.abs(rows).max(axis=1) > 30
    assert 0 < sum(attackers) <= 3
    for rule in (AGGREGATORS["krum"], AGGREGATORS["multi_krum"]):
        shares = scores(rule(updates(rows), f=3))
        assert not shares[attackers].any()
        assert shares.sum() == pytest.approx(1)


@pytest.mark.parametrize("name", ["krum", "multi_krum"])
def test_krum_is_among_the_finite_rows_where_too_few_are_finite(name: str) -> None:
    rows = normal(8)
    rows[[0, 3, 6]] = np.nan
    finite = [1, 2, 4, 5, 7]
    best, _ = blanchard(rows[finite], -1)  # sums over all others
    outcome = AGGREGATORS[name](updates(rows), f=1)
    chosen = best[: 1 if name == "krum" else 5]
    mean = rows[[finite[k] for k in chosen]].astype(np.float64).mean(axis=0)
    np.testing.assert_allclose(outcome.row, mean, atol=1e-14)
    rows[finite[1:]] = np.inf
    np.testing.assert_array_equal(AGGREGATORS[name](updates(rows), f=1).row, rows[finite[0]])


def test_krum_takes_the_lowest_id_of_equal_rows() -> None:
    outcome = AGGREGATORS["krum"](updates(np.ones((5, 3), np.float32)))
    np.testing.assert_array_equal(scores(outcome), [1, 0, 0, 0, 0])


def least_sum(rows: Rows, weights: Floats) -> Floats:
    """Return the geometric median by a general minimizer."""
    values = rows.astype(np.float64)

    def sum_of_distances(z: Floats) -> tuple[float, Floats]:
        gaps = z - values
        lengths = np.maximum(np.linalg.norm(gaps, axis=1), 1e-12)
        return float(weights @ lengths), (weights / lengths) @ gaps

    found = minimize(
        sum_of_distances, np.median(values, axis=0), jac=True, method="BFGS", options={"gtol": 1e-9}
    )
    return np.asarray(found.x)


@pytest.mark.parametrize(("n", "c"), [(3, 2), (4, 5), (7, 3), (20, 8), (20, 2), (11, 40)])
def test_geometric_median_has_the_least_sum_of_distances(n: int, c: int) -> None:
    rows = normal(n, c, seed=n + c)
    weights = np.random.default_rng(n).dirichlet(np.full(n, 5.0))
    for count in (weights, np.full(n, 1 / n)):
        outcome = AGGREGATORS["geometric_median"](updates(rows, weights=count.tolist()))
        np.testing.assert_allclose(outcome.row, least_sum(rows, count), atol=2e-5)
        assert scores(outcome).sum() == pytest.approx(1)


def test_geometric_median_of_an_equal_majority_is_its_row() -> None:
    rows = alike(11)
    np.testing.assert_allclose(
        AGGREGATORS["geometric_median"](updates(rows)).row, rows[-1], atol=1e-5
    )


def test_geometric_median_is_moved_little_by_distant_rows() -> None:
    honest = normal(8)
    near, far = (
        np.concatenate([honest, np.full((3, WIDTH), at, np.float32)]) for at in (1e3, 1e37)
    )
    rows = [AGGREGATORS["geometric_median"](updates(each)).row for each in (near, far)]
    np.testing.assert_allclose(rows[1], rows[0], atol=0.02)
    np.testing.assert_allclose(rows[1], least_sum(near, np.full(11, 1 / 11)), atol=0.02)


def test_geometric_median_of_two_rows_of_equal_weight_is_their_mean() -> None:
    rows = normal(2)
    np.testing.assert_allclose(
        AGGREGATORS["geometric_median"](updates(rows)).row, rows.mean(axis=0), atol=1e-6
    )


@pytest.mark.parametrize(("n", "attackers", "at"), [(41, 20, 1e30), (101, 50, 1e10)])
def test_geometric_median_withstands_nearly_half_of_the_rows(
    n: int, attackers: int, at: float
) -> None:
    rows = normal(n, 10)
    rows[:attackers] = at
    shares = scores(AGGREGATORS["geometric_median"](updates(rows)))
    honest = shares[attackers:] @ rows[attackers:].astype(np.float64)
    moved = shares[:attackers].sum() * at * np.sqrt(10)
    assert moved < 20
    assert np.linalg.norm(honest) < 20


def cao(rows: Rows, own: Rows) -> tuple[Floats, Floats]:
    """Return the row and the trust by Algorithm 2, sender by sender."""
    total = np.zeros(len(own))
    trust = []
    for row in rows.astype(np.float64):
        length = float(np.linalg.norm(row))
        reference = float(np.linalg.norm(own))
        trust.append(
            max(0.0, float(row @ own) / (length * reference)) if length and reference else 0.0
        )
        total += trust[-1] * reference / (length or 1) * row
    return total / (sum(trust) or 1), np.asarray(trust)


@kinds
@sizes
def test_fltrust_is_that_of_the_paper(kind: Callable[[int], Rows], n: int) -> None:
    rows = kind(n)
    own = normal(1, seed=5)[0]
    rows[-1] = 0 if n > 4 else rows[-1]
    row, trust = cao(rows, own.astype(np.float64))
    outcome = AGGREGATORS["fltrust"](updates(rows, own))
    np.testing.assert_allclose(outcome.row, row, atol=1e-6)
    np.testing.assert_allclose(scores(outcome), trust, atol=1e-7)


def test_fltrust_returns_the_trusted_row_where_one_row_has_its_direction() -> None:
    own = normal(1)[0]
    outcome = AGGREGATORS["fltrust"](updates(np.stack([-own, 3 * own, -2 * own]), own))
    np.testing.assert_allclose(outcome.row, own, rtol=1e-6)
    np.testing.assert_allclose(scores(outcome), [0, 1, 0], atol=1e-12)


def test_fltrust_returns_zeros_where_no_row_is_trusted() -> None:
    own = normal(1)[0]
    for rows, reference in ((np.stack([-own, 0 * own]), own), (own[None], 0 * own)):
        outcome = AGGREGATORS["fltrust"](updates(rows, reference))
        np.testing.assert_array_equal(outcome.row, 0)
        np.testing.assert_array_equal(scores(outcome), 0)


def clipped(rows: Rows, centre: Rows, weights: list[float], tau: float) -> Floats:
    """Return c + sum_k w_k clip(v_k - c, tau), sender by sender."""
    row = centre.astype(np.float64)
    for weight, value in zip(weights, rows.astype(np.float64), strict=True):
        gap = value - centre
        row = row + weight * gap * min(1.0, tau / max(float(np.linalg.norm(gap)), 1e-300))
    return row


@pytest.mark.parametrize("kind", [normal, tied, opposite, alike])
@pytest.mark.parametrize("n", [2, 3, 5, 20])
@pytest.mark.parametrize("with_reference", [True, False])
def test_clipping_is_that_of_the_papers(
    kind: Callable[[int], Rows], n: int, with_reference: bool
) -> None:
    rows = kind(n)
    centre = rows[1] if with_reference else np.zeros(WIDTH)
    weights = np.random.default_rng(n).dirichlet(np.ones(n)).tolist()
    messages = updates(rows, centre if with_reference else None, weights)
    for tau in (1e-3, 3.0, 8.0, 1e6):
        row = AGGREGATORS["clipping"](messages, tau=tau).row
        np.testing.assert_allclose(row, clipped(rows, centre, weights, tau), atol=1e-12)
    farthest = sorted(
        (float(np.linalg.norm(row - centre.astype(np.float64))) for row in rows), reverse=True
    )
    for f in range(n):
        row = AGGREGATORS["clipping"](messages, f=f).row
        np.testing.assert_allclose(row, clipped(rows, centre, weights, farthest[f]), atol=1e-12)


def test_the_scores_of_clipping_are_its_factors() -> None:
    rows = np.asarray([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(scores(AGGREGATORS["clipping"](updates(rows), tau=2.0)), [0.4, 1, 1])
    np.testing.assert_allclose(scores(AGGREGATORS["clipping"](updates(rows))), [0.2, 1, 1])


def test_the_trusted_row_is_the_last_of_the_inner_products() -> None:
    rows = normal(4)
    everyone = rows.astype(np.float64)
    np.testing.assert_allclose(updates(rows[:3]).gram, everyone[:3] @ everyone[:3].T, rtol=1e-12)
    np.testing.assert_allclose(updates(rows[:3], rows[3]).gram, everyone @ everyone.T, rtol=1e-12)


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("trimmed_mean", {"f": 2}, 4, "trimmed_mean: f=2 needs more than 4 messages, there are 4"),
    ("trimmed_mean", {"f": -1}, 4, "trimmed_mean: f must be "),
    ("krum", {"f": 2}, 6, "krum: f=2 needs more than 6 messages, there are 6"),
    ("krum", {}, 1, "krum: f=1 needs more than 4 messages, there is 1"),
    ("krum", {"f": -1}, 9, "krum: f must be "),
    ("multi_krum", {"f": 1}, 4, "multi_krum: f=1 needs more than 4 messages, there are 4"),
    ("multi_krum", {"f": 1, "m": 5}, 7, "multi_krum: m=5 is more than 4"),
    ("multi_krum", {"f": 1, "m": 0}, 7, "multi_krum: m must be "),
    ("clipping", {"f": 3}, 3, "clipping: f=3 needs more than 3 messages, there are 3"),
    ("clipping", {"tau": 1.0, "f": -2}, 3, "clipping: f must be "),
    ("clipping", {"tau": 0.0}, 3, "clipping: tau must be "),
    ("fltrust", {}, 3, "fltrust needs a reference row: "),
]


@pytest.mark.parametrize(("name", "options", "n", "message"), REFUSED)
def test_impossible_options_are_refused_in_one_line(
    name: str, options: dict[str, Any], n: int, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        AGGREGATORS[name](updates(np.zeros((n, 3))), **options)
    assert str(caught.value).startswith(f"--aggregator {message}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_rule_needs_a_trusted_row_exactly_where_it_states_so(name: str) -> None:
    """A rule that states `needs_reference` refuses updates without one; all others accept them."""
    if needs_reference(AGGREGATORS[name]):
        with pytest.raises(InputError, match=f"--aggregator {name}"):
            AGGREGATORS[name](updates(normal(7)))
    else:
        AGGREGATORS[name](updates(normal(7)))


@pytest.mark.parametrize("name", AGGREGATORS)
def test_weights_do_not_count_exactly_where_a_rule_states_so(name: str) -> None:
    rows, uneven = normal(7), [k / 28 for k in range(1, 8)]
    one, other = (
        AGGREGATORS[name](updates(rows, rows[0], weights)).row for weights in (None, uneven)
    )
    assert np.array_equal(one, other) == ignores_weights(AGGREGATORS[name])


def test_the_registry_holds_the_rules() -> None:
    coordinate_wise = ["mean", "median", "trimmed_mean"]
    assert sorted(AGGREGATORS) == sorted(
        [*coordinate_wise, "krum", "multi_krum", "geometric_median", "fltrust", "clipping"]
    )
    assert all(
        isinstance(AGGREGATORS[name](updates(normal(3))), Aggregate) for name in coordinate_wise
    )


def test_rules_do_not_import_torch() -> None:
    code = "import sys, dfl.robust.aggregators; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
