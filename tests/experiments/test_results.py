"""The committed results: tables are those of their seeds, and follow the rules of every page."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.sweep import runner
from experiments import cells, common
from experiments.messages_and_graphs import faults, label_coverage, local_steps, update_mixing
from experiments.methods import convergence_rates, methods_cifar10
from experiments.personal_layers import (
    auxiliary_tasks,
    easy_vqa,
    lg_depth,
    lg_fair,
    lg_rotated,
    lg_table1,
    new_architecture,
    vqa_modalities,
)
from experiments.servers_and_robustness import (
    cifar10_mcmahan2017,
    client_fraction,
    cnn_mcmahan2017,
    fltrust_cnn,
    robust_fltrust2021,
    robust_gossip,
    stragglers,
)
from experiments.speed import placement, precision
from experiments.workloads import normalization, shakespeare_rounds
from tests.support import launched

RESULTS = Path(__file__).parents[2] / "experiments/results"
REAL = Path(os.environ.get("DFL_DATA") or Path(__file__).parents[3] / "shared" / "data")
FOLDERS = sorted(path.parent.name for path in RESULTS.glob("*/table.csv"))
Figures = Mapping[str, str | Callable[[pd.DataFrame], float]]
"""Column of a table -> the column of seeds.csv whose mean it is, or a function of a cell's rows."""


