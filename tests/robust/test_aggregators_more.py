"""What do the rules keep to whatever is said: on any number of ranks, of nothing, of what is not
finite, of liars?
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dfl.core.layout import BLOCK, columns
from dfl.robust.aggregators import AGGREGATORS, Aggregate, Floats, Updates

Rows = NDArray[Any]
RULES: dict[str, partial[Aggregate]] = {
    "mean": partial(AGGREGATORS["mean"]),
    "median": partial(AGGREGATORS["median"]),
    "trimmed_mean": partial(AGGREGATORS["trimmed_mean"], f=2),
    "krum": partial(AGGREGATORS["krum"], f=2),
    "multi_krum": partial(AGGREGATORS["multi_krum"], f=2),
    "geometric_median": partial(AGGREGATORS["geometric_median"]),
    "fltrust": partial(AGGREGATORS["fltrust"]),
    "clipping": partial(AGGREGATORS["clipping"], f=2),
    "clipping:tau": partial(AGGREGATORS["clipping"], tau=50.0),
}
ALONE = {name: partial(AGGREGATORS[name.partition(":")[0]], **{"f": 0} if "f" in rule.keywords else rule.keywords)
         for name, rule in RULES.items() if "krum" not in name}  # fmt: skip
JUDGED = sorted({"krum", "multi_krum", "geometric_median", "fltrust", "clipping", "clipping:tau"})
LIES = (np.inf, -np.inf, np.nan)
every = pytest.mark.parametrize("name", RULES)


def words(rows: Rows, trusted: Rows | None = None) -> Updates:
    weights = np.arange(1.0, len(rows) + 1)
    return Updates(rows, weights / weights.sum(), trusted)


def normal(n: int, c: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((n, c)).astype(np.float32)


class Asked(Exception):  # noqa: N818
    """A rank waits for the sum of everybody's blocks; args[0] are its own."""


def attempt(rule: partial[Aggregate], whole: Updates, sums: list[Floats]) -> Aggregate | Floats:
    """What a rule makes of words if it is told these sums; or the blocks that it asks the next sum
    of.
    """
    known = iter(sums)

    def total(parts: Floats) -> Floats:
        for answer in known:
            return answer
        raise Asked(parts)

    try:
        return rule(Updates(whole.rows, whole.weights, whole.trusted, total))
    except Asked as question:
        return np.asarray(question.args[0])


def on_ranks(
    rule: partial[Aggregate], rows: Rows, trusted: Rows | None, ranks: int
) -> list[Aggregate]:
    """What every rank makes of its columns: all begin anew with one sum more, until none waits for
    another.
    """
    sums: list[Floats] = []
    heard = [
        words(rows[:, c].copy(), None if trusted is None else trusted[c])
        for c in columns(rows.shape[1], ranks)
    ]
    while True:
        said = [attempt(rule, whole, sums) for whole in heard]
        asked = [parts for parts in said if isinstance(parts, np.ndarray)]
        if not asked:
            return [outcome for outcome in said if isinstance(outcome, Aggregate)]
        assert len(asked) == ranks  # a sum takes them all
        sums.append(np.add.reduce(np.concatenate(asked), axis=0))


@every
@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("trusts", [True, False])
def test_bits_do_not_depend_on_the_cut(name: str, ranks: int, trusts: bool) -> None:
    if name == "fltrust" and not trusts:
        return
    rows = normal(9, 4 * BLOCK + 123)
    rows[5], rows[7, 3] = rows[2], np.inf
    trusted = normal(1, rows.shape[1], seed=1)[0] if trusts else None
    whole = RULES[name](words(rows, trusted))
    parts = on_ranks(RULES[name], rows, trusted, ranks)
    assert [len(part.row) for part in parts] == [len(c) for c in columns(rows.shape[1], ranks)]
    np.testing.assert_array_equal(np.concatenate([part.row for part in parts]), whole.row)
    for part in parts:
        np.testing.assert_array_equal(np.asarray(part.scores), np.asarray(whole.scores))


