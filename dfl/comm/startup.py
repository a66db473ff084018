"""Limits the time until all ranks of a job are up, and names those that are not. Without MPI.

MPI starts when the last rank arrives, and waits for it forever. A thread of every rank that has
arrived counts the seconds, looks for the other ranks of the job among the processes of this host,
and ends the job:

 - A rank that is stopped, or neither waits nor computes, is late after `timeout` seconds.
 - A rank that computes may take its time: it may import, read or prepare what its job needs.
 - Ranks without a process on this host are on other hosts, whose ranks name them. If no rank does,
   the job ends `ELSEWHERE` seconds later. If all ranks were started here, such a rank has ended,
   and the job ends soon.

A rank that has arrived shows that by a file in memory, which others find through /proc and which
ends with it.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dfl.comm.processes import Process, ours, process
from dfl.comm.stalls import ranks_named

TIMEOUT = 600.0
"""Default seconds for which a rank waits for others."""
ELSEWHERE = 30.0
"""Seconds that ranks of other hosts have to name a late one, and launchers to start a host."""
GAPS = 1.0, 120.0
"""Least and greatest seconds between two looks at which ranks compute."""
SIGN = "dfl-rank"
"""The name of the file in memory."""
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
"""The variables in which launchers give a process its rank."""

_HERE = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""The variables in which launchers give the number of ranks on this host."""


@dataclass(frozen=True)
class RankSign:
    """What is seen of a rank on this host.

    Attributes:
        pids: its processes, a wrapper before the program.
        stopped: whether one of them is stopped.
        runs: whether one of them computes, or is at its disk.
        waits: whether it has arrived and waits for others.
        ticks: processor time that they have used.
    """

    pids: tuple[int, ...]
    stopped: bool
    runs: bool
    waits: bool
    ticks: int


def first() -> bool:
    """Return whether this process prints to the terminal, by the launcher's environment."""
    return all(os.environ.get(name, "0") == "0" for name in RANKS)


def verdict(
    mine: int,
    size: int,
    now: Mapping[int, RankSign],
    before: Mapping[int, RankSign],
    over: float,
    here: bool = False,
) -> tuple[str, int]:
    """Return a line that names the late ranks, and the rank that prints it.

    The line is empty if all ranks go on waiting.

    Args:
        mine, size: this rank, and the number of ranks.
        now, before: what is seen of the ranks on this host, and was seen at the look before.
        over: seconds for which this rank has waited beyond its limit.
        here: whether all ranks are on this host, and a rank without a process has ended.
    """
    waiting = [rank for rank, seen in now.items() if seen.waits and not seen.stopped]
    printer = min([mine, *waiting])
    stopped = {rank: seen for rank, seen in now.items() if seen.stopped}
    busy = dict[int, RankSign]()
    idle = dict[int, RankSign]()
    for rank, seen in now.items():
        if rank not in (mine, *stopped, *waiting):
            works = seen.runs or rank not in before or seen.ticks != before[rank].ticks
            (busy if works else idle)[rank] = seen
    absent = [rank for rank in range(size) if rank != mine and rank not in now]
    reasons = []
    if stopped and over >= 0:
        reasons.append(f"{_named(stopped)} {_is(stopped)} stopped")
    if idle and over >= 0:
        reasons.append(f"{_named(idle)} {_is(idle)} idle and did not arrive")
    if absent and (here or (over >= ELSEWHERE and not reasons and not busy)):
        reasons.append(f"{ranks_named(absent)} did not arrive, with no process on this host")
    if not reasons and not busy and over >= ELSEWHERE:
        reasons.append("all ranks are here and wait for each other")
    return "; ".join(reasons), printer


