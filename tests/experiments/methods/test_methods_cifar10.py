"""The comparison of methods on CIFAR-10: its data, its rates, its table; run on digits."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.config import Run
from dfl.core.registry import choose
from dfl.datasets import DATASETS
from dfl.datasets.partitions.base import Labels
from dfl.sweep import Cell
from experiments import common
from experiments.methods import methods_cifar10 as experiment
from experiments.methods.cifar10_setting import CASES, METHODS, even_dirichlet, held_out
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

EXPERIMENT = "methods.methods_cifar10"
SMALL = ("--dataset", "digits", "--seeds", "1", "--steps", "16", "--cases", "ring8_4")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits."""
    out = tmp_path_factory.mktemp("experiment")
    done = run_experiment(EXPERIMENT, out, *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith((out / "table.md").read_text().strip())
    return out


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert table["method"].tolist() == [METHODS[name].title for name in CASES["ring8_4"].methods]
    assert table["seeds"].eq(1).all()
    assert table["worst_peer"].between(0, 100).all()
    assert (table["worst_peer"] <= table["mean_peer"]).all()
    assert "4 of 4 runs have finished" in (published / "table.md").read_text()
    assert "NOT run" not in (published / "table.md").read_text()
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert not list(published.glob("**/state.safetensors"))


def test_a_figure_has_a_panel_for_each_case_that_has_run(published: Path) -> None:
    table, seeds = (pd.read_csv(published / name) for name in ("table.csv", "seeds.csv"))
    assert len(experiment.draw(table, seeds).axes) == 1


def test_a_figure_is_the_mean_of_the_last_evaluations(published: Path) -> None:
    for row in pd.read_csv(published / "seeds.csv", dtype={"lr": str}).to_dict("records"):
        values = ",".join(f"{name}={row[name]}" for name in ("case", "method", "lr", "seed"))
        metrics = pd.read_csv(published / "cells" / values / "metrics.csv")
        assert metrics["round"].tolist() == list(range(0, 17, 2))
        assert row["worst_peer"] == pytest.approx(metrics["accuracy_min"].tail(3).mean(), rel=1e-5)


def test_runs_that_are_done_are_not_run_again(published: Path) -> None:
    records = {file: file.stat().st_mtime_ns for file in published.glob("**/run.json")}
    before = pd.read_csv(published / "table.csv")
    assert run_experiment(EXPERIMENT, published, *SMALL).returncode == 0
    assert {file: file.stat().st_mtime_ns for file in published.glob("**/run.json")} == records
    assert pd.read_csv(published / "table.csv").equals(before)


def test_no_run_trains_on_what_chooses_the_rates() -> None:
    """The images held out are a tenth of the training images, and in no training set."""
    whole = choose("--dataset", "digits", DATASETS)(None)
    plain, validating = (held_out(None, of="digits", validate=each) for each in (False, True))
    n = len(whole.train_labels)
    assert len(validating.test_labels) == round(n / 10)
    assert np.array_equal(plain.train_inputs, validating.train_inputs)
    assert np.array_equal(plain.test_inputs, whole.test_inputs)
    parts = (plain.train_inputs, validating.test_inputs)
    both = np.concatenate([np.asarray(each).reshape(len(each), -1) for each in parts])
    assert len(both) == n
    ordered = np.asarray(whole.train_inputs).reshape(n, -1)
    assert np.array_equal(both[np.lexsort(both.T)], ordered[np.lexsort(ordered.T)])


@pytest.mark.parametrize("alpha", [0.01, 1.0])
def test_peers_have_equally_many_examples(alpha: float) -> None:
    labels = np.repeat(np.arange(10), 100)
    rng = np.random.default_rng(0)
    cut = even_dirichlet(Labels(train=labels, test=labels), 16, rng, alpha=alpha)
    sizes = [len(own) for own in cut.train]
    assert max(sizes) - min(sizes) <= 1
    assert np.array_equal(np.sort(np.concatenate(cut.train)), np.arange(1000))
    classes = np.mean([len(np.unique(labels[own])) for own in cut.train])
    assert classes < 4 if alpha < 1 else classes > 6


def tuned(monkeypatch: pytest.MonkeyPatch, best: float) -> tuple[pd.DataFrame, list[Run]]:
    """The rates tried where a rate is the best on images held out, and the worst on test images."""
    runs: list[Run] = []

    def run_grid(cells: list[Cell], out: Path, *, in_process: bool, report: bool) -> pd.DataFrame:
        runs.extend(cell.run for cell in cells)
        tables = []
        for cell in cells:
            far = abs(np.log10(cell.run.lr / best))
            table = pd.DataFrame({"round": [0, cell.run.rounds], "accuracy_min": [0, 1 - far / 9]})
            if cell.run.lr > best:
                table = table.head(1)  # it diverged
            tables.append(table.assign(accuracy_mean=0.0, consensus_distance=0.0, **cell.values))
        return pd.concat(tables, ignore_index=True)

    monkeypatch.setattr(experiment, "run_grid", run_grid)
    return experiment.tune(experiment.Options(), "ring8_0.1", "dpsgd"), runs


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.1, [0.03, 0.1, 0.3]),
        (0.01, [0.003, 0.01, 0.03, 0.1, 0.3]),
        (3.0, [0.03, 0.1, 0.3, 1.0, 3.0]),
    ],
)
def test_the_search_of_a_rate_goes_on_until_the_best_has_neighbours(
    monkeypatch: pytest.MonkeyPatch, best: float, tried: list[float]
) -> None:
    found, runs = tuned(monkeypatch, best)
    assert found["lr"].tolist() == tried
    assert common.chosen(found) == best
    assert {run.dataset for run in runs} == {"held_out:of=cifar10,validate=true"}
    assert {run.seed for run in runs} == {0}


