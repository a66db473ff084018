"""The experiment on engines: its shapes, timing and finding."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dfl.comm.mpi import World
from dfl.simulation.prepare import prepare
from experiments.speed import engines
from experiments.speed.stopwatch import WORK, examples, seconds

pytestmark = pytest.mark.slow


def test_twelve_shapes_and_twelve_recurrent_ones_are_named() -> None:
    assert len(engines.SHAPES) == 24
    assert len({(s.model, s.batch_size, s.inputs) for s in engines.SHAPES.values()}) == 24
    assert sum(s.model.startswith("har_lstm") for s in engines.SHAPES.values()) == 12


def test_both_engines_are_timed(tmp_path: Path) -> None:
    engines.main(shapes=["mlp 64-64", "lenet"], times=1, rounds=2, out=tmp_path)
    table = pd.read_csv(tmp_path / "table.csv").set_index("shape")
    assert (table[["batched_ms", "loop_ms"]] > 0).all(axis=None)
    assert table["auto"].to_dict() == {"mlp 64-64": "batched", "lenet": "loop"}
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_the_finding_is_read_off_the_table() -> None:
    table = pd.DataFrame(
        {
            "shape": ["a", "b"],
            "batched_ms": [2.0, 30.0],
            "loop_ms": [100.0, 20.0],
            "auto": ["batched", "batched"],
            "over_the_better": [1.0, 1.5],
        }
    )
    text = engines.finding(table)
    assert "50 times faster for a and 1.50 times slower for b" in text
    assert "at most 1.50 times slower than the better engine (b)" in text


def test_a_stopwatch_times_the_rounds_between_evaluations() -> None:
    shape = engines.SHAPES["mlp 64-64"]
    run = engines._run(shape, "auto", rounds=4)
    assert len(seconds(run, examples(shape.inputs, 160))) == 4
    assert (run.rounds, run.eval_every) == (7, 7)


@pytest.mark.parametrize(
    ("work", "d"), [("A", 199_210), ("B", 2_410), ("C", 650), ("D", 64_102), ("E", 5_450)]
)
def test_the_work_is_that_of_the_baselines(work: str, d: int) -> None:
    it = WORK[work]
    data = examples(it.shape, it.peers)
    shape = engines.Shape(it.peers, 1, it.shape, it.model, it.batch_size)
    setting = prepare(replace(engines._run(shape, "auto", 1), dataset=data), World())
    assert setting.task.parameter_layout.d == d
    assert setting.task.examples.inputs.dtype.itemsize == 4
