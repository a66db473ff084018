"""The experiment on FLTrust: its grid, table, finding and figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

import dfl
from dfl.comm.mpi import connect
from dfl.comm.network import Network
from dfl.core.errors import InputError
from dfl.simulation.prepare import prepare
from experiments import common
from experiments.servers_and_robustness import robust_fltrust2021 as module
from experiments.servers_and_robustness.robust_fltrust2021 import ATTACKS, RULES, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
RATES = {"mean": 0.4, "fltrust": 0.2}
TINY = (
    "--dataset",
    "digits",
    "--peers",
    "10",
    "--rounds",
    "2",
    "--seeds",
    "2",
    "--rates",
    "0.01",
    "0.2",
)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, str]:
    """The experiment on few examples: its folder, its table and its output."""
    out = tmp_path_factory.mktemp("fltrust")
    done = run_experiment("servers_and_robustness.robust_fltrust2021", out, *TINY)
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return out, pd.read_csv(out / "table.csv"), done.stdout


def last_of(out: Path, cell: str) -> dict[Any, Any]:
    return dfl.load(out / "cells" / cell).rows.iloc[-1].to_dict()


def table_of(errors: dict[tuple[str, str], float], success: float = 0.5) -> pd.DataFrame:
    """The table of hand-made runs of ten rounds, one seed; what is not named has an error of
    0.05.
    """
    rows = [
        {
            "attack": attack,
            "rule": rule,
            "seed": 0,
            "round": t,
            "accuracy_mean": 0.1 if t == 0 else 1 - error,
        }
        | ({"backdoor_success_mean": success} if attack == "backdoor" else {})
        for attack in ATTACKS
        for rule in RULES
        if attack != "adaptive" or rule == "fltrust"
        for t, error in ((0, 0.9), (10, errors.get((attack, rule), 0.05)))
    ]
    return module.tabulate(module.by_seed(pd.DataFrame(rows), 10, RATES))


def test_a_row_per_attack_and_rule(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    _, table, printed = experiment
    assert list(zip(table["attack"], table["rule"], strict=True)) == [
        (a, r) for a in ATTACKS for r in RULES
    ]
    unknown = table["error"].isna()
    assert set(table["rule"][unknown]) == set(RULES) - {"fltrust"}
    assert set(table["attack"][unknown]) == {"adaptive"}
    assert table["error"][~unknown].between(0, 1).all()
    assert (table["backdoor_success"].notna() == (table["attack"] == "backdoor")).all()
    assert "\nFinding: over 2 seeds the mean has an error of" in printed
    assert printed.count("| adaptive | mean | - | - |") == 1


def test_numbers_are_those_of_the_runs(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    out, table, _ = experiment
    for row in table.dropna(subset="error").to_dict("records"):
        seeds = range(int(row["seeds"]))
        ends = [
            last_of(out, f"attack={row['attack']},rule={row['rule']},seed={seed}") for seed in seeds
        ]
        assert row["error"] == pytest.approx(
            1 - np.mean([end["accuracy_mean"] for end in ends]), rel=1e-5
        )
        if row["attack"] == "backdoor":
            opened = np.mean([end["backdoor_success_mean"] for end in ends])
            assert row["backdoor_success"] == pytest.approx(opened, rel=1e-5)


def test_every_cell_has_every_seed(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    out, whole, _ = experiment
    made = module.tabulate(pd.read_csv(out / "seeds.csv")).astype(
        {"lost_runs": float, "seeds": float}
    )
    pd.testing.assert_frame_equal(common.with_intervals(made, None), whole, rtol=1e-4)
    table = whole.dropna(subset="error")
    assert len(table) == 26
    assert (table["seeds"] == 2).all()
    assert table["std_over_seeds"].notna().all()


def test_the_rate_is_chosen_by_validation(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    out, table, printed = experiment
    best = {}
    for rule in ("mean", "fltrust"):
        found = {
            lr: last_of(out, f"tuned={rule},lr={lr},seed=0")["validation_accuracy_mean"]
            for lr in ("0.01", "0.2")
        }
        best[rule] = max(found, key=found.__getitem__)
        used = table.loc[table["rule"] == rule, "lr"].dropna()
        assert (used == float(best[rule])).all()
        assert len(used) == 5 + (rule == "fltrust")
        run = dfl.load(out / "cells" / f"attack=trim,rule={rule},seed=0").run
        assert run.lr == float(best[rule])
        assert run.validation == 0.0
    assert f"The learning rate is {best['fltrust']} for FLTrust and {best['mean']} else." in printed
    median = dfl.load(out / "cells" / "attack=trim,rule=median,seed=0").run
    assert median.lr == float(best["mean"])


def test_the_setting_is_that_of_the_paper() -> None:
    run = module.setting(Options(), "trim", "krum", lr=0.1, seed=3)
    assert (run.peers, run.partition, run.batch_size, run.momentum) == (
        100,
        "biased:q=0.5",
        32,
        0.0,
    )
    assert (run.attack, run.aggregator, run.algorithm) == (
        "trim:fraction=0.2",
        "krum:f=20",
        "fedavg",
    )
    trusting = module.setting(Options(), "none", "fltrust", lr=0.1, seed=3)
    assert (trusting.attack, trusting.algorithm) == ("none", "fltrust:root=100,bias=0.1")
    assert (
        module.setting(Options(peers=10), "none", "trimmed_mean", lr=0.1).aggregator
        == "trimmed_mean:f=2"
    )


def test_a_fifth_attacks() -> None:
    options = Options(dataset="digits", peers=10)
    network: Network = prepare(
        module.setting(options, "label_flip", "mean", lr=0.1, seed=0), connect()
    ).network
    assert len(network.threat_model.attackers) == 2


def test_the_adaptive_attack_is_for_fltrust() -> None:
    cells = module.grid(Options(seeds=1), {"mean": 0.3, "fltrust": 0.1})
    assert len(cells) == 5 * 5 + 1
    adaptive = [cell for cell in cells if str(cell.run.attack).startswith("adaptive")]
    assert [cell.values["rule"] for cell in adaptive] == ["fltrust"]
    for cell in cells:
        assert cell.run.lr == (0.1 if cell.values["rule"] == "fltrust" else 0.3)


def test_a_lost_model_guesses() -> None:
    rows = pd.DataFrame(
        [
            {"attack": "none", "rule": rule, "seed": 0, "round": t, "accuracy_mean": 0.7}
            for rule in RULES
            for t in ((0,) if rule == "mean" else (0, 10))
        ]
    )
    table = module.tabulate(module.by_seed(rows, 10, RATES)).set_index("rule")
    assert table.loc["mean", "error"] == pytest.approx(0.9)
    assert table.loc["krum", "error"] == pytest.approx(0.3)
    assert table["lost_runs"].tolist() == [1, 0, 0, 0, 0]


def test_no_number_from_memory_stands_beside() -> None:
    """The paper's tables were not at hand: its claims are judged, and no figure is called
    published.
    """
    made = table_of({})
    for table in (made, pd.read_csv(ROOT / "experiments/results/robust_fltrust2021/table.csv")):
        assert not [name for name in map(str, table) if "paper" in name or "published" in name]
    assert not [
        line
        for axes in module.draw(made, Options()).axes
        for line in axes.lines
        if line.get_marker() == "D"
    ]


HURT = {("trim", rule): 0.2 for rule in ("mean", "median", "trimmed_mean")}


@pytest.mark.parametrize(
    ("errors", "verdicts"),
    [
        (HURT | {("krum", "krum"): 0.6}, "holds holds holds"),
        (HURT | {("trim", "fltrust"): 0.1, ("krum", "krum"): 0.4}, "FAILS holds FAILS"),
        (
            HURT | {("trim", "fltrust"): 0.07, ("trim", "median"): 0.06, ("krum", "krum"): 0.6},
            "holds FAILS holds",
        ),
    ],
)
def test_the_finding_judges_the_bars(errors: dict[tuple[str, str], float], verdicts: str) -> None:
    text = module.finding(table_of(errors), Options())
    small, more, broken = verdicts.split()
    assert f"under every attack: {small} (" in text
    assert f"FLTrust loses least: {more} (" in text
    assert f"breaks Krum: {broken} (" in text


def test_the_finding_has_errors_and_backdoors() -> None:
    text = module.finding(table_of(HURT | {("label_flip", "fltrust"): 0.3}), Options())
    assert "the mean has an error of 0.050 without an attack" in text
    assert "under every attack: FAILS (+0.250 under label_flip, +0.000 under trim)" in text
    assert "backdoor succeeds on at most 3% of the images: FAILS (50% with mean" in text
    assert "of the images: holds" in module.finding(table_of(HURT, success=0.03), Options())


def test_the_figure_shows_what_was_measured() -> None:
    figure = module.draw(table_of(HURT), Options())
    errors, opened = figure.axes
    heights = [bar.get_height() for bar in errors.patches if isinstance(bar, Rectangle)]
    assert len(heights) == len(module.ATTACKS) * len(RULES)
    assert sum(abs(height - 0.2) < 1e-9 for height in heights) == 3
    assert len(opened.patches) == len(RULES)
    assert [text.get_text() for text in errors.get_xticklabels()] == [
        name.replace("_", " ") for name in ATTACKS
    ]


def test_a_data_set_without_a_model_is_refused() -> None:
    with pytest.raises(InputError, match="--dataset must be one of mnist, digits, not 'adult'"):
        module.setting(Options(dataset="adult"), "none", "mean", lr=0.1)
