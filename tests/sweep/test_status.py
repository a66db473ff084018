"""The status of a run is read from its folder alone."""

from __future__ import annotations

import errno
import fcntl
import os
import warnings
from pathlib import Path

import pytest

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import Lock, is_locked
from dfl.store import manifest
from dfl.store.fingerprints import files_of, of_files
from dfl.sweep.status import (
    CHANGED,
    DAMAGED,
    DIVERGED,
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    TAIL,
    WAITING,
    CellState,
    last_message,
    read_state,
)

TABLE = "round,seconds,accuracy_mean\n0,0.1,0.10\n10,0.2,0.30\n"


@pytest.mark.parametrize(
    ("status", "over", "bad"),
    [
        (DONE, True, False), (DIVERGED, True, True), (FAILED, False, True),
        (DAMAGED, False, True), (CHANGED, False, True), (RUNNING, False, False),
        (STOPPED, False, False), (WAITING, False, False),
    ],
)  # fmt: skip
def test_a_cell_is_over_if_no_later_sweep_runs_it(status: str, over: bool, bad: bool) -> None:
    state = CellState(status, {})
    assert (state.over, state.bad) == (over, bad)


def write(folder: Path, code: int | None, ending: str = "as it did", log: str = "") -> None:
    names = [name for name in ("metrics.csv",) if code == 0 and (folder / name).exists()]
    manifest.write(folder, {"run": {}, "exit": code, "ending": ending}, names)
    (folder / "output.log").write_text(log)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, DONE),
        (3, DIVERGED),
        (None, STOPPED),
        (75, STOPPED),
        (130, STOPPED),
        (1, FAILED),
        (2, FAILED),
        (-9, FAILED),
    ],
)
def test_the_status_follows_from_the_exit_code(
    tmp_path: Path, code: int | None, status: str
) -> None:
    write(tmp_path, code)
    assert read_state(tmp_path).status == status


def test_a_run_that_never_began_is_waiting_unless_it_failed(tmp_path: Path) -> None:
    assert read_state(tmp_path / "none").status == WAITING
    (tmp_path / "cell.toml").touch()
    (tmp_path / "output.log").touch()
    assert read_state(tmp_path).status == WAITING
    (tmp_path / "output.log").write_text("dfl: --topology torus with 7 peers\n\n")
    seen = read_state(tmp_path)
    assert (seen.status, seen.row, seen.reason) == (FAILED, {}, "--topology torus with 7 peers")


def test_only_failed_and_diverged_runs_have_a_reason(tmp_path: Path) -> None:
    write(tmp_path, 3, "DivergedError: peer 1", "round 2\ndfl: peer 1 is no longer finite\n")
    assert read_state(tmp_path).reason == "peer 1 is no longer finite"
    write(tmp_path, 1, "RuntimeError: oh", "")
    assert read_state(tmp_path).reason == "RuntimeError: oh"
    for code in (0, 75, None):
        write(tmp_path, code, "finished", "dfl: stopped\n")
        assert read_state(tmp_path).reason == ""


