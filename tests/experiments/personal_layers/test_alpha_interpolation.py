"""The experiment on mixed least squares: its formula, its samples, its table and figure."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from dfl.core.errors import InputError
from experiments import common
from experiments.personal_layers import alpha_interpolation as experiment
from experiments.personal_layers.alpha_interpolation import Options, Parabola

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SMALL = Options(devices=7, examples=60, features=3, seeds=2)
RHOS = (0.5, 0.1, 0.06, 0.02)


def by_hand(rho: float, deviation: float, *sizes: int) -> tuple[float, float, float]:
    """alpha*, and the excess risk of the pooled and of own models, with noise of a standard
    deviation.
    """
    M, n, d = sizes
    c = 3 * deviation**2 / n
    return rho**2 / (rho**2 + c), d / 3 * ((M - 1) / M * rho**2 + c / M), d / 3 * c


@pytest.fixture(scope="module")
def measured() -> dict[float, list[Parabola]]:
    """The excess risk of the paper's own setting, by two seeds for each of its four values of
    rho.
    """
    return {rho: [experiment.risk(Options(), rho, seed) for seed in (100, 101)] for rho in RHOS}


@pytest.mark.parametrize("rho", RHOS)
def test_the_measured_least_is_where_the_formula_has_it(
    measured: dict[float, list[Parabola]], rho: float
) -> None:
    """Noise of standard deviation sigma, in place of sigma squared, would move it by more where it
    moves at all.
    """
    wanted, pooled, own = by_hand(rho, 1.5**2, 100, 2000, 20)
    for found in measured[rho]:
        assert found.least_at == pytest.approx(wanted, abs=0.05)
        assert found.at(0.0) == pytest.approx(pooled, rel=0.2)
        assert found.at(1.0) == pytest.approx(own, rel=0.1)


def test_the_noise_has_sigma_squared_as_its_standard_deviation() -> None:
    """Sigma itself would put the least of rho = 0.1 at 0.75, and leave 0.44 of the own models'
    excess risk.
    """
    x, y, u = experiment.sample(Options(), 0.1, 0)
    assert (y - (x * u[:, None]).sum(2)).std() == pytest.approx(2.25, rel=0.01)
    assert experiment.expected(Options(), 0.1).least_at == pytest.approx(0.5684, abs=5e-5)
    assert by_hand(0.1, 1.5, 100, 2000, 20)[0] == pytest.approx(0.7477, abs=5e-5)


@pytest.mark.parametrize(
    ("rho", "alpha", "own", "pooled", "best"),
    [(0.5, 0.9705, 5.1131, 6.7130, 5.1116), (0.1, 0.5684, 5.1131, 5.1290, 5.0915),
     (0.06, 0.3216, 5.1131, 5.0868, 5.0791), (0.02, 0.0500, 5.1131, 5.0656, 5.0655)],
)  # fmt: skip
def test_the_formula_gives_the_known_errors(
    rho: float, alpha: float, own: float, pooled: float, best: float
) -> None:
    """With the noise, 5.0625, computed separately."""
    theory = experiment.expected(Options(), rho)
    assert theory.least_at == pytest.approx(alpha, abs=5e-5)
    found = [5.0625 + theory.at(each) for each in (1, 0, theory.least_at)]
    assert found == pytest.approx([own, pooled, best], abs=6e-5)


@pytest.mark.parametrize("alpha", [-0.5, 0.0, 0.3, 1.0, 1.4])
def test_the_formula_is_the_one_that_the_experiment_prints(alpha: float) -> None:
    M, n, d, rho = 7, 60, 3, 0.3
    c, theory = 3 * 2.25**2 / n, experiment.expected(SMALL, rho)
    terms = (
        (1 - alpha) ** 2 * ((M - 1) / M * rho**2 + c / M)
        + 2 * alpha * (1 - alpha) * c / M
        + alpha**2 * c
    )
    assert theory.at(alpha) == pytest.approx(d / 3 * terms)
    assert theory.least_at == pytest.approx(by_hand(rho, 2.25, M, n, d)[0])


def test_the_formula_is_the_mean_over_many_seeds() -> None:
    """Few devices, whose number is part of it, and examples enough for their covariance."""
    options = Options(devices=3, examples=400, features=4)
    found = [experiment.risk(options, 0.1, seed) for seed in range(600)]
    theory = experiment.expected(options, 0.1)
    for alpha in (0.0, 0.5, 1.0):
        assert np.mean([each.at(alpha) for each in found]) == pytest.approx(
            theory.at(alpha), rel=0.06
        )
    square, slope, _ = np.mean(found, axis=0)
    assert -slope / square == pytest.approx(theory.least_at, abs=0.02)


def test_least_squares_are_those_of_numpy() -> None:
    x, y, _ = experiment.sample(SMALL, 0.5, 0)
    own, pooled = experiment.least_squares(x, y)
    for m in range(7):
        assert_allclose(own[m], np.linalg.lstsq(x[m], y[m])[0], rtol=1e-9)
    assert_allclose(pooled, np.linalg.lstsq(x.reshape(-1, 3), y.reshape(-1))[0], rtol=1e-9)
    assert np.abs(own - pooled).max() > 0.05


def test_the_excess_risk_is_that_of_the_ensemble() -> None:
    own, pooled, u = (
        experiment.sample(SMALL, 0.5, 0)[2],
        np.array([0.3, -0.2, 0.7]),
        np.ones((7, 3)),
    )
    found = experiment.excess(own, pooled, u)
    for alpha in (0.0, 0.4, 1.0):
        w = alpha * own + (1 - alpha) * pooled
        assert found.at(alpha) == pytest.approx(
            np.mean([(w[m] - u[m]) @ (np.eye(3) / 3) @ (w[m] - u[m]) for m in range(7)])
        )
    grid = np.linspace(-1, 2, 300_001)
    assert found.least_at == pytest.approx(grid[np.argmin(found.at(grid))], abs=1e-5)


def test_excess_risk_is_the_test_error_less_the_noise() -> None:
    """On a million examples of a device, drawn separately."""
    rng = np.random.default_rng(0)
    own, pooled, u = rng.normal(size=(1, 3)), rng.normal(size=3), rng.normal(size=(1, 3))
    x = rng.uniform(-1, 1, (1_000_000, 3))
    noise = rng.normal(0, 2.25, 1_000_000)
    error = (x @ u[0] + noise - x @ (0.3 * own[0] + 0.7 * pooled)) ** 2
    assert error.mean() - 2.25**2 == pytest.approx(
        experiment.excess(own, pooled, u).at(0.3), abs=0.05
    )


def test_devices_are_drawn_as_in_the_paper() -> None:
    x, _, u = experiment.sample(replace(SMALL, devices=20_000, examples=3), 0.4, 0)
    assert (x.min(), x.max(), x.var()) == pytest.approx((-1, 1, 1 / 3), abs=0.01)
    assert u.std(0) == pytest.approx([0.4] * 3, rel=0.02)
    assert ((u.mean(0) > -0.02) & (u.mean(0) < 1.02)).all()
    assert u.mean(0).std() > 0.05  # v is not the same for every feature
    assert np.mean((u - u.mean(0))[:, 0] * (u - u.mean(0))[:, 1]) / 0.16 == pytest.approx(
        0, abs=0.03
    )


def test_a_sample_is_always_the_same_and_another_for_every_seed_and_rho() -> None:
    seen = [experiment.sample(SMALL, rho, seed) for rho, seed in ((0.5, 0), (0.5, 1), (0.1, 0))]
    assert all(
        (a == b).all() for a, b in zip(seen[0], experiment.sample(SMALL, 0.5, 0), strict=True)
    )
    assert len({found[0][0, 0, 0] for found in seen}) == 3


def parabola(least: float, height: float) -> Parabola:
    """Two times (alpha - least) squared, and a height."""
    return Parabola(2.0, -2 * least, 2 * least**2 + height)


def test_a_row_and_the_finding_have_what_was_measured() -> None:
    row = experiment._row(SMALL, 0.1, [parabola(0.4, 1.0), parabola(0.6, 2.0)])
    assert row["alpha"] == pytest.approx(0.5)
    assert row["std_over_seeds"] == pytest.approx(np.sqrt(0.02))
    assert row["pooled"] == pytest.approx((1.32 + 2.72) / 2)
    assert row["own"] == pytest.approx((1.72 + 2.32) / 2)
    assert row["best"] == pytest.approx(1.5)
    assert row["alpha_formula"] == pytest.approx(by_hand(0.1, 2.25, 7, 60, 3)[0])
    formula = {
        "alpha_formula": 0.55,
        "pooled_formula": 2.02,
        "own_formula": 2.02,
        "best_formula": 1.2,
    }
    table = pd.DataFrame([row | formula])
    text = experiment.finding(table, SMALL)
    assert (
        "for rho = 0.1 the best alpha is 0.500 in the mean over 2 seeds, by formula 0.550, "
        "a difference of 0.050 at most" in text
    )
    assert "within 25.0% of its formula" in text
    assert "it is 74% of that of the better end" in text


def test_the_figure_has_the_formula_over_what_was_measured(
    measured: dict[float, list[Parabola]],
) -> None:
    figure = experiment.draw(measured, Options(seeds=2))
    assert [axes.get_title() for axes in figure.axes] == [rf"$\rho$ = {rho:g}" for rho in RHOS]
    for axes, rho in zip(figure.axes, RHOS, strict=True):
        mean, theory, mark, least = (
            np.asarray(line.get_xydata(), float) for line in axes.lines[:4]
        )
        assert_allclose(
            mean[:, 1], [np.mean([each.at(a) for each in measured[rho]]) for a in experiment.ALPHAS]
        )
        assert_allclose(
            theory[:, 1], [experiment.expected(Options(), rho).at(a) for a in experiment.ALPHAS]
        )
        assert mark[0, 0] == mark[1, 0] == pytest.approx(by_hand(rho, 2.25, 100, 2000, 20)[0])
        assert least[0, 0] == pytest.approx(np.mean([each.least_at for each in measured[rho]]))
        assert axes.get_xlabel()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"examples": 19}, "--examples 19 must be at least --features 20"),
        ({"seeds": 1}, "--seeds must be at least 2, not 1"),
        ({"devices": 0}, "--devices must be at least 2, not 0"),
        ({"sigma": 0.0}, "--sigma must be positive, not 0"),
        ({"rhos": (0.1, 0.0)}, "--rhos must be positive, not 0"),
    ],
)
def test_bad_input_is_refused(values: dict[str, int], line: str) -> None:
    with pytest.raises(InputError, match=line):
        Options(**values)  # type: ignore[arg-type]


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    arguments = [
        "--rhos",
        "0.5",
        "0.06",
        "--seeds",
        "2",
        "--devices",
        "10",
        "--examples",
        "200",
        "--out",
        str(tmp_path),
    ]
    command = [sys.executable, "-m", "experiments.personal_layers.alpha_interpolation", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    assert "\nFinding: for rho = 0.5, 0.06 the best alpha is" in done.stdout
    assert pd.read_csv(tmp_path / "table.csv")["rho"].tolist() == [0.5, 0.06]
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_published_table_has_the_figures_of_the_experiment() -> None:
    row = common.by_label(
        pd.read_csv(ROOT / "experiments/results/alpha_interpolation/table.csv"), ["rho"]
    )
    assert list(row) == list(RHOS)
    for rho, own in row.items():
        wanted = by_hand(rho, 2.25, 100, 2000, 20)
        formulas = [own[name] for name in ("alpha_formula", "pooled_formula", "own_formula")]
        assert formulas == pytest.approx(list(wanted), rel=1e-5)
        assert own["alpha"] == pytest.approx(wanted[0], abs=0.005)
        assert own["best"] < min(own["own"], own["pooled"])
    assert row[0.1]["best"] / row[0.1]["own"] == pytest.approx(0.57, abs=0.005)
    assert row[0.06]["best"] / row[0.06]["pooled"] == pytest.approx(0.69, abs=0.005)
