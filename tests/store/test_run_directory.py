"""The folder of a run: which folders a run may write to, its record and its links."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import dfl
from dfl.core import files
from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically, is_locked, make_directory, no_follow, read_bytes
from dfl.report import report
from dfl.reporting.page import write
from dfl.store import manifest
from dfl.store.callbacks import RunInfo
from dfl.store.run_directory import (
    CONTENT,
    FILES,
    FOLDERS,
    MARKER,
    claim,
    refuse_foreign,
    refuse_unusable,
    take_back,
)
from tests.conftest import eventually
from tests.support.mpirun import ENV, ROOT, mpirun_command

RECORD = {"run": {"seed": 0}, "exit": 0, "ending": "finished"}


def marked_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Fill a folder with an invalid marker."""

    def fill(folder: Path) -> None:
        make(folder / MARKER)
        (folder / "notes.txt").write_text("mine")

    return fill


def linked_marker(path: Path) -> None:
    (path.parent.parent / "ours").write_bytes(CONTENT)
    path.symlink_to(path.parent.parent / "ours")


FOREIGN: dict[str, Callable[[Path], object]] = {
    "a file": lambda folder: (folder / "notes.txt").write_text("mine"),
    "a folder": lambda folder: (folder / "heartbeats").mkdir(),
    "a copy of run.json": lambda folder: manifest.write(folder, RECORD),
    "another marker": marked_by(lambda path: path.write_text("something else")),
    "half a marker": marked_by(lambda path: path.write_bytes(CONTENT[:5])),
    "a marker with more in it": marked_by(lambda path: path.write_bytes(CONTENT * 2)),
    "a folder as marker": marked_by(lambda path: path.mkdir()),
    "a pipe as marker": marked_by(lambda path: os.mkfifo(path)),
    "a link as marker": marked_by(linked_marker),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_folder_with_foreign_files_is_refused(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    FOREIGN[what](folder)
    before = sorted(tmp_path.rglob("*"))
    for refused in (lambda: refuse_foreign("--resume", folder), lambda: claim(folder, "--resume")):
        with pytest.raises(InputError, match=f"--resume {folder}"):
            refused()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("held", [None, b"", CONTENT[:5], CONTENT])
def test_a_new_or_empty_folder_is_claimed_and_released(tmp_path: Path, held: bytes | None) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    if held is not None:  # by a program that was killed
        (folder / MARKER).write_bytes(held)
    made = claim(folder)
    assert (folder / MARKER).read_bytes() == CONTENT
    assert claim(folder) == []
    (folder / "rows").touch()
    take_back(made)
    assert sorted(os.listdir(folder)) == [MARKER, "rows"]
    (folder / "rows").unlink()
    take_back(made)
    assert os.listdir(folder) == ([] if held is None else [MARKER])


def test_created_folders_are_removed(tmp_path: Path) -> None:
    take_back(claim(tmp_path / "a" / MARKER))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_created_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder in (
        tmp_path / "file",
        tmp_path / "file" / "below",
        tmp_path / "dangling",
        tmp_path / ("x" * 300),
        Path("a\0b"),
        tmp_path / "new" / ("x" * 300),
    ):
        with pytest.raises(InputError, match=r"--out .* cannot be written to: "):
            claim(folder)
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]


def test_a_path_too_long_for_files_in_it_is_refused(tmp_path: Path) -> None:
    long = tmp_path.joinpath(*["x" * 250] * 15)
    deep = long / ("x" * (4050 - len(str(long))))
    with pytest.raises(InputError, match=r"--out .* cannot be written to: File name too long"):
        list(dfl.simulate(dfl.Run(peers=2, rounds=0, out=deep)))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["grid.toml", "peers=4/cell.toml"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_run_refuses_the_folder_of_a_sweep(tmp_path: Path, name: str, resume: bool) -> None:
    claim(folder := tmp_path / "sweep")
    claim(folder / "peers=4")
    (folder / name).touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=f"{folder} holds a sweep"):
        refuse_unusable(folder, resume)
    if not resume:
        with pytest.raises(InputError, match=f"--out {folder} holds a sweep"):
            list(dfl.simulate(dfl.Run(peers=2, rounds=0, out=folder)))
    assert sorted(tmp_path.rglob("*")) == before
    refuse_unusable(folder / "peers=4", resume=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.write_text("<html>on dfl.run</html>"),
        lambda path: path.symlink_to("own.html"),
        Path.touch,
        Path.mkdir,
        os.mkfifo,
    ],
)
def test_a_page_of_the_user_is_never_replaced(tmp_path: Path, make: Callable[[Path], None]) -> None:
    claim(folder := tmp_path / "run")
    (folder / "own.html").write_text("mine")
    make(folder / "report.html")
    before = {path: path.lstat().st_ino for path in folder.iterdir()}
    message = re.escape(f"{folder}/report.html")
    run = dfl.Run(peers=2, rounds=0, model="softmax", examples_per_peer=5, out=folder)
    with pytest.raises(InputError, match=rf"{message} (was not written by|cannot be read)"):
        list(dfl.simulate(run))
    with pytest.raises(InputError, match=message):
        write(folder, "a page")
    assert {path: path.lstat().st_ino for path in folder.iterdir()} == before
    list(dfl.simulate(replace(run, report=False)))
    with pytest.raises(InputError, match=message):
        report(folder)
    assert (folder / "own.html").read_text() == "mine"


