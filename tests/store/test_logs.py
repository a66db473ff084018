"""The log file of every rank, which is not printed."""

from __future__ import annotations

import errno
import logging
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dfl
from dfl.comm.mpi import World
from dfl.core.errors import DivergedError, InputError
from dfl.store.logs import LOG, Early, LogFile, gathered, listening
from dfl.store.run_directory import claim
from tests.conftest import Command
from tests.support.mpirun import ENV, ROOT, mpirun

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) (.*)")


@pytest.fixture(autouse=True)
def tidy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that a test leaves the logger and the warnings as they were."""
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    before = list(LOG.handlers), LOG.level, warnings.showwarning
    yield
    assert (LOG.handlers, LOG.level, warnings.showwarning) == before


def run(folder: Path, **more: Any) -> dfl.Run:
    few: dict[str, Any] = {
        "peers": 3,
        "rounds": 4,
        "eval_every": 2,
        "model": "softmax",
        "examples_per_peer": 20,
    }
    return dfl.Run(**few | {"out": folder} | more)


def logged(folder: Path, rank: int = 0) -> list[tuple[str, str]]:
    """Levels and messages of a rank's log; a line without a level continues the message above."""
    lines: list[tuple[str, str]] = []
    for line in (folder / "logs" / f"rank-{rank}.log").read_text().splitlines():
        if found := LINE.fullmatch(line):
            lines.append((found[1], found[2]))
        else:
            lines[-1] = lines[-1][0], f"{lines[-1][1]}\n{line}"
    return lines


def test_a_run_is_logged_and_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = list(dfl.simulate(run(tmp_path / "run")))
    (_, start), *lines, last = logged(tmp_path / "run")
    figures, evaluations = lines[1::2], lines[::2]
    assert start.startswith("start: rank 0 of 1, peers 0 to 2, on ")
    assert f"dfl {dfl.__version__}, torch " in start
    assert last == ("INFO", "finished")
    assert [level for level, _ in figures] == ["INFO"] * len(rows)
    for row, (_, text) in zip(rows, evaluations, strict=True):
        assert re.fullmatch(rf"evaluation after round {row['round']} in \d+\.\d\d s", text)
    assert [line for _, line in figures] == [
        line for row in rows for line in [str(row).replace("'", '"')]
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("debug", {"DEBUG", "INFO", "WARNING"}),
        ("info", {"INFO", "WARNING"}),
        ("warning", {"INFO", "WARNING"}),
        ("error", {"INFO"}),
    ],
)
def test_the_level_selects_what_is_logged(tmp_path: Path, level: Any, written: set[str]) -> None:
    settings = run(
        tmp_path / "run", log_level=level, algorithm="qdfedavgm:exchange=paper", bits=8, peers=4
    )
    list(dfl.simulate(settings))
    lines = logged(tmp_path / "run")
    assert {level for level, _ in lines} == written
    assert lines[0][1].startswith("start")  # whatever the level
    rounds = [text for level, text in lines if level == "DEBUG"]
    assert len(rounds) == (5 if level == "debug" else 0)
    assert all(re.fullmatch(r"round \d: \d+\.\d{6} s", text) for text in rounds)
    notes = [text for level, text in lines if level == "WARNING"]
    assert len(notes) == (0 if level == "error" else 1)


def test_a_handler_of_the_caller_may_have_a_lower_level(tmp_path: Path) -> None:
    levels: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        listener = logging.NullHandler()
        patch.setattr(listener, "handle", lambda record: levels.append(record.levelname))
        patch.setattr(LOG, "handlers", [*LOG.handlers, listener])
        patch.setattr(LOG, "level", logging.DEBUG)
        list(dfl.simulate(run(tmp_path / "run", log_level="warning")))
    assert levels.count("DEBUG") == 5
    assert [text.partition(":")[0] for _, text in logged(tmp_path / "run")] == ["start"]


def test_without_a_folder_nothing_is_logged_or_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    list(dfl.simulate(dfl.Run(peers=3, rounds=1, model="softmax", log_level="debug")))
    assert list(tmp_path.iterdir()) == []
    LOG.error("not handled")
    assert capfd.readouterr() == ("", "")


