"""A resumed run gives the bytes of an uninterrupted one, for every state that a method keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dfl
from dfl.algorithms.gossip.dfedavgm import DFedAvgM, State
from dfl.algorithms.protocols import Net, Task
from dfl.comm.mpi import World
from dfl.datasets.data import Data
from dfl.simulation.defaults import settle
from dfl.simulation.prepare import prepare
from dfl.store import checkpoint_files, manifest, progress
from dfl.store.progress import progress_of
from dfl.store.results import load
from dfl.store.run_files import RunFiles
from tests.models.test_kinds import Half
from tests.support.stopping import crash, record, same


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})


def small(**settings: Any) -> dfl.Run:
    few = {
        "peers": 5,
        "rounds": 7,
        "eval_every": 2,
        "model": "mlp:hidden=6",
        "examples_per_peer": 20,
    }
    return dfl.Run(**{**few, "checkpoint_every": 3, **settings})


RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "replicas": {"bits": 4},
    "edges": {"topology": "one_peer_exponential", "bits": 3, "attack": "sign_flip:peers=2"},
    "published": {
        "algorithm": "qdfedavgm:exchange=paper,alpha=0.5",
        "compressor": "quantize:bits=8",
    },
    "independent": {"init": "independent", "bits": 2, "lr_schedule": "cosine"},
    "served": {"algorithm": "fedavg:fraction=0.6,server_momentum=0.5"},
    "pushed": {"algorithm": "push_sum", "topology": "one_peer_exponential", "faults": "link_loss"},
    "relayed": {
        "algorithm": "relay_sgd",
        "topology": "double_tree",
        "share": "head:1",
        "share_all_until": "2",
    },
    "pooled": {"algorithm": "pooled"},
    "local only": {"algorithm": "local_only"},
    "trusted": {"algorithm": "fltrust:root=20", "attack": "trim"},
    "split": {"algorithm": "fedavg:fraction=0.6", "share": "head:1", "model": "mlp:hidden=6+5"},
    "all shared until round 4": {"share": "head:1", "share_all_until": "4", "bits": 5},
    "all shared until a goal": {
        "share": "head:1",
        "share_all_until": "train_loss=2.317",
        "lr": 0.01,
        "eval_every": 1,
    },
    "split before the cut": {"share": "head:1", "share_all_until": "2", "bits": 5},
    "split before, served": {
        "algorithm": "fedavg:server_momentum=0.5",
        "share": "head:1",
        "share_all_until": "1",
    },
    "trusted, split": {"algorithm": "fltrust:root=20", "share": "head:1"},
    "trusted, split before": {
        "algorithm": "fltrust:root=20",
        "share": "head:1",
        "share_all_until": "2",
    },
    "split by a goal before": {
        "share": "head:1",
        "share_all_until": "train_loss=2.33",
        "lr": 0.01,
        "eval_every": 1,
    },
    "stopped by a goal": {"until": "train_loss=2.310", "lr": 0.01, "eval_every": 1, "rounds": 40},
    "faulty": {
        "bits": 8,
        "faults": "link_loss:p=0.3+outage:p=0.2,length=2+stragglers:fraction=0.4",
    },
    "bursts": {
        "faults": "burst:p=0.3,length=3+join:at=4,peers=1",
        "links": "uplink:mbps=8,compute=constant,step_ms=9",
    },
    "faulty and served": {
        "algorithm": "fedavg",
        "faults": "link_loss:p=0.3+leave:at=4",
        "links": "phone",
    },
    "tracked": {"algorithm": "momentum_tracking", "share": "head:1", "share_all_until": "4"},
    "remembered": {"algorithm": "d2", "lr_schedule": "cosine"},
    "drawn": {
        "model": "mlp:hidden=12,dropout=0.3",
        "auxiliary": "rotation",
        "partition": "dirichlet:alpha=0.3",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "t"), [*((name, 5) for name in RUNS), ("plain", 3)])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, name: str, t: int) -> None:
    """The crash comes after the checkpoint of round 3; all of them resume from it."""
    run = small(**RUNS[name])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(dfl.simulate(replace(run, out=whole)))
    crash(replace(run, out=cut), t)
    assert record(cut)["ending"].startswith("Cut")
    assert checkpoint_files.find(cut).round == 3  # type: ignore[union-attr]
    rows = list(dfl.simulate(dfl.resumed(cut)))
    same(whole, cut)
    assert [row["round"] for row in rows] == [r for r in load(whole).rows["round"] if r >= 3]
    assert (record(cut)["exit"], [each["round"] for each in record(cut)["resumed"]]) == (0, [3])


@dataclass(frozen=True, kw_only=True)
class Views(DFedAvgM):
    """DFedAvgM whose models are every second column of a larger tensor."""

    def round(self, state: State, task: Task, net: Net) -> State:
        x = super().round(state, task, net).x
        return State(torch.stack([x, -x], dim=2)[:, :, 0])


def test_a_state_of_views_is_written_as_it_is(tmp_path: Path) -> None:
    for name, method in (("plain", DFedAvgM()), ("views", Views())):
        list(dfl.simulate(small(algorithm=method, out=tmp_path / name)))
    models = (tmp_path / name / "state.safetensors" for name in ("plain", "views"))
    assert len({path.read_bytes() for path in models}) == 1
    plain, views = (checkpoint_files.find(tmp_path / name) for name in ("plain", "views"))
    assert plain is not None
    assert views is not None
    assert np.array_equal(plain.arrays()["x"], views.arrays()["x"])


def test_goals_are_met_between_the_checkpoint_and_the_end(tmp_path: Path) -> None:
    """Otherwise the two runs with goals above would test nothing."""
    for name, goal in (("all shared until a goal", 2.317), ("stopped by a goal", 2.31)):
        rows = list(dfl.simulate(small(**RUNS[name])))
        assert next(row["round"] for row in rows if row["train_loss"] <= goal) in (4, 6)


def test_a_run_can_be_resumed_several_times(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = small(bits=4, checkpoint_every=1)
    list(dfl.simulate(replace(run, out=whole)))
    crash(replace(run, out=cut), 1)
    for t in (2, 3, 6):
        crash(dfl.resumed(cut), t)
    list(dfl.simulate(dfl.resumed(cut)))
    same(whole, cut)
    launches = record(cut)["resumed"]
    assert [each["round"] for each in launches] == [1, 2, 3, 6]
    assert {"started", "command", "host", "ranks"} < set(launches[0])
    assert record(cut)["started"] <= launches[0]["started"]


def test_the_clock_continues_after_a_resume(tmp_path: Path) -> None:
    run = small(out=tmp_path / "run")
    crash(run, 5)
    seconds = checkpoint_files.find(tmp_path / "run").content["seconds"]  # type: ignore[union-attr]
    list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    clock = load(tmp_path / "run").rows["seconds"].tolist()
    assert clock == sorted(clock)
    assert clock[-1] > seconds > clock[1]
    assert record(tmp_path / "run")["seconds"] > seconds


def test_without_a_checkpoint_a_resumed_run_starts_at_round_0(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    list(dfl.simulate(small(out=whole, checkpoint_every=None)))
    assert not (whole / "checkpoint").exists()
    crash(small(out=cut, checkpoint_every=None), 4)
    list(dfl.simulate(dfl.resumed(cut)))
    same(whole, cut)
    assert [each["round"] for each in record(cut)["resumed"]] == [0]


def contents(folder: Path) -> dict[Path, bytes]:
    return {
        file: file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.parent.name != "logs"
    }


def test_a_finished_run_without_a_checkpoint_is_not_extended(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "run", checkpoint_every=None)))
    before = contents(tmp_path)
    with pytest.raises(dfl.InputError, match=r"--resume .*run is finished and has no checkpoint"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run", rounds=9)))
    assert contents(tmp_path) == before


@pytest.mark.parametrize("every", [None, 3])
def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, every: int | None) -> None:
    list(dfl.simulate(small(out=tmp_path / "run", checkpoint_every=every)))
    before = contents(tmp_path)
    with pytest.warns(UserWarning, match="is finished after 7 rounds"):
        assert list(dfl.simulate(dfl.resumed(tmp_path / "run"))) == []
    with pytest.raises(dfl.InputError, match="has --lr"):
        list(dfl.simulate(replace(dfl.resumed(tmp_path / "run"), lr=0.3)))
    assert contents(tmp_path) == before


def test_a_run_that_restarts_refuses_another_model_or_data(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    given: dict[str, Any] = {"model": torch.nn.Linear(4, 3), "dataset": Data(x, y, x[:9], y[:9], 3)}
    crash(small(out=tmp_path / "run", examples_per_peer=None, checkpoint_every=None, **given), 4)
    before = contents(tmp_path)
    others = (
        (
            {"dataset": replace(given["dataset"], train_labels=(y + 1) % 3)},
            "the data set or the graph is not the one",
        ),
        ({"model": torch.nn.Linear(4, 3, bias=False)}, "the model is not the one"),
    )
    for other, reason in others:
        with pytest.raises(dfl.InputError, match=reason):
            list(dfl.simulate(dfl.resumed(tmp_path / "run", **{**given, **other})))
    assert contents(tmp_path) == before
    assert [row["round"] for row in dfl.simulate(dfl.resumed(tmp_path / "run", **given))][:1] == [0]


def test_more_rounds_equal_a_run_of_that_many_rounds(tmp_path: Path) -> None:
    whole, longer = tmp_path / "whole", tmp_path / "longer"
    list(dfl.simulate(small(out=whole, rounds=10)))
    list(dfl.simulate(small(out=longer, rounds=6)))
    list(dfl.simulate(dfl.resumed(longer, rounds=10)))
    same(whole, longer)


def test_a_callers_own_model_and_data_are_resumed(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
    given: dict[str, Any] = {"model": torch.nn.Linear(4, 3), "dataset": Data(x, y, x[:9], y[:9], 3)}
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = small(model="mlp", bits=8, examples_per_peer=None)
    list(dfl.simulate(replace(run, out=whole, **given)))
    crash(replace(run, out=cut, **given), 4)
    list(dfl.simulate(dfl.resumed(cut, **given)))
    same(whole, cut)
    crash(replace(run, out=tmp_path / "other", **given), 4)
    with pytest.raises(dfl.InputError, match="the model is not the one that the run began with"):
        list(
            dfl.simulate(
                dfl.resumed(
                    tmp_path / "other",
                    model=torch.nn.Linear(4, 3, bias=False),
                    dataset=given["dataset"],
                )
            )
        )
    for other in (
        replace(given["dataset"], test_labels=1 - y[:9] % 2),
        replace(given["dataset"], train_labels=(y + 1) % 3),
    ):
        with pytest.raises(
            dfl.InputError, match="the data set or the graph is not the one that the run began with"
        ):
            list(dfl.simulate(dfl.resumed(tmp_path / "other", model=given["model"], dataset=other)))


def test_models_of_several_kinds_are_resumed(tmp_path: Path) -> None:
    kinds = [Half(True), Half(False, 12)]
    for name, way in (("ring", {"bits": 5}), ("trust", {"algorithm": "fltrust:root=20"})):
        run, whole, cut = small(model="mlp", share="head", **way), tmp_path / name, tmp_path / "cut"
        list(dfl.simulate(replace(run, out=whole, model=kinds)))
        crash(replace(run, out=cut / name, model=kinds), 5)
        list(dfl.simulate(dfl.resumed(cut / name, model=kinds)))
        same(whole, cut / name)
    named = small(model="mlp:hidden=8+mlp:hidden=8+5", share="first:1", bits=5)
    list(dfl.simulate(replace(named, out=tmp_path / "named")))
    crash(replace(named, out=tmp_path / "cut" / "named"), 5)
    list(dfl.simulate(dfl.resumed(tmp_path / "cut" / "named")))
    same(tmp_path / "named", tmp_path / "cut" / "named")


def test_the_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "run", checkpoint_every=2)))
    held = sorted(each.name for each in (tmp_path / "run" / "checkpoint").iterdir())
    assert held == [f"000000000{t}.{kind}" for t in (6, 7) for kind in ("json", "safetensors")]


def test_a_state_that_is_not_finite_gets_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(dfl.DivergedError):
        list(dfl.simulate(small(out=tmp_path / "run", checkpoint_every=1, lr=1e30)))
    assert not (tmp_path / "run" / "checkpoint").exists()


def test_another_version_of_a_library_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crash(small(out=tmp_path / "run"), 4)
    monkeypatch.setattr(progress, "versions", lambda: {"torch": "9", "mpi4py": "0"})
    last = checkpoint_files.find(tmp_path / "run")
    assert last
    (note,) = progress_of(small(resume=tmp_path / "run"), last, (), last.content["data"]).notes
    assert note.startswith("the checkpoint is of torch 2.")
    assert note.endswith(", now 9: last bits may differ")


def test_the_slower_of_two_resumed_runs_writes_nothing(tmp_path: Path) -> None:
    """Two programs resume a run, and one finishes before the other begins to write."""
    crash(small(out=tmp_path / "run"), 4)
    late = dfl.resumed(tmp_path / "run")
    setting = prepare(late, World())
    list(dfl.simulate(late))
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    assert setting.info
    assert setting.progress
    files = RunFiles(tmp_path / "run", setting.progress)
    with pytest.raises(dfl.InputError, match="another program resumed this run meanwhile"):
        files.start(setting.info)
    assert {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()
    } == before


def test_message_figures_do_not_depend_on_the_resume(tmp_path: Path) -> None:
    """The quantization error of a round before a checkpoint is measured although only the resumed
    run reports it.
    """
    run = small(bits=8, eval_every=2)
    crash(replace(run, out=tmp_path / "run"), 4)
    list(dfl.simulate(dfl.resumed(tmp_path / "run", eval_every=1)))
    errors = load(tmp_path / "run").rows["relative_squared_error"]
    assert (errors[1:] > 0).all()


def test_rows_of_other_columns_are_refused(tmp_path: Path) -> None:
    crash(small(out=tmp_path / "run"), 4)
    found = checkpoint_files.find(tmp_path / "run")
    assert found
    content = found.content | {"table": found.content["table"].replace("accuracy_min", "worst")}
    checkpoint_files.write(tmp_path / "run", found.arrays(), content)
    with pytest.raises(
        dfl.InputError, match=r"metrics.csv has columns \['round',.*'worst'.*and these rows have"
    ):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))


def test_without_rows_there_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfl.store.run_files.RunFiles.row", lambda *given: None)
    with pytest.raises(dfl.InputError, match=r"metrics.csv was removed or changed"):
        list(dfl.simulate(small(out=tmp_path / "run")))


def test_rows_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    run = small(out=tmp_path / "run", eval_every=1)
    crash(run, 5)
    table = tmp_path / "run" / "metrics.csv"
    assert pd.read_csv(table)["round"].tolist() == [0, 1, 2, 3, 4]
    table.write_text(table.read_text() + "5,0.1,a torn li")
    list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    assert pd.read_csv(table)["round"].tolist() == list(range(8))


def removed(path: Path) -> None:
    path.unlink()


def other_rows(path: Path) -> None:
    path.write_text(path.read_text().replace("\n0,", "\n1,"))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def no_text(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n0,", b"\n\xff,"))


@pytest.mark.parametrize("damage", [removed, other_rows, cut_short, no_text])
def test_damaged_rows_are_rewritten(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    run = small(out=tmp_path / "cut", eval_every=1)
    crash(run, 5)
    list(dfl.simulate(replace(run, out=tmp_path / "whole")))
    damage(tmp_path / "cut" / "metrics.csv")
    setting = prepare(dfl.resumed(tmp_path / "cut"), World())
    assert setting.progress
    assert any("metrics.csv" in note for note in setting.progress.notes)
    list(dfl.simulate(dfl.resumed(tmp_path / "cut")))
    same(tmp_path / "whole", tmp_path / "cut")


OUTPUTS = ["metrics.csv", "peers.csv", "state.safetensors", "run.json"]


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("damage", [removed, cut_short])
def test_a_finished_run_is_rebuilt_from_its_last_checkpoint(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    run = small(bits=4)
    for folder in ("whole", "damaged"):
        list(dfl.simulate(replace(run, out=tmp_path / folder)))
    damage(tmp_path / "damaged" / name)
    list(dfl.simulate(dfl.resumed(tmp_path / "damaged")))
    same(tmp_path / "whole", tmp_path / "damaged")
    assert manifest.damage(tmp_path / "damaged") == ""
    assert record(tmp_path / "damaged")["run"] == record(tmp_path / "whole")["run"] | {
        "out": str(tmp_path / "damaged")
    }


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_damaged_run_without_a_checkpoint_is_not_changed(tmp_path: Path, name: str) -> None:
    run = small(out=tmp_path / "run", checkpoint_every=None)
    list(dfl.simulate(run))
    (tmp_path / "run" / name).unlink()
    before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
    with pytest.raises(dfl.InputError, match=f"{name} .*no checkpoint"):
        list(dfl.simulate(replace(settle(run, 1), resume=run.out)))
    assert {
        file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()
    } == before


@pytest.mark.parametrize("end", ["row", "finish"])
@pytest.mark.parametrize("damage", [removed, cut_short, other_rows])
def test_removed_or_changed_rows_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, damage: Callable[[Path], None]
) -> None:
    known, seen = getattr(RunFiles, end), list[object]()

    def late(self: RunFiles, *given: Any) -> None:
        seen.append(given)
        if end == "finish" or len(seen) == 3:
            damage(tmp_path / "run" / "metrics.csv")
        known(self, *given)

    monkeypatch.setattr(RunFiles, end, late)
    with pytest.raises(dfl.InputError, match=r"metrics\.csv was removed or changed"):
        list(dfl.simulate(small(out=tmp_path / "run")))
    assert record(tmp_path / "run")["exit"] == 2
    assert not (tmp_path / "run" / "state.safetensors").exists() or end == "finish"
    assert (tmp_path / "run" / "metrics.csv").exists() == (damage is not removed)


def test_the_checksum_of_the_data_stays_that_of_earlier_versions(tmp_path: Path) -> None:
    """With another one, runs that were begun before could not be resumed."""
    x = np.arange(48, dtype=np.float32).reshape(12, 4)
    data = dfl.Data(x, np.arange(12) % 3, x[:3], np.arange(3), classes=3)
    setting = dfl.Run(dataset=data, model="softmax", peers=3, rounds=1, out=tmp_path / "run")
    list(dfl.simulate(setting))
    manifest = json.loads((tmp_path / "run/run.json").read_text())
    assert manifest["data"] == "2d9ad7b6cba1f5b4b764ee6a3320fc6f0a32a3723ec5ac53352a1023ffa5f4dc"
