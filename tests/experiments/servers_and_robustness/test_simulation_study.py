"""The simulation study: its samples, estimators, errors, table and figure."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.lines import Line2D
from scipy.optimize import minimize_scalar
from sklearn.linear_model import LogisticRegression

from dfl.core.errors import InputError
from experiments import common
from experiments.servers_and_robustness import simulation_study as study
from experiments.servers_and_robustness.simulation_study import Floats, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SMALL = Options(examples=(60,), clients=(2, 6), replications=5, steps=40, descent=30)


@pytest.fixture(scope="module")
def sampled() -> tuple[Floats, Floats]:
    """60 examples in 5 replications."""
    return study.sample(SMALL, 60)


def test_z_has_the_given_mean_and_variance() -> None:
    z, _ = study.sample(replace(SMALL, replications=50), 4000)
    assert z.shape == (4000, 50)
    assert z.mean() == pytest.approx(1, abs=0.02)
    assert z.var() == pytest.approx(2, rel=0.02)
    wide, _ = study.sample(replace(SMALL, replications=50, variance=4.0), 4000)
    assert wide.var() == pytest.approx(4, rel=0.02)


def test_y_follows_the_logistic_law() -> None:
    z, y = study.sample(replace(SMALL, beta=1.5, replications=50), 4000)
    assert set(np.unique(y)) == {0.0, 1.0}
    for low, high in ((-1.0, -0.5), (0.0, 0.2), (1.0, 1.2)):
        near = (z > low) & (z < high)
        assert y[near].mean() == pytest.approx((1 / (1 + np.exp(-1.5 * z[near]))).mean(), abs=0.02)


def test_a_sample_is_always_the_same_and_another_for_every_size() -> None:
    (z, y), (again, other) = study.sample(SMALL, 60), study.sample(SMALL, 60)
    assert (z == again).all()
    assert (y == other).all()
    assert (study.sample(SMALL, 61)[0][:60] != z).any()


def test_replications_beyond_the_first_draw_other_numbers() -> None:
    z, y = study.sample(SMALL, 60)
    assert len(np.unique(z)) == z.size
    assert len({tuple(column) for column in y.T}) == 5


def test_maximum_likelihood_agrees_with_two_other_programs(sampled: tuple[Floats, Floats]) -> None:
    z, y = sampled
    found = study.most_likely(z, y)
    for r in range(z.shape[1]):
        x, side = z[:, r], 2 * y[:, r] - 1
        searched = minimize_scalar(
            lambda b, x=x, side=side: np.logaddexp(0, -side * x * b).sum(),
            bounds=(-5, 5),
            method="bounded",
            options={"xatol": 1e-10},
        )
        fitted = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(
            x[:, None], y[:, r]
        )
        assert found[r] == pytest.approx(searched.x, abs=1e-6)
        assert found[r] == pytest.approx(fitted.coef_.item(), abs=1e-5)


def test_the_loss_is_minus_the_log_likelihood(sampled: tuple[Floats, Floats]) -> None:
    z, y = map(torch.from_numpy, sampled)
    beta = torch.linspace(-1, 2, 5, dtype=torch.float64)
    p = 1 / (1 + torch.exp(-beta * z))
    by_hand = -(y * p.log() + (1 - y) * (1 - p).log()).sum(1)
    torch.testing.assert_close(study.loss(beta * z, y), by_hand)


def test_descent_is_that_of_autograd(sampled: tuple[Floats, Floats]) -> None:
    z, y = map(torch.from_numpy, sampled)
    model = study.Slopes(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=SMALL.lr)
    for _ in range(SMALL.descent):
        optimizer.zero_grad()
        study.loss(model(z), y).mean().backward()
        optimizer.step()
    np.testing.assert_allclose(
        study.descent(*sampled, SMALL), model.beta.detach().numpy(), rtol=0, atol=1e-13
    )


def test_the_estimates_of_a_model_with_an_intercept_are_the_same_by_every_way() -> None:
    options = replace(SMALL, intercept=-1.0, start=0.5, descent=3000, lr=0.5)
    z, y = study.sample(options, 60)
    best, descended = study.most_likely(z, y, intercept=True), study.descent(z, y, options)
    assert best.shape == (10,)  # slopes, then intercepts
    for r in range(5):
        fitted = LogisticRegression(C=np.inf, tol=1e-10).fit(z[:, [r]], y[:, r])
        assert best[r] == pytest.approx(fitted.coef_.item(), abs=1e-5)
        assert best[5 + r] == pytest.approx(fitted.intercept_.item(), abs=1e-5)
    np.testing.assert_allclose(descended, best, rtol=0, atol=1e-6)
    few = replace(options, descent=20)
    found = study.fedavg(z, y, 6, 20, few, batch_size=0)
    np.testing.assert_allclose(found, study.descent(z, y, few), rtol=0, atol=1e-12)


def test_settings_change_what_is_drawn_or_where_it_starts() -> None:
    for changes in study.OTHERS.values():
        other = replace(SMALL, **changes)
        z, y = study.sample(other, 60)
        same = all(
            (one == two).all() for one, two in zip((z, y), study.sample(SMALL, 60), strict=True)
        )
        assert same == ("start" in changes)
        none = study.descent(z, y, replace(other, descent=0))
        assert (none[:5] == changes.get("start", 0)).all()


@pytest.mark.parametrize("clients", [1, 2, 6, 60])
def test_with_batches_of_all_examples_fedavg_is_descent(
    sampled: tuple[Floats, Floats], clients: int
) -> None:
    found = study.fedavg(*sampled, clients, SMALL.descent, SMALL, batch_size=0)
    np.testing.assert_allclose(found, study.descent(*sampled, SMALL), rtol=0, atol=1e-12)


def test_clients_with_one_example_descend_whatever_their_batches(
    sampled: tuple[Floats, Floats],
) -> None:
    found = study.fedavg(*sampled, 60, SMALL.descent, SMALL, batch_size=1)
    np.testing.assert_allclose(found, study.descent(*sampled, SMALL), rtol=0, atol=1e-12)


def test_batches_of_one_example_are_as_many_steps_as_a_client_has_examples() -> None:
    z, y = (
        np.tile([[1.5, -0.5]], (12, 1)),
        np.tile([[1.0, 0.0]], (12, 1)),
    )  # all alike, so that order is nothing
    beta = np.zeros(2)
    for _ in range(3 * 4):  # 3 rounds, 4 examples a client
        beta = beta + SMALL.lr * (y[0] - 1 / (1 + np.exp(-beta * z[0]))) * z[0]
    np.testing.assert_allclose(
        study.fedavg(z, y, 3, 3, SMALL, batch_size=1), beta, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("intercept", [False, True])
def test_one_client_has_the_maximum_likelihood_estimate(intercept: bool) -> None:
    z, y = study.sample(replace(SMALL, intercept=-0.5 if intercept else None), 600)
    best = study.most_likely(z, y, intercept)[:5]
    found = study.one_step(z, y, 1, intercept)
    for name in ("meta", "surrogate"):
        np.testing.assert_allclose(found[name], best, rtol=0, atol=1e-9)
    assert (abs(found["one_shot"] - best) > 0).all()  # it is corrected
    assert abs(found["one_shot"] - best).max() < 0.02


def test_clients_share_all_examples_between_them() -> None:
    z, y = study.sample(SMALL, 600)
    whole, parts = study.most_likely(z, y), study.one_step(z, y, 3)
    halves = [
        study.most_likely(z[200 * k : 200 * k + 200], y[200 * k : 200 * k + 200]) for k in range(3)
    ]
    assert (parts["meta"] > np.min(halves, 0)).all()
    assert (parts["meta"] < np.max(halves, 0)).all()
    assert abs(parts["surrogate"] - whole).max() < abs(parts["meta"] - whole).max()


def test_a_client_without_an_estimate_leaves_none() -> None:
    assert all(
        np.isnan(beta).all() for beta in study.one_step(*study.sample(SMALL, 60), 60).values()
    )


def test_batches_of_one_example_do_depend_on_the_clients(sampled: tuple[Floats, Floats]) -> None:
    two, six = (study.fedavg(*sampled, k, 5, SMALL, batch_size=1) for k in (2, 6))
    assert abs(two - six).max() > 1e-3


def test_replications_are_independent(sampled: tuple[Floats, Floats]) -> None:
    z, y = sampled
    all_five = study.fedavg(*sampled, 6, 5, SMALL, batch_size=1)
    for r in (0, 3):
        alone = study.fedavg(z[:, [r]], y[:, [r]], 6, 5, SMALL, batch_size=1)
        np.testing.assert_allclose(alone, all_five[[r]], rtol=0, atol=1e-12)


def test_errors_are_from_the_truth_and_from_the_best() -> None:
    found, best = np.array([1.2, 0.8, 1.3]), np.array([1.1, 0.9, 1.0])
    errors = study._errors(found, best, 1.0)
    assert errors["bias"] == pytest.approx(0.1)
    assert errors["bias_se"] == pytest.approx(np.std([0.2, -0.2, 0.3], ddof=1) / np.sqrt(3))
    assert errors["rmse"] == pytest.approx(np.sqrt(0.17 / 3))
    assert errors["mle_bias"] == pytest.approx(0, abs=1e-12)
    assert errors["mle_rmse"] == pytest.approx(np.sqrt(0.02 / 3))
    assert errors["minus_mle"] == pytest.approx(0.1)
    assert errors["rms_from_mle"] == pytest.approx(np.sqrt(0.11 / 3))


def test_every_client_takes_steps_enough() -> None:
    table = study.study(
        replace(SMALL, examples=(60,), clients=(1, 6), steps=40, replications=3), 60
    )
    assert table["each"].tolist() == [60, 10]
    assert table["rounds"].tolist() == [10, 10]  # ten at least
    table = study.study(
        replace(SMALL, examples=(60,), clients=(6, 30), steps=140, replications=3), 60
    )
    assert table["rounds"].tolist() == [14, 70]  # 14 * 10 and 70 * 2 steps
    assert table["descent_distance"].astype(float).max() < 1e-12


def hand_made() -> pd.DataFrame:
    """Two sizes with two numbers of clients each."""
    return pd.DataFrame(
        {
            "setting": study.STANDARD,
            "examples": [100, 100, 400, 400], "clients": [2, 10, 2, 10], "each": [50, 10, 200, 40],
            "rounds": [40, 200, 10, 50], "bias": [0.05, 0.02, 0.04, -0.01],
            "bias_se": [0.01, 0.011, 0.01, 0.01], "rmse": [0.3, 0.2, 0.1, 0.1],
            "mle_bias": [0.015, 0.015, 0.005, 0.005], "mle_rmse": [0.2, 0.2, 0.05, 0.05],
            "minus_mle": [0.035, 0.0051, 0.0352, -0.015], "rms_from_mle": [0.04, 0.01, 0.04, 0.02],
            "descent_distance": ["1e-16", "4e-15", "2e-16", "3e-16"],
            "descent_to_mle": ["2e-05", "3e-05", "1e-06", "1e-06"],
            "meta_bias": [-0.02, np.nan, -0.01, -0.03], "one_shot_bias": [0.001, np.nan, 0.002, 0],
            "surrogate_bias": [0.003, np.nan, 0, 0.004], "one_step_kept": [5, 0, 5, 5],
        }
    )  # fmt: skip


def test_the_finding_is_read_off_the_table() -> None:
    text = study.finding(hand_made(), SMALL)
    assert text.startswith(
        "over 5 replications and from n = 100 to 400 the root mean square error of maximum"
    )
    assert (
        "on all data goes from 0.200 to 0.050; that of FedAvg from 0.300 to 0.100 with 2 clients"
        in text
    )
    assert ", from 0.200 to 0.100 with 10 clients. FedAvg's bias is -0.0100 to +0.0500" in text
    assert "(beyond two standard errors in 2 of 4 cells)" in text
    assert "that of maximum likelihood +0.0050 to +0.0150" in text
    assert (
        "+0.0051 off in the mean where clients have fewest examples (10) "
        "and +0.0352 where they have most" in text
    )
    assert (
        "gradient descent on all data to 4e-15 for every n and K, and after 30 rounds within 3e-05"
        in text
    )
    assert "FedAvg has a bias of -0.0100 to +0.0500, meta has a bias of -0.0300 to -0.0100" in text


def points(line: Line2D) -> list[list[float]]:
    """What a line goes through."""
    drawn: list[list[float]] = np.asarray(line.get_xydata(), np.float64).tolist()
    return drawn


def test_the_figure_shows_every_number_of_clients_and_the_best() -> None:
    figure = study.draw(hand_made(), SMALL)
    bias, error, distance = figure.axes
    assert [line.get_label() for line in error.lines] == [
        "FedAvg, 2 clients", "FedAvg, 10 clients", "maximum likelihood, all data"
    ]  # fmt: skip
    assert points(error.lines[0]) == [[100, 0.3], [400, 0.1]]
    assert points(error.lines[2]) == [[100, 0.2], [400, 0.05]]
    assert points(distance.lines[1]) == [[10, 0.01], [40, 0.02]]
    assert points(bias.lines[0]) == [[100, 0.05], [400, 0.04]]
    assert all(axes.get_xlabel() and axes.get_ylabel() and axes.get_title() for axes in figure.axes)


def test_more_examples_bring_the_best_nearer_to_the_truth() -> None:
    few, many = (study.sample(replace(SMALL, replications=200), n) for n in (100, 1600))
    errors = [
        study._errors(best, best, 1.0)
        for best in (study.most_likely(*few), study.most_likely(*many))
    ]
    assert errors[0]["mle_rmse"] / errors[1]["mle_rmse"] == pytest.approx(
        4, rel=0.3
    )  # as one over root n
    assert errors[0]["minus_mle"] == errors[0]["rms_from_mle"] == 0


def test_longer_local_work_ends_further_from_the_best() -> None:
    options = Options(examples=(400,), clients=(2, 40), replications=20, steps=200, descent=1)
    table = common.by_label(study.study(options, 400), ["clients"])
    assert table[2]["rms_from_mle"] > 3 * table[40]["rms_from_mle"]
    assert table[2]["minus_mle"] > 0


def test_examples_that_cannot_be_split_evenly_are_refused() -> None:
    with pytest.raises(
        InputError, match="--examples 100 cannot be split evenly among --clients 30"
    ):
        Options(examples=(100,), clients=(30,))


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    sizes = ["--examples", "60", "120", "--clients", "4", "10"]
    few = ["--replications", "8", "--steps", "50", "--descent", "20"]
    done = run_experiment("servers_and_robustness.simulation_study", tmp_path, *sizes, *few)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv")
    standard = table[table["setting"] == study.STANDARD]
    assert standard[["examples", "clients"]].to_numpy().tolist() == [
        [60, 4],
        [60, 10],
        [120, 4],
        [120, 10],
    ]
    assert standard["mle_rmse"].nunique() == 2  # the same data for every number of clients
    others = table[len(standard) :]
    assert others["setting"].unique().tolist() == list(study.OTHERS)
    assert others["clients"].tolist() == [4, 10] * len(study.OTHERS)
    assert set(others["examples"]) == {60}
    assert standard["rmse"].between(0.05, 1).all()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    assert "\nFinding: over 8 replications" in done.stdout


def test_the_published_table_is_of_the_whole_study_and_exact() -> None:
    table = pd.read_csv(ROOT / "experiments/results/simulation_study/table.csv")
    standard = table[table["setting"] == study.STANDARD]
    assert len(standard) == len(Options().examples) * len(Options().clients)
    assert len(table) == len(standard) + 2 * len(study.OTHERS)
    assert (table["each"] * table["clients"] == table["examples"]).all()
    assert (table["rounds"] * table["each"] >= Options().steps).all()
    assert table["descent_distance"].max() < 1e-12
    assert (table["rms_from_mle"] >= table["minus_mle"].abs()).all()
    row = common.by_label(standard, ["examples", "clients"])
    assert row[10000, 10]["rmse"] > 3 * row[10000, 10]["mle_rmse"]  # the finding of the experiment
