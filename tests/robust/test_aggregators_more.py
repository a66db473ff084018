"""Properties of all rules: the number of ranks, empty and non-finite messages, attackers."""

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
ALONE = {
    name: partial(rule.func, **{"f": 0} if "f" in rule.keywords else rule.keywords)
    for name, rule in RULES.items()
    if "krum" not in name
}
"""The rules that accept a single message."""
JUDGED = sorted({"krum", "multi_krum", "geometric_median", "fltrust", "clipping", "clipping:tau"})
NOT_FINITE = (np.inf, -np.inf, np.nan)
every = pytest.mark.parametrize("name", RULES)


def updates(rows: Rows, reference: Rows | None = None) -> Updates:
    weights = np.arange(1.0, len(rows) + 1)
    return Updates(rows, weights / weights.sum(), reference)


def normal(n: int, c: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).standard_normal((n, c)).astype(np.float32)


class SumNeeded(Exception):  # noqa: N818
    """A rank waits for a sum over all ranks; args[0] are its own blocks."""


def attempt(rule: partial[Aggregate], whole: Updates, sums: list[Floats]) -> Aggregate | Floats:
    """Return the result of a rule with some known sums, or the blocks of the next sum it needs."""
    known = iter(sums)

    def total(parts: Floats) -> Floats:
        for known_sum in known:
            return known_sum
        raise SumNeeded(parts)

    try:
        return rule(Updates(whole.rows, whole.weights, whole.reference, total))
    except SumNeeded as needed:
        return np.asarray(needed.args[0])


def on_ranks(
    rule: partial[Aggregate], rows: Rows, reference: Rows | None, ranks: int
) -> list[Aggregate]:
    """Return every rank's result from its columns.

    All ranks begin anew with one more sum known, until none waits for another.
    """
    sums: list[Floats] = []
    received = [
        updates(rows[:, c].copy(), None if reference is None else reference[c])
        for c in columns(rows.shape[1], ranks)
    ]
    while True:
        results = [attempt(rule, whole, sums) for whole in received]
        blocks = [parts for parts in results if isinstance(parts, np.ndarray)]
        if not blocks:
            return [outcome for outcome in results if isinstance(outcome, Aggregate)]
        assert len(blocks) == ranks  # a sum takes them all
        sums.append(np.add.reduce(np.concatenate(blocks), axis=0))


@every
@pytest.mark.parametrize("ranks", [2, 3, 7])
@pytest.mark.parametrize("with_reference", [True, False])
def test_results_are_the_same_bits_on_any_number_of_ranks(
    name: str, ranks: int, with_reference: bool
) -> None:
    if name == "fltrust" and not with_reference:
        return
    rows = normal(9, 4 * BLOCK + 123)
    rows[5] = rows[2]
    rows[7, 3] = np.inf
    reference = normal(1, rows.shape[1], seed=1)[0] if with_reference else None
    whole = RULES[name](updates(rows, reference))
    parts = on_ranks(RULES[name], rows, reference, ranks)
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
                else rule(updates(np.zeros((n, c), dtype), np.zeros(c, dtype)))
            )
            assert outcome.row.shape == (c,)
            assert outcome.row.dtype == np.float64
            assert not outcome.row.any()
            assert outcome.scores is None or np.isfinite(outcome.scores).all()


@pytest.mark.parametrize("name", ALONE)
def test_a_lone_sender_is_the_result(name: str) -> None:
    rows = normal(1, 6)
    np.testing.assert_allclose(ALONE[name](updates(rows, rows[0])).row, rows[0], rtol=1e-12)


@every
@pytest.mark.parametrize("n", [9, 1])
@pytest.mark.parametrize("c", [1, 40])
def test_messages_are_not_changed(name: str, n: int, c: int) -> None:
    rule = RULES[name] if n == 9 else ALONE.get(name)
    if rule is None:
        return
    rows = normal(n, c)
    reference = normal(1, c, seed=3)[0]
    rows_before = rows.copy()
    reference_before = reference.copy()
    rule(updates(rows, reference))
    np.testing.assert_array_equal(rows, rows_before)
    np.testing.assert_array_equal(reference, reference_before)


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_row_that_is_not_finite_gets_score_0(name: str, value: float) -> None:
    rows = normal(9, 12)
    reference = normal(1, 12, seed=1)[0]
    rows[[0, 4], [3, 11]] = value
    outcome = RULES[name](updates(rows, reference))
    assert np.isfinite(outcome.row).all()
    assert outcome.scores is not None
    assert not outcome.scores[[0, 4]].any()
    assert outcome.scores[[1, 2, 3, 5, 6, 7, 8]].sum() > 0


@pytest.mark.parametrize("name", ["geometric_median", "fltrust"])
def test_a_row_that_is_not_finite_is_as_if_not_sent(name: str) -> None:
    rows = normal(9, 12)
    reference = normal(1, 12, seed=1)[0]
    rows[[0, 1]] = np.nan
    received = updates(rows, reference)
    fewer = updates(rows[2:], reference)
    weights = received.weights[2:] / received.weights[2:].sum()
    expected = RULES[name](Updates(fewer.rows, weights, reference)).row
    np.testing.assert_allclose(RULES[name](received).row, expected, rtol=1e-9, atol=1e-12)


def test_clipping_takes_the_centre_in_place_of_rows_that_are_not_finite() -> None:
    rows = normal(4, 5).astype(np.float64)
    rows[2] = np.nan
    centre = rows[0].copy()
    received = updates(rows, centre)
    expected = centre + np.where(np.isnan(rows), 0, rows - centre).T @ received.weights
    np.testing.assert_allclose(AGGREGATORS["clipping"](received, tau=1e9).row, expected, rtol=1e-12)