@pytest.mark.parametrize("method", METHODS)
def test_all_take_as_many_examples(method: str) -> None:
    options = experiment.Options()
    for case in CASES:
        run = experiment.run_of(options, case, method, 0.1)
        assert (run.peers or 0) * run.rounds * (run.local_steps or 0) == 8 * options.steps
        assert run.dataset == "held_out:of=cifar10,validate=false"
        assert run.rounds % run.eval_every == 0


def test_published_figures_are_those_of_methods_that_run() -> None:
    assert all(set(case.published) <= set(case.methods) for case in CASES.values())
    assert all(case.rates_of is None or case.rates_of in CASES for case in CASES.values())


def test_a_table_states_what_is_missing_and_what_diverged() -> None:
    options = experiment.Options(cases=("ring8_4", "ring8_1"))
    common = {"case": "ring8_4", "lr": "0.01", "mean_peer": 0.6, "consensus_distance": 1.0}
    seeds = pd.DataFrame(
        [
            {**common, "method": "dsgdm", "seed": 0, "worst_peer": 0.5},
            {**common, "method": "dsgdm", "seed": 1, "worst_peer": 0.3},
            {**common, "method": "decentlam", "seed": 0, "worst_peer": np.nan},
        ]
    )
    whole = experiment.tabulate(options, seeds)
    table = whole[whole["case"] == "8 peers, 4 classes each"].set_index("method")
    assert table["seeds"].tolist() == [2, 0, 1, 0]
    assert table.loc["DSGDm", "worst_peer"] == pytest.approx(40)
    assert table.loc["DecentLaM", "diverged"] == 1
    assert table["published_full_setting"].tolist() == [35.6, 49.4, 54.9, 66.8]
    text = experiment.finding(whole, options)
    assert "3 of 45 runs have finished" in text
    assert "DSGDm 40.0 (of 2 seeds only: DSGDm; of 1 seed only: DecentLaM; " in text
    assert "NOT run: QG-DSGDm, momentum tracking; 1 run diverged: DecentLaM); 8 peers, " in text
    assert "8 peers, alpha = 1: NOT run." in text


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    for flag, value in (("--dataset", "nonsense"), ("--cases", "ring9")):
        done = run_experiment(EXPERIMENT, tmp_path, flag, value)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == 1
        assert flag in done.stderr
        assert value in done.stderr
