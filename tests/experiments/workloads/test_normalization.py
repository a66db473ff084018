"""The comparison of normalizations: its images, its figures and its finding; run on digits."""

from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.core.registry import choose
from dfl.datasets import DATASETS
from experiments import common
from experiments.workloads import normalization as experiment

ROUNDS = 12
STEPS = 2


def small(out: Path, **changes: int) -> experiment.Options:
    return experiment.Options(
        **{
            "out": out, "dataset": "digits", "side": 4, "test": 20, "train": 12, "peers": 3,
            "seeds": 1, "rounds": ROUNDS, "batch": 4, **changes,
        }  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits of 4 x 4 pixels."""
    out = tmp_path_factory.mktemp("experiment")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "STEPS", STEPS)
        with (out / "printed.txt").open("w") as printed, redirect_stdout(printed):
            experiment.experiment(small(out))
    return out


@pytest.mark.slow
def test_a_figure_is_the_mean_over_the_last_tenth_of_the_rounds(published: Path) -> None:
    seeds = pd.read_csv(published / "seeds.csv")
    cells = experiment.grid(small(published))
    assert len(seeds) == len(cells) == 10
    for row, cell in zip(seeds.to_dict("records"), cells, strict=True):
        assert [row[name] for name in cell.values] == list(cell.values.values())
        metrics = pd.read_csv(published / "cells" / cell.name / "metrics.csv").set_index("round")
        assert metrics.index.tolist() == [0, 3, 6, 9, 11, 12]
        for name, column in experiment.FIGURES.items():
            expected = 100 * (metrics[column][11] + metrics[column][12]) / 2
            assert row[name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_results_are_written_after_every_new_run_and_once_where_all_have_finished(
    published: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (published / "printed.txt").read_text().count("Finding: ") == 10
    before = (published / "seeds.csv").read_bytes()
    monkeypatch.setattr(experiment, "STEPS", STEPS)
    experiment.experiment(small(published))
    assert capsys.readouterr().out.count("Finding: ") == 1
    assert (published / "seeds.csv").read_bytes() == before


@pytest.mark.slow
def test_the_table_states_what_is_reduced(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert table["normalization"].tolist() == [*experiment.NORMS] * 2
    assert table["seeds"].eq(1).all()
    page = (published / "table.md").read_text()
    assert "Finding: reduced: 4 x 4 pixels, 24 local steps of 4 images" in page
    assert "10 of 10 runs have finished; diverged: none." in page
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_runs_that_diverged_and_missing_ones_are_stated() -> None:
    rows = [
        {"partition": "IID", "normalization": name, "seed": seed, **dict.fromkeys(of, value)}
        for of in [experiment.FIGURES]
        for name, seed, value in (
            ("GroupNorm", 0, 40.0), ("GroupNorm", 1, 50.0), ("none", 0, np.nan), ("none", 1, 10.0),
        )
    ]  # fmt: skip
    table = experiment.tabulate(pd.DataFrame(rows))
    assert table["normalization"].tolist() == ["GroupNorm", "none"]
    assert table["common_test"].tolist() == [45.0, 10.0]
    text = experiment.finding(table, experiment.Options(seeds=2))
    assert "4 of 20 runs have finished; diverged: IID none (1 of 2)." in text
    assert "IID: GroupNorm 45.0 and 45.0; none 10.0 and 10.0." in text


def test_differences_are_paired_by_seed() -> None:
    figures = {"BatchNorm, local": (10.0, 30.0), "GroupNorm": (30.0, 11.0)}
    rows = [
        {
            "partition": "IID", "normalization": name, "seed": seed, "worst_peer": 0.0,
            "mean_model": 0.0, "common_test": values[seed], "own_test": 2 * values[seed],
        }
        for seed in (1, 0)
        for name, values in figures.items()
    ]  # fmt: skip
    table = experiment.tabulate(pd.DataFrame(rows))
    by = common.by_label(table, ["normalization"])
    own, base = by["GroupNorm"], by["BatchNorm, local"]
    assert (own["minus_local"], own["own_minus_local"]) == (0.5, 1.0)
    assert own["minus_local_std"] == pytest.approx(39 / 2**0.5)
    assert (base["minus_local"], base["minus_local_std"]) == (0, 0)


def test_images_are_means_of_squares() -> None:
    images = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    for dtype in (np.uint8, np.float32):
        made = experiment.smaller(images.astype(dtype), 2)
        assert made.dtype == dtype
        for y, x in np.ndindex(2, 2):
            square = images[..., 2 * y : 2 * y + 2, 2 * x : 2 * x + 2].reshape(2, 3, 4)
            exact = square.mean(2)
            assert np.array_equal(made[..., y, x], exact.round() if dtype == np.uint8 else exact)


def test_an_excerpt_has_some_of_the_test_images_and_all_training_images() -> None:
    whole = choose("--dataset", "digits", DATASETS)(None)
    few = experiment.excerpt(None, of="digits", side=8, test=50)
    assert np.array_equal(few.train_inputs, whole.train_inputs)
    assert len(few.test_labels) == 50
    tests = {bytes(image) for image in np.ascontiguousarray(whole.test_inputs)}
    assert {bytes(image) for image in np.ascontiguousarray(few.test_inputs)} <= tests
    with pytest.raises(dfl.InputError, match="--side must divide 8, the pixels of digits, not 3"):
        experiment.excerpt(None, of="digits", side=3)
