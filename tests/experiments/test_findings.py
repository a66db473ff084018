"""The committed findings are those of the committed tables."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments import common
from experiments.speed import benchmark_peers

RESULTS = Path(__file__).parents[2] / "experiments/results"
KEPT = {
    "table": "table.csv",
    "seeds": "seeds.csv",
    "each": "seeds.csv",
    "rows": "seeds.csv",
}
"""The parameters of functions `finding`, and the files that have them."""
FOUND = {"label_coverage": "correlations.csv", "stragglers": "differences.csv"}
"""The files of what is found in the rows of seeds."""
TEXT = {"width": str, "loss": str, "lr": str}
"""Columns that are labels."""
MODULES = {
    path.stem: f"experiments.{path.parent.name}.{path.stem}"
    for path in sorted((RESULTS.parent).glob("*/*.py"))
    if "\ndef finding(" in path.read_text()
}
NOT_KEPT = {
    "benchmark_peers": "the rounds of every launch",
    "fltrust_cnn": "more digits of the errors",
    "inference_graph": "more digits of the bytes",
    "learning_speed": "the first rounds, and more digits of the seconds",
    "lg_fair": "more digits of the probes",
    "methods_quadratic": "the slopes",
    "precision": "the intervals of the seeds",
}
"""What findings need that no committed file has."""


def results(stem: str) -> str:
    """Return the folder of the results of an experiment; those of some have its package's name."""
    module = MODULES[stem].split(".")
    return stem if (RESULTS / stem / "table.md").exists() else f"{module[1]}_{stem}"


KNOWN = [
    stem
    for stem in MODULES
    if (RESULTS / results(stem) / "table.md").exists() and results(stem) not in NOT_KEPT
]


def test_nearly_all_findings_are_checked() -> None:
    assert len(KNOWN) >= 34
    assert all((RESULTS / name / "table.md").exists() for name in NOT_KEPT)


@pytest.mark.parametrize("stem", KNOWN)
def test_a_finding_is_that_of_its_table(stem: str) -> None:
    module: Any = import_module(MODULES[stem])
    folder = RESULTS / results(stem)
    given: list[Any] = []
    for name in signature(module.finding).parameters:
        if name == "options":
            given.append(module.Options())
        else:
            file = FOUND[stem] if name == "found" else KEPT[name]
            given.append(pd.read_csv(folder / file, dtype=TEXT))
    stored = (folder / "table.md").read_text().partition("\nFinding: ")[2]
    assert module.finding(*given) == stored.strip()


def test_the_benchmark_s_sentences_are_those_of_its_table() -> None:
    folder = RESULTS / "benchmark_peers"
    table = pd.read_csv(folder / "table.csv")
    stored = (folder / "table.md").read_text().partition("\nFinding: ")[2]
    for _, own in common.groups(table[table["fastest"] == "yes"], ["work"]):
        assert benchmark_peers._of_best(own) in stored
