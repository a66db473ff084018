"""The study of incomes: the people, the committed table, and its estimates from the real data."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.inference import adult
from tests.support.adult_files import people, text, write_adult

RESULTS = Path(__file__).parents[3] / "experiments/results/inference_adult"
REAL = Path(os.environ.get("DFL_DATA") or Path(__file__).parents[4] / "shared" / "data")
real = pytest.mark.skipif(
    not (REAL / "adult").is_dir(), reason=f"no {REAL / 'adult'}: set DFL_DATA"
)


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.read_csv(RESULTS / "table.csv").set_index(["people", "estimator"]).sort_index()


def test_people_without_a_known_occupation_are_left_out(tmp_path: Path) -> None:
    rows = people(200)
    found = adult.read(write_adult(tmp_path, text(rows)))
    assert set(found["occupation"]) == {"Sales", "Craft-repair", "Tech-support"}
    assert len(found) == sum(row[6] != "?" for row in rows)
    np.testing.assert_allclose(found[["education", "age", "hours"]].mean(), 0, atol=1e-12)
    np.testing.assert_allclose(found[["education", "age", "hours"]].std(), 1)


def test_the_committed_table(table: pd.DataFrame) -> None:
    for name in ("all people", "1 of 4"):
        own = table.loc[name]
        away, wider, sent = (own[name].to_dict() for name in ("from_pooled", "hours_se", "bytes"))
        assert away["tilted score, all lead"] < 0.05 < away["tilted score"] < away["meta"]
        graph = away["tilted score, Base-2"]
        assert graph == pytest.approx(away["tilted score, all lead"], rel=1e-4)
        assert away["one intercept"] > 5
        assert away["FedAvg, lr 0.1"] > away["meta"]
        assert wider["tilted score"] > 1.4 * wider["pooled"]
        assert sent["tilted score, Base-2"] > 8 * sent["tilted score, all lead"]
    assert np.isnan(table["from_pooled"].to_dict()["1 of 4", "debiased"])
    country = table.loc["by country"]["from_pooled"].to_dict()
    for name in ("tilted score", "tilted score, all lead", "tilted score, Base-2"):
        assert country[name] < 0.02 < 0.15 < country["meta"] < 0.3
    assert country["one intercept"] < 0.3
    assert country["FedAvg, own intercepts, lr 0.1"] > 2


@real
def test_sites_are_the_larger_countries() -> None:
    people = adult.by_country(adult.read(REAL))
    sizes = people["site"].value_counts()
    assert len(people) == 28627
    assert sizes["United-States"] == 27405
    assert sizes.min() == 100


@real
@pytest.mark.parametrize("estimator", ["pooled", "meta", "tilted score", "one intercept"])
def test_estimates_of_the_real_data_are_those_of_the_table(
    table: pd.DataFrame, estimator: str
) -> None:
    some = adult.read(REAL)
    some = some[some.groupby("occupation").cumcount() % 4 == 0]
    found = adult.fitted(some, adult.ESTIMATORS[estimator])
    assert found is not None
    row = table.to_dict("index")["1 of 4", estimator]
    assert row["n"] == len(some)
    for name in adult.COVARIATES:
        assert found.params[name] == pytest.approx(row[name], rel=1e-4)
        assert found.bse[name] == pytest.approx(row[f"{name}_se"], rel=1e-4)


@real
@pytest.mark.slow
def test_the_page_is_made(tmp_path: Path) -> None:
    adult.page(adult.Options(out=tmp_path, data_dir=REAL, every=(5,), rounds=1, seeds=2))
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "table.md", "figure.png"}
