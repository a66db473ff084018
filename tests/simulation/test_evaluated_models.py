"""A callback that asks for them receives the models of all peers at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import dfl
from dfl.simulation import evaluator
from dfl.simulation.run_state import gathered
from dfl.store.callbacks import Outcome, Peers
from tests.support.mpirun import mpirun

State = Mapping[str, NDArray[np.floating[Any]]]
"""Models by parameter name."""

FEW: dict[str, Any] = {
    "peers": 3, "model": "mlp:hidden=8", "examples_per_peer": 20, "rounds": 4, "eval_every": 2,
    "eval_last": 2,
}  # fmt: skip
"""A run that is evaluated after rounds 0, 2, 3 and 4."""
ROUNDS = [0, 2, 3, 4]
WAYS: dict[str, tuple[dict[str, Any], int]] = {
    "graph": ({"topology": "ring", "bits": 4}, 3),
    "server": ({"algorithm": "fedavg:fraction=0.7"}, 1),
    "personal layers, server": ({"algorithm": "fedavg", "share": "head:1"}, 3),
    "personal layers, graph": ({"topology": "ring", "share": "first:1"}, 3),
    "alone": ({"algorithm": "local_only", "momentum": 0.9}, 3),
}
"""Settings, and the number of rows of every parameter."""
SHAPES = {"1.weight": (8, 64), "1.bias": (8,), "3.weight": (10, 8), "3.bias": (10,)}

JOB = """
import sys
from pathlib import Path
from tests.simulation.test_evaluated_models import main

main(Path(sys.argv[1]), *sys.argv[2:])
"""


class Seen(dfl.Callback):
    """Keeps what it is given, without a copy, and the order of the calls."""

    needs_models = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.states: dict[int, State] = {}
        self.end: State = {}
        self.error: BaseException | None = None

    def row(self, row: dfl.Row) -> None:
        self.calls.append(("row", row.round))

    def evaluated(self, t: int, peers: Peers) -> None:
        self.calls.append(("evaluated", t))

    def evaluated_models(self, t: int, state: State) -> None:
        self.calls.append(("evaluated_models", t))
        self.states[t] = state

    def finish(self, outcome: Outcome) -> None:
        self.calls.append(("finish", -1))
        self.end = outcome.state

    def close(self, error: BaseException | None) -> None:
        self.error = error


class Broken(Seen):
    """Fails at the models of round 3."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.planned = error

    def evaluated_models(self, t: int, state: State) -> None:
        super().evaluated_models(t, state)
        if t == 3:
            raise self.planned


class Uninterested(Seen):
    """Does not ask for models."""

    needs_models = False


def watched(*callbacks: dfl.Callback, **settings: Any) -> list[dfl.Row]:
    """Run with callbacks, and return the rows without their clocks."""
    rows = list(dfl.simulate(dfl.Run(**{**FEW, **settings}), callbacks=[*callbacks]))
    return [dfl.Row({**row, "seconds": 0.0}) for row in rows]


def assert_same(one: State, other: State) -> None:
    """Assert that two states are the same to the bit."""
    assert list(one) == list(other)
    for name, rows in one.items():
        assert rows.dtype == other[name].dtype
        assert rows.shape == other[name].shape
        assert rows.tobytes() == other[name].tobytes(), name


def main(folder: Path, what: str) -> None:
    """Run on all ranks of a job, and write the models that rank 0 receives; or let it fail."""
    if what != "all":
        error = dfl.InputError("not these models") if what == "input" else ValueError("a defect")
        watched(Broken(error))
        return
    for name, (settings, _) in WAYS.items():
        seen = Seen()
        watched(seen, **settings)
        for t, state in seen.states.items():
            place = folder / name / str(t)
            place.mkdir(parents=True)
            for parameter, rows in state.items():
                np.save(place / f"{parameter}.npy", rows)


@pytest.mark.parametrize("way", WAYS)
def test_they_are_those_of_runs_that_end_there(way: str) -> None:
    """A shorter run is the beginning of a longer one."""
    settings, rows = WAYS[way]
    seen = Seen()
    watched(seen, **settings)
    assert list(seen.states) == ROUNDS
    for t, state in seen.states.items():
        assert {name: value.shape for name, value in state.items()} == {
            name: (rows, *shape) for name, shape in SHAPES.items()
        }
        if t:
            short = Seen()
            watched(short, **settings, rounds=t, eval_every=t, eval_last=1)
            assert_same(state, short.end)
    assert_same(seen.states[4], seen.end)
    assert any((seen.states[2][name] != seen.states[3][name]).any() for name in SHAPES)


def test_personal_layers_are_each_peers_own_beside_the_shared_ones() -> None:
    seen = Seen()
    watched(seen, algorithm="fedavg", share="head:1")
    end = seen.states[4]
    for name in SHAPES:
        alike = [bool((end[name][i] == end[name][0]).all()) for i in (1, 2)]
        assert alike == [name.startswith("3.")] * 2


