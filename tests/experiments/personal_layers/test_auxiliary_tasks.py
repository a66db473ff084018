"""The experiment on auxiliary tasks and weights: its runs, differences, table, finding, figure."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.sweep.grid import name_of
from experiments import common
from experiments.personal_layers import auxiliary_tasks as experiment
from tests.support.launched import here

pytestmark = pytest.mark.slow

DIFFERENCES = [f"{name}_minus" for name in experiment.FIGURES]

SMALL: dict[str, Any] = {
    "dataset": "digits", "devices": 10, "examples": 40, "look": 100, "rounds": 8, "before": 6,
    "seeds": 2, "jobs": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits with the weights 0 and 3.5."""
    out = tmp_path_factory.mktemp("experiment")
    with pytest.MonkeyPatch.context() as patch, here() as launched:
        patch.setattr(experiment, "WEIGHTS", (0.0, 3.5))
        experiment.experiment(experiment.Options(**SMALL, out=out))
    assert sorted(launched) == sorted(
        name_of({"before": data, "seed": seed}) for data in experiment.DATA for seed in range(2)
    )
    return out


@pytest.fixture(scope="module")
def seeds(published: Path) -> pd.DataFrame:
    """The rows of seeds.csv."""
    return pd.read_csv(published / "seeds.csv")


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert len(table) == 1 + 4 * 2 + 1 + 3
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "\n\nFinding: of 8 tasks and weights, " in (published / "table.md").read_text()


def test_the_numbers_are_those_of_the_runs(published: Path, seeds: pd.DataFrame) -> None:
    for row in seeds.to_dict("records"):
        values = {name: row[name] for name in [*experiment.LABELS, "seed"]}
        rows = pd.read_csv(published / "cells" / name_of(values) / "metrics.csv")
        end, early = rows.iloc[-1], rows[rows["round"] == 4].iloc[0]
        expected = [
            100 * end["local_accuracy_mean"], 100 * end["accuracy_ensemble"],
            100 * end["accuracy_mean"], 100 * early["local_accuracy_mean"],
            end["payload_bytes"] / 1e6,
        ]  # fmt: skip
        assert [row[name] for name in (*experiment.FIGURES, "MB")] == pytest.approx(
            expected, rel=1e-5
        )


def test_all_methods_continue_from_the_same_model(published: Path, seeds: pd.DataFrame) -> None:
    for row in seeds.to_dict("records"):
        values = {name: row[name] for name in [*experiment.LABELS, "seed"]}
        begun = pd.read_csv(published / "cells" / name_of(values) / "metrics.csv").iloc[0]
        before = name_of({"before": row["data"], "seed": row["seed"]})
        end = pd.read_csv(published / "cells" / before / "metrics.csv").iloc[-1]
        assert begun["accuracy_mean"] == end["accuracy_mean"]
        assert begun["local_accuracy_mean"] == end["local_accuracy_mean"]


def test_a_task_of_weight_0_changes_nothing_and_one_of_weight_3_and_a_half_does(
    seeds: pd.DataFrame,
) -> None:
    tasks = seeds[seeds["auxiliary"] != "none"]
    for (task, weight), own in common.groups(tasks, ["auxiliary", "weight"]):
        moved = own[DIFFERENCES].abs().to_numpy().max()
        assert moved < 0.05 if weight == 0 else moved > 0.05, task
    assert set(tasks["auxiliary"]) == set(experiment.TASKS)


def test_tasks_send_no_more_than_the_shared_layers(seeds: pd.DataFrame) -> None:
    """64-64-32-10: 2,080 and 330 parameters; two devices of ten receive and send, in eight
    rounds.
    """
    assert seeds["MB"].to_numpy() == pytest.approx(8 * 2 * 2 * 4 * (2080 + 330) / 1e6, rel=1e-5)


def test_weights_count_where_devices_have_unequal_numbers(
    published: Path, seeds: pd.DataFrame
) -> None:
    for data, others in (("dirichlet", {"uniform", "gradient"}), ("shards", {"gradient"})):
        plain = seeds[(seeds["data"] == data) & (seeds["auxiliary"] == "none")]
        moved = plain[(plain[DIFFERENCES] != 0).any(axis=1)]
        assert set(moved["weighting"]) == others
        peers = [
            dfl.load(published / "cells" / name_of({"before": data, "seed": seed})).peers
            for seed in range(2)
        ]
        assert all((each["n_train"].nunique() == 1) == (data == "shards") for each in peers)


