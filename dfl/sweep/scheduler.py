"""The scheduler of a sweep: runs cells on this machine, each as a program, several at a time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from dfl.core.errors import DivergedError, InputError, Suspended
from dfl.core.files import LOCK, Lock, no_follow
from dfl.store.run_directory import CELL
from dfl.sweep.status import (
    CELL_LOCK,
    CHANGED,
    DONE,
    FAILED,
    LAUNCH,
    RUNNING,
    STOPPED,
    WAITING,
    CellState,
    is_running,
    last_message,
    read_state,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""The signals that stop a sweep; SIGUSR1 is Slurm's warning."""
PAUSE = 0.1
"""Seconds between two checks of the programs that run."""
ATTEMPTS = 3
"""Number of times that a cell is started whose program is refused as if another one ran it."""

Callback = Callable[[Path | None], None]
"""Called with the folder of every cell that has ended, and with None after every check."""


class Started(NamedTuple):
    """A cell that a program of this sweep runs.

    Attributes:
        folder: of the cell.
        claim: the lock that keeps other sweeps from starting the cell.
        stamp: identifies the run.json that the folder had before, as `_stamp` does.
    """

    folder: Path
    claim: Lock
    stamp: tuple[int, int]


@dataclass
class Scheduler:
    """Runs the cells of a sweep.

    Attributes:
        waiting: folders of the cells that are to run, in order.
        at_once: the number of cells that may run at a time.
        ranks: the number of ranks of each cell.
        running: the programs and the cells that they run.
        elsewhere: folders of cells that another program runs.
        ended: the state of every cell that has ended.
        signals: the signals that were received, in order.
        refused: how often the program of a cell was refused as if another one ran it.
    """

    waiting: deque[Path]
    at_once: int
    ranks: int = 1
    running: dict[subprocess.Popen[bytes], Started] = field(default_factory=dict)
    elsewhere: list[Path] = field(default_factory=list)
    ended: dict[Path, CellState] = field(default_factory=dict)
    signals: list[int] = field(default_factory=list)
    refused: Counter[Path] = field(default_factory=Counter)

    def run(self, callback: Callback) -> None:
        """Run the cells until all have ended, those of other programs too, or a signal came.

        Args:
            callback: called with the folder of every cell that has ended, and with None after
                every check.

        Raises:
            InputError: several ranks are needed, and there is no mpirun.
        """
        start_of_command = [*launcher(self.ranks), sys.executable]
        obeyed = 0
        with _collect_signals(self.signals):
            while self.running or ((self.waiting or self.elsewhere) and not self.signals):
                self._start_waiting(start_of_command, callback)
                obeyed = self._obey(obeyed)
                self._collect(callback)
                self._queue_released()
                callback(None)
                time.sleep(PAUSE)

    def _queue_released(self) -> None:
        """Once no cell waits, queue the cells that the other program has released."""
        if not self.waiting:
            self.waiting.extend(folder for folder in self.elsewhere if not is_running(folder))
            self.elsewhere = [folder for folder in self.elsewhere if folder not in self.waiting]

    def _start_waiting(self, start_of_command: Sequence[str], callback: Callback) -> None:
        """Start as many cells as may run."""
        while self.waiting and len(self.running) < self.at_once and not self.signals:
            self._start(start_of_command, self.waiting.popleft(), callback)

    def _start(self, start_of_command: Sequence[str], folder: Path, callback: Callback) -> None:
        """Start a cell, unless another program runs it or has finished it since the sweep began."""
        try:
            claim = Lock(folder, CELL_LOCK, patience=0)
        except InputError:
            self.elsewhere.append(folder)
            return
        except OSError as error:
            self._end(folder, _unwritable(folder, error), callback)
            return
        state = read_state(folder, (LOCK,))
        if state.over:
            self._end(folder, state, callback)
        elif state.status == RUNNING:
            self.elsewhere.append(folder)
        else:
            try:
                stamp = _stamp(folder)
                program = _started(start_of_command, folder, claim)
                self.running[program] = Started(folder, claim, stamp)
                return
            except OSError as error:
                self._end(folder, _unwritable(folder, error), callback)
        claim.release()

    def _end(self, folder: Path, state: CellState, callback: Callback) -> None:
        self.ended[folder] = state
        callback(folder)

    def _obey(self, obeyed: int) -> int:
        """Terminate the programs after a first signal, and kill them after a second one.

        Returns:
            The number of signals received so far.
        """
        if len(self.signals) > obeyed:
            for program in self.running:
                os.killpg(program.pid, signal.SIGKILL) if obeyed else program.terminate()
        return len(self.signals)

    def _collect(self, callback: Callback) -> None:
        """Record the cells whose program has ended since the last call."""
        for program in [each for each in self.running if each.poll() is not None]:
            folder, claim, stamp = self.running.pop(program)
            state = self._outcome(folder, program.returncode, stamp)
            claim.release()
            if state is None:
                self.elsewhere.append(folder)
            else:
                self._end(folder, state, callback)

    def _outcome(self, folder: Path, code: int, stamp: tuple[int, int]) -> CellState | None:
        """Return how a cell has ended, and None where another program runs it or has run it.

        A program is taken as refused because of another one where it ends with the code of a
        refusal and run.json has changed. Our own program does so too where it cannot write run.json
        at its end; after `ATTEMPTS` such refusals the cell has failed.

        Args:
            folder: of the cell.
            code: the exit code of this sweep's program of the cell.
            stamp: identifies the run.json that the folder had before that program started.
        """
        state = read_state(folder, (LOCK,))
        if self.signals or state.status in (DONE, CHANGED):
            return state
        if state.status == RUNNING:
            return None
        if code == InputError.code and _stamp(folder) != stamp:
            if state.status not in (STOPPED, WAITING):
                return state
            self.refused[folder] += 1
            if self.refused[folder] < ATTEMPTS:
                return None
        if code in (0, DivergedError.code, Suspended.code, 130):
            return state
        message = last_message(folder) if code > 0 else f"ended by {signal.Signals(-code).name}"
        return CellState(FAILED, state.row, message or f"exit code {code}")


