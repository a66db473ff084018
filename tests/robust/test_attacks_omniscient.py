"""Attacks that know the honest messages: their formulas, and the harm that they do."""

from __future__ import annotations

from dataclasses import replace
from statistics import NormalDist, mean, median, pstdev
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.core.errors import InputError
from dfl.robust.attacks import ATTACKS, AttackView
from tests.support.attackers import Floats, rows_of, view_of

# --- ipm, alie -----------------------------------------------------------------------------------


def test_ipm_sends_minus_eps_times_the_honest_mean() -> None:
    rows = rows_of(7, 50, dtype=np.float64)
    sent = ATTACKS["ipm"](eps=0.25).falsify(view_of(rows, [0, 6]))
    for k in range(50):
        assert sent[:, k] == pytest.approx([-0.25 * mean(rows[1:6, k])] * 2, rel=1e-12)
    assert np.array_equal(
        ATTACKS["ipm"](eps=0.1).falsify(view_of(rows, [2])),
        ATTACKS["ipm"]().falsify(view_of(rows, [2])),
    )


@pytest.mark.parametrize(
    ("n", "attackers", "share"), [(10, [0, 5], 0.5), (21, [3], 0.5), (25, [0, 1, 2, 3, 4], 0.6)]
)
def test_alie_deviates_from_the_mean_by_the_quantile_of_its_supporters(
    n: int, attackers: list[int], share: float
) -> None:
    rows = rows_of(n, 40, dtype=np.float64)
    sent = ATTACKS["alie"]().falsify(view_of(rows, attackers))
    honest = np.delete(rows, attackers, axis=0)
    supporters = int(n / 2 + 1) - len(attackers)
    assert (len(honest) - supporters) / len(honest) == share
    for k in range(40):
        expected = mean(honest[:, k]) - NormalDist().inv_cdf(share) * pstdev(honest[:, k])
        assert sent[:, k] == pytest.approx([expected] * len(attackers), rel=1e-9, abs=1e-12)


def test_alie_stays_between_the_honest_minimum_and_mean() -> None:
    rows = rows_of(100, 400)
    sent = ATTACKS["alie"]().falsify(view_of(rows, list(range(20))))
    assert np.all(rows[20:].min(0) < sent)
    assert np.all(sent < rows[20:].mean(0))


def test_alie_takes_a_given_z() -> None:
    rows = rows_of(6, 30, dtype=np.float64)
    sent = ATTACKS["alie"](z=1.5).falsify(view_of(rows, [2]))
    honest = np.delete(rows, 2, axis=0)
    assert sent[0] == pytest.approx([mean(column) - 1.5 * pstdev(column) for column in honest.T])


@pytest.mark.parametrize(
    ("n", "m", "share"), [(3, 2, 1 / 2), (10, 8, 2 / 3), (4, 4, 4 / 5), (2, 1, 1 / 2)]
)
def test_alie_without_supporters_has_a_finite_z(n: int, m: int, share: float) -> None:
    rows = rows_of(n, 20, dtype=np.float64)
    imitated = rows[m:] if m < n else rows
    expected = imitated.mean(0) - NormalDist().inv_cdf(share) * imitated.std(0)
    assert ATTACKS["alie"]().falsify(view_of(rows, list(range(m))))[0] == pytest.approx(
        expected, rel=1e-9, abs=1e-12
    )


# --- trim ----------------------------------------------------------------------------------------


def test_trim_follows_its_formula() -> None:
    rows = rows_of(9, 200, dtype=np.float64)
    rows[:, 7] = 0.0
    rows[:, 8] = np.arange(-4, 5)
    rows[:, 9] = np.arange(1, 10)
    view = view_of(rows, [1, 5, 6])
    sent = ATTACKS["trim"]().falsify(view)
    drawn = view.uniform("trim")
    for k in range(200):
        column = [float(value) for value in rows[:, k]]
        up = sum(column) > 0
        extreme = min(column) if up else max(column)
        for i in range(3):
            r = 1 + float(drawn[i, k])
            expected = extreme / r if (extreme > 0) == up else extreme * r
            assert sent[i, k] == pytest.approx(0.0 if sum(column) == 0 else expected, rel=1e-12)
    assert not np.any(sent[0, 10:] == sent[1, 10:])


def test_trim_moves_mean_median_and_trimmed_mean_against_the_honest_direction() -> None:
    rows = rows_of(50, 300, dtype=np.float64)
    attackers = list(range(10))
    falsified = rows.copy()
    falsified[attackers] = ATTACKS["trim"]().falsify(view_of(rows, attackers))
    for k in range(300):
        s = np.sign(sum(rows[:, k]))
        assert s * mean(falsified[:, k]) < s * mean(rows[:, k])
        assert s * median(falsified[:, k]) <= s * median(rows[:, k])
        trimmed, honest = (mean(sorted(column[:, k])[10:-10]) for column in (falsified, rows))
        assert s * trimmed < s * honest


