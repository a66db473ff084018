"""How far a run is, is told from its folder alone."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path

import pytest

from dfl.cells import DIVERGED, DONE, FAILED, RUNNING, STOPPED, WAITING, held, last_words, look, record
from dfl.errors import InputError
from dfl.files import Lock

TABLE = "round,seconds,accuracy_mean\n0,0.1,0.10\n10,0.2,0.30\n"


def write(folder: Path, code: int | None, ending: str = "as it did", log: str = "") -> None:
    (folder / "run.json").write_text(json.dumps({"run": {}, "exit": code, "ending": ending}))
    (folder / "output.log").write_text(log)


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, DONE), (3, DIVERGED), (None, STOPPED), (75, STOPPED), (130, STOPPED), (1, FAILED), (2, FAILED), (-9, FAILED)],
)
def test_the_status_is_the_exit_code(tmp_path: Path, code: int | None, status: str) -> None:
    write(tmp_path, code)
    assert look(tmp_path).status == status


def test_what_never_began_waits_unless_it_complained(tmp_path: Path) -> None:
    assert look(tmp_path / "none").status == WAITING
    (tmp_path / "cell.toml").touch()
    (tmp_path / "output.log").touch()
    assert look(tmp_path).status == WAITING
    (tmp_path / "output.log").write_text("dfl: --topology torus with 7 peers\n\n")
    seen = look(tmp_path)
    assert (seen.status, seen.row, seen.reason) == (FAILED, {}, "--topology torus with 7 peers")


def test_a_reason_is_given_where_something_went_wrong(tmp_path: Path) -> None:
    write(tmp_path, 3, "DivergedError: peer 1", "round 2\ndfl: peer 1 is no longer finite\n")
    assert look(tmp_path).reason == "peer 1 is no longer finite"
    write(tmp_path, 1, "RuntimeError: oh", "")
    assert look(tmp_path).reason == "RuntimeError: oh"
    for code in (0, 75, None):
        write(tmp_path, code, "finished", "dfl: stopped\n")
        assert look(tmp_path).reason == ""


def test_the_last_words_are_ours_before_those_of_an_mpi(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert last_words(tmp_path) == ""
    log.write_text("dfl: before\n" + "round\n" * 20 + "ValueError: now\n  \n")
    assert last_words(tmp_path) == "ValueError: now"
    log.write_text("dfl: the disk is full\n====\n=   BAD TERMINATION\n====\n")
    assert last_words(tmp_path) == "the disk is full"
    log.write_bytes(b"\xff\xfe oh\n")
    assert last_words(tmp_path).endswith("oh")


def test_the_last_row_is_whole_and_as_it_was_written(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    assert look(tmp_path).row == {}
    for text, last in (
        (TABLE, {"round": "10", "seconds": "0.2", "accuracy_mean": "0.30"}),
        (TABLE + "20,0.3,0.4", {"round": "10", "seconds": "0.2", "accuracy_mean": "0.30"}),
        ("round,seconds,accuracy_mean\n", {}),
        ("round,sec", {}),
        ("", {}),
    ):
        table.write_text(text)
        assert look(tmp_path).row == last


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    write(tmp_path, None)
    (tmp_path / ".lock").touch()  # a run that was killed left it
    assert not held(tmp_path)
    lock = Lock(tmp_path)
    assert held(tmp_path)
    assert held(tmp_path)
    assert look(tmp_path).status == RUNNING
    lock.release()
    assert look(tmp_path).status == STOPPED
    Lock(tmp_path).release()  # looking takes nothing
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # somebody else looks at the same moment
        assert not held(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, "{}"])
def test_what_is_no_run_is_refused(tmp_path: Path, text: str) -> None:
    for prepare in (lambda: None, lambda: (tmp_path / "run.json").write_text(text, encoding="latin-1")):
        prepare()
        with pytest.raises(InputError, match="is no run directory") as caught:
            record(tmp_path)
        assert "\n" not in str(caught.value)
