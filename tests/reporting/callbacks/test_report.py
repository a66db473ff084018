"""A run directory is complete, is written atomically, and loads as it was written."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import dfl
from dfl.comm.mpi import World
from dfl.core.files import Lock, atomically
from dfl.report import report
from dfl.simulation.defaults import settle
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.store import manifest
from dfl.store.callbacks import COLUMNS
from dfl.store.results import Result
from dfl.store.run_directory import OUTPUTS, claim
from dfl.store.run_files import RunFiles

PEERS = [
    "peer",
    "rank",
    "degree",
    "n_train",
    "labels",
    "accuracy",
    "local_accuracy",
    "train_loss",
    "payload_bytes_sent",
]


def small(**settings: Any) -> dfl.Run:
    run = dfl.Run(peers=4, rounds=3, eval_every=2, model="mlp:hidden=5", examples_per_peer=20)
    return replace(run, **settings)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dfl.Row], Result]:
    """Return the rows that a run yielded, and the result loaded from its folder."""
    folder = tmp_path_factory.mktemp("runs") / "of the" / "ring"
    rows = list(
        dfl.simulate(small(out=folder, bits=4, validation=0.2, partition="shards:per_peer=2"))
    )
    return rows, dfl.load(folder)


@pytest.fixture
def setting(tmp_path: Path) -> Prepared:
    return prepare(small(out=tmp_path / "run"), World())


def test_loaded_rows_are_those_of_the_run(done: tuple[list[dfl.Row], Result]) -> None:
    rows, result = done
    assert list(result.rows.columns)[: len(COLUMNS)] == list(COLUMNS)
    assert result.rows.to_dict("records") == rows
    assert result.rows["round"].tolist() == [0, 2, 3]


@pytest.mark.usefixtures("without_figures")
def test_the_loaded_run_has_all_settings_and_repeats(done: tuple[list[dfl.Row], Result]) -> None:
    _, result = done
    given = small(out=result.folder, bits=4, validation=0.2, partition="shards:per_peer=2")
    assert result.run == settle(given, 1)
    again = [
        row["accuracy_mean"]
        for row in dfl.simulate(
            dfl.Run.from_dict(result.record["run"] | {"out": f"{result.folder}2"})
        )
    ]
    assert again == result.rows["accuracy_mean"].tolist()


def test_run_json_has_settings_and_environment(done: tuple[list[dfl.Row], Result]) -> None:
    record = done[1].record
    assert (record["exit"], record["ending"], record["ranks"], record["threads"]) == (
        0,
        "finished",
        1,
        1,
    )
    assert record["seconds"] > 0
    assert record["versions"]["torch"] == torch.__version__
    assert {"python", "dfl", "numpy", "scipy", "networkx", "mpi4py"} < set(record["versions"])
    assert record["model"] == {
        "own_module": False,
        "shape": [1, 8, 8],
        "classes": 10,
        "parameters": 385,
        "dtype": "float32",
    }
    assert {"git", "host", "platform", "command", "started"} < set(record)


def test_peers_have_a_row_each(done: tuple[list[dfl.Row], Result]) -> None:
    rows, result = done
    measured = [*PEERS[:7], "validation_accuracy", *PEERS[7:]]
    assert list(result.peers.columns) == [*measured, "relative_squared_error"]
    last = result.peers["relative_squared_error"].max()
    assert last == rows[-1]["relative_squared_error"]
    assert result.peers["accuracy"].mean() == pytest.approx(rows[-1]["accuracy_mean"], rel=1e-12)
    assert result.peers["payload_bytes_sent"].sum() == rows[-1]["payload_bytes"]
    assert (result.peers["degree"] == 2).all()
    for labels, examples in zip(result.peers["labels"], result.peers["n_train"], strict=True):
        assert sum(int(item.split(":")[1]) for item in labels.split()) == examples


@pytest.mark.usefixtures("without_figures")
def test_without_validation_its_column_is_left_out(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "run")))
    assert (tmp_path / "run" / "peers.csv").read_text().splitlines()[0].split(",") == PEERS
    assert (tmp_path / "run" / "metrics.csv").read_text().splitlines()[0].split(",") == list(
        COLUMNS
    )


def test_loaded_models_have_the_accuracy_of_the_run(done: tuple[list[dfl.Row], Result]) -> None:
    _, result = done
    assert {name: tuple(value.shape) for name, value in result.state.items()} == {
        "1.weight": (4, 5, 64), "1.bias": (4, 5), "3.weight": (4, 10, 5), "3.bias": (4, 10),
    }  # fmt: skip
    setting = prepare(result.run, World())
    inputs, labels = setting.task.inputs(setting.test_sets.inputs), setting.test_sets.labels
    for peer, wanted in enumerate(result.peers["accuracy"]):
        assert float((result.model(peer)(inputs).argmax(1) == labels).double().mean()) == wanted
    mean = float((result.mean_model()(inputs).argmax(1) == labels).double().mean())
    assert mean == result.rows["accuracy_mean_model"].iloc[-1]


def test_a_loaded_model_is_the_callers_to_train(
    done: tuple[list[dfl.Row], Result],
) -> None:
    first = next(done[1].model(1).parameters())
    assert first.requires_grad
    with torch.no_grad():
        first.zero_()
    assert next(done[1].model(1).parameters()).abs().sum() > 0


def test_the_state_does_not_depend_on_the_launch(done: tuple[list[dfl.Row], Result]) -> None:
    raw = (done[1].folder / "state.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert set(header) == set(done[1].state)


@pytest.mark.usefixtures("without_figures")
def test_a_module_of_the_caller_is_needed_to_load_its_models(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    list(dfl.simulate(replace(small(out=tmp_path / "own"), model=module)))
    with pytest.raises(dfl.InputError, match="module="):
        dfl.load(tmp_path / "own").model(0)
    result = dfl.load(tmp_path / "own", module)
    assert torch.equal(result.model(2).get_parameter("1.weight"), result.state["1.weight"][2])
    assert not torch.equal(module.get_parameter("1.weight"), result.state["1.weight"][2])
    with pytest.raises(dfl.InputError, match="another model"):
        dfl.load(tmp_path / "own", torch.nn.Linear(2, 2)).mean_model()


@pytest.mark.parametrize("peer", [-1, 4])
def test_a_peer_that_does_not_exist_is_refused(
    done: tuple[list[dfl.Row], Result], peer: int
) -> None:
    with pytest.raises(dfl.InputError, match="peers 0 to 3, not"):
        done[1].model(peer)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / ("x" * 300)):
        with pytest.raises(dfl.InputError, match="no run directory"):
            dfl.load(folder)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(dfl.InputError, match="no run directory"):
        dfl.load(tmp_path)


def test_unfinished_run_has_rows_but_no_models(tmp_path: Path) -> None:
    rows = dfl.simulate(small(out=tmp_path / "run"))
    next(rows)
    result = dfl.load(tmp_path / "run")
    assert (result.record["exit"], result.record["ending"], len(result.rows)) == (
        None,
        "running",
        1,
    )
    with pytest.raises(dfl.InputError, match=r"no state\.safetensors: the run is running"):
        result.mean_model()
    copy = tmp_path / "copy"  # as a kill would leave it
    shutil.copytree(tmp_path / "run", copy)
    rows.close()  # type: ignore[attr-defined]
    record = dfl.load(tmp_path / "run").record
    assert (record["exit"], record["ending"]) == (130, "interrupted")
    assert dfl.load(copy).record["ending"] == "killed"
    report(copy)
    page = (copy / "report.html").read_text()
    assert "killed (round 0 of " in page
    assert '"live":false' in page.replace('"live": ', '"live":')


def started(prepared: Prepared, folder: Path) -> RunFiles:
    """Start the callback that writes a run directory, and return it."""
    assert prepared.info
    assert prepared.progress
    files = RunFiles(folder, prepared.progress)
    files.start(prepared.info)
    return files


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (ValueError("oh"), 1),
        (dfl.InputError("no"), 2),
        (dfl.DivergedError("peer 3"), 3),
        (KeyboardInterrupt(), 130),
        (GeneratorExit(), 130),
    ],
)
def test_the_record_has_the_exit_code_of_an_error(
    setting: Prepared, error: BaseException | None, code: int
) -> None:
    assert setting.run.out is not None
    files = started(setting, setting.run.out)
    files.close(error)
    record = dfl.load(setting.run.out).record
    assert record["exit"] == code
    assert str(error or "") in record["ending"]
    assert "\n" not in record["ending"]


DAMAGES: dict[str, bytes | None] = {
    "a flipped bit": None,
    "{}": b"{}",
    "no UTF-8": b"round,seconds\n0,\xff\n",
    "empty": b"",
    "NaN": b"round\nNaN\n",
    "twice its header": b"round,seconds\n0,1.0\nround,seconds\n0,1.0\n",
}
LOADERS: dict[str, Callable[[Result], Any]] = {
    "metrics.csv": lambda found: found.rows,
    "peers.csv": lambda found: found.peers,
    "state.safetensors": lambda found: found.model(0),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "a directory", "a pipe"])
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("ending", [0, 130, None])
def test_damage_is_reported_when_a_file_is_read(
    done: tuple[list[dfl.Row], Result],
    tmp_path: Path,
    name: str,
    damage: str,
    ending: int | None,
) -> None:
    folder, path = tmp_path / "run", tmp_path / "run" / name
    shutil.copytree(done[1].folder, folder)
    files = {0: list(LOADERS), 130: ["metrics.csv"], None: []}[ending]
    manifest.write(folder, done[1].record | {"exit": ending, "ending": "as it did"}, files)
    content = bytearray(path.read_bytes())
    if damage in DAMAGES:
        content[len(content) // 2] ^= 0x80  # no longer ASCII
        path.write_bytes(content if DAMAGES[damage] is None else DAMAGES[damage] or b"")
    else:
        path.unlink()
        path.mkdir() if damage == "a directory" else os.mkfifo(path)
    found = dfl.load(folder)
    if (name, damage, ending) == ("metrics.csv", "empty", None):
        assert found.rows.empty  # a running run may have written no row yet
        return
    with pytest.raises(dfl.InputError, match=re.escape(name)) as caught:
        LOADERS[name](found)
    assert "\n" not in str(caught.value)
    for other in set(files) - {name}:
        LOADERS[other](found)


def test_an_incomplete_row_is_left_out(tmp_path: Path) -> None:
    rows = dfl.simulate(small(out=tmp_path / "run"))
    next(rows)
    with (tmp_path / "run" / "metrics.csv").open("a") as file:
        file.write("2,0.12")
    assert dfl.load(tmp_path / "run").rows["round"].tolist() == [0]
    rows.close()  # type: ignore[attr-defined]


@pytest.mark.usefixtures("without_figures")
def test_a_resumed_run_does_not_show_the_models_of_its_earlier_end(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "run", checkpoint_every=1)))
    rows = dfl.simulate(dfl.resumed(tmp_path / "run", rounds=9))
    next(rows)
    for loader in (LOADERS["peers.csv"], LOADERS["state.safetensors"]):
        with pytest.raises(dfl.InputError, match="the run is running"):
            loader(dfl.load(tmp_path / "run"))
    list(rows)
    assert dfl.load(tmp_path / "run").model(0)


def test_diverging_run_keeps_its_rows(tmp_path: Path) -> None:
    with pytest.raises(dfl.DivergedError):
        list(dfl.simulate(small(out=tmp_path / "run", lr=1e30, rounds=9)))
    result = dfl.load(tmp_path / "run")
    assert result.record["exit"] == 3
    assert len(result.rows) >= 1


@pytest.mark.usefixtures("without_figures")
def test_two_runs_that_start_together_do_not_share_a_folder(
    setting: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run starts and ends before this one takes the lock of the folder."""
    folder = setting.run.out
    assert folder is not None

    def late(path: Path) -> Lock:
        monkeypatch.undo()
        list(dfl.simulate(small(out=path, seed=1)))
        return Lock(path)

    monkeypatch.setattr("dfl.store.run_files.Lock", late)
    with pytest.raises(dfl.InputError, match="holds a run already"):
        started(setting, folder)
    assert manifest.damage(folder) == ""
    assert dfl.load(folder).run.seed == 1