def test_one_cell_alone_has_its_row(
    published: Path, seeds: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "data=dirichlet,auxiliary=none,weight=0.0,weighting=uniform,seed=1"
    with here() as launched:
        experiment.experiment(experiment.Options(**SMALL, out=tmp_path, only=name))
    assert launched == ["before=dirichlet,seed=1"]
    row = pd.read_csv(StringIO(capsys.readouterr().out))
    own = seeds[(seeds["weighting"] == "uniform") & (seeds["seed"] == 1)].reset_index(drop=True)
    pd.testing.assert_frame_equal(row, own[list(row)], check_dtype=False)


def test_a_cell_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(dfl.InputError, match="--only must name a cell, not 'seed=0'"):
        experiment.experiment(experiment.Options(**SMALL, out=tmp_path / "out", only="seed=0"))
    assert not (tmp_path / "out").exists()


def test_the_setting(published: Path) -> None:
    options = experiment.Options(**SMALL, out=published)
    task = {"auxiliary": "jigsaw", "weight": 0.1, "weighting": "examples"}
    run = experiment.second(options, {"data": "shards", "seed": 1} | task)
    assert (run.auxiliary, run.share, run.algorithm, run.partition, run.seed) == (
        "jigsaw:weight=0.1,head_layers=2", "head:2", "fedavg:fraction=0.2,weighting=examples",
        "shards:per_peer=2", 1,
    )  # fmt: skip
    assert (run.ensemble, run.rounds, run.examples_per_peer) == (True, 8, 40)
    begun = experiment.first(options, {"data": "dirichlet", "seed": 1}).run
    assert (begun.auxiliary, begun.share, begun.rounds, begun.partition) == (
        "none", "all", 6, "dirichlet:alpha=0.1",
    )  # fmt: skip


def rows() -> pd.DataFrame:
    """Three seeds, between which all figures differ; jigsaw gains 1, 2 and 3 points, gradient
    loses 1.
    """
    methods = [
        experiment.BASE,
        experiment.BASE | {"auxiliary": "jigsaw", "weight": 0.1},
        experiment.BASE | {"weighting": "gradient"},
    ]
    return pd.DataFrame(
        [
            {"data": "shards"} | method | {"seed": seed}
            | dict.fromkeys(experiment.FIGURES, 50.0 + 10 * seed + (0, 1 + seed, -1)[k])
            | {"MB": 7.0}
            for seed in range(3) for k, method in enumerate(methods)
        ]
    )  # fmt: skip


def table() -> pd.DataFrame:
    made = experiment.tabulate(experiment.with_differences(rows()))
    return common.with_intervals(made, 3)


def test_differences_are_paired_by_seed() -> None:
    by = common.by_label(table(), ["auxiliary", "weighting"])
    row = by["jigsaw", "examples"]
    assert (row["local_test"], row["local_test_minus"], row["local_test_minus_std"]) == (62, 2, 1)
    assert row["new_alone_minus_ci95"] == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert by["none", "gradient"]["early_local_minus"] == -1
    assert by["none", "gradient"]["early_local_minus_ci95"] == 0
    assert by["none", "examples"]["new_test_minus"] == 0
    assert {row["MB"] for row in by.values()} == {7.0}


def test_the_finding_counts_tasks_whose_interval_excludes_no_difference() -> None:
    text = experiment.finding(table())
    assert text.startswith("of 1 tasks and weights, 0 raise the local test and 0 lower it, ")
    assert "shards, jigsaw 0.1: local test +2.00 ± 2.48, " in text
    assert "shards, gradient: local test -1.00 ± 0.00, " in text
    worse = table().assign(local_test_minus=lambda each: -2 * each["local_test_minus"])
    assert "0 raise the local test and 1 lower it" in experiment.finding(worse)


def test_the_figure_shows_the_differences() -> None:
    panels = experiment.draw(table(), experiment.Options()).axes
    assert len(panels) == len(experiment.FIGURES)
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["jigsaw 0.1", "gradient"]
    for axes in panels:
        points = np.asarray(axes.lines[0].get_xdata(), float)
        assert points.tolist() == [2, -1]