def test_the_figures_of_a_round_are_those_of_its_models() -> None:
    """Accuracies on the common test set, computed with torch alone."""
    data, seen = dfl.datasets.DATASETS["digits"](None), Seen()
    rows = watched(seen, topology="ring", eval_examples=None)
    inputs = torch.from_numpy(data.test_inputs).float().flatten(1) * data.scale + data.shift
    labels = torch.from_numpy(data.test_labels)
    for row in rows:
        w = {name: torch.from_numpy(value) for name, value in seen.states[row.round].items()}
        right = []
        for i in range(3):
            h = (inputs @ w["1.weight"][i].T + w["1.bias"][i]).relu()
            out = h @ w["3.weight"][i].T + w["3.bias"][i]
            right.append(float((out.argmax(1) == labels).double().mean()))
        assert row["accuracy_mean"] == pytest.approx(np.mean(right), abs=1.1 / len(labels))
        assert row["accuracy_max"] == pytest.approx(max(right), abs=1.1 / len(labels))


def test_they_follow_the_figures_of_their_round() -> None:
    seen = Seen()
    watched(seen)
    calls = ("row", "evaluated", "evaluated_models")
    assert seen.calls == [*((call, t) for t in ROUNDS for call in calls), ("finish", -1)]


def test_only_callbacks_that_ask_receive_them() -> None:
    asking, other = Seen(), Uninterested()
    watched(other, asking, other)
    assert list(asking.states) == ROUNDS
    assert other.states == {}
    assert ("evaluated", 4) in other.calls


@pytest.mark.parametrize(("asks", "times"), [(False, 1), (True, 5)])
def test_nothing_is_gathered_before_the_end_where_none_asks(
    asks: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every evaluation, and at the end."""
    rounds = []

    def count(run_state: Any, prepared: Any) -> Any:
        rounds.append(run_state.t)
        return gathered(run_state, prepared)

    monkeypatch.setattr(evaluator, "gathered", count)
    watched(Seen() if asks else Uninterested())
    assert len(rounds) == times


@pytest.mark.parametrize("way", WAYS)
def test_watching_or_changing_them_does_not_change_the_run(way: str) -> None:
    class Spoiler(Seen):
        def evaluated_models(self, t: int, state: State) -> None:
            super().evaluated_models(t, {name: rows.copy() for name, rows in state.items()})
            for rows in state.values():
                rows[...] = 7

    settings, _ = WAYS[way]
    seen, spoiler, blind, before, after = Seen(), Spoiler(), Uninterested(), Seen(), Seen()
    rows = [
        watched(*each, **settings)
        for each in ([seen], [spoiler], [blind], [before, Spoiler(), after])
    ]
    assert rows[0] == rows[1] == rows[2] == rows[3]
    assert_same(seen.end, blind.end)
    for t in ROUNDS:
        for other in (spoiler, before, after):  # each has copies of its own
            assert_same(seen.states[t], other.states[t])


def test_a_run_that_stops_at_its_goal_ends_with_the_models_of_that_round() -> None:
    seen = Seen()
    watched(seen, rounds=30, until="train_loss=2.2", lr=0.1)
    assert 0 < list(seen.states)[-1] < 30
    assert_same(list(seen.states.values())[-1], seen.end)


def test_models_of_a_diverged_round_are_not_passed_on() -> None:
    seen = Seen()
    with pytest.raises(dfl.DivergedError):
        watched(seen, lr=1e30, rounds=8, eval_every=1)
    assert 0 in seen.states
    assert all(np.isfinite(rows).all() for state in seen.states.values() for rows in state.values())
    assert isinstance(seen.error, dfl.DivergedError)


@pytest.mark.parametrize("kind", [ValueError, dfl.InputError])
def test_an_exception_ends_the_run(kind: type[Exception]) -> None:
    broken, other = Broken(kind("no")), Seen()
    with pytest.raises(kind, match="no"):
        watched(broken, other)
    assert list(broken.states) == [0, 2, 3]
    assert ("evaluated", 4) not in broken.calls
    assert ("finish", -1) not in broken.calls + other.calls
    assert broken.error is other.error is broken.planned


@pytest.mark.mpi
def test_they_are_the_same_bytes_on_one_and_on_three_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    main(tmp_path / "1", "all")
    done = mpirun(3, str(tmp_path / "job.py"), str(tmp_path / "3"), "all")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    files = [
        {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}
        for folder in (tmp_path / "1", tmp_path / "3")
    ]
    assert len(files[0]) == len(WAYS) * len(ROUNDS) * len(SHAPES)
    assert files[0] == files[1]


@pytest.mark.mpi
@pytest.mark.parametrize(("what", "line"), [("input", "not these models"), ("other", "a defect")])
def test_an_exception_ends_a_job(what: str, line: str, tmp_path: Path) -> None:
    """No rank waits for the one that failed."""
    (tmp_path / "job.py").write_text(JOB)
    done = mpirun(2, str(tmp_path / "job.py"), str(tmp_path), what, timeout=100)
    assert done.returncode != 0
    assert line in done.stderr
