"""Are the figures of fairness what their definitions say, and does a probe find what is there and nothing else?"""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dfl.evaluation.fairness import auc, demographic_parity_gap, equalised_odds_gap, probe_auc

Ints = NDArray[np.int64]
BIT = st.integers(0, 1)


def bits(text: str) -> Ints:
    return np.array([int(c) for c in text.replace(" ", "")])


def share(d: Ints, *conditions: Any) -> float | None:
    """P(d = 1 | conditions), counted one by one; None where nobody fulfils them."""
    among = [one for one, *fulfilled in zip(d, *conditions, strict=True) if all(fulfilled)]
    return sum(among) / len(among) if among else None


# --- area under the curve ---------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(-3, 3), BIT), min_size=2, max_size=30))
def test_auc_is_the_share_of_pairs_in_order(pairs: list[tuple[int, int]]) -> None:
    scores, truth = np.array(pairs).T
    ones, zeros = scores[truth == 1], scores[truth == 0]
    assume(len(ones) and len(zeros))
    won = [1.0 if a > b else 0.5 if a == b else 0.0 for a, b in product(ones, zeros)]
    assert auc(scores / 3, truth) == pytest.approx(sum(won) / len(won))


def test_auc_of_one_class_or_of_nobody_is_not_defined() -> None:
    assert np.isnan(auc(np.arange(3.0), np.ones(3, np.int64)))
    assert np.isnan(auc(np.arange(3.0), np.zeros(3, np.int64)))
    assert np.isnan(auc(np.zeros(0), np.zeros(0, np.int64)))


# --- gaps between two groups ------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(BIT, BIT, BIT), min_size=1, max_size=30))
def test_gaps_are_differences_of_shares(people: list[tuple[int, int, int]]) -> None:
    d, y, z = np.array(people).T
    rates = [share(d, z == g) for g in (0, 1)]
    gap = demographic_parity_gap(d, z)
    assert np.isnan(gap) if None in rates else gap == pytest.approx(abs(rates[1] - rates[0]))  # type: ignore[operator]
    cells = [share(d, y == label, z == g) for label in (0, 1) for g in (0, 1)]
    odds = equalised_odds_gap(d, y, z)
    if None in cells:
        assert np.isnan(odds)
    else:
        false, true = (abs(cells[k] - cells[k + 1]) for k in (0, 2))  # type: ignore[operator]
        assert odds == pytest.approx(max(false, true))


def test_gaps_by_hand() -> None:
    z = bits("1111 0000")
    y = bits("1100 1100")
    assert demographic_parity_gap(bits("1110 1000"), z) == 0.5
    assert (
        equalised_odds_gap(bits("1110 1000"), y, z) == 0.5
    )  # true positives 1 and 1/2, false 1/2 and 0
    assert equalised_odds_gap(bits("1100 1111"), y, z) == 1.0  # only the false positives differ
    assert equalised_odds_gap(bits("1100 0000"), y, z) == 1.0  # only the true ones


def test_a_perfect_decision_has_equal_odds_whatever_the_parity() -> None:
    z, y = bits("1111 0000"), bits("1110 1000")
    assert equalised_odds_gap(y, y, z) == 0.0
    assert demographic_parity_gap(y, z) == 0.5


@given(st.lists(st.tuples(BIT, BIT, BIT), min_size=1, max_size=30))
def test_gaps_do_not_care_which_group_is_called_one(people: list[tuple[int, int, int]]) -> None:
    d, y, z = np.array(people).T
    for truth_value in (d, d.astype(bool), 1 - d):
        a, b = demographic_parity_gap(truth_value, z), demographic_parity_gap(d, 1 - z)
        assert a == pytest.approx(b, nan_ok=True)
    assert equalised_odds_gap(d, y, z) == pytest.approx(
        equalised_odds_gap(d.astype(bool), y, 1 - z), nan_ok=True
    )


# --- the probe --------------------------------------------------------------------------------------------------------

N, WIDE = 1500, 8
H = np.random.default_rng(0).standard_normal((2 * N, WIDE)).astype(np.float32)


def probed(z: Ints, h: NDArray[Any] = H, seed: int = 0) -> NDArray[np.float64]:
    """The probe's AUC for the columns of z, fitted on the first half of the rows."""
    return probe_auc(h[:N], z[:N], h[N:], z[N:], seed)


