"""The experiment on people and their phones: its runs, table and finding."""

from pathlib import Path

import pandas as pd
import pytest

import dfl
from experiments import common
from experiments.personal_layers import har_people as experiment
from tests.support.har_files import write_har
from tests.support.launched import here

pytestmark = pytest.mark.slow

METHODS = ["local only", "FedAvg", "LG-FedAvg"]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on four people."""
    folder = tmp_path_factory.mktemp("experiment")
    write_har(folder / "data" / "har")
    options = experiment.Options(
        data_dir=folder / "data", out=folder / "out", devices=4, rounds=4, before=1, look=8,
        seeds=2, jobs=1,
    )  # fmt: skip
    with here() as launched:
        experiment.experiment(options)
    assert len(launched) == 2 * 3
    return options.out


def test_the_numbers_are_those_of_the_runs(published: Path) -> None:
    table = pd.read_csv(published / "table.csv").set_index("method")
    assert table.index.tolist() == METHODS
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "\n\nFinding: local only: mean " in (published / "table.md").read_text()
    for method in METHODS:
        peers = [
            dfl.load(common.cell_folder(published, method=method, seed=seed)).peers
            for seed in range(2)
        ]
        worst = [100 * each["local_accuracy"].min() for each in peers]
        mean = [100 * each["local_accuracy"].mean() for each in peers]
        assert table["worst"][method] == pytest.approx(sum(worst) / 2, rel=1e-4)
        assert table["mean"][method] == pytest.approx(sum(mean) / 2, rel=1e-4)


def test_bytes_are_those_of_the_shared_part(published: Path) -> None:
    """har_cnn has 274,822 parameters, 774 of them in the last layer."""
    table = pd.read_csv(published / "table.csv").set_index("method")["MB"]
    assert table["local only"] == 0
    assert table["FedAvg"] == pytest.approx(4 * 4 * 2 * 4 * 274_822 / 1e6, rel=1e-5)
    assert table["LG-FedAvg"] == pytest.approx((274_822 + 3 * 774) * 4 * 2 * 4 / 1e6, rel=1e-5)
