"""Settings that contradict each other, and unusable files and folders, are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import dfl
from dfl.store.run_directory import claim
from tests.conftest import Command
from tests.support.idx_files import LABELS, TEST_IMAGES, write

IMPOSSIBLE = [
    (
        "--bits 8 --compressor quantize",
        "--bits 8 and --compressor quantize both",
    ),
    ("--bits 8 --compressor none", "--bits 8 and --compressor none both"),
    (
        "--bits 8 --algorithm dfedavgm",
        "--bits 8 has no part in --algorithm dfedavgm: leave it out, or choose --algorithm ",
    ),
    (
        "--compressor quantize:bits=4",
        "--compressor quantize:bits=4 has no part in --algorithm dfedavgm",
    ),
    ("--compressor sign", "--compressor: unknown 'sign'; choose from "),
    (
        "--topology torus --peers 7",
        "--topology torus with 7 peers: torus needs both sides to be at least 3; 7 peers",
    ),
    (
        "--topology star --mixing out_degree --peers 4",
        "--mixing out_degree on --topology star: only the columns of the matrix sum to 1, and "
        "--algorithm dfedavgm needs rows",
    ),
    (
        "--topology hypercube --peers 6",
        "--topology hypercube with 6 peers: hypercube needs a power of two",
    ),
    (
        "--topology regular:k=4 --peers 4",
        "--topology regular:k=4 with 4 peers: regular needs 1 <= k < peers",
    ),
    (
        "--topology regular:k=3 --peers 5",
        "--topology regular:k=3 with 5 peers: regular needs 1 <= k < peers and k*p",
    ),
    (
        "--topology erdos_renyi:p=0 --peers 4",
        "--topology erdos_renyi:p=0 with 4 peers: erdos_renyi:p=0 of 4 peers: ",
    ),
    (
        "--peers 1439",
        "--peers 1439 with 1 training example each: that takes 1439 of them, there are 1438",
    ),
    ("--peers 2147483647 --topology complete", "--peers 2147483647 with 1 training example each"),
    (
        "--peers 4 --examples-per-peer 360",
        "--examples-per-peer 360 for 4 peers: that takes 1440 of them, there are",
    ),
    ("--eval-examples 360", "--eval-examples 360 of 359 test examples in digits"),
    (
        "--model lenet",
        "--model lenet needs images of at least 16x16, channels x height x width, not inputs of",
    ),
    (
        "--model mlp:hidden=1000000+1000000 --peers 16",
        "--model mlp:hidden=1000000+1000000 has 1,000,076,000,010 para",
    ),
    (
        "--validation 0.01 --peers 4 --examples-per-peer 10",
        "--validation 0.01 holds out no example where a peer has",
    ),
    (
        "--validation 0.9 --peers 4 --examples-per-peer 1",
        "--validation 0.9 holds out no example where a peer has at",
    ),
    (
        "--partition labels:per_peer=400 --peers 4",
        "--partition labels: 4 peers with per_peer=400 need 1600 training",
    ),
    (
        "--partition shards:per_peer=400 --peers 4",
        "--partition shards: 4 peers with per_peer=400 need 1600 training",
    ),
    ("--partition dirichlet:alpha=0.01,min_examples=0 --peers 99", "--partition leaves "),
    (
        "--compressor quantize:bits=4,rounding=sign --algorithm qdfedavgm",
        "--compressor quantize: rounding must be ",
    ),
]


@pytest.mark.parametrize(("tokens", "line"), IMPOSSIBLE)
@pytest.mark.parametrize("way", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_impossible_combinations_are_refused(
    dfl_run: Command, tokens: str, line: str, way: list[str]
) -> None:
    assert dfl_run.refused(*tokens.split(), *way).startswith(line)


SETTINGS: dict[str, tuple[str | bytes, str]] = {
    "unknown.toml": (
        "roundz = 3",
        "unknown setting 'roundz' (did you mean rounds?); choose from peers, ",
    ),
    "hyphen.toml": ("local-steps = 3", "unknown setting 'local-steps' (did you mean local_steps?)"),
    "text.toml": ('rounds = "3"', "--rounds must be a whole number, not '3'"),
    "float.toml": ("rounds = 2.5", "--rounds must be a whole number, not 2.5"),
    "bool.toml": ("peers = true", "--peers must be a whole number, not True"),
    "huge.toml": ("peers = 1" + "0" * 30, "--peers must be from 1 to 2147483647, not 1000"),
    "nan.toml": ("lr = nan", "--lr must be a positive number, not nan"),
    "inf.toml": ("weight_decay = inf", "--weight-decay must be at least 0, not inf"),
    "date.toml": (
        "seed = 2020-01-01",
        "--seed must be a whole number, not datetime.date(2020, 1, 1)",
    ),
    "table.toml": ("[topology]\nname = 'ring'", "--topology must be text, not {'name': 'ring'}"),
    "list.toml": (
        "model = ['mlp']",
        "--model must be text, or in Python an object with arrays in place of lists, not ['mlp']",
    ),
    "choice.toml": ("init = 'same'", "--init must be common or independent, not 'same'"),
    "path.toml": ("out = ''", "--out must be a path, not ''"),
    "zero.toml": ('data_dir = "a\\u0000b"', "--data-dir must be a path, not 'a\\x00b'"),
    "broken.toml": ("rounds 3", "not a TOML file of settings (TOMLDecodeError: Expected '='"),
    "twice.toml": (
        "rounds = 3\nrounds = 4",
        "not a TOML file of settings (TOMLDecodeError: Cannot overwrite a value",
    ),
    "deep.toml": ("x = " + "[" * 9999, "not a TOML file of settings (RecursionError: "),
    "junk.toml": (b"\x89PNG\r\n\x1a\n\xff", "not a TOML file of settings (UnicodeDecodeError: "),
    "run.json": (
        '{"name": "package", "version": 3}',
        "not the run.json of a run (KeyError: 'run')",
    ),
    "list.json": ("[1, 2]", "not the run.json of a run (TypeError: "),
    "text.json": ('{"run": "ring"}', "not the run.json of a run (TypeError: "),
    "broken.json": ('{"run": {', "not the run.json of a run (JSONDecodeError: "),
    "edited.json": ('{"run": {"topology": "ring"}, "checksum": "0"}', "its checksum"),
    "empty.json": ("", "not the run.json of a run (JSONDecodeError: "),
    "newer.json": ('{"run": {"sheep": 3}}', "unknown setting 'sheep'"),
    "null.json": ('{"run": {"rounds": null}}', "--rounds must be a whole number, not None"),
    "own.json": (
        '{"run": {"model": "own"}}',
        "that run was given objects, --model own",
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_files_of_settings_are_refused(dfl_run: Command, name: str) -> None:
    content, message = SETTINGS[name]
    path = dfl_run.folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert dfl_run.refused("--config", str(path)).startswith(f"--config {path}: {message}")


@pytest.mark.parametrize(
    ("path", "why"), [("no.toml", "No such file or directory"), (".", "Is a directory")]
)
def test_missing_files_of_settings_are_refused(dfl_run: Command, path: str, why: str) -> None:
    assert dfl_run.refused("--config", path) == f"--config {path}: cannot be read ({why})"
    assert dfl_run.refused("--config=") == "--config must be a path, not ''"
    assert (
        dfl_run.refused("--config", "two\nlines")
        == "--config two lines: cannot be read (No such file or directory)"
    )


def test_settings_of_a_file_are_checked_like_flags(dfl_run: Command) -> None:
    path = dfl_run.folder / "c.toml"
    path.write_text('compressor = "quantize:bits=4"\nalgorithm = "qdfedavgm"\n')
    both = ["--config", str(path)]
    assert dfl_run.refused(*both, "--bits", "8").startswith(
        "--bits 8 and --compressor quantize:bits=4 both"
    )
    assert dfl_run.refused(*both, "--algorithm", "dfedavgm").startswith(
        "--compressor quantize:bits=4 has no part in --algorithm"
    )
    path.write_text('topology = "rign"\n')
    assert dfl_run.refused(*both).startswith("--topology: unknown 'rign' (did you mean ring?)")


def test_folders_that_cannot_be_written_to_are_refused(dfl_run: Command) -> None:
    few = ["--peers", "2", "--rounds", "0", "--model", "softmax"]
    for name in ("run.json", "metrics.csv"):
        claim(dfl_run.folder / f"old-{name}")
        (dfl_run.folder / f"old-{name}" / name).touch()
        line = dfl_run.refused(*few, "--out", f"old-{name}")
        assert line.startswith(f"--out old-{name} holds a run already")
        resumed = f"--resume old-{name}, in Python dfl.resumed('old-{name}')"
        assert line.endswith(f"give another folder, or {resumed}")
    (dfl_run.folder / "file").touch()
    assert (
        dfl_run.refused(*few, "--out", "file") == "--out file cannot be written to: Not a directory"
    )
    assert dfl_run.refused(*few, "--out", "file/in").startswith(
        "--out file/in cannot be written to: Not a directory"
    )
    assert dfl_run.refused(*few, "--out", "/proc/dfl").startswith(
        "--out /proc/dfl cannot be written to: "
    )
    (dfl_run.folder / "runs").touch()
    assert dfl_run.refused(*few).startswith("--out: runs/")


def test_an_empty_folder_of_the_user_is_not_removed(dfl_run: Command) -> None:
    (dfl_run.folder / "mine").mkdir()
    dfl_run.refused("--out", "mine", "--topology", "torus", "--peers", "7")


def test_folders_without_data_and_network_are_refused(dfl_run: Command) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        dfl_run.monkeypatch.setenv(variable, "http://127.0.0.1:9")
    (dfl_run.folder / "file").touch()
    (dfl_run.folder / "empty").mkdir()
    for name in ("file", "empty"):
        line = dfl_run.refused("--dataset", "mnist", "--data-dir", name)
        assert line.startswith("cannot download https://")
        assert f"into {name}/mnist" in line
        dfl_run.monkeypatch.setenv("DFL_DATA", name)
        assert dfl_run.refused("--dataset", "mnist") == line
        dfl_run.monkeypatch.delenv("DFL_DATA")


def test_damaged_files_of_data_are_refused(dfl_run: Command) -> None:
    folder = write(dfl_run.folder / "mnist", packed=False)
    whole = (folder / LABELS).read_bytes()
    for damaged, found in (
        (b"", "found"),
        (b"<html>", "found"),
        (whole[:-1], "found"),
        (whole[:-1] + b"\x0b", "11"),
    ):
        (folder / LABELS).write_bytes(damaged)
        line = dfl_run.refused("--dataset", "mnist", "--data-dir", ".")
        assert line.startswith(f"mnist/{LABELS}: ")
        assert found in line
    (folder / LABELS).write_bytes(whole)
    assert dfl_run("--dataset", "mnist", "--data-dir", ".", "--dry-run").code == 0
    (folder / TEST_IMAGES).unlink()
    assert dfl_run.refused("--dataset", "mnist", "--data-dir", ".").startswith(
        f"mnist/{TEST_IMAGES}.gz: found no such"
    )


def test_a_run_that_diverges_ends_with_code_3_and_keeps_its_rows(dfl_run: Command) -> None:
    ended = dfl_run(
        "--lr", "1e6", "--peers", "4", "--rounds", "9", "--eval-every", "1", "--out", "wild"
    )
    assert ended.code == 3
    assert "train_loss of peer 0 is nan after round 1" in ended.err
    assert "--lr (it is 1000000" in ended.err
    assert ended.err.count("\n") == 1
    assert json.loads(Path("wild/run.json").read_text())["exit"] == 3
    assert len(dfl.load("wild").rows) == 1
    assert {path.name for path in Path("wild").iterdir()} == {
        ".dfl",
        "run.json",
        "metrics.csv",
        "history",
        "report.html",
        "logs",
    }
