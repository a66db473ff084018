"""Fixtures of many tests, among them the command line in this process."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import pytest
import torch

from dfl.run import main


def pytest_configure() -> None:
    """Restore Ctrl-C where a background shell ignores it; compute on one thread; keep bytecode.

    Without bytecode, each worker compiles all tests, and each process that tests start all of dfl.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of workers of `-n auto`: one per core, and one more for the slow tier.

    Tests of the slow tier wait for the processes that they start for much of their time.
    """
    cores = len(os.sched_getaffinity(0))
    return cores if config.option.markexpr.startswith("not") else cores + 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order modules: the slow tier first, then those that start jobs, then those with most tests.

    A long module that starts last would leave the other workers without work.
    """
    tests = Counter(item.path for item in items)
    first = {
        path: min(_place(item) for item in own)
        for path, own in groupby(items, key=attrgetter("path"))
    }
    items.sort(key=lambda item: (first[item.path], -tests[item.path], item.path))


def pytest_collection_finish() -> None:
    """Keep the collected tests and the imported modules out of the search for garbage."""
    gc.collect()
    gc.freeze()


def _place(item: pytest.Item) -> int:
    marks = [item.get_closest_marker(name) is not None for name in ("cluster", "mpi", "slow")]
    starts = isinstance(item, pytest.Function) and hasattr(item.module, "mpirun")
    return [*marks, starts, True].index(True)


def eventually(done: Callable[[], bool], seconds: float) -> bool:
    """Whether a condition becomes true within some seconds; it is checked every 20 ms."""
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.02)
    return done()


@dataclass(frozen=True)
class Ended:
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Command:
    """`python -m dfl.run`, in an empty folder."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    monkeypatch: pytest.MonkeyPatch

    def __call__(self, *tokens: str) -> Ended:
        self.monkeypatch.setattr("sys.argv", ["run.py", *tokens])
        self.capsys.readouterr()
        code = main()
        return Ended(code, *self.capsys.readouterr())

    def refused(self, *tokens: str) -> str:
        """Assert that a command is refused and return its one line.

        Nothing else is printed, and no file is written.
        """
        before = self.files()
        ended = self(*tokens)
        assert ended.code == 2, ended
        assert ended.out == ""
        assert self.files() == before
        assert ended.err.startswith("dfl: ")
        assert ended.err.endswith("\n")
        assert ended.err.count("\n") == 1, ended.err
        assert len(ended.err) < 1000
        return ended.err[5:-1]

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*"))


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk() -> Iterator[None]:
    """Files of tests need not survive a loss of power: a small run waits for the disk 16 times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module")
def no_figures() -> Iterator[None]:
    """Runs of a module draw no figures: drawing takes a second, and has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {})
        yield


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a test draw no figures."""
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})


@pytest.fixture
def dfl_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    without_figures: None,
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DFL_DATA", raising=False)
    return Command(tmp_path, capsys, monkeypatch)
