"""Experiments run from their command lines on digits; grids, tables and refusals of
`experiments.common`.
"""

import shutil
import subprocess
import sys
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.sweep import Cell
from experiments import common
from tests.support.launched import here, run_experiment

pytestmark = pytest.mark.slow

EXPERIMENTS = {
    "bits": ["--widths", "float32", "4"],
    "graphs": ["--graphs", "one_peer_exponential"],
    "local_steps": ["--steps", "2", "9"],
    "update_mixing": ["--mixings", "metropolis", "--quadratic-rounds", "200"],
}
"""Arguments that make an experiment small, besides digits, one seed and few rounds."""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", params=EXPERIMENTS)
def experiment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, str]:
    """An experiment that has run: its name, its folder, its output."""
    out = tmp_path_factory.mktemp(request.param)
    few = ["--dataset", "digits", "--seeds", "1", "--rounds", "4", *EXPERIMENTS[request.param]]
    done = run_experiment(f"messages_and_graphs.{request.param}", out, *few)
    assert done.returncode == 0, done.stderr
    return request.param, out, done.stdout


def test_an_experiment_ends_in_a_table_a_figure_and_a_finding(
    experiment: tuple[str, Path, str],
) -> None:
    _, out, printed = experiment
    table = pd.read_csv(out / "table.csv")
    assert len(table) >= 2
    assert table["accuracy"].between(0, 1).all()
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert printed.count("\n| ") == len(table) + 1  # the line below the header, and the rows
    assert "\nFinding: over 1 seeds" in printed
    assert not list(out.glob("cells/*/state.safetensors"))
    assert len(pd.read_csv(out / "seeds.csv")) == len(list(out.glob("cells/*/run.json")))


def test_one_cell_alone_has_its_row(experiment: tuple[str, Path, str], tmp_path: Path) -> None:
    name, out, _ = experiment
    cell = sorted(path.parent.name for path in out.glob("cells/*/run.json"))[-1]
    few = ["--dataset", "digits", "--seeds", "1", "--rounds", "4", *EXPERIMENTS[name]]
    done = run_experiment(f"messages_and_graphs.{name}", tmp_path / "alone", *few, "--only", cell)
    assert done.returncode == 0, done.stderr
    row = pd.read_csv(StringIO(done.stdout), dtype=str)
    seeds = pd.read_csv(out / "seeds.csv", dtype=str)
    labels = list(row.columns[: list(row.columns).index("seed") + 1])
    own = seeds.rename(columns={"accuracy": "accuracy_mean"}).merge(row[labels], on=labels)
    measured = [name for name in row if name in own and name in common.MEASURED]
    assert len(own) == len(row) == 1
    assert measured
    pd.testing.assert_frame_equal(row[measured], own[measured])
    assert [path.name for path in (tmp_path / "alone" / "cells").glob("*=*")] == [cell]


def test_a_cell_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment("messages_and_graphs.bits", tmp_path / "out", "--only", "width=5,seed=0")
    assert done.returncode == 2
    assert done.stderr == (
        "bits: --only must name a cell, not 'width=5,seed=0'; the nearest of 40 are "
        "width=8,seed=0 and width=4,seed=0 and width=3,seed=0\n"
    )
    assert not (tmp_path / "out").exists()


def test_the_numbers_are_those_of_the_runs(experiment: tuple[str, Path, str]) -> None:
    name, out, _ = experiment
    table = pd.read_csv(out / "table.csv").astype(str)
    labels = {"bits": ["width"]}.get(name) or import_module(
        f"experiments.messages_and_graphs.{name}"
    ).LABELS
    for row in table.to_dict("records"):
        values = {label: row[label] for label in labels}
        metrics = pd.read_csv(common.cell_folder(out, **values, seed=0) / "metrics.csv")
        assert float(row["accuracy"]) == pytest.approx(metrics["accuracy_mean"].iloc[-1], rel=1e-5)


def test_update_mixing_grows_as_in_theory(experiment: tuple[str, Path, str]) -> None:
    name, out, _ = experiment
    if name != "update_mixing":
        pytest.skip("of another experiment")
    row = common.by_label(pd.read_csv(out / "table.csv"), ["method"])
    exact, short, replica = (
        row[name] for name in ("published, float32", "published, 8 bits", "replica, float32")
    )
    assert exact["quadratic_growth"] == pytest.approx(exact["theory_growth"], abs=2e-3)
    assert short["quadratic_growth"] == pytest.approx(exact["theory_growth"], abs=2e-3)
    assert replica["quadratic_growth"] == pytest.approx(1, abs=1e-3)
    assert exact["quadratic_distance"] > 50 * replica["quadratic_distance"]


def test_bits_are_compared_at_the_same_seed(experiment: tuple[str, Path, str]) -> None:
    name, out, _ = experiment
    if name != "bits":
        pytest.skip("of another experiment")
    row = common.by_label(pd.read_csv(out / "table.csv", dtype={"width": str}), ["width"])
    assert row["float32"]["minus_float32"] == 0
    assert row["4"]["minus_float32"] == pytest.approx(
        row["4"]["accuracy"] - row["float32"]["accuracy"], abs=1e-5
    )
    assert row["4"]["share_of_float32"] == pytest.approx(1 / 8, rel=1e-2)
    assert row["4"]["bytes_per_message"] < row["float32"]["bytes_per_message"] / 7.9


