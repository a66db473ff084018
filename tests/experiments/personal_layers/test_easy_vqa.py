"""The experiment on questions about images: its runs, table and finding."""

from pathlib import Path

import pandas as pd
import pytest

import dfl
from experiments import common
from experiments.personal_layers import easy_vqa as experiment
from tests.support.launched import here
from tests.support.vqa_files import write_easy

pytestmark = pytest.mark.slow

COLUMNS = {
    "local_test": "local_accuracy_mean",
    "new_test": "accuracy_ensemble",
    "new_alone": "accuracy_mean",
}
"""Column of the table -> column of metrics.csv."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on a few questions."""
    folder = tmp_path_factory.mktemp("experiment")
    write_easy(folder / "data" / "easy_vqa")
    options = experiment.Options(
        data_dir=folder / "data", out=folder / "out", devices=3, examples=20, rounds=4,
        before=3, after=2, look=12, seeds=1, jobs=1,
    )  # fmt: skip
    with here() as launched:
        experiment.experiment(options)
    assert len(launched) == 4
    return options.out


def test_the_numbers_are_those_of_the_runs(published: Path) -> None:
    table = pd.read_csv(published / "table.csv").set_index(["length", "method"])
    assert table.index.tolist() == [
        (1, "FedAvg"), (1, "LG-FedAvg"), (3, "FedAvg"), (3, "LG-FedAvg"),
    ]  # fmt: skip
    for length, method in table.index:
        cell = common.cell_folder(published, length=length, method=method, seed=0)
        rows = dfl.load(cell).rows
        assert rows["round"].max() == length * (4 if method == "FedAvg" else 5)
        for column, figure in COLUMNS.items():
            expected = 100 * common.tail_mean(rows, figure)
            assert table[column][length, method] == pytest.approx(expected, rel=1e-4)


def test_the_finding_has_the_differences_between_the_methods() -> None:
    """Points 2 and 4 at two seeds have the mean 3 and the interval 12.7 * sqrt(2) / sqrt(2)."""
    rows = [
        {"length": 1, "method": method, "seed": seed, **dict.fromkeys(experiment.TESTS, right),
         "payload_bytes": sent}
        for method, sent, rights in (("FedAvg", 4, (0.5, 0.6)), ("LG-FedAvg", 3, (0.52, 0.64)))
        for seed, right in enumerate(rights)
    ]  # fmt: skip
    finding = experiment.finding(pd.DataFrame(rows))
    assert "the published rounds, 75% of the bytes: +3.0 ± 12.7 on own questions" in finding
    assert finding.count("+3.0 ± 12.7") == 3


def test_bytes_are_those_of_the_shared_part(published: Path) -> None:
    """The head has 725 parameters for five answers; the rest is both encoders."""
    bytes_of = pd.read_csv(published / "table.csv").set_index(["length", "method"])["MB"] * 1e6
    head = 24 * 24 + 24 + 24 * 5 + 5
    for length in experiment.LENGTHS:
        whole = bytes_of[length, "FedAvg"] / (length * 4 * 3 * 2 * 4)
        sent = length * 3 * 2 * 4 * (3 * whole + 2 * head)
        assert bytes_of[length, "LG-FedAvg"] == pytest.approx(sent, rel=1e-4)
