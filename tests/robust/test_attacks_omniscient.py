"""Do attacks that know what the honest say follow their formulas, and do the harm that they are
known for?
"""

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
from tests.support.attackers import Floats, rows_of, seen

# --- ipm, alie ------------------------------------------------------------------------------------
# --------------------


def test_ipm_is_a_short_step_back() -> None:
    rows = rows_of(7, 50, dtype=np.float64)
    said = ATTACKS["ipm"](eps=0.25).say(seen(rows, [0, 6]))
    for k in range(50):
        assert said[:, k] == pytest.approx([-0.25 * mean(rows[1:6, k])] * 2, rel=1e-12)
    assert np.array_equal(
        ATTACKS["ipm"](eps=0.1).say(seen(rows, [2])), ATTACKS["ipm"]().say(seen(rows, [2]))
    )


@pytest.mark.parametrize(
    ("n", "bad", "share"), [(10, [0, 5], 0.5), (21, [3], 0.5), (25, [0, 1, 2, 3, 4], 0.6)]
)
def test_alie_stands_as_many_deviations_off_as_supporters_allow(
    n: int, bad: list[int], share: float
) -> None:
    rows = rows_of(n, 40, dtype=np.float64)
    said = ATTACKS["alie"]().say(seen(rows, bad))
    honest = np.delete(rows, bad, axis=0)
    supporters = int(n / 2 + 1) - len(bad)
    assert (len(honest) - supporters) / len(honest) == share
    for k in range(40):
        wanted = mean(honest[:, k]) - NormalDist().inv_cdf(share) * pstdev(honest[:, k])
        assert said[:, k] == pytest.approx([wanted] * len(bad), rel=1e-9, abs=1e-12)


def test_alie_hides_among_the_honest() -> None:
    rows = rows_of(100, 400)
    said = ATTACKS["alie"]().say(seen(rows, list(range(20))))
    assert np.all(rows[20:].min(0) < said)
    assert np.all(said < rows[20:].mean(0))


def test_alie_with_a_z_of_ones_own() -> None:
    rows = rows_of(6, 30, dtype=np.float64)
    said = ATTACKS["alie"](z=1.5).say(seen(rows, [2]))
    honest = np.delete(rows, 2, axis=0)
    assert said[0] == pytest.approx([mean(column) - 1.5 * pstdev(column) for column in honest.T])


@pytest.mark.parametrize(
    ("n", "m", "share"), [(3, 2, 1 / 2), (10, 8, 2 / 3), (4, 4, 4 / 5), (2, 1, 1 / 2)]
)
def test_alie_where_no_supporter_is_needed_or_none_is_left(n: int, m: int, share: float) -> None:
    rows = rows_of(n, 20, dtype=np.float64)
    models = rows[m:] if m < n else rows
    wanted = models.mean(0) - NormalDist().inv_cdf(share) * models.std(0)
    assert ATTACKS["alie"]().say(seen(rows, list(range(m))))[0] == pytest.approx(
        wanted, rel=1e-9, abs=1e-12
    )


# --- trim -----------------------------------------------------------------------------------------
# --------------------


def test_trim_follows_its_formula() -> None:
    rows = rows_of(9, 200, dtype=np.float64)
    rows[:, 7], rows[:, 8], rows[:, 9] = 0.0, np.arange(-4, 5), np.arange(1, 10)
    view = seen(rows, [1, 5, 6])
    said, drawn = ATTACKS["trim"]().say(view), view.uniform("trim")
    for k in range(200):
        column = [float(value) for value in rows[:, k]]
        up = sum(column) > 0
        far = min(column) if up else max(column)
        for i in range(3):
            r = 1 + float(drawn[i, k])
            wanted = far / r if (far > 0) == up else far * r
            assert said[i, k] == pytest.approx(0.0 if sum(column) == 0 else wanted, rel=1e-12)
    assert not np.any(said[0, 10:] == said[1, 10:])


def test_trim_moves_the_mean_and_the_median_against_all() -> None:
    rows = rows_of(50, 300, dtype=np.float64)
    bad = list(range(10))
    lied = rows.copy()
    lied[bad] = ATTACKS["trim"]().say(seen(rows, bad))
    for k in range(300):
        s = np.sign(sum(rows[:, k]))
        assert s * mean(lied[:, k]) < s * mean(rows[:, k])
        assert s * median(lied[:, k]) <= s * median(rows[:, k])
        trimmed, honest = (mean(sorted(column[:, k])[10:-10]) for column in (lied, rows))
        assert s * trimmed < s * honest


