"""The experiment on the number of shared layers: its grid, bytes, table, finding and figure."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

import dfl
from experiments import common
from experiments.personal_layers import lg_depth as experiment
from tests.support.launched import here

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "dataset": "digits", "devices": 6, "examples": 60, "hidden": "12+8", "look": 200,
    "rounds": 2, "before": 3, "seeds": 1, "jobs": 1,
}  # fmt: skip
SPLITS = ("nothing", "head:1", "head:2", "first:1", "first:2", "all")


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits."""
    out = tmp_path_factory.mktemp("experiment")
    with here() as launched:
        experiment.experiment(experiment.Options(**SMALL, out=out))
    names = [common.cell_folder(out, share=share, seed=0).name for share in ("before", *SPLITS)]
    assert launched == names
    return out


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert table["share"].tolist() == ["before", *SPLITS]
    made = common.with_intervals(experiment.tabulate(pd.read_csv(published / "seeds.csv")), 1)
    pd.testing.assert_frame_equal(made, table, check_dtype=False, rtol=1e-4)
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "\n\nFinding: local test is best with " in (published / "table.md").read_text()


def test_all_splits_go_on_from_the_same_models(published: Path) -> None:
    before = dfl.load(published / "cells" / "share=before,seed=0").rows.iloc[-1]
    for share in SPLITS:
        rows = dfl.load(common.cell_folder(published, share=share, seed=0)).rows
        assert rows["round"].tolist() == [0, 2]
        assert rows["accuracy_mean"].iloc[0] == before["accuracy_mean"]
    row = pd.read_csv(published / "table.csv").iloc[0]
    assert row["new_test"] == pytest.approx(100 * before["accuracy_mean"], rel=1e-5)
    assert row["local_test"] == pytest.approx(100 * before["local_accuracy_mean"], rel=1e-5)


def test_the_numbers_are_those_of_the_runs(published: Path) -> None:
    table = pd.read_csv(published / "table.csv").set_index("share")
    for share in SPLITS:
        end = dfl.load(common.cell_folder(published, share=share, seed=0)).rows.iloc[-1]
        assert table.loc[share, "local_test"] == pytest.approx(
            100 * end["local_accuracy_mean"], rel=1e-5
        )
        assert table.loc[share, "new_test"] == pytest.approx(
            100 * end["accuracy_ensemble"], rel=1e-5
        )
        assert table.loc[share, "new_alone"] == pytest.approx(100 * end["accuracy_mean"], rel=1e-5)


def test_bytes_are_those_of_the_layers(published: Path) -> None:
    """64-12-8-10: 780, 104 and 90 parameters; one device of six receives and sends, in each of
    two rounds.
    """
    table = pd.read_csv(published / "table.csv").set_index("share")
    parameters = {
        "nothing": 0,
        "head:1": 90,
        "head:2": 194,
        "first:1": 780,
        "first:2": 884,
        "all": 974,
    }
    for share, n in parameters.items():
        assert table.loc[share, "MB"] == pytest.approx(2 * 2 * 4 * n / 1e6, rel=1e-5, abs=1e-12)


def test_what_is_shared_grows_from_nothing_over_both_ends_to_all() -> None:
    assert experiment.splits(experiment.Options(hidden="5+5+5")) == (
        "nothing", "head:1", "head:2", "head:3", "first:1", "first:2", "first:3", "all",
    )  # fmt: skip


def test_the_setting() -> None:
    options = experiment.Options(out=Path("here"), seeds=3)
    cells = experiment.grid(options)
    assert len(cells) == 3 * 8
    run = cells[-1].run
    assert cells[-1].values == {"share": "all", "seed": 2}
    assert run.init_from == Path("here/cells/share=before,seed=2")
    assert (run.peers, run.partition, run.algorithm, run.ensemble) == (
        100, "shards:per_peer=2", "fedavg:fraction=0.1", True,
    )  # fmt: skip
    begun = experiment.first(options, 2)
    assert (begun.rounds, begun.share, begun.init_from, begun.seed) == (
        options.before,
        "all",
        None,
        2,
    )


def rows() -> pd.DataFrame:
    """Two seeds; local test falls and new test rises with what is shared."""
    looks = [
        (k, seed, t, 0.6 + 0.05 * k if t else 0.5)
        for k in range(len(SPLITS))
        for seed in (0, 1)
        for t in (0, 9)
    ]
    return pd.DataFrame(
        [
            {"share": SPLITS[k], "seed": seed, "round": t, "local_accuracy_mean": 1.3 - value,
             "accuracy_ensemble": value + 0.02 * seed, "accuracy_mean": value - 0.1,
             "payload_bytes": 1e6 * k * t}
            for k, seed, t, value in looks
        ]
    )  # fmt: skip


def test_the_table_and_the_finding_follow_from_the_rows() -> None:
    table = experiment.tabulate(experiment.by_seed(rows()))
    row = common.by_label(table, ["share"])
    assert list(row) == ["before", *SPLITS]
    assert [row["before"][name] for name in ("local_test", "new_test", "MB")] == pytest.approx(
        [80, 51, 0]
    )
    figures = ("local_test", "new_test", "new_alone", "MB", "local_test_std", "new_test_std")
    assert [row["head:2"][name] for name in figures] == pytest.approx(
        [60, 71, 60, 18, 0, np.sqrt(2)], abs=1e-9
    )
    text = experiment.finding(table)
    assert text == (
        "local test is best with nothing (70.0 %), ends: nothing 70.0 %, all 45.0 %; "
        "new test is best with all (86.0 %), ends: nothing 61.0 %, all 86.0 %."
    )


def test_the_figure_shows_both_tests_and_the_bytes() -> None:
    left, right = experiment.draw(
        experiment.tabulate(experiment.by_seed(rows())), experiment.Options()
    ).axes
    assert [text.get_text() for text in left.get_xticklabels()] == list(SPLITS)
    lines = [np.asarray(line.get_ydata(), float) for line in left.lines]
    points = [values for values in lines if len(values) == len(SPLITS)]
    assert np.allclose(points, [[70 - 5 * k for k in range(6)], [61 + 5 * k for k in range(6)]])
    dotted = [
        float(values[0])
        for line, values in zip(left.lines, lines, strict=True)
        if line.get_linestyle() == ":"
    ]
    assert dotted == pytest.approx([80, 51])
    bars = [patch.get_height() for patch in right.patches if isinstance(patch, Rectangle)]
    assert bars == pytest.approx([9 * k for k in range(6)])
