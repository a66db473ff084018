"""The experiment on FedAvg: the settings of the paper, counted rounds, and rates chosen by
validation.
"""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.config import Run
from dfl.core.errors import InputError
from dfl.sweep import Cell
from experiments import common
from experiments.servers_and_robustness import fedavg_mcmahan2017 as experiment
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

EXPERIMENT = "servers_and_robustness.fedavg_mcmahan2017"
SMALL = ["--dataset", "digits", "--rounds", "3", "--seeds", "1"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits: a case with rates to choose from, and one with a
    given rate.
    """
    out = tmp_path_factory.mktemp("experiment")
    done = run_experiment(EXPERIMENT, out, *SMALL, "--cases", "shards_full", "shards_b10_e20")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return out


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert table["case"].tolist() == ["2NN, shards, B=inf, E=1", "2NN, shards, B=10, E=20"]
    assert table["rounds"].isna().all()  # three rounds are too few
    assert (table["rounds_run"] == 3).all()
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "NOT reached by every one of 1 seed in 3 rounds" in (published / "table.md").read_text()


def test_the_rate_is_the_one_that_validates_best(published: Path) -> None:
    tried = pd.read_csv(published / "tuning.csv").groupby("case", sort=False)
    of_full, given = tried.get_group("shards_full"), tried.get_group("shards_b10_e20")
    assert of_full["lr"].tolist() == list(experiment.CASES["shards_full"].rates)
    assert given["validation"].isna().all()
    best = of_full["lr"].iloc[int(of_full["validation"].argmax())]
    assert pd.read_csv(published / "table.csv")["lr"].tolist() == [
        best,
        experiment.CASES["shards_b10_e20"].rates[0],
    ]
    for row in of_full.itertuples():
        metrics = dfl.load(published / "tuning" / "cells" / f"case=shards_full,lr={row.lr:g}").rows
        assert row.validation == pytest.approx(metrics["validation_accuracy_mean"].max(), rel=1e-5)


def test_runs_that_count_train_on_everything_and_runs_that_choose_do_not(published: Path) -> None:
    counts, chooses = ((published / part).glob("cells/*/run.json") for part in ("", "tuning"))
    assert {dfl.load(file.parent).run.validation for file in counts} == {0.0}
    assert {dfl.load(file.parent).run.validation for file in chooses} == {0.1}


def test_a_tie_goes_to_the_first_and_divergence_loses() -> None:
    tried = pd.DataFrame({"lr": [0.1, 0.2, 0.4], "validation": [0.9, 0.9, 0.1]})
    assert common.chosen(tried) == 0.1
    assert common.chosen(tried.assign(validation=[0.1, 0.2, 0.7])) == 0.4
    assert common.chosen(tried.assign(validation=[np.nan, 0.2, np.nan])) == 0.2
    assert common.chosen(tried[1:2].assign(validation=np.nan)) == 0.2


PUBLISHED = {
    # Table 1 for C = 0.1, and Table 4: model, partition, E, B, target, rounds
    "iid_full": ("2nn", "iid", 1, 0, 0.97, 1474),
    "iid_b10": ("2nn", "iid", 1, 10, 0.97, 87),
    "shards_full": ("2nn", experiment.SHARDS, 1, 0, 0.97, 1796),
    "shards_b10": ("2nn", experiment.SHARDS, 1, 10, 0.97, 664),
    "iid_b10_e20": ("2nn", "iid", 20, 10, 0.97, 32),
    "shards_b10_e20": ("2nn", experiment.SHARDS, 20, 10, 0.97, 738),
    "cnn_iid_b10": ("cnn", "iid", 5, 10, 0.99, 18),
}


UNIT = {"iid_b10_unit": "iid_b10", "shards_b10_unit": "shards_b10"}
"""Cases that are repeated with pixels from 0 to 1."""


def test_every_number_of_the_paper_has_a_case() -> None:
    assert {*PUBLISHED, *UNIT} == set(experiment.CASES)


@pytest.mark.parametrize("name", UNIT)
def test_raw_pixels_are_all_that_is_changed(name: str) -> None:
    raw, plain = (
        experiment.grid(experiment.Options(), each, 0.1)[0].run for each in (name, UNIT[name])
    )
    assert raw == replace(plain, dataset="mnist:unit=true")
    assert experiment.CASES[name].published == experiment.CASES[UNIT[name]].published


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_settings_are_the_papers(name: str) -> None:
    cell, *_ = experiment.grid(experiment.Options(), name, 0.1)
    run = cell.run
    case = experiment.CASES[name]
    setting = (
        run.model,
        run.partition,
        run.local_epochs,
        run.batch_size,
        case.target,
        case.published,
    )
    assert setting == PUBLISHED[name]
    assert (run.dataset, run.peers, run.examples_per_peer, run.momentum) == (
        "mnist",
        100,
        None,
        0.0,
    )
    assert (run.algorithm, run.aggregator, run.lr_schedule) == (
        "fedavg:fraction=0.1",
        None,
        "constant",
    )
    assert run.until == f"accuracy={case.target}"
    assert cell.values == {"case": name, "lr": "0.1", "seed": 0}


def test_every_case_has_its_own_setting() -> None:
    runs = [experiment.run_of(experiment.Options(), name) for name in experiment.CASES]
    assert all(a != b for i, a in enumerate(runs) for b in runs[:i])


def test_seeds_and_rounds_are_at_most_those_given() -> None:
    several = experiment.grid(experiment.Options(seeds=2, rounds=7), "iid_b10", 0.1)
    assert [(cell.run.seed, cell.run.rounds) for cell in several] == [(0, 7), (1, 7)]
    one = experiment.grid(experiment.Options(seeds=9), "cnn_iid_b10", 0.1)
    assert [(cell.run.seed, cell.run.rounds) for cell in one] == [
        (0, experiment.CASES["cnn_iid_b10"].cap)
    ]


def rows(name: str, *seeds: list[float]) -> pd.DataFrame:
    """Evaluations every tenth round of runs whose accuracies are given."""
    return pd.concat(
        pd.DataFrame({
            "case": name, "lr": "0.1", "seed": seed, "accuracy_mean": values,
            "seconds": 2.0 * (seed + 1), "round": 10 * np.arange(len(values)),
        })
        for seed, values in enumerate(seeds)
    )  # fmt: skip


def test_rounds_are_counted_as_in_the_paper() -> None:
    """On the best accuracy so far, linear between evaluations: half-way from 20 to 30, and from 10
    to 30.
    """
    row = experiment.tabulate(
        rows("iid_b10", [0.1, 0.95, 0.96, 0.98], [0.1, 0.96, 0.2, 0.98])
    ).iloc[0]
    assert (row["fewest"], row["most"]) == pytest.approx((25, 25))
    row = experiment.tabulate(rows("iid_b10", [0.1, 0.97], [0.1, 0.96, 0.98])).iloc[0]
    assert (row["rounds"], row["fewest"], row["most"], row["seeds"]) == pytest.approx(
        (12.5, 10, 15, 2)
    )
    assert row["ratio"] == pytest.approx(12.5 / 87)
    assert (row["best_accuracy"], row["rounds_run"], row["seconds"]) == pytest.approx(
        (0.975, 20, 3)
    )


def test_a_seed_that_does_not_get_there_leaves_no_number() -> None:
    table = experiment.tabulate(rows("shards_b10", [0.1, 0.97], [0.1, 0.96]))
    assert table[["rounds", "ratio"]].isna().all(axis=None)
    assert (
        "shards, B=10, E=1: 97% NOT reached by every one of 2 seeds in 10 rounds"
        in experiment.finding(table)
    )
    assert "(best 0.9650), published for pixels 0 to 1 664" in experiment.finding(table)


def test_the_finding_is_read_off_the_table() -> None:
    table = experiment.tabulate(
        pd.concat([rows("iid_b10", [0.1, 0.97], [0.1, 0.96, 0.98]), rows("cnn_iid_b10", [0, 0.99])])
    )
    first, second = experiment.finding(table).split("; ")
    assert (
        first == "2NN, IID, B=10, E=1: 97% in 12 rounds (10 to 15 over 2 seeds), "
        "published for pixels 0 to 1 87, 0.14 of it"
    )
    assert (
        second == "CNN, IID, B=10, E=5: 99% in 10 rounds (10 to 10 over 1 seed), "
        "published for pixels 0 to 1 18, 0.56 of it."
    )


def test_the_figure_has_a_range_and_a_mark_for_the_paper() -> None:
    table = experiment.tabulate(
        pd.concat(
            [
                rows("iid_b10", [0.1, 0.97], [0.1, 0.96, 0.98]),
                rows("iid_b10_unit", [0.1, 0.97]),
                rows("iid_b10_e20", [0.1, 0.98]),
            ]
        )
    )
    (axes,) = experiment.draw(table).axes
    here, same, other = (
        np.asarray(line.get_xydata(), float)
        for line in axes.lines
        if line.get_marker() in ("o", "D")
    )
    assert here.tolist() == pytest.approx(np.array([[12.5, 0], [10, 1], [10 * 87 / 88, 2]]))
    assert same[1].tolist() == [87, 1]
    assert other[0].tolist() == [87, 0]
    assert np.isnan([same[0, 0], same[2, 0], other[1, 0], other[2, 0]]).all()  # memory is not drawn


def test_a_number_from_memory_is_in_no_column_of_published_ones() -> None:
    row = experiment.tabulate(rows("iid_b10_e20", [0.1, 0.98])).iloc[0]
    assert row["from_memory"] == 32
    assert row[["published", "published_for_pixels_0_to_1", "ratio"]].isna().all()
    assert "from memory 32" in experiment.finding(
        experiment.tabulate(rows("iid_b10_e20", [0.1, 0.98]))
    )


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment(EXPERIMENT, tmp_path, "--cases", "nonsense")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--cases must be among iid_b10, shards_b10" in done.stderr
    assert done.stderr.endswith("not nonsense\n")
    with pytest.raises(InputError, match="nonsense"):
        experiment.Options(cases=("nonsense",))


def test_finished_runs_are_not_run_again(published: Path) -> None:
    """With one of its two cases, the experiment reads its cells back, and its table holds that case
    alone.
    """
    records = {file: file.stat().st_mtime_ns for file in published.glob("**/run.json")}
    assert len(records) == len(experiment.CASES["shards_full"].rates) + 2
    before = pd.read_csv(published / "table.csv").iloc[:1]
    options = experiment.Options(
        out=published, dataset="digits", rounds=3, seeds=1, cases=("shards_full",)
    )
    experiment.experiment(options)
    assert {file: file.stat().st_mtime_ns for file in published.glob("**/run.json")} == records
    again = pd.read_csv(published / "table.csv")
    pd.testing.assert_frame_equal(again, before, check_dtype=False)  # 664 beside NaN is a float


@pytest.mark.parametrize("name", experiment.CASES)
def test_rates_are_a_grid_like_the_papers(name: str) -> None:
    """Neighbours are a factor of 10^(1/3), to the three digits that they are given with."""
    rates = experiment.CASES[name].rates
    assert [b / a for a, b in pairwise(rates)] == pytest.approx(
        [10 ** (1 / 3)] * (len(rates) - 1), rel=5e-3
    )


def test_what_helps_to_choose_is_never_the_test_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does worst on test data is best on validation data here, and is chosen; the best
    evaluation counts.
    """
    runs: list[Run] = []

    def measured(out: Path, cells: list[Cell], jobs: int) -> pd.DataFrame:
        runs.extend(cell.run for cell in cells)
        rates = [cell.values["lr"] for cell in cells]
        best = [float(rate) / 10 for rate in rates]
        rows = pd.DataFrame(
            {"lr": rates, "validation_accuracy_mean": best, "accuracy_mean": [1 - x for x in best]}
        )
        later = rows.assign(validation_accuracy_mean=0.9 * rows["validation_accuracy_mean"])
        return pd.concat([rows, later], ignore_index=True)

    monkeypatch.setattr(common, "measure", measured)
    tried = experiment.tune(experiment.Options(), "iid_b10")
    assert tried["validation"].tolist() == pytest.approx([0.00464, 0.01, 0.0215, 0.0464])
    assert common.chosen(tried) == 0.464
    assert [run.lr for run in runs] == [0.0464, 0.1, 0.215, 0.464]
    assert {(run.seed, run.rounds, run.eval_every, run.until) for run in runs} == {(0, 30, 6, None)}
