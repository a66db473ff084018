"""The scheduler runs cells in parallel, forwards signals, and skips cells of other programs."""

from __future__ import annotations

import json
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import Lock
from dfl.store import manifest
from dfl.sweep import scheduler
from dfl.sweep.folder import as_toml
from dfl.sweep.scheduler import Scheduler
from dfl.sweep.status import (
    CELL_LOCK,
    DIVERGED,
    DONE,
    FAILED,
    RUNNING,
    STOPPED,
    WAITING,
    read_state,
)


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", root)
    monkeypatch.setattr(scheduler, "PAUSE", 0.02)
    monkeypatch.setattr(
        scheduler, "command", lambda folder: ["-m", "tests.support.fake_cell", str(folder), "0.01"]
    )


def cell(folder: Path, name: str, **settings: object) -> Path:
    (folder / name).mkdir()
    run = {"peers": 4, "rounds": 5, "model": "softmax", **settings}
    (folder / name / "cell.toml").write_text(as_toml(Run.from_dict(run)))
    return folder / name


def work(
    cells: list[Path], at_once: int = 2, signals: tuple[signal.Signals, ...] = ()
) -> Scheduler:
    """Run cells, and assert that the callback received only cells that ended.

    Args:
        signals: sent to this process once the first cell has written a row, one after each check of
            the scheduler: while its handlers are in place, or the process would end.
    """
    received = list[Path | None]()
    left = deque(signals)

    def receive(folder: Path | None) -> None:
        received.append(folder)
        if folder is None and left and read_state(cells[0]).row:
            signal.raise_signal(left.popleft())

    found = Scheduler(deque(cells), at_once)
    found.run(receive)
    assert not left
    assert {each for each in received if each} <= set(found.ended)
    return found


def launches(folder: Path) -> int:
    """Return how often a cell was started."""
    return len((folder / "launches").read_text()) if (folder / "launches").exists() else 0


def test_a_failed_cell_does_not_stop_the_others(tmp_path: Path) -> None:
    cells = [
        cell(tmp_path, "refused", peers=13), cell(tmp_path, "broken", device="cuda:7"),
        cell(tmp_path, "diverged", lr=9), cell(tmp_path, "good"), cell(tmp_path, "better", seed=1),
    ]  # fmt: skip
    ended = work(cells).ended
    assert [ended[each].status for each in cells] == [FAILED, FAILED, DIVERGED, DONE, DONE]
    assert [ended[each].reason for each in cells[:3]] == [
        "--topology torus with 13 peers: has no sides", "RuntimeError: deliberately broken",
        "peer 1 is no longer finite after round 2: try a smaller --lr",
    ]  # fmt: skip
    assert [ended[each].row["round"] for each in cells[2:]] == ["1", "5", "5"]

    again = work(cells)  # cells that are done or diverged are not repeated
    assert list(map(launches, cells)) == [2, 2, 1, 1, 1]
    assert [again.ended[each].status for each in cells] == [FAILED, FAILED, DIVERGED, DONE, DONE]


def test_a_cell_that_fails_in_silence_has_no_message_of_an_earlier_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = cell(tmp_path, "one", peers=13)
    assert work([one]).ended[one].reason == "--topology torus with 13 peers: has no sides"
    monkeypatch.setattr(scheduler, "command", lambda folder: ["-c", "import sys; sys.exit(7)"])
    assert work([one]).ended[one].reason == "exit code 7"
    log = (one / "output.log").read_text().splitlines()
    assert [line.split()[0] for line in log] == ["launch", "dfl:", "launch"]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_the_number_of_running_cells_is_bounded(tmp_path: Path, at_once: int) -> None:
    cells = [cell(tmp_path, str(n)) for n in range(4)]
    most = 0

    def count(folder: Path | None) -> None:
        nonlocal most
        most = max(most, len(found.running))

    found = Scheduler(deque(cells), at_once)
    found.run(count)
    assert most == at_once
    assert [read_state(each).status for each in cells] == [DONE] * 4


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        scheduler, "command", lambda folder: ["-m", "tests.support.fake_cell", str(folder), "0.2"]
    )


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_makes_running_cells_write_a_checkpoint(
    tmp_path: Path, number: signal.Signals
) -> None:
    handler = signal.getsignal(number)
    cells = [cell(tmp_path, str(n), rounds=200) for n in range(3)]
    found = work(cells, signals=(number,))
    assert found.signals == [number]
    assert set(found.ended) == set(cells[:2])
    assert found.ended[cells[0]].status == STOPPED
    assert "75" in (cells[0] / "run.json").read_text()
    assert launches(cells[2]) == 0
    assert signal.getsignal(number) is handler


def test_a_second_signal_ends_cells_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause = 60
    monkeypatch.setattr(
        scheduler,
        "command",
        lambda folder: ["-m", "tests.support.fake_cell", str(folder), f"{pause}"],
    )
    one = cell(tmp_path, "one", rounds=200)
    begun = time.monotonic()
    found = work([one], signals=(signal.SIGTERM, signal.SIGTERM))
    assert found.ended[one].status == STOPPED
    assert '"exit": null' in (one / "run.json").read_text()
    assert time.monotonic() - begun < pause