@pytest.mark.parametrize(
    "make", [Path.mkdir, Path.touch, os.mkfifo, lambda path: path.symlink_to("own")]
)
@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_other_things_in_place_of_files_and_folders_are_refused(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    claim(tmp_path / "run")
    make(tmp_path / "run" / name)
    (tmp_path / "own").mkdir()
    path = tmp_path / "run" / name
    good = (
        path.is_dir() and not path.is_symlink()
        if name in FOLDERS
        else path.is_file() or path.is_symlink()
    )
    if good:
        refuse_unusable(tmp_path / "run", resume=True)
    else:
        with pytest.raises(InputError, match=f"--resume .*{name}"):
            refuse_unusable(tmp_path / "run", resume=True)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    for make in (os.symlink, os.link):
        make(foreign, tmp_path / "name")
        for mode in ("w", "a", "r+"):
            with pytest.raises(OSError, match="name"):
                open(tmp_path / "name", mode, opener=no_follow).close()
        with atomically(tmp_path / "name") as part:
            part.write_text("new")
        assert not (tmp_path / "name").is_symlink()
        (tmp_path / "name").unlink()
        make(foreign, tmp_path / ".lock")
        with pytest.raises(OSError, match="lock"):
            Lock(tmp_path)
        (tmp_path / ".lock").unlink()
    os.symlink(foreign, tmp_path / ".name.part")
    with pytest.raises(OSError, match=r"\.name\.part"), atomically(tmp_path / "name"):
        pass
    assert foreign.read_text() == "mine"
    assert (tmp_path / ".name.part").is_symlink()


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, steps = tmp_path / "name", list[tuple[Path, bool]]()

    def fsync(handle: int) -> None:
        own = os.fstat(handle)
        known = (tmp_path, *tmp_path.iterdir())
        (synced,) = (each for each in known if os.path.samestat(each.stat(), own))
        steps.append((synced, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with atomically(path) as part:
        part.write_text("new")
    assert steps == [(tmp_path / ".name.part", False), (tmp_path, True)]


def test_a_left_part_is_replaced_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".name.part").write_text("half")
    (tmp_path / ".name.part").chmod(0o600)
    os.link(tmp_path / ".name.part", tmp_path / "other")
    with atomically(tmp_path / "name") as part, part.open("a") as file:
        file.write("whole")
    assert ((tmp_path / "name").read_text(), (tmp_path / "other").read_text()) == ("whole", "half")
    (tmp_path / "new").touch()
    assert (tmp_path / "name").stat().st_mode == (tmp_path / "new").stat().st_mode
    for name in ("name", ".name.part"):
        (tmp_path / "name").unlink(missing_ok=True)
        (tmp_path / name).mkdir()
        with pytest.raises(OSError, match=name), atomically(tmp_path / "name"):
            pass
        (tmp_path / name).rmdir()


def test_programs_that_write_one_file_wait_for_each_other(tmp_path: Path) -> None:
    """A lock is of an open file, so threads are to it what programs are."""

    def write(letter: str) -> None:
        for _ in range(30):
            with atomically(tmp_path / "name") as part:
                for _ in range(5):
                    with part.open("a") as file:
                        file.write(letter)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, "abc"))
    assert (tmp_path / "name").read_text() in ("aaaaa", "bbbbb", "ccccc")
    assert os.listdir(tmp_path) == ["name"]


def test_a_file_that_is_written_for_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "WAIT", 0.05)
    with atomically(tmp_path / "name") as part:
        part.write_text("first")
        with (
            pytest.raises(OSError, match=r"\.name\.part is being written by another program"),
            atomically(tmp_path / "name"),
        ):
            pass
    assert (tmp_path / "name").read_text() == "first"