@every
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_zeros_and_no_coordinates_give_zeros(name: str, dtype: type) -> None:
    for n, rule in ((9, RULES[name]), (1, ALONE.get(name))):
        for c in (0, 1, 5):
            outcome = (
                Aggregate(np.zeros(c))
                if rule is None
                else rule(words(np.zeros((n, c), dtype), np.zeros(c, dtype)))
            )
            assert outcome.row.shape == (c,)
            assert outcome.row.dtype == np.float64
            assert not outcome.row.any()
            assert outcome.scores is None or np.isfinite(outcome.scores).all()


@pytest.mark.parametrize("name", ALONE)
def test_who_speaks_alone_is_believed(name: str) -> None:
    rows = normal(1, 6)
    np.testing.assert_allclose(ALONE[name](words(rows, rows[0])).row, rows[0], rtol=1e-12)


@every
@pytest.mark.parametrize("n", [9, 1])
@pytest.mark.parametrize("c", [1, 40])
def test_what_was_said_is_left_as_it_was(name: str, n: int, c: int) -> None:
    if (rule := RULES[name] if n == 9 else ALONE.get(name)) is None:
        return
    rows, trusted = normal(n, c), normal(1, c, seed=3)[0]
    before = rows.copy(), trusted.copy()
    rule(words(rows, trusted))
    np.testing.assert_array_equal(rows, before[0])
    np.testing.assert_array_equal(trusted, before[1])


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("lie", LIES)
def test_a_row_that_is_not_finite_is_not_believed(name: str, lie: float) -> None:
    rows, trusted = normal(9, 12), normal(1, 12, seed=1)[0]
    rows[[0, 4], [3, 11]] = lie
    outcome = RULES[name](words(rows, trusted))
    assert np.isfinite(outcome.row).all()
    assert outcome.scores is not None
    assert not outcome.scores[[0, 4]].any()
    assert outcome.scores[[1, 2, 3, 5, 6, 7, 8]].sum() > 0


@pytest.mark.parametrize("name", ["geometric_median", "fltrust"])
def test_a_row_that_is_not_finite_is_as_if_unsaid(name: str) -> None:
    rows, trusted = normal(9, 12), normal(1, 12, seed=1)[0]
    rows[[0, 1]] = np.nan
    heard, fewer = words(rows, trusted), words(rows[2:], trusted)
    weights = heard.weights[2:] / heard.weights[2:].sum()
    expected = RULES[name](Updates(fewer.rows, weights, trusted)).row
    np.testing.assert_allclose(RULES[name](heard).row, expected, rtol=1e-9, atol=1e-12)


def test_clipping_takes_the_centre_in_place_of_what_is_not_finite() -> None:
    rows = normal(4, 5).astype(np.float64)
    rows[2] = np.nan
    heard = words(rows, centre := rows[0].copy())
    expected = centre + np.where(np.isnan(rows), 0, rows - centre).T @ heard.weights
    np.testing.assert_allclose(AGGREGATORS["clipping"](heard, tau=1e9).row, expected, rtol=1e-12)


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("lie", LIES)
def test_where_nobody_is_left_the_listener_stays(name: str, lie: float) -> None:
    outcome = RULES[name](words(np.full((9, 4), lie), None if name != "fltrust" else np.ones(4)))
    np.testing.assert_array_equal(outcome.row, 0)
    np.testing.assert_array_equal(np.asarray(outcome.scores), np.zeros(9))


@pytest.mark.parametrize("name", ["fltrust", "clipping", "clipping:tau"])
@pytest.mark.parametrize("lie", LIES)
def test_what_is_trusted_and_not_finite_is_not_hidden(name: str, lie: float) -> None:
    trusted = np.full(4, lie, np.float32)
    assert not np.isfinite(RULES[name](words(normal(9, 4), trusted)).row).any()


@pytest.mark.parametrize("lie", LIES)
def test_not_finite_is_large_coordinate_by_coordinate(lie: float) -> None:
    rows = normal(9, 12)
    rows[[0, 4], 3] = lie
    large = np.where(np.isfinite(rows), rows, -1e30 if lie < 0 else 1e30).astype(np.float32)
    for name in ("median", "trimmed_mean"):
        np.testing.assert_array_equal(RULES[name](words(rows)).row, RULES[name](words(large)).row)
    rows[[0, 1, 2, 3, 4, 5], 3] = lie
    rows[[6, 7, 8], 3] = -np.inf
    assert not np.isfinite(RULES["median"](words(rows)).row[3])
    assert np.isfinite(np.delete(RULES["median"](words(rows)).row, 3)).all()


