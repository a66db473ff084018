"""The experiment on convergence rates: its problems, its quantizer, its exponents and its table."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.methods import convergence_rates as experiment
from experiments.methods.convergence_rates import (
    COMPARISONS,
    COORDINATES,
    EXAMPLES,
    FIXED,
    MOMENTUM,
    PEERS,
    REACH,
    STEPS,
    Grid,
    LeastSquares,
    NonConvex,
    Problem,
)
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

PROBLEMS = [problem for problem, _ in COMPARISONS]


def full_loss(problem: Problem, x: NDArray[np.float64]) -> tuple[float, Tensor]:
    """f(x), and its gradient, by the model and the loss of a run over all examples of all peers."""
    model = problem.model()
    parameters = dict(model.named_parameters())["x"]
    with torch.no_grad():
        parameters.copy_(torch.from_numpy(x))
    data = problem.data()
    inputs, labels = (
        torch.from_numpy(np.asarray(each)) for each in (data.train_inputs, data.train_labels)
    )
    loss = experiment.weighted(model(inputs), labels).mean()
    (gradient,) = torch.autograd.grad(loss, parameters)
    return loss.item(), gradient


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_epsilon_is_that_of_the_examples(problem: Problem) -> None:
    """The noise of all examples cancels out, and ε follows from their losses."""
    x = np.random.default_rng(3).normal(size=COORDINATES)
    loss, gradient = full_loss(problem, x)
    if isinstance(problem, NonConvex):
        expected = gradient.square().sum().item()
    else:
        assert isinstance(problem, LeastSquares)
        best = problem.rows.T @ problem.best
        expected = loss - full_loss(problem, best)[0]
        assert problem.epsilon(best) == pytest.approx(0, abs=1e-20)
    assert problem.epsilon(x) == pytest.approx(expected, rel=1e-9)


def test_least_squares_meet_the_inequality_and_are_not_strongly_convex() -> None:
    """||grad f||² >= 2 ν (f - min f), and there is a direction in which f is constant."""
    problem = LeastSquares()
    rng = np.random.default_rng(4)
    for _ in range(5):
        x = rng.normal(size=COORDINATES)
        _, gradient = full_loss(problem, x)
        least = 2 * problem.weights.mean() * problem.epsilon(x)
        assert gradient.square().sum().item() >= least * (1 - 1e-9)
        flat = rng.normal(size=COORDINATES)
        flat -= problem.rows.T @ (problem.rows @ flat)
        assert problem.epsilon(x + flat) == pytest.approx(problem.epsilon(x), rel=1e-9)


def test_a_round_moves_as_far_as_stated() -> None:
    """K heavy-ball steps with a gradient of 1 and a learning rate of 1."""
    velocity = moved = 0.0
    for _ in range(STEPS):
        velocity = MOMENTUM * velocity + 1
        moved += velocity
    assert moved == REACH


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_the_ladder_is_long_enough(problem: Problem) -> None:
    """By theory ε falls by two decades, where an exponent is measured."""
    scales = [problem.scale(rounds) for rounds in problem.ladder]
    assert all(a < b for a, b in pairwise(scales))
    fall = (scales[-1] / scales[0]) ** (1 / problem.power)
    assert fall >= 100 or problem is FIXED


def test_the_quantizer_is_that_of_theory() -> None:
    """Multiples of s, unbiased, with a variance of (a - vs)((v + 1)s - a) <= s²/4."""
    draws = torch.Generator().manual_seed(0)
    a = torch.linspace(-0.2, 0.2, 21, dtype=torch.float64).repeat(20_000, 1)
    grid = Grid(step=0.05)
    encoded = grid.encode(
        a,
        lambda rows, places: torch.randint(
            -(2**31), 2**31, (rows.stop, places.stop), generator=draws, dtype=torch.int64
        ).to(torch.int32),
    )
    assert encoded.shape == (20_000, 42)
    q = grid.decode(encoded, 21, torch.float64)
    assert ((q / 0.05) - (q / 0.05).round()).abs().max() < 1e-9
    low = (a[0] / 0.05 + 1e-9).floor() * 0.05
    variance = (a[0] - low) * (low + 0.05 - a[0])
    assert (q.mean(0) - a[0]).abs().max() < 6 * 0.025 / 20_000**0.5
    assert torch.allclose(q.var(0), variance, atol=3e-5)
    assert variance.max() <= 0.05**2 / 4 + 1e-12


def test_the_bound_of_a_step_is_the_stationary_variance() -> None:
    rounds = 10**6
    move = 2 * REACH * FIXED.rate(rounds)  # L R η
    variance = 0.0
    for _ in range(20_000):
        variance = (1 - move) ** 2 * variance + 0.1**2 / (4 * PEERS)
    assert experiment.bound(0.1, rounds) == pytest.approx(COORDINATES * 4 * variance, rel=1e-3)


def rows(power: float, factor: float = 1.0) -> pd.DataFrame:
    """Runs whose ε follows the theory, but for a power and for seeds that differ by a factor."""
    return pd.DataFrame(
        {
            "problem": problem.name,
            "method": method,
            "rounds": rounds,
            "seed": seed,
            "epsilon": factor**seed * problem.scale(rounds) ** (-1 / (power * problem.power)),
        }
        for problem, methods in COMPARISONS
        for method in methods
        for rounds in problem.ladder
        for seed in range(3)
    )


def test_exponents_are_read_off_the_runs() -> None:
    table = experiment.tabulate(rows(1, factor=2))
    measured = table[table["theory"].notna()]
    assert measured["exponent"].tolist() == pytest.approx([2.0] * 4 + [1.0] * 4)
    assert (measured["high"] - measured["low"]).max() < 1e-9  # seeds differ by a factor only
    least_squares = measured[measured["theory"] == 1]
    assert least_squares["plain"].min() > 1.05  # with the logarithm they seem slower
    assert table["bound"].notna().sum() == 3
    assert table["added"].abs().max() == 0


@pytest.mark.parametrize(("power", "verdict"), [(1.1, "holds"), (1.2, "FAILS"), (0.8, "FAILS")])
def test_the_finding_compares_with_theory(power: float, verdict: str) -> None:
    text = experiment.finding(experiment.tabulate(rows(power)))
    assert text.count(f"within 15%: {verdict}") == 2
    assert f"DFedAvgM, 4 bits {2 * power:.2f}" in text


def test_seeds_that_disagree_widen_the_interval() -> None:
    runs = rows(1)
    other = runs["seed"] == 1
    runs.loc[other, "epsilon"] = runs.loc[other, "epsilon"] ** 1.1
    table = experiment.tabulate(runs)
    wide = table[table["theory"].notna()]
    assert ((wide["high"] - wide["low"]) > 0.1).all()
    assert (wide["low"] < wide["theory"]).all()


def test_methods_differ_in_nothing_else() -> None:
    """Centralized SGD takes as many examples and moves as far as K steps of a constant gradient."""
    problem = NonConvex()
    local, central = (
        experiment.setting(problem, 100, 0, **experiment.METHODS[name])
        for name in ("DFedAvgM", "centralized SGD")
    )
    assert central.lr == pytest.approx(REACH * local.lr)
    assert (central.local_steps, central.batch_size) == (1, STEPS)
    assert (local.local_steps, local.batch_size, local.momentum) == (STEPS, 1, MOMENTUM)
    assert len(problem.data().train_labels) == PEERS * EXAMPLES


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run for few rounds."""
    out = tmp_path_factory.mktemp("experiment")
    done = run_experiment("methods.convergence_rates", out, "--rounds", "30", "--seeds", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return out


def test_an_experiment_ends_in_a_table_and_a_figure(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert len(table) == sum(len(methods) for _, methods in COMPARISONS)
    falling = table[table["theory"].notna()]
    assert (falling["eps_last"] < 0.6 * falling["eps_first"]).all()
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_eight_bits_hardly_change_a_run(published: Path) -> None:
    """The mean of all models is kept by every message; only the disagreement changes."""
    runs = pd.read_csv(published / "seeds.csv")
    exact, short = (
        runs[runs["method"] == name]["epsilon"].to_numpy()
        for name in ("DFedAvgM", "DFedAvgM, 8 bits")
    )
    assert np.abs(short / exact - 1).max() < 1e-2
    assert np.abs(short / exact - 1).max() > 0


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment("methods.convergence_rates", tmp_path, "--seeds", "1")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--seeds" in done.stderr
    assert "1" in done.stderr
