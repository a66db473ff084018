"""How are the cells of a sweep run on one machine? Each as a program of its own, so many at a time, to the last."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.files import Lock, no_follow
from dfl.sweep.cells import (
    CELL_LOCK,
    DIVERGED,
    DONE,
    FAILED,
    RUN_LOCK,
    RUNNING,
    STOPPED,
    WAITING,
    CellState,
    last_words,
    look,
    running,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""By which a sweep is told to stop; SIGUSR1 is Slurm's warning."""
PAUSE = 0.1
"""Seconds between two looks at what runs."""


class Started(NamedTuple):
    """A cell that a program of ours runs.

    Attributes:
        folder: of the cell.
        claim: keeps other sweeps from starting the cell.
        stamp: which run.json the folder had before.
    """

    folder: Path
    claim: Lock
    stamp: tuple[int, int]


@dataclass
class Jobs:
    """Cells that wait, run and have ended.

    Attributes:
        waiting: folders of the cells that are to run, in order.
        at_once: how many may run at a time.
        ranks: on how many ranks each runs.
        running: the programs, and the cells that they run.
        elsewhere: folders of cells that another program runs.
        ended: how every cell that ran was last seen.
        told: the signals that came, in order.
    """

    waiting: deque[Path]
    at_once: int
    ranks: int = 1
    running: dict[subprocess.Popen[bytes], Started] = field(default_factory=dict)
    elsewhere: list[Path] = field(default_factory=list)
    ended: dict[Path, CellState] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)

    def work(self, tell: Callable[[Path | None], None]) -> None:
        """Run the cells, until all have ended, those too that another program runs, or a signal came.

        Args:
            tell: called with the folder of every cell that has ended, and with None now and then.

        Raises:
            InputError: several ranks are asked for, and there is no mpirun.
        """
        words, obeyed = [*launcher(self.ranks), sys.executable], 0
        with _listening(self.told):
            while self.running or ((self.waiting or self.elsewhere) and not self.told):
                self._fill(words, tell)
                obeyed = self._obey(obeyed)
                self._collect(tell)
                self._take_back()
                tell(None)
                time.sleep(PAUSE)

    def _take_back(self) -> None:
        """Once nothing else waits, put those cells in line that the other program has let go of."""
        if not self.waiting:
            self.waiting.extend(folder for folder in self.elsewhere if not running(folder))
            self.elsewhere = [folder for folder in self.elsewhere if folder not in self.waiting]

    def _fill(self, words: Sequence[str], tell: Callable[[Path | None], None]) -> None:
        """Start as many cells as may run."""
        while self.waiting and len(self.running) < self.at_once and not self.told:
            self._begin(words, self.waiting.popleft(), tell)

    def _begin(
        self, words: Sequence[str], folder: Path, tell: Callable[[Path | None], None]
    ) -> None:
        """Start a cell, unless another program runs it, or has done so since the sweep began."""
        try:
            claim = Lock(folder, CELL_LOCK, patience=0)
        except InputError:
            self.elsewhere.append(folder)
            return
        except OSError as error:
            self._end(folder, _unwritable(folder, error), tell)
            return
        seen = look(folder, (RUN_LOCK,))
        if seen.status in (DONE, DIVERGED):
            self._end(folder, seen, tell)
        elif seen.status == RUNNING:
            self.elsewhere.append(folder)
        else:
            try:
                stamp = _stamp(folder)
                self.running[_started(words, folder, claim)] = Started(folder, claim, stamp)
                return
            except OSError as error:
                self._end(folder, _unwritable(folder, error), tell)
        claim.release()

    def _end(self, folder: Path, seen: CellState, tell: Callable[[Path | None], None]) -> None:
        self.ended[folder] = seen
        tell(folder)

    def _obey(self, obeyed: int) -> int:
        """Have what runs end well where a signal came, and at once where a second one did; how many came so far."""
        if len(self.told) > obeyed:
            for program in self.running:
                os.killpg(program.pid, signal.SIGKILL) if obeyed else program.terminate()
        return len(self.told)

    def _collect(self, tell: Callable[[Path | None], None]) -> None:
        """Tell of the cells that have ended since the last call."""
        for program in [each for each in self.running if each.poll() is not None]:
            folder, claim, stamp = self.running.pop(program)
            seen = _outcome(folder, program.returncode, stamp, bool(self.told))
            claim.release()
            if seen is None:
                self.elsewhere.append(folder)
            else:
                self._end(folder, seen, tell)


def _started(words: Sequence[str], folder: Path, claim: Lock) -> subprocess.Popen[bytes]:
    """The program of a cell. It keeps the claim on the cell if the sweep is killed."""
    with open(folder / "output.log", "ab", opener=no_follow) as log:
        return subprocess.Popen(
            [*words, *command(folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # cells side by side do not fight for the cores
            start_new_session=True,  # Ctrl-C is ours to pass on
            pass_fds=(claim.file.fileno(),),
        )  # fmt: skip


def _outcome(folder: Path, code: int, stamp: tuple[int, int], told: bool) -> CellState | None:
    """How a cell has ended; None where another program ran it, so that its files must be read again later.

    Args:
        folder: of the cell.
        code: with which our program of the cell ended.
        stamp: which run.json the folder had before that program started.
        told: whether the sweep was told to stop.
    """
    seen = look(folder, (RUN_LOCK,))
    if told or seen.status == DONE:
        return seen
    if seen.status == RUNNING:
        return None
    if (
        code == InputError.code and _stamp(folder) != stamp
    ):  # refused for what another program was doing?
        return None if seen.status in (STOPPED, WAITING) else seen
    if code in (0, DivergedError.code, Suspended.code, 130):
        return seen
    said = last_words(folder) if code > 0 else f"ended by {signal.Signals(-code).name}"
    return CellState(FAILED, seen.row, said or f"exit code {code}")


def _stamp(folder: Path) -> tuple[int, int]:
    """What tells one run.json of a folder from the next; zeros where there is none."""
    try:
        found = (folder / "run.json").stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _unwritable(folder: Path, error: OSError) -> CellState:
    """A cell whose program cannot be started."""
    return CellState(FAILED, look(folder).row, f"{error.filename or folder}: {error.strerror}")


def command(folder: Path) -> list[str]:
    """The words after `python` that begin the cell in a folder, go on with it, or find it done."""
    return ["-m", "dfl.run", "--config", str(folder / "cell.toml"), "--resume", str(folder)]


def launcher(ranks: int) -> list[str]:
    """The words before `python`; none for one rank.

    Raises:
        InputError: there is none.
    """
    if ranks == 1:
        return []
    return [mpirun(f"--ranks {ranks} needs"), "-n", str(ranks)]


def mpirun(whoever_needs: str) -> str:
    """The mpirun of this Python, or that of the path.

    Args:
        whoever_needs: the beginning of what is said where there is none.

    Raises:
        InputError: there is none.
    """
    found = shutil.which(
        "mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    )
    if found is None:
        raise InputError(f"{whoever_needs} mpirun: pip install 'dfl[mpi]'")
    return found


@contextmanager
def _listening(told: list[int]) -> Iterator[None]:
    """Keep the signals that come, in place of what they do otherwise."""

    def hear(number: int, frame: FrameType | None) -> None:
        told.append(number)

    before = {each: signal.signal(each, hear) for each in SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
