"""Limits of this machine, measured by programs for one or more ranks that print a line of JSON.

    mpirun -n 2 python -m experiments.speed.floors peak       float32 operations a second, all ranks
    mpirun -n 2 python -m experiments.speed.floors exchange   an exchange, and bare MPI on its bytes

`limits` starts them. Compared calls take turns in one process, so that load of the machine
affects both.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import App, Parameter
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.comm.exchange import Net
from dfl.comm.mpi import World, connect
from dfl.config import Run
from dfl.core.layout import Layout
from dfl.simulation.prepare import prepare

SIDE = 2048
"""Rows and columns of the matrices that are multiplied."""
app = App(name="python -m experiments.speed.floors", help_format="plaintext", version_flags=[])


@app.command
def peak(*, repeats: int = 8) -> None:
    """Print the float32 operations a second of all ranks together in a product of square matrices,
    one thread each.

    Args:
        repeats: number of products that are timed; the median counts.
    """
    torch.set_num_threads(1)
    world = connect()
    a = torch.randn(SIDE, SIDE)
    b = torch.randn(SIDE, SIDE)
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
    """Print the times of an exchange on a ring, and of a blocking Neighbor_alltoallv of the same
    bytes between the same ranks.

    Args:
        sizes: bytes of a message of float32 numbers.
        hosted: peers on each rank.
        repeats: exchanges of each size; the median counts.
    """
    found = [one for peers in hosted for one in _exchange(connect(), peers, sizes, repeats)]
    if connect().rank == 0:
        print(json.dumps(found))


def _exchange(
    world: World, hosted: int, sizes: tuple[int, ...], repeats: int
) -> list[dict[str, Any]]:
    """Time exchanges of every size on a ring of `hosted` peers a rank."""
    run = Run(
        peers=hosted * world.size,
        dataset=f"gaussian:examples={hosted * world.size},test=1",
        model="softmax",
    )
    setting = prepare(run, world)
    found, net = [], Net(setting.network, 0, measured=False)
    for size in sizes:
        messages = torch.randn(
            hosted, size // 4, generator=torch.Generator().manual_seed(world.rank)
        )
        sends, receives = crossing(setting.network.schedule.weights[0], setting.layout, world.rank)
        bare = _bare(world, sends, receives, size)
        times = _in_turn(world, [partial(net.exchange, messages), bare], repeats)
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
    """Return the numbers of messages that this rank sends to every other, and receives from it.

    A message crosses to a rank once for each sending peer with a neighbour there.
    """

    def messages(to: int, source: int) -> int:
        between = weights[layout.hosted(to)][:, layout.hosted(source)]
        return len(np.unique(between.tocoo().col))

    others = [other for other in range(layout.ranks) if other != rank]
    sends = {other: messages(other, rank) for other in others}
    receives = {other: messages(rank, other) for other in others}
    return {r: n for r, n in sends.items() if n}, {r: n for r, n in receives.items() if n}


def _bare(
    world: World, sends: dict[int, int], receives: dict[int, int], size: int
) -> Callable[[], object]:
    """Return a call that moves messages of `size` bytes between ranks by MPI alone."""
    link = world.comm.Create_dist_graph_adjacent(list(receives), list(sends), reorder=False)
    out, into = (_buffer(rows, size) for rows in (sends, receives))
    return lambda: link.Neighbor_alltoallv(out, into)


def _buffer(rows: dict[int, int], size: int) -> list[Any]:
    """Return a buffer for messages by rank, all written to once, with counts and offsets."""
    counts = np.array(list(rows.values()), np.int64) * size
    return [
        np.ones(int(counts.sum()), np.uint8),
        (counts.tolist(), (np.cumsum(counts) - counts).tolist()),
    ]


def _in_turn(world: World, works: list[Callable[[], object]], repeats: int) -> NDArray[np.float64]:
    """Return the seconds of every call, (repeats, calls), begun by all ranks together, after two
    turns of warm-up.
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
    """Wait for all ranks, spinning, so that they continue together."""
    if world.size > 1:
        world.comm.Barrier()


if __name__ == "__main__":
    app()
