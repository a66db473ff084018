"""Recurrent, two-input and normalised models go on after a crash as if there had been none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import dfl
from tests.mpi.layouts import workloads
from tests.support.stopping import crash, same

pytestmark = pytest.mark.usefixtures("no_figures")

RUNS = dict(workloads())
QUICK = "-faults"
"""The end of the names of runs that the quick tier has: with most that a checkpoint holds."""


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=() if label.endswith(QUICK) else pytest.mark.slow)
        for label in RUNS
    ],
)
def test_a_resumed_run_has_the_same_bytes(tmp_path: Path, label: str) -> None:
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    run = replace(RUNS[label], rounds=4, checkpoint_every=1)
    crash(replace(run, out=cut), 2)
    dataset = {} if isinstance(run.dataset, str) else {"dataset": run.dataset}
    list(dfl.simulate(dfl.resumed(cut, **dataset)))
    list(dfl.simulate(replace(run, out=whole)))
    same(cut, whole)