@pytest.mark.parametrize("name", JUDGED)
@pytest.mark.parametrize("value", NOT_FINITE)
def test_where_no_row_is_finite_the_result_is_zeros(name: str, value: float) -> None:
    outcome = RULES[name](
        updates(np.full((9, 4), value), None if name != "fltrust" else np.ones(4))
    )
    np.testing.assert_array_equal(outcome.row, 0)
    np.testing.assert_array_equal(np.asarray(outcome.scores), np.zeros(9))


@pytest.mark.parametrize("name", ["fltrust", "clipping", "clipping:tau"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_a_trusted_row_that_is_not_finite_gives_no_finite_result(name: str, value: float) -> None:
    reference = np.full(4, value, np.float32)
    assert not np.isfinite(RULES[name](updates(normal(9, 4), reference)).row).any()


@pytest.mark.parametrize("value", NOT_FINITE)
def test_coordinate_wise_rules_take_values_that_are_not_finite_for_large(value: float) -> None:
    rows = normal(9, 12)
    rows[[0, 4], 3] = value
    large = np.where(np.isfinite(rows), rows, -1e30 if value < 0 else 1e30).astype(np.float32)
    for name in ("median", "trimmed_mean"):
        np.testing.assert_array_equal(
            RULES[name](updates(rows)).row, RULES[name](updates(large)).row
        )
    rows[[0, 1, 2, 3, 4, 5], 3] = value
    rows[[6, 7, 8], 3] = -np.inf
    assert not np.isfinite(RULES["median"](updates(rows)).row[3])
    assert np.isfinite(np.delete(RULES["median"](updates(rows)).row, 3)).all()


def test_rows_whose_squares_overflow_are_like_rows_that_are_not_finite() -> None:
    rows = normal(9, 4).astype(np.float64)
    rows[1] = 1e200
    rows[2] = -1e200
    for name in JUDGED:
        outcome = RULES[name](updates(rows, None if name != "fltrust" else rows[3]))
        assert np.isfinite(outcome.row).all()
        assert not np.asarray(outcome.scores)[1:3].any()


INTEGERS = arrays(np.int64, (9, 3), elements=st.integers(-5, 5))
SHIFT = arrays(np.int64, 3, elements=st.integers(-9, 9))
NUMBERS = arrays(np.float64, (7, 3), elements=st.floats(-100, 100, width=32))
ANYTHING = arrays(np.float32, (2, 3), elements=st.floats(width=32))


@settings(deadline=None, max_examples=40)
@given(rows=INTEGERS, order=st.permutations(range(9)))
def test_the_order_of_senders_does_not_matter(rows: Rows, order: list[int]) -> None:
    reference = np.asarray([1.0, 2.0, 3.0])
    first = updates(rows.astype(np.float64), reference)
    second = Updates(first.rows[order], first.weights[order], reference)
    for name in set(RULES) - {"krum", "multi_krum"}:  # equal scores go to the lowest id
        one, other = RULES[name](first), RULES[name](second)
        np.testing.assert_allclose(other.row, one.row, atol=1e-7)
    for name in ("median", "trimmed_mean"):
        np.testing.assert_array_equal(RULES[name](second).row, RULES[name](first).row)


@settings(deadline=None, max_examples=40)
@given(rows=INTEGERS, shift=SHIFT)
def test_the_result_moves_with_all_messages(rows: Rows, shift: Rows) -> None:
    messages = rows.astype(np.float64)
    centre = rows[0].astype(np.float64)
    for name in set(RULES) - {"fltrust"}:  # its angles are at 0
        here = RULES[name](updates(messages, centre))
        there = RULES[name](updates(messages + shift, centre + shift))
        np.testing.assert_allclose(there.row, here.row + shift, atol=1e-6)


@settings(deadline=None, max_examples=40)
@given(row=arrays(np.float32, 3, elements=st.floats(-100, 100, width=32)), n=st.integers(7, 12))
def test_the_result_of_equal_messages_is_that_message(row: Rows, n: int) -> None:
    rows = np.repeat(row[None], n, axis=0)
    for name, rule in RULES.items():
        np.testing.assert_allclose(
            rule(updates(rows, row)).row, row, rtol=1e-6, atol=1e-30, err_msg=name
        )


@settings(deadline=None, max_examples=60)
@given(honest=NUMBERS, falsified=ANYTHING, places=st.permutations(range(9)))
def test_a_few_attackers_leave_the_result_between_honest_values(
    honest: Rows, falsified: Rows, places: list[int]
) -> None:
    rows = np.concatenate([honest, falsified])[places]
    lowest, highest = honest.min(axis=0), honest.max(axis=0)
    for name in ("median", "trimmed_mean"):
        row = RULES[name](updates(rows)).row
        assert (lowest - 1e-9 <= row).all()
        assert (row <= highest + 1e-9).all()


@settings(deadline=None, max_examples=60)
@given(honest=NUMBERS, falsified=ANYTHING, places=st.permutations(range(9)))
def test_a_few_attackers_move_the_result_by_a_multiple_of_the_honest_distance(
    honest: Rows, falsified: Rows, places: list[int]
) -> None:
    rows = np.concatenate([honest, falsified])[places]
    centre = honest.mean(axis=0)
    farthest = np.linalg.norm(honest - centre, axis=1).max()
    received = Updates(rows, np.full(9, 1 / 9), centre)
    for name, factor in (
        ("krum", 4.0),
        ("multi_krum", 4.0),
        ("geometric_median", 4.0),
        ("clipping", 1.0),
    ):
        gap = np.linalg.norm(RULES[name](received).row - centre)
        assert gap <= factor * farthest + 1e-3, name
