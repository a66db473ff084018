"""Measurements of dfl's costs and of the limits of the machine, a function for each in
`QUESTIONS`.

Each returns rows with the time of a case, `ours`, and its time at the limit, `limit`, in the same
unit.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from cyclopts import Parameter

from dfl.models.zoo import two_nn
from experiments import common
from experiments.speed import codec, plain_loops
from experiments.speed.launch import launch, timed
from experiments.speed.stopwatch import WORK

Row = dict[str, Any]

PAIR = 2
"""Number of ranks, one per core, where a question is not about the number of ranks."""
WIDTHS = (4, 8)
"""Bits of the messages that are encoded and decoded."""
NANOSECONDS = {"encode": 4.0, "decode": 1.0}
"""Of a coordinate, at most."""
STARTS = {1: 1.3, 16: 1.1}
"""Ranks -> start-up over that of ranks that import torch and meet, at most."""
MEET = """
import time, torch
from mpi4py import MPI
request = MPI.COMM_WORLD.Ibarrier()
while not request.Test():
    time.sleep(1e-3)
"""
"""The minimum before round 0: import torch and meet, without spinning on the cores of others."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of `benchmark_limits`."""

    questions: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        "training", "models", "exchange", "codec", "strong scaling", "weak scaling", "start",
    )  # fmt: skip
    """The comparisons to make."""
    ranks: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 2, 4, 16)
    """Numbers of ranks for the last three."""
    sizes: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (
        10_000,
        100_000,
        1_000_000,
        10_000_000,
    )
    """Bytes of a message for the exchange."""
    work: str = "A"
    """The work of `stopwatch` for training and scaling."""
    rounds: int = 10
    """Rounds to time."""
    repeats: int = 3
    """Number of launches of each program; medians count."""
    out: Path = Path("results/benchmark_limits")


def training(options: Options) -> list[Row]:
    """Compare a round of work with 6 operations for each parameter and example, at the speed of a
    matrix product.

    Two forward and four backward: a product and a sum for the output, for the inputs' gradient and
    for the weights'.
    """
    rounds = []
    speeds = []
    for _ in range(options.repeats):
        speeds.append(launch(PAIR, "-m", "experiments.speed.floors", "peak")["flops"])
        rounds.append(_round(options, PAIR))
    floor = operations(options.work) / median(speeds)
    return [
        _row(
            f"work {options.work}, {PAIR} ranks",
            "ms",
            1e3 * median(rounds),
            1e3 * floor,
            at_most=1 / 0.7,
        )
    ]


def models(options: Options) -> list[Row]:
    """Compare a round of convolutional and recurrent models on one rank with a loop of torch, in
    seconds of the processor; they take turns.
    """
    rows = []
    for name, work in plain_loops.WORKS.items():
        ours, theirs = [], []
        for _ in range(options.repeats):
            ours += plain_loops.ours(work, options.rounds)
            theirs += plain_loops.theirs(work, options.rounds)
        rows.append(
            _row(name, "ms", 1e3 * median(ours), 1e3 * median(theirs), at_most=work.at_most)
        )
    return rows


def operations(name: str) -> float:
    """Return the floating-point operations of a round of work: 6 d for each example."""
    work = WORK[name]
    if work.model != "2nn":
        raise ValueError(f"the operations of {work.model} are not known")
    d = sum(parameter.numel() for parameter in two_nn(work.shape, 10).parameters())
    return 6.0 * d * work.peers * work.examples


def exchange(options: Options) -> list[Row]:
    """Compare an exchange of float32 messages on a ring with the same bytes through a blocking
    Neighbor_alltoallv of bare MPI.
    """
    sizes = [str(size) for size in options.sizes]
    found = launch(PAIR, "-m", "experiments.speed.floors", "exchange", "--sizes", *sizes)["found"]
    return [
        _row(
            f"{one['hosted']} peer{'s' * (one['hosted'] > 1)} a rank, {_bytes(one['bytes'])}",
            "ms",
            1e3 * one["share"],
            1e3 * one["bare"],
            at_most=1.3 if one["bytes"] >= 100_000 else None,
        )
        for one in found
    ]


def coding(options: Options) -> list[Row]:
    """Compare encoding and decoding with a copy of the same floats, one thread."""
    torch.set_num_threads(1)
    rows = [
        row for q, m in codec.SHAPES for row in codec.measure(q, m, 3 * options.repeats, WIDTHS)
    ]
    return [
        _row(
            f"{verb} {row['bits']} bits, {row['q']:,} x {row['m']:,}",
            "ns/coordinate",
            1e3 / row[verb],
            1e3 / row["copy"],
            at_most=nanoseconds / (1e3 / row["copy"]),
        )
        for verb, nanoseconds in NANOSECONDS.items()
        for row in rows
    ]


def strong(options: Options) -> list[Row]:
    """Compare a round of the same work on more ranks with the time on one divided by the cores."""
    alone = _round(options, 1)
    return [
        _row(_ranks(ranks), "ms", 1e3 * seconds, 1e3 * alone / min(ranks, cores()))
        for ranks in options.ranks
        for seconds in [alone if ranks == 1 else _round(options, ranks)]
    ]


def weak(options: Options) -> list[Row]:
    """Compare a round of four peers on every rank with the time of four on one; ranks in excess of
    the cores take turns.
    """
    alone = _round(options, 1, 4)
    return [
        _row(
            f"{_ranks(ranks)}, {4 * ranks} peers",
            "ms",
            1e3 * seconds,
            1e3 * alone * ranks / min(ranks, cores()),
        )
        for ranks in options.ranks
        for seconds in [alone if ranks == 1 else _round(options, ranks, 4 * ranks)]
    ]


def start(options: Options) -> list[Row]:
    """Compare --dry-run of 16 peers on digits, from the shell, with ranks that import torch and
    meet.
    """
    ours = ("-m", "dfl.run", "--peers", "16", "--dry-run")
    rows = []
    for ranks in options.ranks:
        pairs = [
            (timed(ranks, *ours)[1], timed(ranks, "-c", MEET)[1]) for _ in range(options.repeats)
        ]
        rows.append(
            _row(
                _ranks(ranks),
                "s",
                median(a for a, _ in pairs),
                median(b for _, b in pairs),
                at_most=STARTS.get(ranks),
            )
        )
    return rows


QUESTIONS: dict[str, Callable[[Options], list[Row]]] = {
    "training": training,
    "models": models,
    "exchange": exchange,
    "codec": coding,
    "strong scaling": strong,
    "weak scaling": weak,
    "start": start,
}


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _round(options: Options, ranks: int, peers: int | None = None) -> float:
    """Return the median seconds of a round."""
    more = [] if peers is None else ["--peers", str(peers)]
    arguments = [
        "-m",
        "experiments.speed.stopwatch",
        "--work",
        options.work,
        "--rounds",
        str(options.rounds),
        *more,
    ]
    return float(median(launch(ranks, *arguments)["seconds"]))


def _row(case: str, unit: str, ours: float, limit: float, *, at_most: float | None = None) -> Row:
    return {
        "case": case,
        "unit": unit,
        "ours": ours,
        "limit": limit,
        "ratio": ours / limit,
        "at_most": at_most,
    }


def _ranks(ranks: int) -> str:
    return f"{ranks} rank{'s' * (ranks > 1)}"


def _bytes(size: int) -> str:
    return f"{size // 10**6} MB" if size >= 10**6 else f"{size // 1000} kB"