def test_finished_cells_are_not_run_again(tmp_path: Path) -> None:
    options = common.Options(dataset="digits", rounds=1, out=tmp_path)
    cell = Cell({"seed": 0}, common.standard(options, seed=0))
    with here() as names:
        first = common.measure(tmp_path, [cell])
        assert names == ["seed=0"]
        assert common.measure(tmp_path, [cell]).equals(first)
        assert names == ["seed=0"]
        shutil.rmtree(tmp_path / "cells" / "seed=0")
        again = common.measure(tmp_path, [cell])
        assert names == ["seed=0"] * 2
    assert again.drop(columns="seconds").equals(first.drop(columns="seconds"))
    with pytest.raises(InputError, match="seed=0 with another seed"):
        common.measure(tmp_path, [Cell({"seed": 0}, common.standard(options, seed=1))])


ROWS = pd.DataFrame(
    {"name": ["a", "b"], "n": [1, 20], "x": [0.1 + 0.2, np.nan], "tiny": [1e-300, -1 / 3]}
)


def test_rows_are_computed_once_and_read_back_equal(tmp_path: Path) -> None:
    calls: list[int] = []

    def compute() -> pd.DataFrame:
        calls.append(1)
        return ROWS

    settings = {"rounds": 3, "out": Path("somewhere"), "only": None}
    first = common.kept_rows(tmp_path / "rows" / "seed=0", settings, compute)
    again = common.kept_rows(
        tmp_path / "rows" / "seed=0", dict(reversed(settings.items())), compute
    )
    assert calls == [1]
    pd.testing.assert_frame_equal(first, ROWS, check_exact=True)
    pd.testing.assert_frame_equal(again, ROWS, check_exact=True)
    common.kept_rows(tmp_path / "rows" / "seed=1", settings, compute)
    assert calls == [1, 1]


@pytest.mark.parametrize("other", [{"rounds": 4}, {}, {"rounds": 3, "goal": 0.5}, {"rounds": "3"}])
def test_rows_of_other_settings_are_refused(tmp_path: Path, other: dict[str, Any]) -> None:
    folder = tmp_path / "seed=0"
    common.kept_rows(folder, {"rounds": 3}, lambda: ROWS)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError) as refused:
        common.kept_rows(folder, other, lambda: ROWS)
    line = str(refused.value)
    assert str(folder) in line
    assert "--out" in line
    assert "\n" not in line
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_rows_without_their_settings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("x\n1\n")
    with pytest.raises(InputError, match="other settings"):
        common.kept_rows(tmp_path, {"rounds": 3}, lambda: ROWS)


def test_nothing_is_left_where_rows_are_not_computed(tmp_path: Path) -> None:
    def fail() -> pd.DataFrame:
        raise ValueError("no rows")

    with pytest.raises(ValueError, match="no rows"):
        common.kept_rows(tmp_path / "seed=0", {"rounds": 3}, fail)
    assert list(tmp_path.iterdir()) == []
    found = common.kept_rows(tmp_path / "seed=0", {"rounds": 4}, lambda: ROWS)
    pd.testing.assert_frame_equal(found, ROWS, check_exact=True)


@pytest.mark.parametrize("fails_at", [0, 1])
def test_rows_that_were_not_written_to_their_end_are_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """The disk fails at the settings, or at the rows."""
    known, calls = Path.write_text, []

    def write(path: Path, text: str) -> int:
        calls.append(path)
        if len(calls) == fails_at + 1:
            known(path, text[: len(text) // 2])
            raise OSError("no space left")
        return known(path, text)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write)
        with pytest.raises(OSError, match="no space left"):
            common.kept_rows(tmp_path, {"rounds": 3}, lambda: ROWS)
    assert not (tmp_path / "rows.csv").exists()
    found = common.kept_rows(tmp_path, {"rounds": 4}, lambda: ROWS)
    pd.testing.assert_frame_equal(found, ROWS, check_exact=True)
    with pytest.raises(InputError, match="other settings"):
        common.kept_rows(tmp_path, {"rounds": 3}, lambda: ROWS)


def test_a_folder_that_is_no_run_is_left_alone(tmp_path: Path) -> None:
    notes = tmp_path / "cells" / "seed=0" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.write_text("mine")
    options = common.Options(dataset="digits", rounds=1, out=tmp_path)
    with pytest.raises(InputError, match=r"--out .*cells"):
        common.measure(tmp_path, [Cell({"seed": 0}, common.standard(options, seed=0))])
    assert notes.read_text() == "mine"


def test_a_failed_cell_is_refused(tmp_path: Path) -> None:
    run = Run(dataset="mnist", data_dir=tmp_path / "nothing", peers=2, rounds=1)
    with pytest.raises(InputError, match="nothing"):
        common.measure(tmp_path, [Cell({"seed": 0}, run)])


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    experiment = [sys.executable, "-m", "experiments.messages_and_graphs.bits"]
    command = [*experiment, "--out", str(tmp_path), "--dataset", "nonsense"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stderr == "bits: --dataset must be one of digits, mnist, not 'nonsense'\n"


def test_numbers_are_readable_and_a_missing_value_is_a_dash() -> None:
    table = pd.DataFrame(
        {
            "name": ["a"],
            "n": [1234567],
            "value": [0.12345],
            "large": [12345.6],
            "small": [-0.00012345],
            "zero": [0.0],
            "bound": [0.01],
            "none": [float("nan")],
        }
    )
    assert (
        common.markdown(table).splitlines()[2]
        == "| a | 1,234,567 | 0.123 | 1.23e+04 | -0.000123 | 0.000 | 0.010 | - |"
    )