@pytest.mark.parametrize("name", OUTPUTS)
def test_runs_are_not_overwritten(setting: Prepared, name: str) -> None:
    folder = setting.run.out
    assert folder is not None
    claim(folder)
    (folder / name).write_text("precious")
    with pytest.raises(dfl.InputError, match="holds a run already") as caught:
        started(setting, folder)
    assert str(folder) in str(caught.value)
    assert sorted(each.name for each in folder.iterdir()) == [".dfl", name]
    assert (folder / name).read_text() == "precious"


def test_a_folder_that_cannot_be_written_to_is_refused(setting: Prepared, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nowhere")):
        with pytest.raises(dfl.InputError, match=f"--out {folder} cannot be written to"):
            started(setting, folder)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def half() -> None:
        with atomically(path) as part:
            part.write_text("ha")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        half()
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"
    with atomically(path) as part:
        part.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"


def test_a_crash_while_finishing_leaves_no_incomplete_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(part: Path, content: bytes) -> None:
        with part.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(dfl.InputError, match="run cannot be written to: disk full"):
        list(dfl.simulate(small(out=tmp_path / "run")))
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == [
        ".dfl",
        "history",
        "logs",
        "metrics.csv",
        "report.html",
        "run.json",
    ]
    assert dfl.load(tmp_path / "run").record["ending"].endswith("cannot be written to: disk full")


def test_figures_are_drawn(done: tuple[list[dfl.Row], Result]) -> None:
    figures = sorted(done[1].folder.glob("figures/*"))
    assert [each.stem for each in figures] == [
        "accuracy_by_bytes",
        "accuracy_by_round",
        "consensus_distance",
        "graph",
        "label_distribution",
    ]
    assert all(each.read_bytes().startswith(b"\x89PNG") for each in figures)