@pytest.fixture(scope="module")
def attributes() -> Ints:
    """A direction with noise, a product of two coordinates, a rare direction, and nothing."""
    rng = np.random.default_rng(1)
    line = H @ rng.standard_normal(WIDE)
    noisy = line + 2 * rng.standard_normal(2 * N) > 0
    return np.stack(
        [noisy, H[:, 0] * H[:, 1] > 0, line > 2 * line.std(), rng.random(2 * N) < 0.5], axis=1
    ).astype(int)


def test_a_probe_finds_what_is_planted_and_nothing_in_noise(attributes: Ints) -> None:
    line, product_of_two, rare, noise = probed(attributes)
    best = auc((H @ np.random.default_rng(1).standard_normal(WIDE))[N:], attributes[N:, 0])
    assert best - 0.02 < line < best + 0.02  # as good as who knows the direction
    assert product_of_two > 0.9  # where a line finds nothing
    assert rare > 0.98
    assert (
        abs(noise - 0.5) < 0.05
    )  # 3.3 standard deviations, sqrt(1501 / (12 * 750^2)), of random scores


def test_a_line_alone_would_not_find_a_product(attributes: Ints) -> None:
    from sklearn.linear_model import LogisticRegression

    line = LogisticRegression().fit(H[:N], attributes[:N, 1])
    assert abs(auc(line.decision_function(H[N:]), attributes[N:, 1]) - 0.5) < 0.05


def test_test_rows_decide_nothing(attributes: Ints) -> None:
    """The scores of half of the test rows do not depend on the labels, or on the presence, of the others."""
    z = attributes[:, :1]
    half = N + N // 2
    apart = [probe_auc(H[:N], z[:N], H[a:b], z[a:b], 0) for a, b in ((N, half), (half, 2 * N))]
    turned = np.concatenate([z[:half], 1 - z[half:]])
    assert probe_auc(H[:N], z[:N], H[half:], 1 - z[half:], 0) == pytest.approx(1 - apart[1])
    assert probed(turned) != pytest.approx(probed(z))
    again = probe_auc(H[:N], turned[:N], H[N:half], turned[N:half], 0)
    assert again.tolist() == apart[0].tolist()


def test_a_probe_is_the_same_for_the_same_seed_and_each_attribute_has_its_own(
    attributes: Ints,
) -> None:
    z = attributes[:, [1, 3]]
    first = probed(z)
    assert probed(z).tolist() == first.tolist()
    assert probed(z, seed=1).tolist() != first.tolist()
    assert probed(z[:, :1]).tolist() == first[:1].tolist()
    assert probed(z.astype(bool)).tolist() == first.tolist()


def test_scale_and_dead_units_do_not_matter(attributes: Ints) -> None:
    z, odd = attributes[:, :1], H.astype(np.float64) * 10.0 ** np.arange(-4, WIDE - 4) + 3
    with_dead = np.concatenate([odd, np.full((2 * N, 1), 7.0)], axis=1)
    assert abs(probed(z, with_dead) - probed(z)) < 0.02


@pytest.mark.parametrize(
    ("ones", "defined"), [(0, False), (9, False), (10, True), (N - 10, True), (N - 9, False)]
)
def test_too_few_of_a_kind_to_learn_from(ones: int, defined: bool) -> None:
    z = np.zeros((2 * N, 1), np.int64)
    z[:ones] = 1
    z[N : N + 100] = 1
    assert np.isfinite(probed(z)).tolist() == [defined]


def test_few_rows_and_a_test_of_one_kind(attributes: Ints) -> None:
    z = np.arange(40)[:, None] % 2
    assert probe_auc(z[:30] * 2.0, z[:30], z[30:] * 2.0, z[30:], 0).tolist() == [1.0]
    assert np.isnan(probe_auc(z[:30] * 2.0, z[:30], z[30:] * 2.0, 0 * z[30:], 0)).all()
    assert probe_auc(
        H, np.zeros((2 * N, 0), np.int64), H, np.zeros((2 * N, 0), np.int64), 0
    ).shape == (0,)


def test_importing_loads_nothing_heavy() -> None:
    program = "import sys, dfl.evaluation.fairness; print({'torch', 'sklearn', 'pandas'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"
