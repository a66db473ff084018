"""The experiment on labels per device: its partitions, training lengths, table and finding."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from experiments import common
from experiments.personal_layers import device_variance as experiment
from tests.support.launched import here

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "dataset": "digits", "devices": 10, "examples": 60, "labels": (10, 1),
    "model": "mlp:hidden=12+8", "look": 200, "rounds": 10, "before": 3, "seeds": 1, "jobs": 1,
}  # fmt: skip
METHODS = ["local only", "FedAvg", "LG-FedAvg"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits."""
    out = tmp_path_factory.mktemp("experiment")
    with here() as launched:
        experiment.experiment(experiment.Options(**SMALL, out=out))
    assert len(launched) == 2 * 3
    return out


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert table["labels"].tolist() == [10] * 3 + [1] * 3
    assert table["method"].tolist() == METHODS * 2
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "\n\nFinding: 10 labels: local test best with " in (published / "table.md").read_text()


def test_the_numbers_are_those_of_the_runs(published: Path) -> None:
    for row in pd.read_csv(published / "table.csv").to_dict("records"):
        values = {"labels": row["labels"], "method": row["method"], "seed": 0}
        end = dfl.load(common.cell_folder(published, **values)).rows.iloc[-1]
        assert row["local_test"] == pytest.approx(100 * end["local_accuracy_mean"], rel=1e-5)
        assert row["new_test"] == pytest.approx(100 * end["accuracy_ensemble"], rel=1e-5)
        assert row["new_alone"] == pytest.approx(100 * end["accuracy_mean"], rel=1e-5)


def test_bytes_are_those_of_the_shared_part(published: Path) -> None:
    """64-12-8-10 has 974 parameters, 194 of them behind the first layer; one device of ten in each
    of ten rounds.
    """
    table = pd.read_csv(published / "table.csv").set_index(["labels", "method"])["MB"]
    assert table[1, "local only"] == 0
    assert table[1, "FedAvg"] == pytest.approx(10 * 2 * 4 * 974 / 1e6, rel=1e-5)
    assert table[1, "LG-FedAvg"] == pytest.approx((3 * 974 + 7 * 194) * 2 * 4 / 1e6, rel=1e-5)


def test_the_number_of_labels_is_that_of_the_runs(published: Path) -> None:
    table = pd.read_csv(published / "table.csv").set_index(["labels", "method"])["classes"]
    for labels in (10, 1):
        held = dfl.load(published / "cells" / f"labels={labels},method=FedAvg,seed=0").peers[
            "labels"
        ]
        counts = [len(str(each).split()) for each in held]
        assert table[labels, "FedAvg"] == pytest.approx(np.mean(counts))
    assert table[1, "FedAvg"] == 1
    assert table[10, "FedAvg"] > 9


def test_all_methods_train_for_as_many_epochs() -> None:
    cells = experiment.grid(experiment.Options())
    assert len(cells) == 4 * 3 * 5
    by = {
        (cell.values["labels"], cell.values["method"]): cell.run
        for cell in cells
        if cell.values["seed"] == 1
    }
    assert by[10, "FedAvg"].partition == "iid"
    assert by[2, "LG-FedAvg"].partition == "labels:per_peer=2"
    alone, fedavg, lg = (by[5, method] for method in METHODS)
    assert (alone.algorithm, alone.rounds, fedavg.rounds, lg.rounds) == ("local_only", 8, 80, 80)
    assert (fedavg.share, fedavg.share_all_until) == ("all", None)
    assert (lg.share, lg.share_all_until, lg.algorithm) == ("head:2", "50", "fedavg:fraction=0.1")
    assert {run.seed for run in by.values()} == {1}
    assert all(run.ensemble and run.eval_every == run.rounds for run in by.values())


def rows() -> pd.DataFrame:
    """Two seeds; alone is best locally with one label, FedAvg on new examples, LG-FedAvg locally
    with ten.
    """
    figures = {
        (10, "local only"): (0.7, 0.6), (10, "FedAvg"): (0.8, 0.9), (10, "LG-FedAvg"): (0.85, 0.8),
        (1, "local only"): (1.0, 0.3), (1, "FedAvg"): (0.5, 0.5), (1, "LG-FedAvg"): (0.9, 0.4),
    }  # fmt: skip
    return pd.DataFrame(
        [
            {"labels": labels, "method": method, "seed": seed, "round": t,
             "local_accuracy_mean": t * local, "accuracy_ensemble": t * (new + 0.02 * seed),
             "accuracy_mean": t * 0.2, "payload_bytes": 3e6 * t}
            for (labels, method), (local, new) in figures.items() for seed in (0, 1) for t in (0, 1)
        ]
    )  # fmt: skip


def test_the_table_and_the_finding_follow_from_the_rows() -> None:
    table = experiment.tabulate(rows(), {10: 9.9, 1: 1.0})
    row = common.by_label(table, ["labels", "method"])[1, "FedAvg"]
    figures = (
        "classes",
        "local_test",
        "new_test",
        "new_alone",
        "MB",
        "local_test_std",
        "new_test_std",
    )
    assert [row[name] for name in figures] == pytest.approx([1, 50, 51, 20, 3, 0, np.sqrt(2)])
    assert experiment.finding(table) == (
        "10 labels: local test best with LG-FedAvg (85.0 %), new test with FedAvg (91.0 %); "
        "1 labels: local test best with local only (100.0 %), new test with FedAvg (51.0 %)."
    )


def test_the_figure_has_a_line_for_each_method() -> None:
    left, right = experiment.draw(
        experiment.tabulate(rows(), {10: 9.9, 1: 1.0}), experiment.Options()
    ).axes
    assert [left.get_title(), right.get_title()] == ["local test", "new test"]
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == METHODS
    assert [text.get_text() for text in left.get_xticklabels()] == ["10", "1"]


@pytest.mark.parametrize("labels", [(), (0,), (2, 11)])
def test_bad_input_is_refused_in_one_line(labels: tuple[int, ...]) -> None:
    with pytest.raises(dfl.InputError, match="--labels must be from 1 to 10, not"):
        experiment.Options(labels=labels)
