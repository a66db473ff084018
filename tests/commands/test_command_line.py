"""Runs from the command line and from Python: help, dry runs, folders, replays, own modules."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import dfl
from dfl.config import SECTIONS, Run
from dfl.core.options import options
from dfl.core.registry import flag
from dfl.run import _new_folder, read_command
from dfl.simulation.components import registries
from dfl.simulation.defaults import settle
from tests.conftest import Command

KINDS = registries()

FEW = [
    "--peers", "3", "--rounds", "2", "--eval-every", "1", "--model", "softmax",
    "--examples-per-peer", "30",
]  # fmt: skip


def squeezed(text: str) -> str:
    """Return a text without spaces, which depend on the width of a terminal."""
    return re.sub(r"\s", "", text)


def figures(folder: Path | str) -> pd.DataFrame:
    return dfl.load(folder).rows.drop(columns="seconds")


def record(folder: Path | str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((Path(folder) / "run.json").read_text())
    return content


@pytest.mark.parametrize("how", ["--help", "-h"])
def test_help_shows_every_flag_and_component(dfl_run: Command, how: str) -> None:
    ended = dfl_run(how, "--rounds", "3")
    assert (ended.code, ended.err, dfl_run.files()) == (0, "", [])
    for name in [*options(Run), "config", "dry_run", "quiet", "verbose"]:
        assert re.search(rf"^  {flag(name)}\b", ended.out, re.MULTILINE), name
    assert all(f"\n{title}\n" in ended.out for title in SECTIONS.values())
    shown = squeezed(ended.out)
    for kind, registry in KINDS.items():
        assert f"{flag(kind)}{','.join(registry)}" in shown
    assert "Learningrateη.[default:0.05]" in shown
    assert "[choices:common,independent]" in shown
    assert "--quiet[" not in shown


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_is_as_wide_as_the_terminal(dfl_run: Command, width: int) -> None:
    dfl_run.monkeypatch.setenv("COLUMNS", str(width))
    lines = dfl_run("--help").out.splitlines()
    assert max(map(len, lines)) <= min(width, 100)


def test_help_of_a_kind_shows_its_components(dfl_run: Command) -> None:
    ended = dfl_run("--help", "topology", "small_world")
    assert (ended.code, ended.err) == (0, "")
    assert "--topology small_world:k=4" in ended.out
    assert "Watts, Strogatz 1998" in ended.out
    assert "'topolgy' (did you mean topolog" in dfl_run.refused("--help", "topolgy")
    assert "'rign' (did you mean ring?)" in dfl_run.refused("--help", "topology", "rign")


def test_quiet_prints_one_line_and_verbose_every_round(dfl_run: Command) -> None:
    ended = dfl_run(*FEW, "--quiet", "--out", "quiet")
    assert (ended.code, ended.out, ended.err) == (0, "look at    quiet/report.html\n", "")
    assert dfl_run(*FEW, "--quiet", "--no-report", "--out", "b").out == "look at    b/figures\n"
    ended = dfl_run(*FEW, "--verbose", "--out", "verbose")
    assert ended.code == 0
    assert "round 2/2" in ended.out
    assert "DEBUG round 1:" in ended.err
    assert "--quiet" in dfl_run.refused(*FEW, "--quiet", "--verbose")


def test_dry_run_trains_nothing_and_writes_nothing(dfl_run: Command) -> None:
    def train(*given: object) -> None:
        raise AssertionError("a dry run has trained")

    dfl_run.monkeypatch.setattr("dfl.training.task.Task.train", train)
    with pytest.raises(AssertionError, match="has trained"):
        dfl_run("--rounds", "1", "--out", "wet")
    ended = dfl_run("--dry-run", "--peers", "16", "--partition", "shards", "--out", "dry")
    assert (ended.code, ended.err) == (0, "")
    assert not Path("dry").exists()
    assert not Path("runs").exists()
    for part in (
        "16 on 1 rank",
        "spectral gap 0.05",
        "4,810 parameters",
        "per round",
        "training examples",
        "memory",
    ):
        assert part in ended.out


def test_the_default_folder_has_date_algorithm_topology_and_dataset(dfl_run: Command) -> None:
    assert (
        dfl_run("--topology", "small_world:k=2", *FEW, "--bits", "8", "--dataset", "digits").code
        == 0
    )
    (folder,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-qdfedavgm-small_world-digits", folder.name)
    written = record(folder)["run"]
    assert written["out"] == str(folder)
    assert (written["algorithm"], written["compressor"]) == ("qdfedavgm", "quantize:bits=8")
    assert "bits" not in written


def test_runs_of_the_same_second_have_folders_of_their_own(dfl_run: Command) -> None:
    dfl_run.monkeypatch.setattr("time.strftime", lambda form: "now")
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(_new_folder, [settle(Run(), 1)] * 20))
    name = "now-dfedavgm-ring-digits"
    assert {folder.name for folder in folders} == {name, *(f"{name}-{n}" for n in range(2, 21))}
    assert all(folder.is_dir() for folder in folders)
    (folders[0] / "run.json").touch()
    dfl_run.refused("--model", "lenet")  # its folder is removed, the others stay
    assert dfl_run(*FEW).code == 0
    assert record(Path("runs") / f"{name}-21")["exit"] == 0


def test_a_run_is_replayed_bit_for_bit(dfl_run: Command) -> None:
    more = [
        "--topology", "erdos_renyi:p=0.7", "--bits", "4", "--partition", "dirichlet",
        "--validation", "0.2", "--init", "independent", "--seed", "12345678901",
        "--lr", "0.123456789", "--lr-schedule", "cosine",
    ]  # fmt: skip
    assert dfl_run(*FEW, *more, "--out", "first").code == 0
    assert dfl_run("--config", "first/run.json", "--out", "again").code == 0
    assert record("again")["run"] == record("first")["run"] | {"out": "again"}
    pd.testing.assert_frame_equal(figures("first"), figures("again"), check_exact=True)
    assert (
        Path("first/state.safetensors").read_bytes() == Path("again/state.safetensors").read_bytes()
    )
    assert Path("first/peers.csv").read_bytes() == Path("again/peers.csv").read_bytes()

    # Another seed gets a folder of its own.
    assert dfl_run("--config", "first/run.json", "--seed", "2").code == 0
    (other,) = Path("runs").iterdir()
    assert record(other)["run"] == record("first")["run"] | {"out": str(other), "seed": 2}
    assert not figures(other).equals(figures("first"))


def test_a_config_file_is_the_same_as_its_flags(dfl_run: Command) -> None:
    lines = ["peers = 3", "rounds = 9", "eval_every = 1", 'model = "softmax"', "momentum = 0"]
    text = "\n".join([*lines, "examples_per_peer = 30", ""])
    Path("mine.toml").write_text(text, "utf-8-sig")  # with a byte-order mark
    assert dfl_run("--config", "mine.toml", "--rounds", "2", "--out", "file").code == 0
    assert dfl_run(*FEW, "--momentum", "0", "--out", "flags").code == 0
    assert record("file")["run"] == record("flags")["run"] | {"out": "file"}
    pd.testing.assert_frame_equal(figures("file"), figures("flags"), check_exact=True)


@pytest.mark.parametrize(
    ("file", "flags"),
    [
        ("ensemble = true", ["--until", "accuracy_vote=0.99"]),
        ('until = "accuracy_vote=0.99"', ["--ensemble"]),
        ('share_all_until = "1"', ["--share", "head:1"]),
        ("validation = 0.2", ["--until", "validation_accuracy=0.99"]),
    ],
)
def test_flags_and_a_config_file_may_be_valid_only_together(
    file: str, flags: list[str], dfl_run: Command
) -> None:
    Path("mine.toml").write_text(file)
    assert dfl_run("--config", "mine.toml", *flags, "--dry-run").code == 0
    message = dfl_run.refused("--config", "mine.toml", *flags, "--lr", "-1")
    assert message == "--lr must be a positive number, not -1.0"
    alone = [dfl_run(*each, "--dry-run").code for each in (flags, ["--config", "mine.toml"])]
    assert sorted(alone) == [0, 2]


def test_a_config_file_that_contradicts_itself_is_named(dfl_run: Command) -> None:
    Path("mine.toml").write_text('until = "accuracy_vote=0.99"')
    message = "--until accuracy_vote=0.99 needs the ensemble: give --ensemble"
    assert dfl_run.refused("--config", "mine.toml") == f"--config mine.toml: {message}"
    assert dfl_run.refused("--config", "mine.toml", "--peers", "4") == message


def test_flags_override_a_config_file_setting_by_setting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('until = "accuracy_vote=0.99"\nrounds = 7\nlr = 0.2')
    run = read_command(["--config", "mine.toml", "--ensemble", "--lr", "0.1", "--dry-run"], 1).run
    assert run
    assert (run.until, run.ensemble, run.rounds, run.lr) == ("accuracy_vote=0.99", True, 7, 0.1)


def test_a_config_file_with_resume_gives_its_own_settings_only(dfl_run: Command) -> None:
    assert dfl_run(*FEW, "--lr", "0.2", "--out", "run").code == 0
    Path("mine.toml").write_text("peers = 3")
    assert dfl_run("--config", "mine.toml", "--resume", "run").code == 0
    Path("mine.toml").write_text("peers = 3\nlr = 0.1")
    assert "lr" in dfl_run.refused("--config", "mine.toml", "--resume", "run")


def test_a_finished_run_is_recorded_and_reported(dfl_run: Command) -> None:
    ended = dfl_run(*FEW, "--out", "done")
    assert (ended.code, ended.err) == (0, "")
    assert "round 2/2" in ended.out
    assert str(Path("done")) in ended.out
    assert (record("done")["exit"], record("done")["ending"]) == (0, "finished")


def own_data(n: int = 60) -> dfl.Data:
    """Return points around three means in five dimensions."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    inputs = (rng.normal(size=(n, 5)) + 3 * np.eye(3, 5)[labels]).astype(np.float32)
    return dfl.Data(
        inputs[: n // 2], labels[: n // 2], inputs[n // 2 :], labels[n // 2 :], classes=3
    )


@pytest.mark.usefixtures("without_figures")
def test_a_run_from_python_trains_a_callers_module_on_its_data(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3))
    before = [value.clone() for value in module.parameters()]
    run = Run(peers=3, rounds=20, eval_every=10, out=tmp_path / "own")
    rows = list(dfl.simulate(replace(run, model=module, dataset=own_data())))
    assert [row["round"] for row in rows] == [0, 10, 20]
    assert rows[0]["consensus_distance"] == 0
    assert rows[-1]["accuracy_mean"] > max(0.8, rows[0]["accuracy_mean"])
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))

    result = dfl.load(run.out or "", module)
    assert result.rows.to_dict("records") == rows
    assert (result.run.model, result.run.dataset) == ("own:Sequential", "own:Data")
    data = own_data()
    predicted = result.model(2)(torch.from_numpy(data.test_inputs)).argmax(1).numpy()
    assert (predicted == data.test_labels).mean() == result.peers["accuracy"][2]
    mean = (
        result.mean_model()(torch.from_numpy(data.test_inputs)).argmax(1).numpy()
        == data.test_labels
    ).mean()
    assert mean == rows[-1]["accuracy_mean_model"]
    with pytest.raises(dfl.InputError, match="--model 'Sequential'"):
        next(dfl.simulate(replace(result.run, out=None)))