def test_the_ending_of_a_run_is_logged(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        list(
            dfl.simulate(
                run(tmp_path / "diverged", model="mlp", lr=1e4, rounds=50, examples_per_peer=None)
            )
        )
    level, text = logged(tmp_path / "diverged")[-1]
    assert (level, "is no longer finite" in text, "Traceback" in text) == ("ERROR", True, False)
    for _ in dfl.simulate(run(tmp_path / "left")):
        break
    assert logged(tmp_path / "left")[-1] == ("WARNING", "interrupted")


def test_a_failure_is_logged_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> int:
        raise RuntimeError("deliberately broken")

    monkeypatch.setattr("dfl.simulation.loop._agree_after_round", broken)
    with pytest.raises(RuntimeError):
        list(dfl.simulate(run(tmp_path / "run")))
    level, text = logged(tmp_path / "run")[-1]
    assert level == "ERROR"
    assert "Traceback" in text
    assert text.endswith("RuntimeError: deliberately broken")


def test_a_resumed_run_appends_to_the_log(tmp_path: Path) -> None:
    for rounds in (4, 6):
        settings = run(tmp_path / "run", rounds=rounds, checkpoint_every=2)
        list(dfl.simulate(settings if rounds == 4 else dfl.resumed(tmp_path / "run", rounds=6)))
    texts = [text.partition(":")[0] for _, text in logged(tmp_path / "run")]
    assert texts.count("start") == texts.count("finished") == 2
    assert texts[0] == "start"


def test_warnings_are_shown_on_rank_0_and_logged_on_all(tmp_path: Path) -> None:
    for rank, shown in ((0, 1), (1, 0)):
        settings = run(tmp_path)
        with (
            warnings.catch_warnings(record=True) as caught,
            gathered(settings),
            listening(World(rank), settings),
        ):
            warnings.simplefilter("always")
            (early,) = (each for each in LOG.handlers if isinstance(each, Early))
            warnings.warn("mind this", UserWarning, stacklevel=1)
            file = LogFile(tmp_path / "logs" / f"rank-{rank}.log", logging.INFO, "start")
            early.hand_over(file)
            file.close()
        assert len(caught) == shown
        (_, start), (level, text) = logged(tmp_path, rank)
        assert (start, level) == ("start", "WARNING")
        assert text.startswith("UserWarning: mind this (")
        assert "test_logs.py" in text


def test_a_log_that_cannot_be_opened_ends_the_run(dfl_run: Command) -> None:
    claim(dfl_run.folder / "run")
    (dfl_run.folder / "run" / "logs").touch()
    ended = dfl_run("--rounds", "1", "--out", "run", "--peers", "3", "--model", "softmax")
    assert ended.code == 2
    assert "--out run cannot be written to: logs" in ended.err
    assert ended.err.count("\n") == 1


def test_a_name_that_is_no_text_is_logged(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    log = LogFile(tmp_path / "rank-0.log", logging.INFO, "begun")
    log.handle(logging.LogRecord("dfl", logging.INFO, "", 0, "from y\udcff", None, None))
    log.close()
    assert r"from y\udcff" in (tmp_path / "rank-0.log").read_text()
    assert capfd.readouterr().err == ""


class Full:
    """A file on a full disk."""

    def __init__(self, *given: Any, **more: Any) -> None: ...

    def write(self, text: str) -> None: ...

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def close(self) -> None:
        self.flush()


def test_a_full_disk_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogFile, "_open", Full)
    with pytest.raises(InputError, match=r"rank-0\.log cannot be written: No space left on device"):
        list(dfl.simulate(run(tmp_path / "run")))


def test_a_disk_that_fills_up_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    simulation = dfl.simulate(run(tmp_path / "run"))
    next(simulation)
    (file,) = (each for each in LOG.handlers if isinstance(each, LogFile))
    assert file.stream
    with file.stream:
        monkeypatch.setattr(file, "stream", Full())
    assert len(list(simulation)) == 2
    assert isinstance(file.error, OSError)
    assert capfd.readouterr() == ("", "")


WARNING = """
import sys, warnings, dfl
from dfl.simulation import loop
from pathlib import Path
checked = loop._agree_after_round
def warning(run_state, prepared, error):
    warnings.warn("warning of every rank", stacklevel=1)
    if run_state.t == 3 and prepared.world.rank == 1:
        raise RuntimeError("deliberately broken")
    return checked(run_state, prepared, error)
loop._agree_after_round = warning
run = dfl.Run(peers=4, rounds=5, model="softmax", out=Path(sys.argv[1]), log_level="debug")
for row in dfl.simulate(run):
    pass
"""


@pytest.mark.mpi
def test_ranks_print_a_warning_once_and_log_their_failure(tmp_path: Path) -> None:
    (tmp_path / "warning.py").write_text(WARNING)
    done = mpirun(2, str(tmp_path / "warning.py"), str(tmp_path / "run"), timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("UserWarning: warning of every rank") == 1
    logs = [logged(tmp_path / "run", rank) for rank in (0, 1)]
    for rank, lines in enumerate(logs):
        assert f"start: rank {rank} of 2, peers {2 * rank} to {2 * rank + 1}" in lines[0][1]
        assert (
            sum("warning of every rank" in text for level, text in lines if level == "WARNING") == 1
        )
        assert sum(text.startswith('{"round": 0') for _, text in lines) == (rank == 0)
    level, text = logs[1][-1]
    assert (level, "RuntimeError: deliberately broken" in text) == ("ERROR", True)


@pytest.mark.mpi
def test_a_rank_that_cannot_log_ends_the_job(tmp_path: Path) -> None:
    claim(tmp_path / "run")
    (tmp_path / "run" / "logs" / "rank-1.log").mkdir(parents=True)
    done = mpirun(2, "-m", "dfl.run", "--rounds", "1", "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stderr.endswith("run/logs/rank-1.log cannot be written: Is a directory\n")


def test_importing_dfl_prints_nothing() -> None:
    code = "import dfl, logging; from dfl.store.logs import LOG; LOG.critical('x')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=ENV, cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
