"""The experiment on FedAvg, FedSGD and SGD: its settings, its counts of rounds and its tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.reproduction import numbers
from experiments.servers_and_robustness import cifar10_mcmahan2017 as experiment
from experiments.servers_and_robustness.fedavg_mcmahan2017 import grid
from tests.support.cifar_files import contents
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def test_settings_and_published_rounds_are_those_of_table_3() -> None:
    printed = {
        one.row: int(one.value)
        for one in numbers()
        if one.table == "Table 3" and one.quantity == "rounds to 80 %"
    }
    assert {case.published for case in experiment.CASES.values()} == {*printed.values()}
    assert experiment.CASES["sgd"].published == printed["CIFAR-10, SGD, B = 100"]
    runs = {name: grid(experiment.Options(), name, 0.1)[0].run for name in experiment.CASES}
    assert {run.momentum for run in runs.values()} == {0}
    assert {run.until for run in runs.values()} == {"accuracy=0.55"}
    fedavg, fedsgd, sgd = (runs[name] for name in ("fedavg", "fedsgd", "sgd"))
    assert (fedavg.peers, fedavg.local_epochs, fedavg.batch_size) == (100, 5, 50)
    assert (fedsgd.peers, fedsgd.local_epochs, fedsgd.batch_size) == (100, 1, 0)
    assert (sgd.peers, sgd.local_steps, sgd.batch_size) == (1, experiment.UPDATES, 100)
    images = 50_000 // 100 * 10
    assert {"fedavg": 5 * images, "fedsgd": images, "sgd": 100} == experiment.IMAGES


def test_rounds_are_counted_to_every_target_and_those_of_sgd_in_updates() -> None:
    rows = pd.concat(
        pd.DataFrame({
            "case": name, "lr": "0.1", "seed": seed, "accuracy_mean": values,
            "round": 10 * np.arange(len(values)),
        })
        for name, seed, values in (
            ("fedavg", 0, [0.1, 0.45, 0.55]),
            ("fedavg", 1, [0.1, 0.55]),
            ("sgd", 0, [0.1, 0.5, 0.4, 0.6]),
            ("sgd", 1, [0.1, 0.5, 0.55]),
            ("fedsgd", 0, [0.1, 0.5, 0.51]),
            ("fedsgd", 1, [0.1, 0.55]),
        )
    )  # fmt: skip
    seeds = experiment.by_seed(rows)
    table = experiment.tabulate(seeds).set_index("case")
    assert table["rounds_to_55"].tolist() == pytest.approx(
        [(20 + 10) / 2, 100 * (25 + 20) / 2, np.nan], nan_ok=True
    )
    assert table["rounds_to_50"].tolist() == pytest.approx(
        [(15 + 10 * 0.4 / 0.45) / 2, 1000, (10 + 10 * 0.4 / 0.45) / 2]
    )
    assert table.loc["SGD", "times_fedavg"] == pytest.approx(2250 / 15)
    assert table.loc["FedAvg", "images"] == pytest.approx(15 * 0.025)
    assert table.loc["FedSGD", "published_times_fedavg"] == pytest.approx(3750 / 280)
    found = experiment.finding(table.reset_index())
    assert "SGD 2250 rounds, 150.0 times those of FedAvg (published, to 80 %: 64.3)" in found
    assert "FedAvg 15 rounds; SGD" in found
    assert "FedSGD NOT in 20 rounds." in found


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "UPDATES", 10)
    monkeypatch.setitem(experiment.CASES["sgd"].setting, "local_steps", 10)
    folder = tmp_path / "data/cifar10"
    folder.mkdir(parents=True)
    for name, raw in contents(120).items():
        (folder / name).write_bytes(raw)
    done = run_experiment(
        "servers_and_robustness.cifar10_mcmahan2017", tmp_path / "out",
        "--data-dir", str(tmp_path / "data"), "--rounds", "2", "--seeds", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "out/table.csv")
    assert table["case"].tolist() == ["FedAvg", "SGD", "FedSGD"]
    assert table["rounds_run"].tolist() == [2, 2 * 10, 2]
    assert len(pd.read_csv(tmp_path / "out/tuning.csv")) == 9
    assert (tmp_path / "out/figure.png").read_bytes().startswith(b"\x89PNG")