def _started(start_of_command: Sequence[str], folder: Path, claim: Lock) -> subprocess.Popen[bytes]:
    """Start the program of a cell. It keeps the claim on the cell if the sweep is killed."""
    with open(folder / "output.log", "ab", buffering=0, opener=no_follow) as log:
        log.write(time.strftime(f"{LAUNCH} %F %T\n").encode())
        return subprocess.Popen(
            [*start_of_command, *command(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ
            | {"OMP_NUM_THREADS": "1"},  # one core for each of the cells side by side
            start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on
            pass_fds=(claim.file.fileno(),),
        )


def _stamp(folder: Path) -> tuple[int, int]:
    """Return what identifies the run.json of a folder; zeros where there is none."""
    try:
        found = (folder / "run.json").stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


def _unwritable(folder: Path, error: OSError) -> CellState:
    """Return the state of a cell whose program cannot be started."""
    return CellState(
        FAILED, read_state(folder).row, f"{error.filename or folder}: {error.strerror}"
    )


def command(folder: Path) -> list[str]:
    """Return the arguments of `python` that start the cell in a folder, or resume it."""
    return ["-m", "dfl.run", "--config", str(folder / CELL), "--resume", str(folder)]


def launcher(ranks: int) -> list[str]:
    """Return the start of a command line on some ranks, which comes before `python`.

    Raises:
        InputError: several ranks are needed, and there is no mpirun.
    """
    if ranks == 1:
        return []
    return [mpirun(f"--ranks {ranks} needs"), "-n", str(ranks)]


def mpirun(needed_by: str) -> str:
    """Return the path of the mpirun beside this Python, or of that on the PATH.

    Args:
        needed_by: the start of the message where there is none, as "--ranks 3 needs".

    Raises:
        InputError: there is none.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which("mpirun", path=path)
    if found is None:
        raise InputError(f"{needed_by} mpirun: pip install 'dfl-sim[mpi]'")
    return found


@contextmanager
def _collect_signals(received: list[int]) -> Iterator[None]:
    """Append the signals that come to a list, in place of their usual handling."""

    def handler(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
