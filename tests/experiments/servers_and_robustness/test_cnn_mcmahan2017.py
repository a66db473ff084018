"""The experiment on FedAvg with a CNN: the settings of Tables 1 and 2, and its tables."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments import reproduction
from experiments.servers_and_robustness import cnn_mcmahan2017 as experiment
from experiments.servers_and_robustness.client_fraction import by_seed
from experiments.servers_and_robustness.fedavg_mcmahan2017 import SHARDS, UNIT, grid
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def test_published_rounds_are_those_of_the_tables() -> None:
    with (reproduction.HERE / "reproduction.csv").open(newline="") as file:
        printed = {
            (row["table"], row["row"]): int(row["value"])
            for row in csv.DictReader(file)
            if row["row"].startswith("CNN, ") and row["quantity"] == "rounds to 99 %"
        }
    seen = set()
    for case in experiment.CASES.values():
        _, data, epochs, batch, fraction = case.title.replace("=", " = ").split(", ")
        one = f"CNN, {data}, {batch}, {epochs}, {fraction}"
        federated_sgd = (epochs, batch) == ("E = 1", "B = inf")
        two = f"CNN, {data}, " + ("FedSGD" if federated_sgd else f"{epochs}, {batch}")
        known = {
            key: printed[key] for key in (("Table 2", two), ("Table 1", one)) if key in printed
        }
        if fraction != "C = 0.1":
            known.pop(("Table 2", two), None)
        assert case.published == next(iter(known.values())), case.title
        seen |= {*known}
    assert seen == {*printed}


def test_settings_are_those_of_the_tables() -> None:
    assert len(experiment.CASES) == 33
    for name, case in experiment.CASES.items():
        cell, *others = grid(experiment.Options(), name, 0.1)
        partition, epochs, batch, fraction = name.split("_")
        run = cell.run
        assert len(others) == 2
        assert (run.dataset, run.model, run.peers, run.momentum) == (UNIT, "cnn", 100, 0)
        assert run.partition == {"iid": "iid", "shards": SHARDS}[partition]
        assert run.local_epochs == int(epochs[1:])
        assert run.batch_size == {"binf": 0, "b10": 10, "b50": 50}[batch]
        assert run.algorithm == f"fedavg:fraction={max(0.01, float(fraction[1:])):g}"
        assert (run.until, run.eval_examples) == ("accuracy=0.99", 10_000)
        assert len(case.rates) == 3


def test_rounds_are_counted_to_99_percent_and_a_missed_target_leaves_no_number() -> None:
    rows = pd.concat(
        pd.DataFrame({
            "case": name, "lr": "0.1", "seed": seed, "accuracy_mean": values,
            "round": 10 * np.arange(len(values)),
        })
        for name, seed, values in (
            ("iid_e1_b10_c0.1", 0, [0.1, 0.98, 1.0]),
            ("iid_e1_b10_c0.1", 1, [0.1, 0.99]),
            ("iid_e5_b10_c0", 0, [0.1, 0.98]),  # the cap of 100 rounds is not reached
            ("iid_e5_b10_c0", 1, [0.1, 0.98, 0.98, 0.99]),
            ("iid_e5_b10_c0.1", 0, [0.1, 0.98, 0.98, 0.98, 0.98]),
            ("iid_e5_b10_c0.1", 1, [0.1, 0.99]),
        )
    )  # fmt: skip
    table = experiment.tabulate(by_seed(rows, experiment.TARGET))
    assert table["rounds"].tolist() == pytest.approx([12.5, np.nan, np.nan], nan_ok=True)
    assert table["rounds_std"].tolist() == pytest.approx(
        [np.sqrt(12.5), np.nan, np.nan], nan_ok=True
    )
    assert table["published"].tolist() == [34, 50, 20]
    assert table["ratio"].iloc[0] == pytest.approx(12.5 / 34)
    assert table["missed"].tolist() == [0, 1, 1]
    assert table["diverged"].tolist() == [0, 1, 0]
    fewer = experiment.tabulate(by_seed(rows, experiment.TARGET), rounds=10)
    assert fewer["diverged"].tolist() == [0, 0, 0]
    assert table["rounds_run"].tolist() == [20, 10, 40]
    assert experiment.finding(table) == (
        "IID, E=1, B=10, C=0.1: 12.5 rounds (published 34); "
        "IID, E=5, B=10, C=0: 1 of 2 seeds NOT in 10 rounds, 1 diverged (published 50); "
        "IID, E=5, B=10, C=0.1: 1 of 2 seeds NOT in 40 rounds (published 20)."
    )


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    done = run_experiment(
        "servers_and_robustness.cnn_mcmahan2017", tmp_path, "--dataset", "digits", "--rounds", "2",
        "--seeds", "1", "--cases", "shards_e5_b10_c0", "iid_e1_binf_c0.1",
        "--eval-examples", "300",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "IID, E=1, B=inf, C=0.1: 1 of 1 seeds NOT in 2 rounds (published 626)" in done.stdout
    table = pd.read_csv(tmp_path / "table.csv")
    assert table["published"].tolist() == [956, 626]
    assert len(pd.read_csv(tmp_path / "tuning.csv")) == 6
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