def test_make_directory_refuses_links_and_files(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "file").touch()
    make_directory(tmp_path / "target")
    make_directory(tmp_path / "new")
    for name in ("link", "file"):
        with pytest.raises(OSError, match=name):
            make_directory(tmp_path / name)
    assert os.listdir(tmp_path / "target") == []


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_bytes(path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of two files."""
    (tmp_path / "figures").mkdir()
    for name in ("metrics.csv", "figures/graph.png"):
        (tmp_path / name).write_text(f"content of {name}")
    manifest.write(tmp_path, RECORD, ["metrics.csv", "figures/graph.png"])
    return tmp_path


def test_damaged_files_of_a_finished_run_are_found(run: Path) -> None:
    assert manifest.damage(run) == ""
    assert {name: value for name, value in manifest.read(run).items() if name in RECORD} == RECORD
    whole = (run / "figures/graph.png").read_bytes()
    for at in range(len(whole)):
        (run / "figures/graph.png").write_bytes(
            whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]
        )
        assert "graph.png is damaged" in manifest.damage(run)
        assert manifest.damage(run, "metrics.csv") == ""
    (run / "figures/graph.png").unlink()
    assert "graph.png is missing" in manifest.damage(run)
    os.mkfifo(run / "figures/graph.png")
    assert "graph.png is damaged" in manifest.damage(run, "figures/graph.png")


def test_a_run_whose_disk_is_full_keeps_its_complete_rows(tmp_path: Path) -> None:
    """Files of at most 8 kB stand for it: run.json can be written, a further row cannot."""
    folder = tmp_path / "run"
    # Without bytecode, which would be cut as well, and imported.
    command = [sys.executable, "-B", "-m", "dfl.run", "--peers=4", "--model=softmax",
               "--local-steps=1", "--rounds=60", "--eval-every=1", "--no-report",
               f"--out={folder}"]  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *command],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.endswith(f"dfl: --out {folder} cannot be written to: File too large\n")
    found = dfl.load(folder)
    assert 4 * 20 < 4 * len(found.rows) == len(found.history)
    assert found.record["exit"] == 2


def test_a_record_without_checksums_finds_no_damage(run: Path) -> None:
    manifest.write(run, manifest.read(run))
    (run / "metrics.csv").unlink()
    assert manifest.damage(run) == manifest.damage(run, "metrics.csv") == ""


def test_a_damaged_record_is_found(run: Path) -> None:
    whole = (run / manifest.NAME).read_text()
    for at in range(len(whole)):
        if whole[at].isspace():
            continue
        (run / manifest.NAME).write_text(whole[:at] + chr(ord(whole[at]) ^ 1) + whole[at + 1 :])
        assert manifest.NAME in manifest.damage(run), whole[at:]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"run": 3}',
        '{"run": {}}',
        '{"run": {}, "checksum": 7}',
        "[" * 100_000,
        "\xff",
    ],
)
def test_an_invalid_record_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / manifest.NAME).write_bytes(text.encode("latin-1"))
    line = manifest.damage(tmp_path)
    assert manifest.NAME in line
    assert "\n" not in line
    with pytest.raises(InputError):
        manifest.read(tmp_path)


def test_a_directory_or_a_pipe_in_place_of_the_record_is_damage(tmp_path: Path) -> None:
    for make, reason in ((os.mkdir, "Is a directory"), (os.mkfifo, "no regular file")):
        make(tmp_path / manifest.NAME)
        assert reason in manifest.damage(tmp_path)
        os.rename(tmp_path / manifest.NAME, tmp_path / make.__name__)


def test_the_checksum_does_not_depend_on_the_order_of_keys(run: Path) -> None:
    page = json.loads((run / manifest.NAME).read_text())
    (run / manifest.NAME).write_text(json.dumps(dict(reversed(page.items()))))
    assert manifest.damage(run) == ""


ON_TWO = [
    "--peers=4",
    "--rounds=1000000",
    "--eval-every=1",
    "--model=softmax",
    "--examples-per-peer=10",
]


@pytest.mark.mpi
def test_a_job_ends_when_its_folder_is_moved(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = mpirun_command(2, "-m", "dfl.run", *ON_TWO, f"--out={folder}")
    with subprocess.Popen(
        command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as job:
        assert eventually((folder / "metrics.csv").exists, 120)
        folder.rename(tmp_path / "moved")
        _, errors = job.communicate(timeout=60)
    assert job.returncode == 2, errors
    assert errors.count("dfl: ") == errors.count("\n") == 1
    assert str(folder) in errors
    assert not (folder / "metrics.csv").exists()


def test_links_in_a_runs_folder_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target of a link with the name of any file of a run does not change."""
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    (tmp_path / "foreign").mkdir()
    for name in ("rank-0.log", "0", "0000000000.json", "graph.png"):
        (tmp_path / "foreign" / name).write_text("mine")
    (tmp_path / "file").write_text("mine")
    before = {path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")}
    files = [
        ".lock",
        ".run.json.part",
        "run.json",
        "metrics.csv",
        "peers.csv",
        "state.safetensors",
        "logs/rank-0.log",
        "report.html",
        "history/peers.bin",
        "history/start.safetensors",
    ]
    folders = ["logs", "checkpoint", "figures", "tensorboard", "history", "profile"]
    for name in [*files, *folders]:
        folder = tmp_path / "run"
        claim(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(tmp_path / ("file" if name in files else "foreign"))
        run = dfl.Run(
            peers=2,
            rounds=1,
            model="softmax",
            examples_per_peer=5,
            checkpoint_every=1,
            tensorboard=True,
            profile=True,
            out=folder,
        )
        with suppress(dfl.InputError):
            list(dfl.simulate(run))
        shutil.rmtree(folder)
        assert {
            path: path.is_dir() or path.read_bytes() for path in tmp_path.rglob("*")
        } == before, name


def test_a_record_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "run.json").open("wb") as file:
        file.truncate(manifest.LONGEST + 1)
    with pytest.raises(dfl.InputError, match=r"run\.json cannot be read .*bytes, more than"):
        manifest.read(tmp_path)


PLANTED = (
    ".run.json.part", "run.json", "metrics.csv", "peers.csv", "state.safetensors",
    "checkpoint", "figures", "tensorboard", "profile", "report.html",
)  # fmt: skip
"""Names of a run's files and folders that are written after round 0."""


@pytest.mark.parametrize("name", PLANTED)
def test_links_planted_during_a_run_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The link is created after the checks before the run, so the writer itself must refuse it."""
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    foreign = tmp_path / "foreign"
    foreign.mkdir() if "." not in name else foreign.write_text("mine")
    folder = tmp_path / "run"
    run = dfl.Run(
        peers=2,
        rounds=2,
        eval_every=1,
        model="softmax",
        examples_per_peer=5,
        out=folder,
        checkpoint_every=None if name != "checkpoint" else 2,
        tensorboard=name == "tensorboard",
        profile=name == "profile",
    )
    rows = iter(dfl.simulate(run))
    if name != "tensorboard":
        next(rows)
    else:
        folder.mkdir()
        claim(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(foreign)
    with suppress(InputError):
        for _ in rows:
            pass
    if foreign.is_dir():
        assert list(foreign.iterdir()) == []
    else:
        assert foreign.read_text() == "mine"


class Gone(dfl.Callback):
    """A callback whose server is gone when the run ends."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self, error: BaseException | None) -> None:
        del error
        self.closed += 1
        raise ConnectionError("the server is gone")


def test_a_run_is_recorded_as_ended_where_a_callback_cannot_close(tmp_path: Path) -> None:
    run = dfl.Run(peers=2, rounds=2, model="softmax", examples_per_peer=5, out=tmp_path / "run")
    gone = Gone()
    with pytest.raises(ConnectionError, match="the server is gone"):
        for _ in dfl.simulate(run, callbacks=[gone]):
            pass
    assert gone.closed == 1
    assert manifest.read(tmp_path / "run")["exit"] == 0
    assert dfl.load(tmp_path / "run").state is not None


class Refusing(dfl.Callback):
    """A callback that cannot start."""

    def start(self, info: RunInfo) -> None:
        raise ValueError(f"no place for {info.run.peers} peers")


def test_the_error_of_a_start_is_the_one_that_is_raised(tmp_path: Path) -> None:
    run = dfl.Run(peers=2, rounds=2, model="softmax", examples_per_peer=5, out=tmp_path / "run")
    gone = Gone()
    with pytest.raises(ValueError, match="no place for 2 peers"):
        list(dfl.simulate(run, callbacks=[gone, Refusing()]))
    assert gone.closed == 1
    assert manifest.read(tmp_path / "run")["exit"] == 1
    assert not is_locked(tmp_path / "run" / ".lock")


class Sorting(dfl.Callback):
    """A callback that changes what it is given."""

    def evaluated(self, t: int, peers: Mapping[str, NDArray[np.float64]]) -> None:
        del t
        peers["train_loss"].sort()


def test_a_callback_cannot_change_the_figures_of_the_peers(tmp_path: Path) -> None:
    run = dfl.Run(peers=4, rounds=1, model="softmax", examples_per_peer=5)
    for name, callbacks in (("one", []), ("two", [Sorting()])):
        list(dfl.simulate(replace(run, out=tmp_path / name), callbacks=callbacks))
    losses = [dfl.load(tmp_path / name).peers["train_loss"].tolist() for name in ("one", "two")]
    assert losses[0] == losses[1] != sorted(losses[0])
