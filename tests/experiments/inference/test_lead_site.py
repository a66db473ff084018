"""The study of lead sites: the lead of every repetition, and the committed table."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.inference.study import Outcomes, Study
from experiments.inference import lead_site

RESULTS = Path(__file__).parents[3] / "experiments/results/inference_lead_site"


def test_every_repetition_has_a_lead_of_its_own() -> None:
    single = [Outcomes(np.full((3, 2), k), np.full((3, 2), 10 + k)) for k in range(4)]
    beta, errors = lead_site.at(single, np.array([2, 0, 3]))
    assert beta.tolist() == [[2, 2], [0, 0], [3, 3]]
    assert errors.tolist() == [[12, 12], [10, 10], [13, 13]]


def test_no_lead_is_better_than_the_best() -> None:
    study = Study(sites=5, n=100, lowest=-1, highest=1, repetitions=4)
    rows = {(r["iterations"], r["leads"]): r for r in lead_site.measured("small", study)}
    assert rows[0, "pooled"]["from_pooled"] == 0
    for iterations in (1, 2):
        best, worst = (rows[iterations, f"{each} lead"] for each in ("best", "worst"))
        assert best["unsolved"] == 0
        for each in ("first lead", "balanced lead"):
            here = rows[iterations, each]["from_pooled"]
            assert best["from_pooled"] <= here <= worst["from_pooled"]
        assert rows[iterations, "5 leads"] == rows[iterations, "all lead"] | {"leads": "5 leads"}
    assert rows[2, "all lead"]["from_pooled"] < rows[1, "all lead"]["from_pooled"]


def test_the_committed_table() -> None:
    table = pd.read_csv(RESULTS / "table.csv").set_index(["study", "iterations", "leads"])
    away, covers = table["from_pooled"].sort_index(), table["coverage"].sort_index()
    hard = away["rare, shifted"]
    assert hard[1, "worst lead"] > hard[0, "meta"] > hard[1, "first lead"]
    assert hard[2, "first lead"] > hard[0, "meta"]
    for lead in ("first lead", "worst lead"):
        assert hard[2, lead] > 3 * hard[1, lead]
    assert hard[2, "2 leads"] > 5 * hard[2, "5 leads"] > 10 * hard[2, "all lead"]
    assert hard[2, "balanced lead"] < 0.005
    pooled, balanced = covers["rare, shifted", 0, "pooled"], covers["rare, shifted", 2]
    assert balanced["balanced lead"] < 0.9 < pooled
    for study in ("alike", "shifted", "rare"):
        assert away[study, 2, "worst lead"] < 0.0065 < 0.13 < away[study, 0, "meta"]
    assert (table["unsolved"].dropna() == 0).all()


@pytest.mark.slow
def test_the_page_is_made(tmp_path: Path) -> None:
    lead_site.page(lead_site.Options(out=tmp_path, repetitions=3))
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "table.md", "figure.png"}
