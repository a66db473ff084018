"""Processes of this user on this host, read from /proc; none where there is no /proc."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process, as it was when it was looked at.

    Attributes:
        state: the letter of ps: T is stopped, Z has ended.
        parent: the process that started it.
        ticks: processor time that it and its ended children have used.
    """

    pid: int
    state: str
    parent: int
    ticks: int

    @property
    def environment(self) -> dict[str, str]:
        """What it was started with; nothing where that cannot be read."""
        try:
            held = (PROC / str(self.pid) / "environ").read_bytes()
        except OSError:
            return {}
        pairs = (os.fsdecode(each).partition("=") for each in held.split(b"\0") if each)
        return {name: value for name, _, value in pairs}

    def opened(self) -> Iterator[tuple[Path, str]]:
        """Return the files that it has open: where to read them, and what they are called."""
        with suppress(OSError):
            for each in (PROC / str(self.pid) / "fd").iterdir():
                with suppress(OSError):
                    yield each, os.readlink(each)

    @property
    def name(self) -> str:
        """The name of its program, of at most 15 bytes; empty where that cannot be read."""
        try:
            return os.fsdecode((PROC / str(self.pid) / "comm").read_bytes()).rstrip("\n")
        except OSError:
            return ""

    def in_use(self) -> set[str]:
        """Return the names of the files that it has open or in its memory; none once it has ended.

        Open files are read before mapped ones: a file that it maps and then closes is among them.

        Raises:
            OSError: they cannot be read.
        """
        place = PROC / str(self.pid)
        names = set[str]()
        try:
            for each in (place / "fd").iterdir():
                with suppress(FileNotFoundError):  # closed meanwhile
                    names.add(os.readlink(each))
            with (place / "maps").open(errors="surrogateescape") as lines:
                names |= {line[line.index("/") :].rstrip("\n") for line in lines if "/" in line}
        except OSError:
            now = process(self.pid)
            if now is not None and now.state not in "ZX":
                raise
        return names


def process(pid: int) -> Process | None:
    """Return a process; None where there is none of this number."""
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    state, parent, *rest = text.rpartition(")")[2].split()
    return Process(pid, state, int(parent), sum(map(int, rest[9:13])))


def ours() -> list[Process]:
    """Return the processes that this user may look into."""
    found = []
    with suppress(OSError):
        for each in PROC.iterdir():
            with suppress(OSError):
                if each.name.isdecimal() and each.stat().st_uid == os.geteuid():
                    found.append(process(int(each.name)))
    return [each for each in found if each is not None]
