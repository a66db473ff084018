"""The experiment on precisions: its grid, table and finding."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.speed import precision as experiment
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def test_both_precisions_run_from_the_same_seeds(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run_experiment(
        "speed.precision", out, "--datasets", "digits", "--seeds", "2", "--rounds", "3"
    )
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(out / "table.csv").set_index("precision")
    assert list(table.index) == list(experiment.PRECISIONS["cpu"])
    seeds = pd.read_csv(out / "seeds.csv")
    losses = seeds.pivot(index="seed", columns="precision", values="train_loss")
    assert (losses["bf16"] != losses["float32"]).all()  # accuracies may be equal by chance
    each = seeds.pivot(index="seed", columns="precision", values="accuracy_mean")
    minus = (each["bf16"] - each["float32"]).mean()
    assert table.loc["bf16", "minus_float32"] == pytest.approx(minus, abs=1e-6)
    assert (table["ms_per_round"] > 0).all()


def test_the_finding_says_where_the_bar_is_missed() -> None:
    seeds = pd.DataFrame(
        [
            {
                "dataset": name, "precision": precision, "seed": seed,
                "accuracy_mean": 0.9 + 0.01 * seed - lost * (precision == "bf16"),
                "accuracy_min": 0.8,
            }
            for name, lost in (("a", 0.004), ("b", 0.006))
            for precision in experiment.PRECISIONS["cpu"]
            for seed in range(3)
        ]
    )  # fmt: skip
    times = {name: {"float32": 30.0, "bf16": 20.0} for name in ("a", "b")}
    text = experiment.finding(experiment.tabulate(seeds, times))
    assert (
        "a, bf16: within 0.005 of float32 in the mean over 3 paired seeds, -0.0040 ± 0.0000" in text
    )
    assert "b, bf16: NOT within 0.005" in text
    assert text.count("1.50 times as fast") == 2


def test_an_unknown_data_set_is_refused(tmp_path: Path) -> None:
    done = run_experiment("speed.precision", tmp_path / "out", "--datasets", "nist")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("precision: --datasets must be among mnist, cifar10, digits, not nist\n")
