"""The coverage study: its figures, and the committed table beside an independent one."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.inference.study import Outcomes, Study
from experiments.inference import coverage

RESULTS = Path(__file__).parents[3] / "experiments/results/inference_coverage"


def test_figures_of_known_estimates() -> None:
    study = Study(sites=2, n=9, beta=(1.0, 0.0), repetitions=4)
    error = np.array([[0.1, 0.0], [-0.1, 0.2], [0.1, -0.2], [-0.1, 0.0]])
    pooled = Outcomes(study.beta + error, np.full((4, 2), 0.08))
    wide = Outcomes(study.beta + 2 * error, np.full((4, 2), 0.11))
    kept = np.ones(4, bool)
    same, twice = (coverage.row(study, each, pooled, kept) for each in (pooled, wide))
    assert (same["efficiency"], same["efficiency_se"], same["to_pooled"]) == (1, 0, 0)
    assert (same["coverage"], same["coverage_first"]) == (0.75, 1)
    assert twice["efficiency"] == pytest.approx(0.25)
    assert twice["efficiency_se"] == pytest.approx(0, abs=1e-12)
    assert (twice["coverage"], twice["coverage_first"]) == (0.75, 1)
    assert twice["coverage_by_pooled_errors"] == 0.25
    assert same["bias"] == pytest.approx(0)


def test_the_committed_table_agrees_with_an_independent_computation() -> None:
    table = pd.read_csv(RESULTS / "table.csv")
    # One of 36; see the docstring of the experiment.
    assert coverage.beyond(table) == ["coverage of tilted score at K = 20, n = 100, rare"]
    rare = table[table["study"] == coverage.RARE].set_index("estimator")
    assert rare["repetitions"]["tilted score, all studies"] == 300
    more = rare.loc["tilted score, all studies, 6 times as many"]
    assert more["repetitions"] > 1790
    theirs, ours = coverage.INDEPENDENT[coverage.RARE]["tilted score"][2], more["coverage"]
    of_300 = more["coverage_se"] * np.sqrt(6 * theirs * (1 - theirs) / ours / (1 - ours))
    assert abs(ours - theirs) < 3 * np.hypot(of_300, more["coverage_se"])
    many = table[table["study"] == "K = 50, n = 200"].set_index("estimator")
    assert many["efficiency"]["tilted score"] >= 0.95
    assert 0.93 <= many["coverage"]["tilted score"] <= 0.97
    assert many["coverage"]["meta"] < 0.9
    assert max(many["coverage_first"]["meta"], many["coverage_second"]["meta"]) < 0.86


def test_studies_without_a_site_without_estimate_are_the_same_by_both_ways() -> None:
    study = Study(sites=3, n=200, repetitions=4)
    usual, kept = (
        study.estimate(each) for each in (coverage.ESTIMATORS["tilted score"], coverage.Kept())
    )
    np.testing.assert_allclose(kept.beta, usual.beta, rtol=0, atol=1e-10)
    np.testing.assert_allclose(kept.errors, usual.errors, rtol=0, atol=1e-10)


def test_a_study_stays_where_a_site_has_no_estimate() -> None:
    study = Study(sites=20, n=60, lowest=-3.5, highest=-2.0, repetitions=6)
    usual, kept = (
        study.estimate(each) for each in (coverage.ESTIMATORS["tilted score"], coverage.Kept())
    )
    assert np.isnan(usual.beta).any()
    assert np.isfinite(kept.beta).all()


@pytest.mark.slow
def test_the_page_is_made(tmp_path: Path) -> None:
    coverage.page(coverage.Options(out=tmp_path, repetitions=3))
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "table.md", "figure.png"}
