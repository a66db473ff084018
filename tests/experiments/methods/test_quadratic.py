"""The comparison of methods on a quadratic: its numbers, its table and its figure."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.methods.quadratic import LADDER, METHODS, ended, graphs, setting
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def distance(graph: str, method: str) -> float:
    """The distance from the minimum after 1,000 rounds."""
    found = ended(setting(METHODS[method], LADDER[-1], **graphs()[graph]))
    return float(found["distance"])


@pytest.mark.parametrize(
    ("graph", "method", "most"),
    [
        ("ring", "gradient tracking, atc", 1e-6),
        ("ring", "gradient tracking, cta", 1e-6),
        ("ring", "momentum tracking", 1e-6),
        ("ring", "D2", 1e-11),
        ("ring", "exact diffusion", 1e-11),
        ("ring_0.44", "exact diffusion", 1e-11),
        ("chain", "RelaySGD", 3e-6),
        ("changing", "gradient tracking, atc", 1e-11),
    ],
)
def test_a_method_reaches_the_minimum(graph: str, method: str, most: float) -> None:
    assert distance(graph, method) < most


@pytest.mark.parametrize(
    ("method", "bias"),
    [("D-PSGD, atc", 0.656), ("DSGDm", 0.656), ("QG-DSGDm", 0.131), ("DecentLaM", 0.131)],
)
def test_a_method_keeps_its_bias(method: str, bias: float) -> None:
    assert distance("ring", method) == pytest.approx(bias, abs=1e-2)


def test_d2_diverges_below_its_limit_and_is_warned_of() -> None:
    found = ended(setting(METHODS["D2"], LADDER[-1], **graphs()["ring_0.44"]))
    assert found["distance"] > 1e50
    assert found["warned"]
    assert not ended(setting(METHODS["D2"], 1, **graphs()["chain"]))["warned"]


def test_what_diverges_is_warned_of() -> None:
    for graph, given in graphs().items():
        for name, method in METHODS.items():
            end = ended(setting(method, 100, **given))
            assert end["warned"] or not end["distance"] > 10, (graph, name)


def test_the_page_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    done = run_experiment("methods.quadratic", tmp_path, "--rounds", "3")
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv", dtype=str)
    assert list(table["method"]) == list(METHODS)
    assert list(table.columns[-5:]) == list(graphs())
    assert (table.loc[table["method"] == "RelaySGD", "ring"] == "refused").all()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (tmp_path / "table.md").read_text().strip()
