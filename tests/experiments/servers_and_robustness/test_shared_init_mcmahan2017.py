"""The experiment on common initializations: mixtures of two models, its table, finding and
figure.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn import Linear, Module, Sequential
from torch.nn.functional import cross_entropy

import dfl
from dfl.datasets import DATASETS, Data
from dfl.sweep import run_grid
from experiments.servers_and_robustness import shared_init_mcmahan2017 as experiment
from tests.support.launched import here, run_experiment

pytestmark = pytest.mark.slow

EXPERIMENT = "servers_and_robustness.shared_init_mcmahan2017"
THETAS = experiment.THETAS.tolist()


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits."""
    out = tmp_path_factory.mktemp("experiment")
    done = run_experiment(
        EXPERIMENT, out, "--dataset", "digits", "--seeds", "1", "--examples", "300"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return out


def test_the_claim_of_the_paper_holds_on_digits_too(published: Path) -> None:
    table = pd.read_csv(published / "table.csv").set_index("init")
    common, independent = table.loc["common"], table.loc["independent"]
    assert common["loss_half_way"] < min(common["loss_of_first"], common["loss_of_second"])
    assert independent["loss_half_way"] > max(
        independent["loss_of_first"], independent["loss_of_second"]
    )
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_ends_of_the_line_are_the_parents(published: Path) -> None:
    row = pd.read_csv(published / "table.csv").set_index("init").loc["independent"]
    run = dfl.load(published / "cells" / "init=independent,seed=0")
    inputs, labels = experiment.training_set(experiment.Options(dataset="digits"))
    losses = [cross_entropy(run.model(i)(inputs), labels).item() for i in (0, 1)]
    assert losses == pytest.approx([row["loss_of_first"], row["loss_of_second"]], rel=1e-4)
    assert losses[0] != pytest.approx(losses[1], rel=1e-4)


def test_the_parents_are_those_of_the_paper() -> None:
    run = experiment.run_of(experiment.Options(), "independent", 2)
    assert (run.dataset, run.model, run.partition, run.peers, run.examples_per_peer) == (
        "mnist",
        "2nn",
        "iid",
        2,
        600,
    )
    assert (run.algorithm, run.lr, run.momentum, run.init, run.seed) == (
        "local_only",
        0.1,
        0.0,
        "independent",
        2,
    )
    assert run.rounds * (run.local_epochs or 0) * 600 / run.batch_size == 240


def test_the_thetas_are_those_of_the_paper_and_the_middle() -> None:
    assert len(THETAS) == 51
    assert (min(THETAS), max(THETAS)) == (-0.2, 1.2)
    assert {0.0, 0.5, 1.0} <= set(THETAS)


def linear(weight: float) -> Module:
    """A model of one number in, two scores out: `weight` times the number, and nothing."""
    model = Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[weight], [0.0]]))
    return Sequential(model)


def test_mixtures_are_weighted_by_theta() -> None:
    """With one example of the first class the loss is log(1 + exp(-w)), here w = 3 theta - (1 -
    theta).
    """
    losses = experiment.mixtures(
        linear(3.0), linear(-1.0), (torch.ones(5, 1), torch.zeros(5, dtype=torch.int64))
    )
    assert losses == pytest.approx(np.log1p(np.exp(1 - 4 * experiment.THETAS)).tolist(), rel=1e-5)


def test_the_loss_is_the_mean_over_all_examples() -> None:
    """Also over the last ones, which fill no chunk: one in 3,000 has another label, and a loss of
    its own.
    """
    labels = torch.zeros(3000, dtype=torch.int64)
    labels[-1] = 1
    first, *_ = experiment.mixtures(linear(2.0), linear(2.0), (torch.ones(3000, 1), labels))
    assert first == pytest.approx(np.log1p(np.exp(-2)) + 2 / 3000, rel=1e-5)


def test_examples_are_as_a_run_sees_them() -> None:
    raw = np.arange(6, dtype=np.uint8).reshape(3, 2)
    labels = np.array([2, 0, 1])
    data = Data(raw, labels, raw[:1] + 100, labels[:1], classes=3, scale=0.5, shift=-1.0)
    with DATASETS.replaced(six=lambda directory: data):
        seen, known = experiment.training_set(experiment.Options(dataset="six"))
    assert seen.tolist() == [[-1.0, -0.5], [0.0, 0.5], [1.0, 1.5]]
    assert known.tolist() == [2, 0, 1]


def line(init: str, seed: int, half: float) -> pd.DataFrame:
    """A parabola with parents of loss 1 (theta 0) and 2 (theta 1), and `half` half-way."""
    bend = 4 * (half - 1.5)
    losses = [1 + theta + bend * theta * (1 - theta) for theta in THETAS]
    return pd.DataFrame({"init": init, "seed": seed, "theta": THETAS, "loss": losses})


def test_the_table_and_the_finding_follow_from_the_losses() -> None:
    rows = pd.concat(
        [
            line("common", 0, 0.5),
            line("common", 1, 1.5),
            line("independent", 0, 3),
            line("independent", 1, 1.8),
        ]
    )
    table = experiment.tabulate(rows)
    assert table["loss_of_first"].tolist() == pytest.approx([2.0] * 4)
    assert table["loss_of_second"].tolist() == pytest.approx([1.0] * 4)
    assert table["loss_half_way"].tolist() == pytest.approx([0.5, 1.5, 3.0, 1.8])
    assert table["at_theta"].iloc[0] == pytest.approx(
        3 / 8, abs=0.015
    )  # where 1 - 4 + 8 theta is 0
    text = experiment.finding(table)
    assert "common start: half-way the loss is lower than either parent's for 1 of 2 seeds" in text
    assert (
        "independent start: half-way the loss is higher than either parent's for 1 of 2 seeds"
        in text
    )
    assert "1.000 in the mean, the parents' 1.500" in text


def test_the_figure_has_a_line_for_each_seed() -> None:
    rows = pd.concat([line(init, seed, 0.5) for init in experiment.INITS for seed in range(3)])
    left, right = experiment.draw(rows, experiment.Options()).axes
    assert [left.get_title(), right.get_title()] == ["independent starts", "common start"]
    assert all(
        [each.get_label() for each in axes.lines[:3]] == ["seed 0", "seed 1", "seed 2"]
        for axes in (left, right)
    )
    assert np.allclose(
        np.asarray(right.lines[0].get_ydata(), float), line("common", 0, 0.5)["loss"]
    )


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment(EXPERIMENT, tmp_path, "--dataset", "nonsense")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--dataset" in done.stderr
    assert "nonsense" in done.stderr


def test_a_run_with_models_is_not_run_again(published: Path) -> None:
    folder = published / "cells" / "init=common,seed=0"
    options = experiment.Options(dataset="digits", seeds=1, examples=300, out=published)
    written = (folder / "run.json").stat().st_mtime_ns
    with here() as names:
        run_grid(experiment.grid(options), published / "cells")
    assert names == []
    again = experiment.between(options, "common", 0, experiment.training_set(options))
    assert (folder / "run.json").stat().st_mtime_ns == written
    row = pd.read_csv(published / "table.csv").set_index("init").loc["common"]
    assert again.set_index("theta")["loss"][0.5] == pytest.approx(row["loss_half_way"], rel=1e-5)
