"""Heartbeats of the ranks of a run, in its folder: they show each other that they are alive."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dfl.comm.mpi import World
from dfl.core.files import Lock
from dfl.store.run_directory import make_heartbeats, take_back


@contextmanager
def alive(world: World, out: Path | None, timeout: float) -> Iterator[None]:
    """Show the other ranks that this one is alive, and end the job when others are not.

    Args:
        world: the ranks; one rank alone does nothing.
        out: the folder of the run, if it has one; without it a rank that is late cannot be named.
        timeout: seconds for which to wait for others.

    Raises:
        InputError: on every rank, if the folder cannot be written to.
    """
    if world.size == 1:
        yield
        return
    world.limit_start(timeout)
    folder = None if out is None else out / "heartbeats"
    locks: list[Lock] = []
    made = [] if folder is None else _made_on_root(world, folder, locks)
    try:
        with world.alive(folder, timeout):
            yield
    finally:
        for lock in locks:
            lock.release()
        take_back(made)


def _made_on_root(world: World, folder: Path, locks: list[Lock]) -> list[Path]:
    """Make the folder on rank 0, which adds its lock, and return on every rank what was made."""

    def make() -> bytes:
        made, lock = make_heartbeats(folder)
        locks.append(lock)
        return b"\0".join(map(os.fsencode, made))

    return [Path(os.fsdecode(each)) for each in world.from_root(make).split(b"\0")]
