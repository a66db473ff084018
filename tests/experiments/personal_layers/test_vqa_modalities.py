"""The experiment on devices of one modality: its runs, chance, table and finding."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.datasets.partitions.base import Assignment
from experiments import common
from experiments.personal_layers import vqa_modalities as experiment
from tests.support.launched import here
from tests.support.vqa_files import write_easy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on a few questions."""
    folder = tmp_path_factory.mktemp("experiment")
    write_easy(folder / "data" / "easy_vqa")
    options = experiment.Options(
        data_dir=folder / "data", out=folder / "out", dataset="easy_vqa:side=8", devices=3,
        rounds=2, look=12, seeds=1, jobs=1,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch, here() as launched:
        patch.setattr(experiment, "EPOCHS", {20: None, 10: 2})
        experiment.experiment(options)
    assert len(launched) == 6
    return options.out


def test_the_numbers_are_those_of_the_devices(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert len(table) == 2 * 3 * 3
    for found in table.to_dict("records"):
        values = {"questions": found["questions"], "method": found["method"], "seed": 0}
        peers = dfl.load(common.cell_folder(published, **values)).peers
        own = peers.iloc[list(experiment.KINDS).index(found["devices"])]
        assert found["own_test"] == pytest.approx(100 * own["local_accuracy"], rel=1e-4)
        assert found["new_test"] == pytest.approx(100 * own["accuracy"], rel=1e-4)
        assert (found["MB"] == 0) == (found["method"] == "local only")
    assert table.groupby(["questions", "devices"])["chance"].nunique().eq(1).all()
    assert (
        "a device answers its own questions better than chance"
        in (published / "table.md").read_text()
    )


def test_chance_is_that_of_the_most_frequent_answer(tmp_path: Path) -> None:
    labels = np.array([0, 1, 1, 1, 0, 0])
    data = dfl.Data(np.zeros((6, 1)), labels, np.zeros((6, 1)), labels, classes=2)

    def halves(*_: object) -> Assignment:
        parts = [np.array([0, 1, 2, 3]), np.array([4, 5])]
        return Assignment(parts, parts)

    found = experiment.chance(dfl.Run(dataset=data, partition=halves, peers=2))
    assert found.tolist() == [0.75, 1.0]
