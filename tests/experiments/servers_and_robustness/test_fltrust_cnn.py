"""The experiment on FLTrust with a CNN: its grid, table, finding and figure."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import dfl
from experiments import common
from experiments.servers_and_robustness import fltrust_cnn as experiment
from experiments.servers_and_robustness.fltrust_cnn import Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

NAME = "servers_and_robustness.fltrust_cnn"
FEW = (
    "--dataset", "digits", "--clients", "10", "--rounds", "20", "--eval-examples", "100",
    "--seeds", "2", "--attacks", "none", "backdoor",
)  # fmt: skip
CELLS = (("none", "mean"), ("none", "fltrust"), ("backdoor", "fltrust"))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The experiment on digits for twenty rounds: its folder and its output."""
    out = tmp_path_factory.mktemp("fltrust_cnn")
    done = run_experiment(NAME, out, *FEW)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(ran: tuple[Path, str]) -> None:
    out, printed = ran
    table = pd.read_csv(out / "table.csv")
    assert tuple(zip(table["attack"], table["rule"], strict=True)) == CELLS
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert (table["backdoor_success"].notna() == (table["attack"] == "backdoor")).all()
    assert (table["trust"].notna() == (table["rule"] == "fltrust")).all()
    assert (table["trust_of_attackers"].notna() == (table["attack"] == "backdoor")).all()


def test_the_numbers_are_those_of_the_last_tenth_of_the_rounds(ran: tuple[Path, str]) -> None:
    out, _ = ran
    for row in pd.read_csv(out / "seeds.csv").to_dict("records"):
        values = {name: row[name] for name in ("attack", "rule", "seed")}
        tail = dfl.load(common.cell_folder(out, **values)).rows.set_index("round").loc[[19, 20]]
        assert row["error"] == pytest.approx(1 - tail["accuracy_mean"].mean(), abs=1e-5)
        if row["attack"] == "backdoor":
            opened = tail["backdoor_success_mean"].mean()
            assert row["backdoor_success"] == pytest.approx(opened, abs=1e-5)


def test_a_single_cell_has_the_row_of_the_whole_grid(ran: tuple[Path, str], tmp_path: Path) -> None:
    out, _ = ran
    one = "attack=backdoor,rule=fltrust,seed=1"
    done = run_experiment(NAME, tmp_path / "one", *FEW, "--only", one)
    assert done.returncode == 0, done.stderr
    header, *rows = (out / "seeds.csv").read_text().splitlines()
    assert done.stdout.splitlines() == [header, rows[-1]]


def test_the_setting_is_that_of_the_paper() -> None:
    run = experiment.setting(Options(), "backdoor", "fltrust", 3)
    assert (run.peers, run.partition, run.batch_size, run.local_steps, run.momentum) == (
        100, "biased:q=0.5", 32, 1, 0,
    )  # fmt: skip
    assert (run.rounds, run.seed, run.attack) == (2000, 3, "backdoor:fraction=0.2")
    assert run.algorithm == "fltrust:root=100,bias=0.1,batch=0"
    assert run.lr == pytest.approx(0.01875)
    mean = experiment.setting(Options(), "none", "mean", 3)
    assert (mean.algorithm, mean.attack, mean.lr) == ("fedavg", "none", run.lr)
    assert len(experiment.grid(Options(seeds=3))) == 18


def test_the_finding_judges_every_claim() -> None:
    seeds = pd.DataFrame(
        [
            ("none", "mean", 0, 0.05, None, None, None, 2000),
            ("none", "fltrust", 0, 0.06, None, 0.3, None, 2000),
            ("backdoor", "fltrust", 0, 0.08, 0.5, 0.3, 0.2, 2000),
            ("trim", "fltrust", 0, 0.10, None, 0.3, 0.0, 2000),
        ],
        columns=[*experiment.LABELS, "seed", *experiment.FIGURES, "rounds_run"],
    )
    assert experiment.finding(experiment.tabulate(seeds)) == (
        "none: +0.010 above the error of the mean without an attack, at most 0.04 holds; "
        "backdoor: +0.030 above the error of the mean without an attack, at most 0.04 holds; "
        "trim: +0.050 above the error of the mean without an attack, at most 0.04 FAILS; "
        "the backdoor succeeds on 50.0%, at most 0.03 FAILS."
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ("--attacks", "alie"),
            "fltrust_cnn: --attacks must be among none, backdoor, trim, krum, label_flip, not alie",
        ),
        (
            ("--dataset", "cifar10"),
            "fltrust_cnn: --dataset must be one of mnist, digits, not 'cifar10'",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, flags: tuple[str, ...], line: str) -> None:
    done = run_experiment(NAME, tmp_path / "out", *flags)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.strip().splitlines()[-1].endswith(line)
    assert not (tmp_path / "out").exists()
