"""The experiment on the share of clients: the settings of Table 1, and its tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.servers_and_robustness import client_fraction as experiment
from experiments.servers_and_robustness.fedavg_mcmahan2017 import CASES, SHARDS, UNIT, grid
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def test_settings_are_those_of_the_table() -> None:
    assert len(experiment.CASES) == 16
    for name, case in experiment.CASES.items():
        cell, *others = grid(experiment.Options(), name, 0.1)
        partition, batch, fraction = name.split("_")
        run = cell.run
        assert len(others) == 2
        assert (run.dataset, run.model, run.peers, run.local_epochs) == (UNIT, "2nn", 100, 1)
        assert run.partition == {"iid": "iid", "shards": SHARDS}[partition]
        assert run.batch_size == {"b10": 10, "full": 0}[batch]
        assert run.momentum == 0
        assert run.algorithm == f"fedavg:fraction={max(0.01, float(fraction)):g}"
        assert run.until == "accuracy=0.97"
        assert len(case.rates) == 4


def test_cases_of_a_tenth_are_those_of_the_other_experiment() -> None:
    for partition, batch in experiment.PUBLISHED:
        other = CASES[f"{partition}_{batch}"]
        case = experiment.CASES[f"{partition}_{batch}_0.1"]
        assert case.published == other.published
        assert {**case.setting} == {
            "partition": "iid", "batch_size": 10, **other.setting,
            "algorithm": "fedavg:fraction=0.1",
        }  # fmt: skip


def rows(name: str, *seeds: list[float]) -> pd.DataFrame:
    """Evaluations every tenth round of runs whose accuracies are given."""
    return pd.concat(
        pd.DataFrame({
            "case": name, "lr": "0.1", "seed": seed, "accuracy_mean": values,
            "round": 10 * np.arange(len(values)),
        })
        for seed, values in enumerate(seeds)
    )  # fmt: skip


def test_rounds_and_updates_are_counted_and_a_missed_target_leaves_no_number() -> None:
    found = rows("iid_b10_0.5", [0.1, 0.96, 0.98], [0.1, 0.97])
    missed = rows("iid_b10_1", [0.1, 0.97], [0.1, 0.9])
    seeds = experiment.by_seed(pd.concat([found, missed]))
    table = experiment.tabulate(seeds)
    half, whole = table.to_dict("records")
    assert (half["rounds"], half["updates"], half["published"]) == (12.5, 625, 75)
    assert half["ratio"] == pytest.approx(12.5 / 75)
    assert np.isnan(whole["rounds"])
    assert np.isnan(whole["updates"])
    assert experiment.finding(table) == (
        "2NN, IID, B=10, C = 0.5, 1: 12, NOT in 10 rounds (published 75, 70)."
    )


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    done = run_experiment(
        "servers_and_robustness.client_fraction", tmp_path, "--dataset", "digits", "--rounds", "2",
        "--seeds", "1", "--cases", "shards_full_0", "iid_b10_0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "C = 0: NOT in 2 rounds (published 4278)" in done.stdout
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["partition"].tolist() == ["shards", "iid"]
    tried = pd.read_csv(tmp_path / "tuning.csv").groupby("case")
    for (name, own), lr in zip(tried, table["lr"][::-1], strict=True):
        assert own["lr"].tolist() == list(experiment.CASES[str(name)].rates)
        assert lr in own["lr"].tolist()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
