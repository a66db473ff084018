"""Ranks count the same collectives and read each other's heartbeats; run under mpirun."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from dfl.comm.mpi import World
from dfl.comm.stalls import read
from dfl.core.layout import Layout, columns
from dfl.simulation.heartbeats import alive

pytestmark = pytest.mark.mpi


@pytest.fixture
def world() -> World:
    return World(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD)


def test_every_operation_is_the_same_turns_on_every_rank(world: World) -> None:
    def turns() -> int:
        before = world.pulse.turns
        after = world.all_gather(np.array([world.pulse.turns]))
        assert (after == before).all()
        return before

    layout = Layout(7, world.size)
    cut = columns(100, world.size)
    counts = layout.counts
    rows = np.zeros((counts[world.rank], 100), np.float32)
    link = world.link({(world.rank + 1) % world.size: 1}, {(world.rank - 1) % world.size: 1})
    byte = [world.rows_type([range(1)], 1)] * (world.size > 1)
    operations = (
        lambda: world.from_root(lambda: b"x"),
        lambda: world.scatter(lambda rank: b"x" * rank),
        lambda: world.gather(rows),
        lambda: world.all_gather(rows),
        lambda: world.rows(world.columns(rows, cut, counts), cut, counts),
        lambda: world.minimum(world.rank, 1),
        lambda: world.exchange(link, (np.zeros(1, np.uint8), byte), (np.zeros(1, np.uint8), byte)),
        lambda: world.local_rank,
    )
    seen = [turns()]
    for operation in operations:
        operation()
        seen.append(turns())
        # Besides the one in which turns are compared.
        assert world.size == 1 or seen[-1] > seen[-2] + 1
    assert not world.pulse.waiting


def test_heartbeats_of_all_ranks_are_there_until_all_are_done(world: World) -> None:
    parent = Path(world.from_root(lambda: tempfile.mkdtemp().encode()).decode())
    with alive(world, parent / "run", 60):
        world.pulse.doing = "meeting"
        world.minimum(0)
        shown = [read(parent / "run" / "heartbeats" / str(rank)) for rank in range(world.size)]
        if world.size > 1:
            assert [each.rank for each in shown if each] == list(range(world.size))
            names = json.loads(
                world.from_root(lambda: json.dumps([each.pid for each in shown if each]).encode())
            )
            assert len(set(names)) == world.size
        world.minimum(0)
    world.minimum(0)
    assert list(parent.iterdir()) == []
    world.minimum(0)
    if world.rank == 0:
        parent.rmdir()