def test_a_killed_cell_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    monkeypatch.setattr(scheduler, "command", lambda folder: ["-c", dead])
    one = cell(tmp_path, "one")
    state = work([one]).ended[one]
    assert (state.status, state.reason) == (FAILED, "ended by SIGKILL")


def test_every_cell_uses_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setattr(
        scheduler,
        "command",
        lambda folder: ["-c", "import os; exit(os.environ['OMP_NUM_THREADS'])"],
    )
    one = cell(tmp_path, "one")
    assert work([one]).ended[one].reason == "1"


@pytest.fixture
def locks() -> Iterator[list[Lock]]:
    found: list[Lock] = []
    yield found
    for each in found:
        each.release()


def test_cells_that_another_program_runs_are_waited_for(tmp_path: Path, locks: list[Lock]) -> None:
    cells = [cell(tmp_path, str(n)) for n in range(3)]
    locks.append(Lock(cells[0]))
    order: list[str] = []

    def callback(folder: Path | None) -> None:
        if folder:
            order.append(folder.name)
        elif found.elsewhere and not (found.running or found.waiting):
            locks[0].release()

    found = Scheduler(deque(cells), 1)
    found.run(callback)
    assert order == ["1", "2", "0"]
    assert list(map(launches, cells)) == [1, 1, 1]


def test_a_signal_ends_the_waiting(tmp_path: Path, locks: list[Lock]) -> None:
    one = cell(tmp_path, "one")
    locks.append(Lock(one))
    found = Scheduler(deque([one]), 1)
    found.run(lambda folder: signal.raise_signal(signal.SIGTERM))
    assert (found.elsewhere, found.ended, launches(one)) == ([one], {}, 0)


@pytest.mark.parametrize(
    ("code", "status"), [(0, DONE), (3, DIVERGED), (75, DONE), (None, DONE), (2, FAILED)]
)
def test_a_cell_that_another_program_takes_first_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, status: str
) -> None:
    """Another program holds the folder while the cell is refused, and releases it before the sweep
    reads the status.
    """
    refused = """
        import json, pathlib, sys
        from dfl.store import manifest
        folder, code = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
        (folder / "launches").open("a").write("x")
        manifest.write(folder, {"run": {"rounds": 5}, "exit": code, "ending": "so"})
        message = "dfl: it is being written to by another run: wait for it, or end it"
        sys.exit(message if code == 2 else 2)
    """
    fake = scheduler.command

    def command(folder: Path) -> list[str]:
        return (
            fake(folder)
            if launches(folder)
            else ["-c", dedent(refused), str(folder), json.dumps(code)]
        )

    monkeypatch.setattr(scheduler, "command", command)
    one = cell(tmp_path, "one")
    found = work([one])
    assert found.ended[one].status == status
    assert launches(one) == (2 if code in (75, None) else 1)


def test_a_cell_whose_program_cannot_write_its_end_fails_after_three_attempts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = """
        import pathlib, sys
        from dfl.store import manifest
        folder = pathlib.Path(sys.argv[1])
        (folder / "launches").open("a").write("x")
        manifest.write(folder, {"run": {}, "exit": None, "ending": "running"})
        print("dfl: run.json cannot be written: no space left", file=sys.stderr)
        sys.exit(2)
    """
    monkeypatch.setattr(scheduler, "command", lambda folder: ["-c", dedent(stuck), str(folder)])
    one = cell(tmp_path, "one")
    state = work([one]).ended[one]
    assert (state.status, launches(one)) == (FAILED, 3)
    assert state.reason == "run.json cannot be written: no space left"


def test_a_cell_that_finishes_before_its_start_is_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell(tmp_path, str(n)) for n in range(2)]
    for code, each in zip((0, 3), cells, strict=True):
        manifest.write(each, {"run": {"rounds": 5}, "exit": code, "ending": "so"})
    found = work(cells)
    assert [found.ended[each].status for each in cells] == [DONE, DIVERGED]
    assert list(map(launches, cells)) == [0, 0]


def test_only_one_sweep_at_a_time_starts_a_cell(tmp_path: Path) -> None:
    one = cell(tmp_path, "one")
    with Lock(one, CELL_LOCK):
        assert read_state(one).status == RUNNING
        found = Scheduler(deque([one]), 1)
        found.run(lambda folder: signal.raise_signal(signal.SIGTERM))
        assert (found.elsewhere, launches(one)) == ([one], 0)
    assert read_state(one).status == WAITING


def test_ranks_are_started_by_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduler.launcher(1) == []
    program, *arguments = scheduler.launcher(3)
    assert (Path(program).name, arguments) == ("mpirun", ["-n", "3"])
    monkeypatch.setattr("shutil.which", lambda *given, **more: None)
    with pytest.raises(InputError, match="--ranks 3 needs mpirun"):
        scheduler.launcher(3)
