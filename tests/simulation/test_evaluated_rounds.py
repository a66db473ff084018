"""The rounds that are evaluated: every `eval_every`-th, and each of the last `eval_last`."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dfl

FEW: dict[str, Any] = {"peers": 3, "model": "softmax", "examples_per_peer": 20, "rounds": 6}


@pytest.mark.parametrize(
    ("every", "last", "rounds"),
    [(4, 1, [0, 4, 6]), (4, 2, [0, 4, 5, 6]), (9, 1, [0, 6]), (9, 9, [0, 1, 2, 3, 4, 5, 6])],
)
def test_each_of_the_last_rounds_is_evaluated(every: int, last: int, rounds: list[int]) -> None:
    rows = pd.DataFrame(dfl.simulate(dfl.Run(**FEW, eval_every=every, eval_last=last)))
    assert rows["round"].tolist() == rounds
    all_rows = pd.DataFrame(dfl.simulate(dfl.Run(**FEW, eval_every=1)))
    expected = all_rows[all_rows["round"].isin(rounds)].reset_index(drop=True)
    clock = ["seconds"]
    pd.testing.assert_frame_equal(rows.drop(columns=clock), expected.drop(columns=clock))


@pytest.mark.usefixtures("without_figures")
def test_it_may_change_when_a_run_is_resumed(tmp_path: Path) -> None:
    list(dfl.simulate(dfl.Run(**FEW, out=tmp_path / "run", eval_every=3, checkpoint_every=3)))
    list(dfl.simulate(dfl.resumed(tmp_path / "run", rounds=9, eval_last=2)))
    assert dfl.load(tmp_path / "run").rows["round"].tolist() == [0, 3, 6, 8, 9]
