"""The log of each rank, `DIR/logs/rank-3.log`, written by the logger "dfl". Nothing of it is
printed but by `printed`.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import make_directory, no_follow
from dfl.core.options import MOST
from dfl.store.record import ending, versions

if TYPE_CHECKING:
    from dfl.comm.mpi import World

LOG = logging.getLogger("dfl")
LOG.addHandler(logging.NullHandler())  # else Python prints what no other handler takes
FORM = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
"""A line of a log."""


class Early(MemoryHandler):
    """Keeps the last lines that are logged before there is a file for them."""

    def __init__(self, level: int) -> None:
        super().__init__(1000, flushLevel=logging.CRITICAL + 1)
        self.setLevel(level)

    def hand_over(self, file: logging.Handler) -> None:
        """Write them, and keep no more."""
        self.setTarget(file)
        LOG.removeHandler(self)
        self.close()


class LogFile(logging.FileHandler):
    """A rank's log, appended to.

    Attributes:
        error: why the disk did not take a line, if ever.

    Raises:
        OSError: it cannot be opened, or does not take a first line.
    """

    def __init__(self, path: Path, level: int, first: str) -> None:
        self.error: OSError | None = None
        make_directory(path.parent)
        super().__init__(path, encoding="utf-8")
        self.setLevel(level)
        self.setFormatter(FORM)
        self.handle(logging.LogRecord(LOG.name, logging.INFO, __file__, 0, first, None, None))
        if self.error:
            self.close()
            raise self.error

    def _open(self) -> TextIOWrapper:
        """Open it; nothing is written through a link."""
        path, errors = self.baseFilename, "backslashreplace"  # a name of a file may be no UTF-8
        return open(path, "a", encoding="utf-8", errors=errors, opener=no_follow)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  as logging calls it
        """Remember what the disk did not take; no run ends for a later line of its log."""
        error = sys.exception()
        if isinstance(error, OSError):
            self.error = self.error or error
        else:
            super().handleError(record)

    def close(self) -> None:
        """Close it, whatever the disk does."""
        with suppress(OSError):
            super().close()


@contextmanager
def printed() -> Iterator[None]:
    """Print on stderr what this process logs in a block, every round included."""
    handler, before = logging.StreamHandler(), LOG.level
    handler.setFormatter(FORM)
    LOG.addHandler(handler)
    LOG.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        LOG.setLevel(before)
        LOG.removeHandler(handler)


@contextmanager
def gathered(run: Run) -> Iterator[None]:
    """Keep what is logged until there is a file for it."""
    early = Early(_level(run))
    if run.out is not None:
        LOG.addHandler(early)
    try:
        yield
    finally:
        LOG.removeHandler(early)


@contextmanager
def listening(world: World, run: Run) -> Iterator[None]:
    """Log what is warned of, which rank 0 alone shows; while a run computes, not while its caller
    does.
    """
    before, shown = LOG.level, warnings.showwarning

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *more: Any
    ) -> None:
        LOG.warning("%s: %s (%s:%d)", category.__name__, message, filename, lineno)
        if world.rank == 0:
            shown(message, category, filename, lineno, *more)

    if run.out is not None:
        LOG.setLevel(min(_level(run), before or logging.CRITICAL))
    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = shown
        LOG.setLevel(before)


@contextmanager
def opened(run: Run, world: World, notes: Sequence[str]) -> Iterator[None]:
    """Write the log of this rank while a run goes on; a run without a folder has none.

    Args:
        run: the run.
        world: the ranks.
        notes: warnings to log first.

    Raises:
        InputError: on every rank, if the log of some rank cannot be written.
    """
    file = None if run.out is None else _open(run, world, run.out / "logs")
    for note in notes if file else ():
        LOG.warning(note)
    try:
        yield
        LOG.info("finished")
    except BaseException as error:
        code, how = ending(error)
        LOG.log(logging.ERROR if code in (1, 2, 3) else logging.WARNING, how, exc_info=code == 1)
        raise
    finally:
        _close(file)


def _open(run: Run, world: World, folder: Path) -> LogFile:
    known = ", ".join(f"{name} {number}" for name, number in versions().items() if number)
    who = f"rank {world.rank} of {world.size}, {world.pulse.doing}"
    first = f"start: {who}, on {platform.node()}, process {os.getpid()}; {known}"
    file = None
    failed = 0
    try:
        file = LogFile(folder / f"rank-{world.rank}.log", _level(run), first)
    except OSError as error:
        failed = error.errno or errno.EIO
    (worst,) = world.minimum(world.rank << 16 | failed if failed else MOST << 16)
    if file is None or worst != MOST << 16:
        _close(file)
        rank, why = worst >> 16, worst & 0xFFFF
        shared = f": {run.out} must be there on the host of every rank"
        raise InputError(
            f"{folder}/rank-{rank}.log cannot be written: {os.strerror(why)}"
            f"{shared if why == errno.ENOENT else ''}"
        )
    LOG.addHandler(file)
    for early in [each for each in LOG.handlers if isinstance(each, Early)]:
        early.hand_over(file)
    return file


def _close(file: LogFile | None) -> None:
    if file:
        LOG.removeHandler(file)
        file.close()


def _level(run: Run) -> int:
    return logging.getLevelNamesMapping()[run.log_level.upper()]
