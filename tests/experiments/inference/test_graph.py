"""The study over graphs: what connects the sites, its figures, and the committed table."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.inference.estimators import TiltedScore, TiltedScoreGraph
from dfl.inference.study import Outcomes, Study
from experiments.inference import graph

RESULTS = Path(__file__).parents[3] / "experiments/results/inference_graph"


def test_figures_of_known_estimates() -> None:
    study = Study(sites=2, n=9, beta=(1.0, 0.0), repetitions=4)
    error = np.array([[0.1, 0.0], [-0.1, 0.2], [0.1, -0.2], [-0.1, 0.0]])
    pooled = Outcomes(study.beta + error, np.full((4, 2), 0.08))
    twice = Outcomes(study.beta + 2 * error, np.full((4, 2), 0.3))
    same, other = (graph.row(study, each, pooled) for each in (pooled, twice))
    assert (same["excess"], same["from_pooled"], same["coverage"]) == (0, 0, 0.75)
    assert other["excess"] == pytest.approx(3)
    assert other["from_pooled"] == pytest.approx(1)
    assert other["from_pooled_se"] == pytest.approx(0, abs=1e-12)
    assert other["coverage"] == 1
    twice.beta[0] = np.nan
    assert graph.row(study, twice, pooled)["repetitions"] == 3


def test_exact_consensus_is_the_form_with_a_centre() -> None:
    study = Study(sites=graph.STUDY.sites, n=60, lowest=-1, highest=1, repetitions=2)
    server, _ = graph.measured(study, TiltedScore(leads=None), graph.in_centre)
    found, sent = graph.measured(study, TiltedScoreGraph(), graph.over("complete", "float64", 1))
    np.testing.assert_allclose(found.beta, server.beta, atol=1e-10)
    # Five means of one round, and three tables, whose marks two repetitions share.
    table = 12 * (1 + 1 / 2)
    assert sent == {"rounds": 8, "bytes": 11 * 8 * (3 * 14 + 2 * 4 + 3 * table)}


def test_messages_of_8_bits_have_a_scale_per_repetition() -> None:
    study = Study(sites=graph.STUDY.sites, n=60, lowest=-1, highest=1, repetitions=2)
    _, sent = graph.measured(study, TiltedScoreGraph(), graph.over("complete", "8 bits", 1))
    assert sent["bytes"] == 11 * (3 * (4 + 14) + 2 * (4 + 4) + 3 * 8 * 12 * (1 + 1 / 2))


def test_the_committed_table() -> None:
    table = pd.read_csv(RESULTS / "table.csv")
    centre = table[table["graph"] == "centre"].set_index("estimator")
    limit = centre["from_pooled"]["tilted score, all lead"]
    labels = ["estimator", "graph", "messages", "rounds_of_a_mean"]
    found = table.set_index(labels).sort_index().loc["tilted score"]
    for name in ("Base-2", "complete"):
        assert found["from_pooled"][name, "float64", 8] == pytest.approx(limit, rel=1e-3)
    assert found["from_pooled"]["ring", "float64", 8] > 1000 * limit
    assert found["from_pooled"]["ring", "float64", 2] > centre["from_pooled"]["meta"]
    assert found["coverage"]["ring", "float64", 2] < 0.85
    assert found["repetitions"]["Base-2", "30 % lost", 8] == 28
    lost = found["from_pooled"].xs(("30 % lost", 32), level=("messages", "rounds_of_a_mean"))
    assert lost["Base-2"] > 100 * lost["ring"] > 1000 * lost["torus"]
    tracked = table.set_index(labels).loc["gradient tracking"]["from_pooled"]
    assert tracked["torus", "float64", 100] < 1e-15
    assert tracked["ring", "float64", 100] > found["from_pooled"]["ring", "float64", 32]
    assert (found["bytes"].xs("8 bits", level=1) < found["bytes"].xs("float64", level=1)).all()


@pytest.mark.slow
def test_the_page_is_made(tmp_path: Path) -> None:
    options = graph.Options(out=tmp_path, repetitions=2, rounds=(2,), tracked=(2,))
    graph.page(options)
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "table.md", "figure.png"}
