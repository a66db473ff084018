"""TensorBoard shows the values of metrics.csv."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import dfl
from dfl.core.errors import InputError
from tests.conftest import Command


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the rounds and values that TensorBoard reads from a folder, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader warns; it needs more packages than the writer
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def run(folder: Path, **more: Any) -> dfl.Run:
    few: dict[str, Any] = {
        "peers": 3,
        "rounds": 4,
        "eval_every": 2,
        "model": "softmax",
        "examples_per_peer": 20,
    }
    return dfl.Run(**few | {"out": folder, "tensorboard": True} | more)


def test_rows_are_shown_as_they_are(tmp_path: Path) -> None:
    rows = list(dfl.simulate(run(tmp_path / "run")))
    shown = scalars(tmp_path / "run")
    assert set(shown) == set(rows[0]) - {"round"}
    for name, values in shown.items():
        assert [t for t, _ in values] == [0, 2, 4]
        assert [value for _, value in values] == pytest.approx(
            [row[name] for row in rows], rel=1e-6
        )
    assert list(dfl.load(tmp_path / "run").rows["round"]) == [0, 2, 4]


def test_a_resumed_run_shows_every_round_once(tmp_path: Path) -> None:
    again = run(tmp_path / "run", checkpoint_every=2, eval_every=1, rounds=5)
    for row in dfl.simulate(again):
        if row["round"] == 3:
            break
    rows = list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    shown = scalars(tmp_path / "run")["accuracy_mean"]
    assert [t for t, _ in shown] == [0, 1, 2, 3, 4, 5]
    assert shown[5][1] == pytest.approx(rows[-1]["accuracy_mean"], rel=1e-6)


def test_an_extended_run_shows_the_evaluations_of_its_table(tmp_path: Path) -> None:
    list(dfl.simulate(run(tmp_path / "run", checkpoint_every=4, rounds=5)))  # evaluates round 5
    (tmp_path / "run" / "tensorboard").rename(tmp_path / "lost")
    list(dfl.simulate(dfl.resumed(tmp_path / "run", rounds=8)))
    assert [t for t, _ in scalars(tmp_path / "run")["train_loss"]] == [0, 2, 4, 6, 8]
    list(dfl.simulate(dfl.resumed(tmp_path / "run", rounds=10)))
    assert [t for t, _ in scalars(tmp_path / "run")["train_loss"]] == [0, 2, 4, 6, 8, 10]


def test_tensorboard_is_an_optional_package(
    tmp_path: Path, dfl_run: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfl.reporting.callbacks.tensorboard.find_spec", lambda name: None)
    assert "pip install 'dfl-sim[tensorboard]'" in dfl_run.refused(
        "--tensorboard", "--peers", "3", "--rounds", "1"
    )
    with pytest.raises(InputError, match=r"dfl-sim\[tensorboard\]"):
        list(dfl.simulate(run(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_tensorboard_needs_a_folder(dfl_run: Command) -> None:
    with pytest.raises(InputError, match="give --out"):
        next(dfl.simulate(dfl.Run(peers=3, tensorboard=True)))
    assert dfl_run("--tensorboard", "--peers", "3", "--rounds", "1", "--dry-run").code == 0
    assert dfl_run("--tensorboard", "--peers", "3", "--rounds", "1").code == 0
    assert len(list(dfl_run.folder.glob("runs/*/tensorboard/events*"))) == 1


def test_without_the_option_tensorboard_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it would fail
    list(dfl.simulate(run(tmp_path / "run", tensorboard=False)))
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_full_disk_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorboard.SummaryWriter, "flush", full)
    with pytest.raises(
        InputError, match="tensorboard cannot be written to: No space left on device"
    ):
        list(dfl.simulate(run(tmp_path / "run")))