def test_beyond_what_can_be_squared_is_like_what_is_not_finite() -> None:
    rows = normal(9, 4).astype(np.float64)
    rows[1] = 1e200
    rows[2] = -1e200
    for name in JUDGED:
        outcome = RULES[name](words(rows, None if name != "fltrust" else rows[3]))
        assert np.isfinite(outcome.row).all()
        assert not np.asarray(outcome.scores)[1:3].any()


INTEGERS = arrays(np.int64, (9, 3), elements=st.integers(-5, 5))
SHIFT = arrays(np.int64, 3, elements=st.integers(-9, 9))
NUMBERS = arrays(np.float64, (7, 3), elements=st.floats(-100, 100, width=32))
ANYTHING = arrays(np.float32, (2, 3), elements=st.floats(width=32))


@settings(deadline=None, max_examples=40)
@given(rows=INTEGERS, order=st.permutations(range(9)))
def test_who_says_it_does_not_matter(rows: Rows, order: list[int]) -> None:
    trusted = np.asarray([1.0, 2.0, 3.0])
    first = words(rows.astype(np.float64), trusted)
    second = Updates(first.rows[order], first.weights[order], trusted)
    for name in set(RULES) - {"krum", "multi_krum"}:  # equal scores go to the lowest id
        one, other = RULES[name](first), RULES[name](second)
        np.testing.assert_allclose(other.row, one.row, atol=1e-7)
    for name in ("median", "trimmed_mean"):
        np.testing.assert_array_equal(RULES[name](second).row, RULES[name](first).row)


@settings(deadline=None, max_examples=40)
@given(rows=INTEGERS, shift=SHIFT)
def test_when_all_move_the_answer_moves(rows: Rows, shift: Rows) -> None:
    said, centre = rows.astype(np.float64), rows[0].astype(np.float64)
    for name in set(RULES) - {"fltrust"}:  # it looks from 0
        here, there = (
            RULES[name](words(said, centre)),
            RULES[name](words(said + shift, centre + shift)),
        )
        np.testing.assert_allclose(there.row, here.row + shift, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(row=arrays(np.float32, 3, elements=st.floats(-100, 100, width=32)), n=st.integers(7, 12))
def test_what_all_say_is_the_answer(row: Rows, n: int) -> None:
    rows = np.repeat(row[None], n, axis=0)
    for name, rule in RULES.items():
        np.testing.assert_allclose(
            rule(words(rows, row)).row, row, rtol=1e-6, atol=1e-30, err_msg=name
        )


@settings(deadline=None, max_examples=60)
@given(honest=NUMBERS, lies=ANYTHING, places=st.permutations(range(9)))
def test_few_liars_leave_the_answer_among_the_honest(
    honest: Rows, lies: Rows, places: list[int]
) -> None:
    rows = np.concatenate([honest, lies])[places]
    lowest, highest = honest.min(axis=0), honest.max(axis=0)
    for name in ("median", "trimmed_mean"):
        row = RULES[name](words(rows)).row
        assert (lowest - 1e-9 <= row).all()
        assert (row <= highest + 1e-9).all()


@settings(deadline=None, max_examples=60)
@given(honest=NUMBERS, lies=ANYTHING, places=st.permutations(range(9)))
def test_few_liars_move_the_others_no_further_than_the_honest_are_apart(
    honest: Rows, lies: Rows, places: list[int]
) -> None:
    rows = np.concatenate([honest, lies])[places]
    centre = honest.mean(axis=0)
    farthest = np.linalg.norm(honest - centre, axis=1).max()
    heard = Updates(rows, np.full(9, 1 / 9), centre)
    for name, factor in (
        ("krum", 4.0),
        ("multi_krum", 4.0),
        ("geometric_median", 4.0),
        ("clipping", 1.0),
    ):
        gap = np.linalg.norm(RULES[name](heard).row - centre)
        assert gap <= factor * farthest + 1e-3, name
