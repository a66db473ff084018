"""`--profile` measures a run without changing it, and writes a table and a trace."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import dfl
from dfl.comm.mpi import World
from dfl.core.profiling import PHASES, Profiles
from dfl.reporting.callbacks.profile import table, trace
from dfl.reporting.simulate import default_callbacks
from dfl.store.callbacks import Callback, Outcome
from tests.conftest import Command

FEW: dict[str, Any] = {
    "peers": 4, "rounds": 4, "eval_every": 2, "model": "softmax", "examples_per_peer": 20,
    "bits": 4, "checkpoint_every": 2, "report": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})


class Keep(Callback):
    outcome: Outcome

    def finish(self, outcome: Outcome) -> None:
        self.outcome = outcome


def profiles(ranks: int) -> Profiles:
    """Return made profiles, in which phase k took (rank + 1) * k seconds."""
    seconds = np.arange(len(PHASES)) * np.arange(1, ranks + 1)[:, None] * 10**9
    counted = np.stack([np.ones_like(seconds), seconds], axis=2)
    return Profiles(counted, np.array([[0, 3, 1000, 5000], [1, 0, 0, 2000]]))


def test_a_server_waits_for_the_ranks_that_train_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, gather = [0], World.all_gather

    def after_the_last(world: World, rows: NDArray[Any]) -> NDArray[Any]:
        if rows.shape == (FEW["peers"],):  # the weights, which ranks send first
            late[0] += 10**12
        return gather(world, rows)

    clock = time.perf_counter_ns
    monkeypatch.setattr(time, "perf_counter_ns", lambda: clock() + late[0])
    monkeypatch.setattr(World, "all_gather", after_the_last)
    kept = Keep()
    few = FEW | {"eval_every": 4, "checkpoint_every": None}
    list(
        dfl.simulate(dfl.Run(**few, algorithm="fedavg", profile=True, out=tmp_path / "run"), [kept])
    )
    assert kept.outcome.profile is not None
    spent = dict(zip(PHASES, kept.outcome.profile.table[0, :, 1].tolist(), strict=True))
    assert spent["wait"] >= 4 * 10**12
    assert spent["send"] < 10**12


def test_a_profiled_run_has_the_same_results(tmp_path: Path) -> None:
    kept = Keep()
    plain = list(dfl.simulate(dfl.Run(**FEW, out=tmp_path / "plain")))
    profiled = list(dfl.simulate(dfl.Run(**FEW, profile=True, out=tmp_path / "profiled"), [kept]))
    for before, after in zip(plain, profiled, strict=True):
        assert before | {"seconds": 0} == after | {"seconds": 0}
    states = [tmp_path / name / "state.safetensors" for name in ("plain", "profiled")]
    assert states[0].read_bytes() == states[1].read_bytes()
    assert not (tmp_path / "plain" / "profile").exists()
    assert kept.outcome.profile is not None
    calls = dict(zip(PHASES, kept.outcome.profile.table[0, :, 0].tolist(), strict=True))
    rounds, evaluations = 4, 3
    assert calls["encode"] == rounds
    assert calls["decode"] == 2 * rounds  # own messages, and those from other ranks
    assert calls["mix"] == rounds
    assert calls["evaluate"] == evaluations
    assert calls["write"] == evaluations + 2  # two checkpoints
    assert calls["forward and backward"] % rounds == 0
    assert calls["forward and backward"] >= rounds * 20 // 10
    assert calls["batches"] > calls["update"] > 0
    assert kept.outcome.profile.table.shape == (1, len(PHASES), 2)


def test_the_folder_has_the_table_and_the_trace(tmp_path: Path) -> None:
    list(dfl.simulate(dfl.Run(**FEW, profile=True, out=tmp_path / "run")))
    folder = tmp_path / "run" / "profile"
    with (folder / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["phase"] for row in rows] == list(PHASES)
    assert sum(float(row["share"]) for row in rows) == pytest.approx(1)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {each["name"] for each in events} <= set(PHASES)
    assert sum(int(row["calls"]) for row in rows if row["phase"] != "other") == len(events)
    for name in ("encode", "mix"):
        seconds = sum(each["dur"] for each in events if each["name"] == name) / 1e6
        assert seconds == pytest.approx(
            float(next(r["seconds"] for r in rows if r["phase"] == name))
        )


def test_the_table_on_the_terminal_shows_ranks_or_their_range() -> None:
    two = table(profiles(2)).splitlines()
    assert two[0].split() == ["seconds", "mean", "share", "rank", "0", "rank", "1"]
    assert two[2].split() == ["forward", "and", "backward", "1.500", "1.8%", "1.000", "2.000"]
    many = table(profiles(16)).splitlines()
    assert many[0].split() == ["seconds", "mean", "share", "least", "most"]
    assert many[2].split()[-2:] == ["1.000", "16.000"]
    assert len(table(profiles(1)).splitlines()[0].split()) == 3


def test_a_rank_is_a_process_of_the_trace() -> None:
    first, second = trace(profiles(2))
    assert first == {"name": "encode", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 4.0}
    assert second["pid"] == 1


def test_the_command_prints_the_table(dfl_run: Command, tmp_path: Path) -> None:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
    ended = dfl_run(*flags, "--profile", f"--out={tmp_path / 'run'}")
    lines = ended.out.splitlines()
    assert any(line.startswith("forward and backward") for line in lines)


def test_a_quiet_command_prints_no_table(dfl_run: Command, tmp_path: Path) -> None:
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in FEW.items()]
    ended = dfl_run(*flags, "--profile", "--quiet", f"--out={tmp_path / 'run'}")
    assert [line.split()[0] for line in ended.out.splitlines()] == ["look"]


def test_a_profile_needs_a_folder() -> None:
    with pytest.raises(dfl.InputError, match=r"--profile .*--out"):
        default_callbacks(dfl.Run(profile=True))