def test_the_last_message_is_that_of_dfl_before_any_other(tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert last_message(tmp_path) == ""
    log.write_text("dfl: before\n" + "round\n" * 20 + "ValueError: now\n  \n")
    assert last_message(tmp_path) == "ValueError: now"
    log.write_text("dfl: the disk is full\n====\n=   BAD TERMINATION\n====\n")
    assert last_message(tmp_path) == "the disk is full"
    log.write_bytes(b"\xff\xfe oh\n")
    assert last_message(tmp_path).endswith("oh")
    log.write_bytes(b"dfl: long ago\n" + b"x" * TAIL + b"\nValueError: now\n")
    assert last_message(tmp_path) == "ValueError: now"


def test_the_last_row_is_complete_and_as_it_was_written(tmp_path: Path) -> None:
    table = tmp_path / "metrics.csv"
    assert read_state(tmp_path).row == {}
    for text, last in (
        (TABLE, {"round": "10", "seconds": "0.2", "accuracy_mean": "0.30"}),
        (TABLE + "20,0.3,0.4", {"round": "10", "seconds": "0.2", "accuracy_mean": "0.30"}),
        ("round,seconds,accuracy_mean\n", {}),
        ("round,sec", {}),
        ("", {}),
    ):
        table.write_text(text)
        assert read_state(tmp_path).row == last


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    write(tmp_path, None)
    (tmp_path / ".lock").touch()  # a killed run leaves its lock file
    assert not is_locked(tmp_path / ".lock")
    lock = Lock(tmp_path)
    assert is_locked(tmp_path / ".lock")
    assert is_locked(tmp_path / ".lock")
    assert read_state(tmp_path).status == RUNNING
    lock.release()
    assert read_state(tmp_path).status == STOPPED
    Lock(tmp_path).release()  # reading the status takes no lock
    (tmp_path / ".lock").touch()
    with (tmp_path / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # another program reads the status at the same time
        assert not is_locked(tmp_path / ".lock")


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff", "[" * 100_000, "{}"])
def test_a_folder_without_a_record_of_a_run_is_refused(tmp_path: Path, text: str) -> None:
    for prepare in (
        lambda: None,
        lambda: (tmp_path / "run.json").write_text(text, encoding="latin-1"),
    ):
        prepare()
        with pytest.raises(InputError, match="is no run directory") as caught:
            manifest.read(tmp_path)
        assert "\n" not in str(caught.value)


WRONG: dict[str, bytes] = {
    "no table": b"{}\n",
    "no rows": b"{}\n{}\n",
    "not UTF-8": TABLE.encode() + b"20,0.3,0.\xff\n",
    "a header again": (TABLE + TABLE).encode(),
    "a field too many": TABLE.encode() + b"20,0.3,0.4,1\n",
    "no number": TABLE.encode() + b"20,0.3,abc\n",
    "rounds that go back": TABLE.encode() + b"10,0.3,0.4\n",
    "a column twice": b"round,round\n0,1\n",
    "a quote that is open": TABLE.encode() + b'20,0.3,"0.4\n',
    "an empty field": TABLE.encode() + b"20,,0.4\n",
    "half a round": TABLE.encode() + b"20.5,0.3,0.4\n",
    "a round that is NaN": TABLE.encode() + b"nan,0.3,0.4\n",
    "another first column": b"seconds,round\n0.1,0\n",
    "an empty line": b"\n",
    "NUL": TABLE.encode() + b"20,\0,0.4\n",
}


def replaced(path: Path, by: str) -> None:
    """Replace a file by a directory, a FIFO or wrong contents."""
    path.unlink(missing_ok=True)
    if by == "a directory":
        path.mkdir()
    elif by == "a fifo":
        os.mkfifo(path)
    else:
        path.write_bytes(WRONG[by])


@pytest.mark.parametrize("code", [0, 75, None])
@pytest.mark.parametrize("by", [*WRONG, "a directory", "a fifo"])
def test_a_damaged_table_is_reported_and_not_shown(
    tmp_path: Path, code: int | None, by: str
) -> None:
    (tmp_path / "metrics.csv").write_text(TABLE)
    write(tmp_path, code)
    assert read_state(tmp_path).row
    replaced(tmp_path / "metrics.csv", by)
    seen = read_state(tmp_path)
    assert (seen.status, seen.row, seen.table) == (DAMAGED, {}, "")
    assert seen.reason.startswith(f"{tmp_path}/metrics.csv is damaged: ")
    assert "\n" not in seen.reason


def test_files_of_a_finished_run_are_verified(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(TABLE)
    (tmp_path / "state.safetensors").write_bytes(b"1234")
    manifest.write(tmp_path, {"run": {}, "exit": 0}, ["metrics.csv", "state.safetensors"])
    assert read_state(tmp_path).status == DONE
    (tmp_path / "state.safetensors").write_bytes(b"1235")
    seen = read_state(tmp_path)
    assert (seen.status, seen.row["round"]) == (DAMAGED, "10")
    assert seen.reason.startswith(f"{tmp_path}/state.safetensors is damaged")
    assert read_state(tmp_path, models=False).status == DONE  # they may take seconds to read
    (tmp_path / "metrics.csv").write_text(TABLE.replace("0.30", "0.31"))
    assert read_state(tmp_path, models=False).status == DAMAGED
    assert (read_state(tmp_path).status, read_state(tmp_path).row) == (DAMAGED, {})
    (tmp_path / "metrics.csv").unlink()
    assert read_state(tmp_path).reason == f"{tmp_path}/metrics.csv is missing"


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "\xff", "[" * 100_000, "{}", '{"run": {}, "exit": 0}', "null", "1e999"]
)
def test_a_damaged_record_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text, encoding="latin-1")
    seen = read_state(tmp_path)
    assert (seen.status, "\n" in seen.reason) == (DAMAGED, False)
    assert "run.json" in seen.reason


def test_a_cell_that_ran_otherwise_than_its_settings_say_is_changed(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(TABLE)
    manifest.write(tmp_path, {"run": {"rounds": 10}, "exit": 0}, ["metrics.csv"])
    assert read_state(tmp_path).status == DONE  # a run by itself
    (tmp_path / "cell.toml").write_text("rounds = 10\n")
    assert read_state(tmp_path).status == DONE
    for setting, ran, now in (("rounds", 10, 5), ("eval_every", 10, 2), ("eval_last", 1, 3)):
        (tmp_path / "cell.toml").write_text(f"{'rounds = 10' * (now != 5)}\n{setting} = {now}\n")
        seen = read_state(tmp_path)
        assert (seen.status, seen.over, seen.bad) == (CHANGED, False, True)
        line = f"it ran with --{setting.replace('_', '-')} {ran}, not {now}: remove {tmp_path}"
        assert seen.reason.startswith(line)
    (tmp_path / "cell.toml").write_text("rounds = 20\n")
    assert read_state(tmp_path).status == STOPPED  # it goes on
    (tmp_path / "cell.toml").write_text("rounds = 20\neval_every = 2\n")
    assert read_state(tmp_path).status == CHANGED


@pytest.mark.parametrize("code", [0, 3])
def test_a_cell_whose_files_are_others_by_now_is_changed(tmp_path: Path, code: int) -> None:
    links = tmp_path / "links.csv"
    run = Run(model=f"{tmp_path}/net.py:make", links=f"links:path={links}", init_from=tmp_path)
    own = {name: tmp_path / name for name in ("net.py", "links.csv", "state.safetensors")}
    for path in own.values():
        path.write_text("as it was")
    (tmp_path / "cell.toml").touch()
    given = of_files(files_of(run))
    assert len(given) == 3
    record = {"run": run.to_dict(), "exit": code, "ending": "as it did", "given": given}
    manifest.write(tmp_path, record)
    ended = {0: DONE, 3: DIVERGED}[code]
    assert read_state(tmp_path).status == ended
    for name, path in own.items():
        path.write_text("otherwise")
        seen = read_state(tmp_path)
        assert (seen.status, seen.over) == (CHANGED, False)
        assert f"{name if name == 'state.safetensors' else 'file'} of --" in seen.reason
        assert "is not the one that it ran with: restore it, or remove" in seen.reason
        quick = read_state(tmp_path, models=False).status
        assert quick == (ended if name == "state.safetensors" else CHANGED)
        path.unlink()
        assert read_state(tmp_path).status == ended  # what is missing is not compared
        path.write_text("as it was")


@pytest.mark.parametrize("code", [[], {}, "0", True, 0.0, 1e300, [0]])
def test_an_exit_code_of_another_kind_is_no_success(tmp_path: Path, code: object) -> None:
    manifest.write(tmp_path, {"run": {}, "exit": code, "ending": None})
    assert read_state(tmp_path).status == FAILED


@pytest.mark.parametrize("name", ["run.json", "output.log", ".lock", ".sweep.lock"])
@pytest.mark.parametrize("by", ["a directory", "a fifo", "no table"])
def test_the_status_is_read_whatever_replaces_a_file(tmp_path: Path, name: str, by: str) -> None:
    replaced(tmp_path / name, by)
    assert read_state(tmp_path).status in (WAITING, FAILED, DAMAGED)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(file: object, kind: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", unable)
    with pytest.warns(UserWarning, match="has no locks .Function not implemented"):
        Lock(tmp_path).release()
    (tmp_path / ".lock").touch()
    with pytest.warns(UserWarning, match="has no locks"):
        assert read_state(tmp_path).status == WAITING
    with warnings.catch_warnings(record=True, action="default") as recorded:
        for name in ("a", "b", "c"):
            (tmp_path / name).mkdir()
            (tmp_path / name / ".lock").touch()
            assert not is_locked(tmp_path / name / ".lock")
    assert (
        len({str(each.message) for each in recorded}) == 1
    )  # one warning for all folders of a file system
