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

from dfl.cells import DIVERGED, DONE, FAILED, RUNNING, Seen, held, last_words, look
from dfl.errors import DivergedError, InputError, Suspended

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""By which a sweep is told to stop; SIGUSR1 is Slurm's warning."""
PAUSE = 0.1
"""Seconds between two looks at what runs."""


@dataclass
class Jobs:
    """Cells that wait, run and have ended.

    Attributes:
        waiting: folders of the cells that are to run, in order.
        at_once: how many may run at a time.
        ranks: on how many ranks each runs.
        running: the programs, and the folders that they write to.
        elsewhere: folders that somebody else writes to.
        ended: how every cell that ran was last seen.
        told: the signals that came, in order.
    """

    waiting: deque[Path]
    at_once: int
    ranks: int = 1
    running: dict[subprocess.Popen[bytes], Path] = field(default_factory=dict)
    elsewhere: list[Path] = field(default_factory=list)
    ended: dict[Path, Seen] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)

    def work(self, tell: Callable[[Path | None], None]) -> None:
        """Run the cells, until all have ended or a signal came.

        Args:
            tell: called with the folder of every cell that has ended, and with None now and then.

        Raises:
            InputError: several ranks are asked for, and there is no mpirun.
        """
        words, obeyed = [*launcher(self.ranks), sys.executable], 0
        with _listening(self.told):
            while self.running or (self._left() and not self.told):
                self._fill(words)
                obeyed = self._obey(obeyed)
                self._collect(tell)
                tell(None)
                time.sleep(PAUSE)

    def _left(self) -> bool:
        """Whether a cell waits; those of somebody else who has let go of them in the meantime come last."""
        if not self.waiting and not self.running:
            self.waiting.extend(folder for folder in self.elsewhere if not held(folder))
            self.elsewhere = [folder for folder in self.elsewhere if folder not in self.waiting]
        return bool(self.waiting)

    def _fill(self, words: Sequence[str]) -> None:
        """Start as many cells as may run."""
        while self.waiting and len(self.running) < self.at_once and not self.told:
            self._begin(words, self.waiting.popleft())

    def _begin(self, words: Sequence[str], folder: Path) -> None:
        """Start a cell, unless somebody else is at it, or has been."""
        seen = look(folder)
        if seen.status == RUNNING:
            self.elsewhere.append(folder)
        elif seen.status in (DONE, DIVERGED):
            self.ended[folder] = seen
        else:
            try:
                self.running[_started(words, folder)] = folder
            except OSError as error:
                self.ended[folder] = Seen(FAILED, seen.row, f"{error.filename or folder}: {error.strerror}")

    def _obey(self, obeyed: int) -> int:
        """Have what runs end well where a signal came, and at once where a second one did; how many came so far."""
        if len(self.told) > obeyed:
            for program in self.running:
                os.killpg(program.pid, signal.SIGKILL) if obeyed else program.terminate()
        return len(self.told)

    def _collect(self, tell: Callable[[Path | None], None]) -> None:
        """Tell of the cells that have ended since the last call."""
        over = {program: folder for program, folder in self.running.items() if program.poll() is not None}
        for program, folder in over.items():
            del self.running[program]
            seen = _outcome(folder, program.returncode, bool(self.told))
            if seen.status == RUNNING:  # somebody else was faster
                self.elsewhere.append(folder)
            else:
                self.ended[folder] = seen
                tell(folder)


def _started(words: Sequence[str], folder: Path) -> subprocess.Popen[bytes]:
    """The program of a cell."""
    with (folder / "output.log").open("ab") as log:
        return subprocess.Popen(
            [*words, *command(folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},  # cells side by side do not fight for the cores
            start_new_session=True,  # Ctrl-C is ours to pass on
        )  # fmt: skip


def _outcome(folder: Path, code: int, told: bool) -> Seen:
    """How the program ended that wrote to a folder: as its files say, if it came to write them."""
    seen = look(folder)
    if seen.status == RUNNING or told or code in (0, DivergedError.code, Suspended.code, 130):
        return seen
    said = last_words(folder) if code > 0 else f"ended by {signal.Signals(-code).name}"
    return Seen(FAILED, seen.row, said or f"exit code {code}")


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
    found = shutil.which("mpirun", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
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