def test_trim_draws_by_address() -> None:
    rows = rows_of(9, 50)
    said = [ATTACKS["trim"]().say(seen(rows, [1, 2], t=t)) for t in (3, 3, 4)]
    assert np.array_equal(said[0], said[1])
    assert not np.any(said[0] == said[2])


# --- dissensus ------------------------------------------------------------------------------------
# --------------------


def ring(n: int) -> Floats:
    """Every neighbour and oneself a third."""
    return sum((np.roll(np.eye(n), k, axis=0) for k in (-1, 0, 1)), np.zeros((n, n))) / 3


def neighbours(rows: NDArray[Any], bad: list[int]) -> AttackView:
    """What attackers see where all peers speak."""
    view = seen(rows, bad)
    return replace(view, ids=view.bad)


def edges(weights: Floats, bad: list[int]) -> NDArray[np.int64]:
    return np.array(
        [(b, v) for b in bad for v in range(len(weights)) if v != b and weights[v, b]]
    ).reshape(-1, 2)


def test_dissensus_follows_its_formula() -> None:
    rng = np.random.default_rng(1)
    weights = rng.random((8, 8)) * (rng.random((8, 8)) < 0.7)
    rows, bad = rows_of(8, 20, dtype=np.float64), [1, 4, 5]
    pairs = edges(weights, bad)[::-1]
    told = ATTACKS["dissensus"](eps=0.7).tell(neighbours(rows, bad), csr_array(weights), pairs)
    assert len(told) == len(pairs) > 10
    for (_, v), said in zip(pairs.tolist(), told, strict=True):
        others = [j for j in range(8) if j != v]
        away = sum(weights[v, j] * (rows[j] - rows[v]) for j in others if j not in bad)
        attackers = sum(weights[v, j] for j in others if j in bad)
        assert said == pytest.approx(rows[v] - 0.7 * away / attackers, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("eps", [1.0, 1.5])
def test_dissensus_moves_neighbours_away_from_consensus(eps: float) -> None:
    """With eps = 1 a victim stays where it is; with more its distance to its honest neighbours
    grows.
    """
    rows, weights, bad = rows_of(6, 30, dtype=np.float64), ring(6), [0, 3]
    pairs = edges(weights, bad)
    assert sorted(pairs[:, 1].tolist()) == [1, 2, 4, 5]
    told = ATTACKS["dissensus"](eps=eps).tell(neighbours(rows, bad), csr_array(weights), pairs)
    for (b, v), said in zip(pairs.tolist(), told, strict=True):
        mixed = weights[v] @ np.where(np.arange(6)[:, None] == b, said, rows)
        friend = rows[3 - v if v < 3 else 9 - v]
        assert mixed - rows[v] == pytest.approx((1 - eps) * (friend - rows[v]) / 3, abs=1e-12)
        honest = np.linalg.norm(weights[v] @ rows - friend)
        assert np.linalg.norm(mixed - friend) >= max(
            np.linalg.norm(rows[v] - friend) - 1e-12, honest
        )


def test_dissensus_does_not_depend_on_the_cut() -> None:
    rows, weights, bad = rows_of(9, 4096 + 5), ring(9), [2, 7]
    before = rows.copy()
    view, pairs = neighbours(rows, bad), edges(weights, bad)
    told = ATTACKS["dissensus"]().tell(view, csr_array(weights), pairs)
    assert told.dtype == np.float32
    for here in (slice(0, 4096), slice(4096, 4101), slice(4096, 4096)):
        part = replace(view, words=replace(view.words, rows=rows[:, here]), places=here)
        assert (
            ATTACKS["dissensus"]().tell(part, csr_array(weights), pairs).tobytes()
            == told[:, here].tobytes()
        )
    assert rows.tobytes() == before.tobytes()


def test_dissensus_at_the_ends() -> None:
    rows, weights = rows_of(4, 10), csr_array(ring(4))
    none = ATTACKS["dissensus"]().tell(neighbours(rows, []), weights, np.zeros((0, 2), np.int64))
    assert none.shape == (0, 10)
    alone = ATTACKS["dissensus"]().tell(
        neighbours(rows, [1, 3]), weights, np.array([[1, 2], [3, 2]])
    )
    assert np.array_equal(
        alone, rows[[2, 2]]
    )  # between two attackers there is nobody to be kept from
    unheard = ATTACKS["dissensus"]().tell(
        neighbours(rows, [1]), csr_array((4, 4)), np.array([[1, 2]])
    )
    assert np.array_equal(unheard, rows[[2]])


def test_dissensus_has_no_word_for_a_server() -> None:
    assert ATTACKS["dissensus"]().per_edge
    with pytest.raises(InputError, match="a server has none, choose another"):
        ATTACKS["dissensus"]().say(seen(rows_of(4, 10), [1]))
