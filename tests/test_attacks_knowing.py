"""Do attacks that know what the honest say follow their formulas, and do the harm that they are known for?"""

from __future__ import annotations

from statistics import NormalDist, mean, median, pstdev

import numpy as np
import pytest

from dfl.attacks import ATTACKS
from tests.liars import rows_of, seen

# --- ipm, alie --------------------------------------------------------------------------------------------------------


def test_ipm_is_a_short_step_back() -> None:
    rows = rows_of(7, 50, dtype=np.float64)
    said = ATTACKS["ipm"](eps=0.25).say(seen(rows, [0, 6]))
    for k in range(50):
        assert said[:, k] == pytest.approx([-0.25 * mean(rows[1:6, k])] * 2, rel=1e-12)
    assert np.array_equal(ATTACKS["ipm"](eps=0.1).say(seen(rows, [2])), ATTACKS["ipm"]().say(seen(rows, [2])))


@pytest.mark.parametrize(("n", "bad", "share"), [(10, [0, 5], 0.5), (21, [3], 0.5), (25, [0, 1, 2, 3, 4], 0.6)])
def test_alie_stands_as_many_deviations_off_as_supporters_allow(n: int, bad: list[int], share: float) -> None:
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


@pytest.mark.parametrize(("n", "m", "share"), [(3, 2, 1 / 2), (10, 8, 2 / 3), (4, 4, 4 / 5), (2, 1, 1 / 2)])
def test_alie_where_no_supporter_is_needed_or_none_is_left(n: int, m: int, share: float) -> None:
    rows = rows_of(n, 20, dtype=np.float64)
    models = rows[m:] if m < n else rows
    wanted = models.mean(0) - NormalDist().inv_cdf(share) * models.std(0)
    assert ATTACKS["alie"]().say(seen(rows, list(range(m))))[0] == pytest.approx(wanted, rel=1e-9, abs=1e-12)


# --- trim -------------------------------------------------------------------------------------------------------------


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