class Scaled(nn.Module):
    """A module with a parameter that has no rule of initialization."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = self.linear(x) * self.scale
        return scaled


def test_modules_that_cannot_be_trained_are_refused(tmp_path: Path) -> None:
    run = Run(peers=3, rounds=1, out=tmp_path / "none")
    normed = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    for settings, module, message in (
        ({}, normed, "keeps running statistics .*--norm-stats"),
        ({}, nn.ReLU(), "the model ReLU has no parameters to train"),
        (
            {"init": "independent"},
            Scaled(),
            "--init independent cannot draw the parameter .*scale of a Scaled",
        ),
    ):
        with pytest.raises(dfl.InputError, match=message):
            next(
                dfl.simulate(
                    replace(
                        Run.from_dict(run.to_dict() | settings), model=module, dataset=own_data()
                    )
                )
            )
    assert not list(tmp_path.iterdir())
    assert next(dfl.simulate(Run(peers=3, model=Scaled(), dataset=own_data())))["round"] == 0


def test_bad_input_from_python_is_refused_in_one_line() -> None:
    for make in (
        lambda: dfl.Run(peers="x"),  # type: ignore[arg-type]
        lambda: next(dfl.simulate(dfl.Run(topology="rign"))),
        lambda: next(dfl.simulate(dfl.Run(peers=7, topology="torus"))),
        lambda: next(dfl.simulate(dfl.Run(partition="shards", peers=31, dataset=own_data()))),
        lambda: dfl.load("no/such/run"),
    ):
        with pytest.raises(dfl.InputError) as caught:
            make()
        assert "\n" not in str(caught.value)
