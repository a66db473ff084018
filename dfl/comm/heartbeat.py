"""Who is alive, and who keeps the others waiting? Knows of no MPI.

A thread of every rank shows in `DIR/heartbeats/RANK` what the rank is at, and looks at the others' files when the rank
has waited for them for too long:

 - In a round whoever has not come as far after `timeout` seconds is late, and the job ends.
 - Before the first round and after the last, rank 0 may read, download or draw for as long as it takes. Late is then
   only who was alive and is silent now, or everyone, if all wait and none gets any further.

A rank is silent if its file has not changed from one look to the next; hosts' clocks need not agree. Time in which a
rank was stopped itself, as when a machine sleeps, counts as no waiting.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dfl.comm.stalls import Sign, Signs, read, verdict
from dfl.core.files import make_directory, no_follow

AWAKE = 2e-3
"""Seconds that a waiting rank stays awake, giving way to others, before it sleeps."""
NAP = 5e-4
"""Seconds of its longest sleep: what is on its way moves on only while somebody looks."""
SLOWEST = 10.0
"""Seconds between two signs of life at the most."""
GAPS = 2.0, 120.0
"""Least and most seconds between the two looks; what is new may take a minute to show on a shared file system."""


def until(done: Callable[[], bool], patience: float = float("inf")) -> bool:
    """Wait until something is done, giving way to others and then asleep; False if that takes too many seconds."""
    begun, pause = time.perf_counter(), 1e-5
    while not done():
        if (waited := time.perf_counter() - begun) > patience:
            return False
        if waited < AWAKE:
            os.sched_yield()  # a message on its way moves on only while both ends look at it
        else:
            time.sleep(pause)
            pause = min(2 * pause, NAP)
    return True


@dataclass
class Pulse:
    """What this rank is at, kept up by whoever works in it, for the thread that shows it.

    Attributes:
        rank, size: which one this is, and how many there are.
        doing, round, turns, waiting: as in `Sign`.
        waits: how often it has begun to wait.
    """

    rank: int
    size: int
    doing: str = "starting"
    round: int | None = None
    turns: int = 0
    waiting: bool = False
    waits: int = 0

    def begin(self, turn: bool = True) -> None:
        """This rank waits for others from now on; a `turn` is what all of them take in the same order."""
        self.turns += turn
        self.waits += 1
        self.waiting = True

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Whoever is kept waiting by a call does so in here."""
        self.begin()
        try:
            yield
        finally:
            self.waiting = False

    @contextmanager
    def beating(
        self, folder: Path | None, timeout: float, late: Callable[[str], None]
    ) -> Iterator[None]:
        """Show signs of life, and watch for those of others.

        Args:
            folder: where the ranks' files are, if anywhere.
            timeout: seconds for which to wait for others.
            late: told, in a line, who is late; ends the job.
        """
        watch, stop = Watch(self, folder, timeout), threading.Event()
        watch.show()
        thread = threading.Thread(target=watch.keep, args=(stop, late), name="pulse", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            watch.hide()
            self.round = None


class Watch:
    """What the thread does: shows what this rank is at, and looks at the others when it has waited for too long."""

    def __init__(self, pulse: Pulse, folder: Path | None, timeout: float) -> None:
        self.pulse, self.folder = pulse, folder
        self.gap = min(max(timeout / 2, GAPS[0]), GAPS[1])
        self.every = min(self.gap / 5, SLOWEST)
        self.timeout = max(timeout, self.gap) + 0.1 * min(
            pulse.rank, 20
        )  # so that not all speak at once
        self.state, self.seconds, self.patient = (0, False), 0.0, 0.0
        self.before: Signs = {}

    def keep(self, stop: threading.Event, late: Callable[[str], None]) -> None:
        """Show and look until told to stop."""
        last = time.monotonic()
        while not stop.wait(self.every):
            passed, last = time.monotonic() - last, time.monotonic()
            self.tick(
                min(passed, 2 * self.every)
            )  # of more, this rank has noticed nothing: it was stopped
            self.show()
            if line := self.look():
                late(line)

    def tick(self, passed: float) -> None:
        """Count seconds that have passed, from anew if the rank is at something else by now."""
        state = self.pulse.waits, self.pulse.waiting
        if state != self.state:
            self.state, self.seconds, self.patient, self.before = state, 0.0, 0.0, {}
        else:
            self.seconds += passed

    def sign(self) -> Sign:
        """What this rank shows now."""
        pulse, (_, waiting) = self.pulse, self.state
        return Sign(
            pulse.rank, platform.node(), os.getpid(), pulse.turns, waiting, round(self.seconds, 1),
            pulse.doing, pulse.round, time.time(),
        )  # fmt: skip

    def show(self) -> None:
        """Write this rank's file, whole. If the disk does not take it, others will not know this rank, no more."""
        if self.folder is None:
            return
        part = self.folder / f".{self.pulse.rank}.part"
        with suppress(OSError):
            make_directory(self.folder)
            with open(part, "w", opener=no_follow) as file:
                file.write(json.dumps(asdict(self.sign())))
            part.replace(self.folder / str(self.pulse.rank))

    def hide(self) -> None:
        """Remove this rank's file."""
        if self.folder is not None:
            with suppress(OSError):
                (self.folder / str(self.pulse.rank)).unlink()

    def look(self) -> str:
        """Who is late, in a line, or nothing. The first look remembers what others show, the second compares."""
        waited = self.seconds - self.patient if self.state[1] else 0.0
        if waited >= self.timeout:
            line = verdict(self.sign(), self.signs(), self.before, self.gap)
            self.patient, self.before = self.seconds, {}
            return line
        if waited >= self.timeout - self.gap and not self.before:
            self.before = self.signs()
        return ""

    def signs(self) -> Signs:
        """What the other ranks show."""
        others = (rank for rank in range(self.pulse.size) if rank != self.pulse.rank)
        return {
            rank: None if self.folder is None else read(self.folder / str(rank)) for rank in others
        }


def complain(text: str) -> None:
    """Print to standard error, whole, whoever else writes; nothing where nobody reads it."""
    with suppress(OSError, ValueError, AttributeError):  # its reader is gone, or it is closed
        sys.stdout.flush()
    with suppress(OSError):
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))
