"""Are runs in this process those that a program of their own would make, and kept once they are
made?
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import dfl
from dfl.config import Run
from dfl.core.errors import InputError
from experiments import common, in_process

pytestmark = pytest.mark.slow

RUN = Run(
    dataset="digits",
    peers=3,
    topology="ring",
    rounds=2,
    eval_every=1,
    model="softmax",
    examples_per_peer=20,
)


def cell(seed: int = 0, **changes: object) -> common.Cell:
    return {"what": "ring", "seed": seed}, Run.from_dict(RUN.to_dict() | {"seed": seed} | changes)


def place(out: Path) -> common.Place:
    return common.Place(out=out)


def test_rows_are_those_of_the_run(tmp_path: Path) -> None:
    rows = in_process.measure(place(tmp_path), [cell(0), cell(1)])
    assert rows["seed"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows["round"].tolist() == [0, 1, 2] * 2
    assert (rows["what"] == "ring").all()
    for seed in (0, 1):
        own = rows[rows["seed"] == seed]
        expected = pd.DataFrame(dfl.simulate(cell(seed)[1]))
        for name in ("accuracy_mean", "train_loss", "consensus_distance"):
            assert own[name].tolist() == expected[name].tolist()


def test_rows_are_those_of_a_program(tmp_path: Path) -> None:
    options = common.Options(out=tmp_path, jobs=1)
    launched, here = common.measure(options, [cell()]), in_process.measure(options, [cell()])
    assert here["accuracy_mean"].tolist() == launched["accuracy_mean"].tolist()
    assert here["train_loss"].tolist() == pytest.approx(launched["train_loss"].tolist(), rel=1e-12)


def test_what_is_kept_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = in_process.measure(place(tmp_path), [cell(0)])
    ran: list[int] = []
    simulate = dfl.simulate

    def noted(run: Run) -> Iterator[dict[str, float]]:
        ran.append(run.seed)
        return simulate(run)

    monkeypatch.setattr(dfl, "simulate", noted)
    again = in_process.measure(place(tmp_path), [cell(0), cell(1)])
    assert ran == [1]
    pd.testing.assert_frame_equal(again[again["seed"] == 0], first)


def test_the_folder_of_the_data_does_not_matter(tmp_path: Path) -> None:
    first = in_process.measure(place(tmp_path), [cell()])
    pd.testing.assert_frame_equal(
        in_process.measure(place(tmp_path), [cell(data_dir=str(tmp_path))]), first
    )


def test_a_cell_of_other_settings_is_refused(tmp_path: Path) -> None:
    in_process.measure(place(tmp_path), [cell()])
    with pytest.raises(InputError, match=r"what=ring,seed=0\.json is of a run with other settings"):
        in_process.measure(place(tmp_path), [cell(lr=0.01)])


def test_an_interrupted_cell_leaves_nothing_that_counts(tmp_path: Path) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "what=ring,seed=0.part").write_text('{"run": ')
    assert len(in_process.measure(place(tmp_path), [cell()])) == 3
    assert not list((tmp_path / "cells").glob("*.part"))


def test_a_run_that_diverges_stops_short(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = in_process.measure(place(tmp_path), [cell(lr=1e30, model="mlp")])
    assert 0 < len(rows) < 3
    assert "no longer finite" in capsys.readouterr().err
    kept = json.loads((tmp_path / "cells" / "what=ring,seed=0.json").read_text())
    assert len(kept["rows"]) == len(rows)


def test_what_cannot_be_run_is_said_and_not_kept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--attack"):
        in_process.measure(place(tmp_path), [cell(attack="nonsense")])
    assert not list((tmp_path / "cells").iterdir())
