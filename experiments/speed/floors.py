"""What can this machine do, asked from inside? Programs for one or more ranks that print a line of
JSON.

    mpirun -n 2 python -m experiments.speed.floors peak       the float32 operations a second of all ranks at once
    mpirun -n 2 python -m experiments.speed.floors exchange   one share, and the same bytes through bare MPI

`limits` starts them. What is compared takes turns in one process, so that a busy moment of the
machine hits both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import App, Parameter
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.mpi import World, connect
from dfl.comm.net import Net
from dfl.config import Run
from dfl.core.layout import Layout
from dfl.simulation.prepare import prepare

SIDE = 2048
"""Rows and columns of the matrices that are multiplied."""
app = App(name="python -m experiments.speed.floors", help_format="plaintext", version_flags=[])


@app.command
def peak(*, repeats: int = 8) -> None:
    """The float32 operations a second that all ranks reach together in a product of square
    matrices, one thread each.

    Args:
        repeats: products that are timed; the median counts.
    """
    torch.set_num_threads(1)
    world, a, b = connect(), torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    out = torch.empty(SIDE, SIDE)
    times = _in_turn(world, [lambda: torch.mm(a, b, out=out)], repeats)
    each = world.gather(2 * SIDE**3 / np.median(times, axis=0))
    if each is not None:
        print(json.dumps({"flops": float(each.sum())}))


@app.command
def exchange(
    *,
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (
        10_000,
        100_000,
        1_000_000,
        10_000_000,
    ),
    hosted: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 8),
    repeats: int = 30,
) -> None:
    """One share on a ring, and the same bytes through a blocking Neighbor_alltoallv between the
    same ranks.

    Args:
        sizes: bytes of a message, float32 words.
        hosted: peers on each rank.
        repeats: shares of each size; the median counts.
    """
    found = [one for peers in hosted for one in _exchange(connect(), peers, (sizes, repeats))]
    if connect().rank == 0:
        print(json.dumps(found))


def _exchange(
    world: World, hosted: int, asked: tuple[tuple[int, ...], int]
) -> list[dict[str, Any]]:
    """Time shares of every size on a ring of `hosted` peers a rank."""
    sizes, repeats = asked
    run = Run(
        peers=hosted * world.size,
        dataset=f"gaussian:examples={hosted * world.size},test=1",
        model="softmax",
    )
    setting = prepare(run, world)
    found, net = [], Net(setting.network, 0, observed=False)
    for size in sizes:
        words = torch.randn(hosted, size // 4, generator=torch.Generator().manual_seed(world.rank))
        bare = _bare(
            world, crossing(setting.network.schedule.weights[0], setting.layout, world.rank), size
        )
        times = _in_turn(world, [lambda words=words: net.exchange(words), bare], repeats)  # type: ignore[misc]
        # the slowest rank's time of every turn, and over the turns the middle one
        everyone = world.gather(times[None])
        if everyone is not None:
            ours, limit = np.median(everyone.max(0), axis=0)
            found.append({"hosted": hosted, "bytes": size, "share": ours, "bare": limit})
    setting.network.close()
    return found


def crossing(
    weights: csr_array, layout: Layout, rank: int
) -> tuple[dict[int, int], dict[int, int]]:
    """Messages that leave this rank for every other, and that come from it: one for each peer that
    is heard there.
    """

    def heard(by: int, of: int) -> int:
        rows, columns = layout.block(by), layout.block(of)
        return len(
            np.unique(weights[rows.start : rows.stop, columns.start : columns.stop].tocoo().col)
        )

    others = [other for other in range(layout.ranks) if other != rank]
    sends, receives = {r: heard(r, rank) for r in others}, {r: heard(rank, r) for r in others}
    return {r: n for r, n in sends.items() if n}, {r: n for r, n in receives.items() if n}


def _bare(
    world: World, counts: tuple[dict[int, int], dict[int, int]], size: int
) -> Callable[[], object]:
    """The same bytes between the same ranks, from one buffer to another."""
    sends, receives = counts
    link = world.comm.Create_dist_graph_adjacent(list(receives), list(sends), reorder=False)
    out, into = (_buffer(rows, size) for rows in (sends, receives))
    return lambda: link.Neighbor_alltoallv(out, into)


def _buffer(rows: dict[int, int], size: int) -> list[Any]:
    """Bytes for so many messages by rank, all written to once, with counts and places."""
    counts = np.array(list(rows.values()), np.int64) * size
    return [
        np.ones(int(counts.sum()), np.uint8),
        (counts.tolist(), (np.cumsum(counts) - counts).tolist()),
    ]


def _in_turn(world: World, works: list[Callable[[], object]], repeats: int) -> NDArray[np.float64]:
    """Seconds of every work, (repeats, works), begun by all ranks together; two rounds of warm-up
    before.
    """
    times = np.zeros((repeats + 2, len(works)))
    for turn in times:
        for k, work in enumerate(works):
            _meet(world)
            begun = time.perf_counter()
            work()
            turn[k] = time.perf_counter() - begun
    return times[2:]


def _meet(world: World) -> None:
    """Wait for all ranks, spinning, so that they go on together; a lone one goes on."""
    if world.size > 1:
        world.comm.Barrier()


if __name__ == "__main__":
    app()