def test_trim_draws_by_address() -> None:
    rows = rows_of(9, 50)
    sent = [ATTACKS["trim"]().falsify(view_of(rows, [1, 2], t=t)) for t in (3, 3, 4)]
    assert np.array_equal(sent[0], sent[1])
    assert not np.any(sent[0] == sent[2])


# --- dissensus -----------------------------------------------------------------------------------


def ring(n: int) -> Floats:
    """Return the mixing matrix of a ring: a third for either neighbour and for the peer itself."""
    return sum((np.roll(np.eye(n), k, axis=0) for k in (-1, 0, 1)), np.zeros((n, n))) / 3


def neighbours(rows: NDArray[Any], attackers: list[int]) -> AttackView:
    """Return the view of attackers where all peers send and ids are peers' numbers."""
    view = view_of(rows, attackers)
    return replace(view, owners=np.arange(len(rows)))


def edges(weights: Floats, attackers: list[int]) -> NDArray[np.int64]:
    return np.array(
        [(b, v) for b in attackers for v in range(len(weights)) if v != b and weights[v, b]]
    ).reshape(-1, 2)


def test_dissensus_follows_its_formula() -> None:
    rng = np.random.default_rng(1)
    weights = rng.random((8, 8)) * (rng.random((8, 8)) < 0.7)
    rows = rows_of(8, 20, dtype=np.float64)
    attackers = [1, 4, 5]
    pairs = edges(weights, attackers)[::-1]
    sent = ATTACKS["dissensus"](eps=0.7).falsify_edges(
        neighbours(rows, attackers), csr_array(weights), pairs
    )
    assert len(sent) == len(pairs) > 10
    for (_, v), message in zip(pairs.tolist(), sent, strict=True):
        others = [j for j in range(8) if j != v]
        away = sum(weights[v, j] * (rows[j] - rows[v]) for j in others if j not in attackers)
        attacking = sum(weights[v, j] for j in others if j in attackers)
        assert message == pytest.approx(rows[v] - 0.7 * away / attacking, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("eps", [1.0, 1.5])
def test_dissensus_moves_neighbours_away_from_consensus(eps: float) -> None:
    """With eps = 1 a victim stays; with more its distance to its honest neighbours grows."""
    rows = rows_of(6, 30, dtype=np.float64)
    weights = ring(6)
    attackers = [0, 3]
    pairs = edges(weights, attackers)
    assert sorted(pairs[:, 1].tolist()) == [1, 2, 4, 5]
    sent = ATTACKS["dissensus"](eps=eps).falsify_edges(
        neighbours(rows, attackers), csr_array(weights), pairs
    )
    for (b, v), message in zip(pairs.tolist(), sent, strict=True):
        mixed = weights[v] @ np.where(np.arange(6)[:, None] == b, message, rows)
        neighbour = rows[3 - v if v < 3 else 9 - v]
        assert mixed - rows[v] == pytest.approx((1 - eps) * (neighbour - rows[v]) / 3, abs=1e-12)
        honest = np.linalg.norm(weights[v] @ rows - neighbour)
        assert np.linalg.norm(mixed - neighbour) >= max(
            np.linalg.norm(rows[v] - neighbour) - 1e-12, honest
        )


def test_dissensus_is_the_same_for_any_cut_into_coordinates() -> None:
    rows = rows_of(9, 4096 + 5)
    weights = ring(9)
    attackers = [2, 7]
    before = rows.copy()
    view = neighbours(rows, attackers)
    pairs = edges(weights, attackers)
    sent = ATTACKS["dissensus"]().falsify_edges(view, csr_array(weights), pairs)
    assert sent.dtype == np.float32
    for here in (slice(0, 4096), slice(4096, 4101), slice(4096, 4096)):
        part = replace(view, updates=replace(view.updates, rows=rows[:, here]), coordinates=here)
        assert (
            ATTACKS["dissensus"]().falsify_edges(part, csr_array(weights), pairs).tobytes()
            == sent[:, here].tobytes()
        )
    assert rows.tobytes() == before.tobytes()


def test_dissensus_without_edges_honest_neighbours_or_weights() -> None:
    rows = rows_of(4, 10)
    weights = csr_array(ring(4))
    none = ATTACKS["dissensus"]().falsify_edges(
        neighbours(rows, []), weights, np.zeros((0, 2), np.int64)
    )
    assert none.shape == (0, 10)
    alone = ATTACKS["dissensus"]().falsify_edges(
        neighbours(rows, [1, 3]), weights, np.array([[1, 2], [3, 2]])
    )
    assert np.array_equal(alone, rows[[2, 2]])  # without honest neighbours v receives its own
    unweighted = ATTACKS["dissensus"]().falsify_edges(
        neighbours(rows, [1]), csr_array((4, 4)), np.array([[1, 2]])
    )
    assert np.array_equal(unweighted, rows[[2]])


def test_dissensus_refuses_to_send_to_a_server() -> None:
    assert ATTACKS["dissensus"]().per_edge
    with pytest.raises(InputError, match="--attack dissensus "):
        ATTACKS["dissensus"]().falsify(view_of(rows_of(4, 10), [1]))