def of_cells(labels: list[str], figures: Figures) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return a function that computes such a table of the rows of seeds.csv."""

    def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
        rows = []
        for key, own in common.groups(seeds, labels):
            row = dict(zip(labels, key if len(labels) > 1 else (key,), strict=True))
            for name, figure in figures.items():
                row[name] = own[figure].mean() if isinstance(figure, str) else figure(own)
            rows.append(row)
        return common.with_intervals(pd.DataFrame(rows), seeds["seed"].nunique())

    return tabulate


def std(column: str) -> Callable[[pd.DataFrame], float]:
    return lambda rows: float(rows[column].std())


ENDS: Figures = {
    "accuracy": "accuracy_mean",
    "std_over_seeds": std("accuracy_mean"),
    "worst_peer": "accuracy_min",
}
"""Columns of `common.summary`."""


def in_order(rows: pd.DataFrame, column: str, values: Iterable[str]) -> pd.DataFrame:
    """Return rows in the order in which a column has its values."""
    return rows.sort_values(column, key=lambda own: own.map([*values].index), kind="stable")


def under(attack: str) -> Callable[[pd.DataFrame], float]:
    """Return a function that returns the mean accuracy under an attack, NaN without runs of it."""
    return lambda rows: float(rows.loc[rows["attack"] == attack, "accuracy"].mean())


RECOMPUTED: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "alpha_interpolation": of_cells(
        ["rho"],
        {
            "alpha": "alpha", "std_over_seeds": std("alpha"),
            "pooled": "pooled", "own": "own", "best": "best",
        },
    ),
    "auxiliary_tasks": lambda seeds: common.with_intervals(
        auxiliary_tasks.tabulate(seeds), seeds["seed"].nunique()
    ),
    "bits": of_cells(
        ["width"],
        {
            "accuracy": "accuracy",
            "std_over_seeds": std("accuracy"),
            "minus_float32": "minus_float32",
            "minus_float32_std": std("minus_float32"),
            "most_at_a_seed": lambda rows: max(rows["minus_float32"], key=abs),
            "minus_float32_last_round": "minus_float32_last_round",
            "relative_squared_error": lambda rows: rows["relative_squared_error"].max(),
        },
    ),
    "cifar10_mcmahan2017": lambda seeds: common.with_intervals(
        cifar10_mcmahan2017.tabulate(seeds), None
    ),
    "client_fraction": lambda seeds: common.with_intervals(client_fraction.tabulate(seeds), None),
    "cnn_mcmahan2017": lambda seeds: common.with_intervals(cnn_mcmahan2017.tabulate(seeds), None),
    "convergence_rates": convergence_rates.tabulate,
    "easy_vqa": lambda seeds: common.with_intervals(
        easy_vqa.tabulate(seeds), seeds["seed"].nunique()
    ),
    "faults": lambda seeds: of_cells(
        ["method", "loss"], {**ENDS, "consensus_distance": "consensus_distance"}
    )(in_order(seeds, "method", faults.METHODS)),
    "fltrust_cnn": lambda seeds: common.with_intervals(fltrust_cnn.tabulate(seeds), None),
    "graphs": of_cells(["graph", "width"], ENDS),
    "har_people": of_cells(
        ["method"],
        {
            "mean": lambda rows: 100 * rows["local_accuracy_mean"].mean(),
            "mean_std": lambda rows: 100 * rows["local_accuracy_mean"].std(),
            "worst": lambda rows: 100 * rows["worst"].mean(),
            "worst_std": lambda rows: 100 * rows["worst"].std(),
        },
    ),
    "label_coverage": lambda seeds: common.with_intervals(label_coverage.tabulate(seeds), None),
    "lg_depth": lambda seeds: common.with_intervals(
        lg_depth.tabulate(seeds), seeds["seed"].nunique()
    ),
    "lg_fair": lambda seeds: common.with_intervals(lg_fair.tabulate(seeds), None),
    "lg_rotated": lambda seeds: common.with_intervals(lg_rotated.tabulate(seeds), None),
    "lg_table1": lambda seeds: common.with_intervals(lg_table1.tabulate(seeds, "mnist"), None),
    "lg_table1_cifar10": lambda seeds: common.with_intervals(
        lg_table1.tabulate(seeds, "cifar10"), None
    ),
    "local_steps": of_cells(
        local_steps.LABELS,
        {
            **ENDS,
            "mean_model": "accuracy_mean_model",
            "consensus_distance": "consensus_distance",
            "target": lambda rows: local_steps.TARGETS[rows["partition"].iloc[0]],
            "rounds_to_target": "rounds_to_target",
            "rounds_to_target_std": std("rounds_to_target"),
            "steps_to_target": lambda rows: (rows["rounds_to_target"] * rows["steps"]).mean(),
        },
    ),
    "methods_cifar10": lambda seeds: common.with_intervals(
        methods_cifar10.tabulate(
            methods_cifar10.Options(cases=tuple(seeds["case"].unique())), seeds.astype({"lr": str})
        ),
        None,
    ),
    "new_architecture": lambda seeds: common.with_intervals(
        new_architecture.tabulate(seeds), seeds["seed"].nunique()
    ),
    "normalization": lambda seeds: common.with_intervals(normalization.tabulate(seeds), None),
    "placement": placement.tabulate,
    "precision": lambda seeds: common.with_intervals(
        precision.tabulate(
            seeds,
            dict.fromkeys(
                ("mnist", "cifar10"), dict.fromkeys(precision.PRECISIONS["cpu"], 1.0)
            ),
        ).drop(columns=["ms_per_round", "speed_up"]),
        None,
    ),
    "robust_fltrust2021": lambda seeds: common.with_intervals(
        robust_fltrust2021.tabulate(seeds), None
    ),
    "robust_gossip": of_cells(
        robust_gossip.LABELS,
        {
            **{attack: under(attack) for attack in robust_gossip.ATTACKS},
            "worst_peer": lambda rows: rows.groupby("attack")["worst_peer"].mean().min(),
            "consensus_distance": lambda rows: (
                rows.groupby("attack")["consensus_distance"].mean().max()
            ),
            "largest_std": lambda rows: rows.groupby("attack")["accuracy"].std().max(),
            "largest_ci95": lambda rows: (  # Student's t of 4 degrees of freedom
                2.776445 * rows.groupby("attack")["accuracy"].std().max() / math.sqrt(5)
            ),
            "seeds": lambda rows: rows["seed"].nunique(),
        },
    ),
    "server_or_peers": of_cells(["method"], {**ENDS, "mean_model": "accuracy_mean_model"}),
    "shakespeare_rounds": lambda seeds: common.with_intervals(
        shakespeare_rounds.tabulate(seeds), None
    ),
    "stragglers": lambda seeds: common.with_intervals(stragglers.tabulate(seeds), None),
    "vqa_modalities": lambda seeds: common.with_intervals(
        vqa_modalities.tabulate(seeds, ["questions", "method", "devices"]), seeds["seed"].nunique()
    ),
    "update_mixing": of_cells(
        update_mixing.LABELS,
        {
            "accuracy": "accuracy_mean",
            "std_over_seeds": std("accuracy_mean"),
            "mean_model": "accuracy_mean_model",
            "consensus_distance": "consensus_distance",
        },
    ),
}  # fmt: skip
"""Experiment with a row per run in seeds.csv -> its table, or the part of it that these give."""


def test_every_table_with_seeds_is_recomputed() -> None:
    assert {path.parent.name for path in RESULTS.glob("*/seeds.csv")} == {*RECOMPUTED}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_a_table_is_that_of_its_seeds(name: str) -> None:
    table, seeds = (pd.read_csv(RESULTS / name / f"{which}.csv") for which in ("table", "seeds"))
    expected = RECOMPUTED[name](seeds)
    assert {*expected} <= {*table}
    for column in expected:
        given, computed = table[column], expected[column]
        if pd.api.types.is_numeric_dtype(given) and pd.api.types.is_numeric_dtype(computed):
            np.testing.assert_allclose(given, computed, rtol=5e-4, atol=1e-6, err_msg=column)
        else:
            assert ["" if pd.isna(cell) else str(cell) for cell in given] == [*map(str, computed)]


@pytest.mark.parametrize("name", FOLDERS)
def test_a_table_in_markdown_is_that_of_its_csv(name: str) -> None:
    page = RESULTS / name / "table.md"
    if not page.exists():
        pytest.skip("of a table that is not printed")
    table = pd.read_csv(RESULTS / name / "table.csv", dtype=str, keep_default_na=False)
    head, _, *lines = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in page.read_text().splitlines()
        if line.startswith("|")
    ]
    assert head == list(table)
    assert len(lines) == len(table)
    for line, row in zip(lines, table.to_numpy().tolist(), strict=True):
        assert all(map(shown, line, row)), (line, row)


def shown(text: str, exact: str) -> bool:
    """Return whether a cell in markdown shows a cell of the csv: three decimals, or three digits if
    it is small or large.
    """
    if text == exact or (text == "-" and exact == ""):
        return True
    number, value = float(text.replace(",", "")), float(exact)
    small_or_large = "e" in text or 0 < abs(number) < 0.01
    half = 0.5 * 10 ** (math.floor(math.log10(abs(number))) - 2) if small_or_large else 5e-4
    return math.isclose(number, value, rel_tol=1e-5, abs_tol=1.01 * half)


def test_a_cell_is_shown_to_its_digits() -> None:
    assert shown("0.564", "0.563992")
    assert not shown("0.565", "0.563992")
    assert shown("1.47e+03", "1474")
    assert not shown("1.48e+03", "1474")
    assert shown("0.00402", "0.00402137")
    assert not shown("0.00403", "0.00402137")
    assert shown("-6.12e-05", "-6.11977e-05")
    assert not shown("-6.13e-05", "-6.11977e-05")
    assert shown("796,840", "796840")
    assert shown("-", "")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_spread_over_seeds_has_its_confidence_interval(name: str) -> None:
    columns = [str(column) for column in pd.read_csv(RESULTS / name / "table.csv")]
    for place, column in enumerate(columns):
        of = column.removesuffix("_std")
        if column == "std_over_seeds":
            assert columns[place + 1] == "ci95"
        elif of != column and of in columns:
            assert columns[place + 1] == f"{of}_ci95"


@pytest.mark.parametrize("name", FOLDERS)
def test_a_published_number_is_of_the_same_setting(name: str) -> None:
    """The column `published` is of the experiments that have a row at the setting of the paper."""
    columns = [*pd.read_csv(RESULTS / name / "table.csv")]
    assert ("published" in columns) == (
        name in ("client_fraction", "cnn_mcmahan2017", "fedavg_mcmahan2017")
    )


def test_intervals_are_those_of_students_t() -> None:
    table = pd.DataFrame({"x": [1.0, 2.0, 3.0], "x_std": [0.1, 0.2, math.nan], "largest_std": 0.5})
    made = common.with_intervals(table, 3)
    assert list(made) == ["x", "x_std", "x_ci95", "largest_std"]
    expected = [4.302653 * 0.1 / math.sqrt(3), 4.302653 * 0.2 / math.sqrt(3), math.nan]
    assert made["x_ci95"].tolist() == pytest.approx(expected, nan_ok=True)
    several: dict[str, Any] = {"std_over_seeds": [0.3, math.nan], "seeds": [2, 1]}
    made = common.with_intervals(pd.DataFrame(several), None)
    assert made["ci95"].tolist() == pytest.approx(
        [12.7062 * 0.3 / math.sqrt(2), math.nan], nan_ok=True
    )
    assert list(table) == ["x", "x_std", "largest_std"]  # as it was


PACKED = {
    "bits": ("mnist", "messages_and_graphs.bits"),
    "cifar10_mcmahan2017": ("cifar10", "servers_and_robustness.cifar10_mcmahan2017"),
    "client_fraction": ("mnist", "servers_and_robustness.client_fraction"),
    "cnn_mcmahan2017": (
        "mnist", "servers_and_robustness.cnn_mcmahan2017", "--cases", "iid_e1_b50_c0.1",
        "iid_e1_b10_c0.1", "iid_e5_b50_c0.1", "iid_e5_b10_c0.1", "iid_e20_b10_c0.1",
        "iid_e20_b50_c0.1", "iid_e5_b10_c0", "iid_e5_binf_c0", "iid_e5_b10_c0.2",
        "iid_e5_b10_c0.5", "shards_e1_b10_c0.1", "shards_e1_b50_c0.1", "shards_e1_binf_c0.1",
    ),
    "device_variance": ("mnist", "personal_layers.device_variance"),
    "easy_vqa": ("easy_vqa", "personal_layers.easy_vqa"),
    "faults": ("mnist", "messages_and_graphs.faults"),
    "fltrust_cnn": ("mnist", "servers_and_robustness.fltrust_cnn", "--attacks", "backdoor"),
    "graphs": ("mnist", "messages_and_graphs.graphs"),
    "local_steps": ("digits", "messages_and_graphs.local_steps"),
    "methods_cifar10": ("cifar10", "methods.methods_cifar10"),
    "normalization": ("cifar10", "workloads.normalization"),
    "robust_fltrust2021": ("mnist", "servers_and_robustness.robust_fltrust2021"),
    "robust_gossip": ("digits", "servers_and_robustness.robust_gossip"),
    "server_or_peers": ("mnist", "servers_and_robustness.server_or_peers"),
    "shakespeare_rounds": (
        "shakespeare", "workloads.shakespeare_rounds", "--cases", "role_256", "role_32",
        "role_32_low", "role_32_high", "iid_32", "ring_float32", "ring_8bits", "sgd_role_32",
        "sgd_iid_32",
    ),
    "time_to_accuracy": ("mnist", "messages_and_graphs.time_to_accuracy"),
    "update_mixing": ("digits", "messages_and_graphs.update_mixing"),
}  # fmt: skip
"""Folder of results with the cells behind it -> the data set, and the command that computes its
tables of them.
"""


def test_every_folder_with_cells_is_recomputed() -> None:
    assert {path.parent.name for path in RESULTS.glob(f"*/{cells.NAME}")} == {*PACKED}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_tables_are_those_of_their_cells(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, module, *arguments = PACKED[name]
    if dataset != "digits" and not (REAL / dataset).is_dir():
        pytest.skip(f"no {REAL / dataset}: set DFL_DATA")

    def refuse(folder: Path, run: dfl.Run) -> None:
        raise AssertionError(f"{folder.name} is not among the cells")

    cells.unpack(RESULTS / name, tmp_path)
    for program in (launched, runner):  # of its own, and of the experiment
        monkeypatch.setattr(program, "_simulate", refuse)
    done = launched.run_experiment(module, tmp_path, "--data-dir", str(REAL), *arguments)
    assert done.returncode == 0, done.stderr
    for table in (RESULTS / name).glob("*.csv"):
        assert (tmp_path / table.name).read_text() == table.read_text()