@dataclass
class StartLimit:
    """Counts the seconds for which this rank waits for the others to arrive.

    Attributes:
        rank, size: the number of this rank, and of ranks.
        timeout: seconds for which it waits.
        end: ends the job with an exit code.
        waits: whether it waits for others now.
    """

    rank: int
    size: int
    timeout: float
    end: Callable[[int], object] = os._exit
    waits: Callable[[], bool] = lambda: False
    stop: threading.Event | None = field(default=None, init=False)

    def begin(self) -> None:
        """Count from now on, from zero where it counts already."""
        self.met()
        self.stop = threading.Event()
        threading.Thread(target=self._watch, args=(self.stop,), name="start", daemon=True).start()

    def met(self) -> None:
        """All ranks have arrived: count no more."""
        if self.stop:
            self.stop.set()
            self.stop = None

    @property
    def _here(self) -> bool:
        """Whether all ranks were started on this host, by the launcher's variables."""
        return any(os.environ.get(name) == str(self.size) for name in _HERE)

    def _watch(self, stop: threading.Event) -> None:
        gap = min(max(self.timeout / 4, GAPS[0]), GAPS[1])
        every = gap / 5
        seconds = 0.0
        last = time.monotonic()
        looked = -gap
        before = dict[int, RankSign]()
        with _Sign(self.rank) as sign:
            while not stop.wait(every):
                passed, last = time.monotonic() - last, time.monotonic()
                sign.show(waits := self.waits())
                if not waits:
                    seconds = 0.0
                    looked = -gap
                    before = {}
                    continue
                seconds += min(passed, 2 * every)  # for longer, this rank was stopped
                soon = max(self.timeout, 2 * gap) - gap, ELSEWHERE
                if seconds < min(soon) or seconds - looked < gap:
                    continue
                now = seen()
                looked = seconds
                here = self._here and seconds >= min(self.timeout, ELSEWHERE)
                line, printer = verdict(
                    self.rank, self.size, now, before, seconds - self.timeout, here
                )
                before = now
                if line and not stop.is_set():
                    self._late(seconds, line, printer)

    def _late(self, seconds: float, line: str, printer: int) -> None:
        if printer == self.rank:
            who = f"rank {self.rank} on {platform.node()}"
            waited = f"{who} waited {seconds:.0f} s for the job to start"
            text = f"dfl: {waited}: {line} (--timeout {self.timeout:g})\n"
            with suppress(OSError):
                os.write(2, text.encode(errors="backslashreplace"))
        else:
            time.sleep(2.0)  # the printer ends the job
        time.sleep(0.5)  # a launcher that sees an end may drop what was printed just before
        self.end(1)


class _Sign:
    """The file in memory by which a rank shows whether it waits."""

    def __init__(self, rank: int) -> None:
        self.file = os.memfd_create(f"{SIGN}-{rank}")

    def __enter__(self) -> _Sign:
        self.show(False)
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self.file)

    def show(self, waits: bool) -> None:
        """Write down whether this rank waits."""
        os.pwrite(self.file, b"waits" if waits else b"works", 0)


def seen() -> dict[int, RankSign]:
    """Return what is seen on this host of the ranks of this job, but for this one."""
    name = next((name for name in RANKS if name in os.environ), "")
    mine = os.environ.get(name, "")
    me = process(os.getpid())
    found = dict[int, list[Process]]()
    launcher = me and _launcher(me, name, mine)
    for each in sorted(ours(), key=lambda each: each.pid):
        value = each.environment.get(name, "")
        ranked = value.isdecimal() and value != mine and each.state not in "ZX"
        if ranked and launcher and _launcher(each, name, value) == launcher:
            found.setdefault(int(value), []).append(each)
    return {rank: _seen(rank, processes) for rank, processes in found.items()}


def _seen(rank: int, processes: list[Process]) -> RankSign:
    return RankSign(
        tuple(each.pid for each in processes),
        any(each.state in "Tt" for each in processes),
        any(each.state in "RD" for each in processes),
        any(_reads(each, f"/memfd:{SIGN}-{rank} ") == b"waits" for each in processes),
        sum(each.ticks for each in processes),
    )


def _launcher(of: Process, name: str, value: str) -> int:
    """Return the process that started a rank: its nearest ancestor that is not of this rank."""
    parent = process(of.parent)
    while parent and parent.environment.get(name) == value:
        of, parent = parent, process(parent.parent)
    return of.parent


def _reads(of: Process, beginning: str) -> bytes:
    """Return the content of a file that a process has open; nothing without one of that name."""
    for path, name in of.opened():
        if name.startswith(beginning):
            with suppress(OSError):
                return Path(path).read_bytes()
    return b""


def _named(ranks: Mapping[int, RankSign]) -> str:
    pids = [seen.pids[-1] for seen in ranks.values()]
    numbers = ", ".join(map(str, pids[:4]))
    return f"{ranks_named(list(ranks))} (process{'' if len(pids) == 1 else 'es'} {numbers})"


def _is(ranks: Mapping[int, RankSign]) -> str:
    return "is" if len(ranks) == 1 else "are"
