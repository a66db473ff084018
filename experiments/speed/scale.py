"""Time of a round and memory by the number of peers, from 100 to 10,000, and once 100,000.

The aims: a peer takes no more than 4 rows of d floats besides its data, a round grows in
proportion to the peers, and 10,000 of them are built, run for 20 rounds and reported within 2
GiB.

Command, on an idle 2-core machine:

    python -m experiments.speed.scale

Finding: 10,000 peers take 0.10 s a round on two ranks and 0.18 s on one; the whole run 8 s on
either, 1.05 and 0.62 GB. From 1,000 peers on a round grows in proportion to them (10 microseconds a
peer on two ranks, 18 on one); below, calls cost as much as the work. A peer takes 4.4 rows on one
rank, and 6.6 on two, where nearly every peer has a neighbour on the other rank: more than the aim
of 4. In 8 bits it is 10 and 12. A part of the rows is freed memory that the C library keeps, but
not where one row for each peer takes more than 32 MB together: with 100,000 peers each takes 3.4
and 4.5 rows, in 8 bits 6.7 and 8.1, by later code (`--peers 100 100000 --beyond 0`, on a slower
machine). With MALLOC_MMAP_THRESHOLD_=1048576 in the environment, by which it gives large blocks
back, rounds on one rank took 40 and 60 % longer, on a busy machine, so dfl does not set it. 100,000
peers work: 27 s to build, 1.25 s a round, 14 s for two evaluations, 6.1 GB. A million peers on a
torus, with 20 examples each and without a folder, take 65 s to build, 9.7 s a round, 166 s for two
evaluations, and 22.7 GB on two ranks, each at its own peak. They were run once, by hand and on a
slower machine:

    mpirun -n 2 python -m experiments.speed.probe --peers 1000000 --examples 20 \\
        --topology torus --rounds 4

Grid: 100 to 10,000 peers, each with 60 examples of `gaussian` (64 features, ten classes), on a
random graph with four neighbours each; softmax regression, 650 parameters, one epoch of batches
of 10; 20 rounds, evaluated on 1,000 test examples before the first and after the last; models in
float32 and differences in 8 bits; one rank and two, one thread each. Every cell is a program of
its own that also writes the run's folder with its figures. 100,000 peers are tried once, on two
ranks in float32.

`round_seconds` is the median of the rounds after the second; build, look (two evaluations) and
report are the other stages, `wall_seconds` all of it from the shell, imports included. `peak_MB`
is the memory of all ranks together, each at its own peak. `rows_per_peer` is the number of rows
of d floats that a peer adds to rank 0 during rounds, in addition to its examples and labels: the
peak of the rounds, less that with the fewest peers, divided by the difference in peers. It
includes the model, the state of the method (two rows more in 8 bits: the peer's public copy and
the sum of its neighbours'), the temporary memory of a round, and memory that was not released
after building.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments import common
from experiments.speed.launch import launch

LABELS = ["ranks", "message"]
FEATURES = 64
EXAMPLES = 60
DATA = EXAMPLES * (4 * FEATURES + 8)
"""Bytes of a peer's examples and labels."""
ROWS = {"float32": 4, "8": 6}
"""Message -> bound on the rows of d floats of a peer; two more for the public copies."""
ROOM = 2**31
"""Bound on the bytes of a run of 10,000 peers."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    peers: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (
        100,
        300,
        1_000,
        3_000,
        10_000,
    )
    """Numbers of peers, ascending."""
    ranks: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 2)
    """Numbers of ranks."""
    messages: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("float32", "8")
    """Widths of a message."""
    beyond: int = 100_000
    """A number of peers to run once, on the most ranks and in the first width; 0 for none."""
    rounds: int = 20
    """Rounds."""
    out: Path = Path("results/scale")


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure time and memory by the number of peers."""
    table = tabulate([measure(options, *cell) for cell in grid(options)])
    common.publish(options, table, draw(table), finding(table, max(options.peers)))


def grid(options: Options) -> list[tuple[int, int, str]]:
    """Return ranks, peers and message of every run."""
    cells = [(r, n, m) for r in options.ranks for m in options.messages for n in options.peers]
    return cells + [(max(options.ranks), options.beyond, options.messages[0])] * bool(
        options.beyond
    )


def measure(options: Options, ranks: int, peers: int, message: str) -> dict[str, Any]:
    """Launch one run, and return what `probe` prints."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "peers": peers,
            "features": FEATURES,
            "examples": EXAMPLES,
            "rounds": options.rounds,
            "out": folder,
        }
        flags |= {} if message == "float32" else {"bits": message}
        arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        found = launch(ranks, "-m", "experiments.speed.probe", *arguments)
    print(
        f"{peers:,} peers on {ranks} ranks, {message}: {found['wall']:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return found | {"peers": peers, "message": message}


def tabulate(found: list[dict[str, Any]]) -> pd.DataFrame:
    """Return a row per run."""
    return pd.DataFrame(
        {
            "ranks": one["ranks"],
            "message": one["message"],
            "peers": one["peers"],
            "round_seconds": one["round"],
            "microseconds_per_peer": one["round"] / one["peers"] * 1e6,
            "rows_per_peer": rows_per_peer(one, found),
            "peak_MB": sum(one["peaks"]) / 1e6,
            "build_seconds": one["seconds"]["build"],
            "look_seconds": one["seconds"]["look"],
            "report_seconds": one["seconds"]["report"],
            "wall_seconds": one["wall"],
        }
        for one in found
    )


def rows_per_peer(one: dict[str, Any], others: list[dict[str, Any]]) -> float:
    """Return the rows of d floats that a peer adds to the memory of rank 0 during rounds, without
    its data.
    """
    alike = [each for each in others if all(each[name] == one[name] for name in LABELS)]
    least = min(alike, key=lambda each: int(each["hosted"]))
    if least["hosted"] == one["hosted"]:
        return float("nan")
    added = one["stages"]["rounds"] - least["stages"]["rounds"]
    each = added / (one["hosted"] - least["hosted"])
    return float((each - DATA) / (4 * one["parameters"]))


def grows(own: pd.DataFrame) -> float:
    """Return the exponent k of a fit, time of a round ~ peers^k."""
    if len(own) < 2:
        return float("nan")
    peers = own["peers"].to_numpy(float)
    seconds = own["round_seconds"].to_numpy(float)
    return float(np.polyfit(np.log(peers), np.log(seconds), 1)[0])


def finding(table: pd.DataFrame, largest: int) -> str:
    """Return growth, rows and memory up to the largest number of peers, and the runs beyond it."""
    within = table[table["peers"] <= largest]
    beyond = table[table["peers"] > largest]
    parts = [
        _of_cell(ranks, message, own) for (ranks, message), own in common.groups(within, LABELS)
    ]
    return "; ".join([*parts, *map(_of_the_rest, beyond.to_dict("records"))]) + "."


def _of_cell(ranks: int, message: str, own: pd.DataFrame) -> str:
    few, *_, many = own.to_dict("records")
    within = "within" if many["peak_MB"] * 1e6 <= ROOM else "NOT within"
    bar = "at most" if many["rows_per_peer"] <= ROWS.get(message, 6) else "MORE than"
    return (
        f"{_name(ranks, message)}: from {few['peers']:,} to {many['peers']:,} peers a round goes "
        f"from {few['round_seconds']:.3g} to {many['round_seconds']:.3g} s, as peers to the power "
        f"{grows(own):.2f}; with the most of them a peer takes {many['rows_per_peer']:.1f} rows of "
        f"d floats beside its data ({bar} {ROWS.get(message, 6)}), and the whole run "
        f"{many['wall_seconds']:.0f} s and {many['peak_MB']:,.0f} MB ({within} 2 GiB)"
    )


def _of_the_rest(row: dict[Any, Any]) -> str:
    """Return the figures of a run with more peers than the grid."""
    return (
        f"{row['peers']:,} peers on {_name(row['ranks'], row['message'])}: "
        f"{row['build_seconds']:.0f} s to build, {row['round_seconds']:.2f} s a round, "
        f"{row['look_seconds']:.0f} s for two evaluations, {row['report_seconds']:.0f} s to "
        f"report, {row['peak_MB'] / 1e3:.1f} GB, "
        f"{row['rows_per_peer']:.1f} rows of d floats a peer"
    )


def _name(ranks: int, message: str) -> str:
    return f"{ranks} rank{'s' if ranks > 1 else ''}, {common.in_bits(message)}"


def draw(table: pd.DataFrame) -> Figure:
    """Draw seconds of a round, memory, and the other stages, by peers, on logarithmic axes."""
    figure = Figure(figsize=(13.5, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for (key, own), colour in zip(common.groups(table, LABELS), common.COLOURS, strict=False):
        style: dict[str, Any] = {
            "color": colour,
            "marker": "o",
            "markersize": 4,
            "label": _name(*key),
        }
        left.plot(own["peers"], own["round_seconds"], **style)
        middle.plot(own["peers"], own["peak_MB"] / 1e3, **style)
    _proportional(left, table)
    middle.axhline(ROOM / 1e9, color="0.6", linestyle=":", label="2 GiB")
    (ranks, message), alone = common.groups(
        table[table["message"] == table["message"].iloc[0]], LABELS
    )[-1]
    for name, colour in zip(("build", "look", "report"), common.COLOURS, strict=False):
        right.plot(
            alone["peers"],
            alone[f"{name}_seconds"],
            color=colour,
            marker="o",
            markersize=4,
            label=name,
        )
    right.plot(
        alone["peers"],
        alone["round_seconds"],
        color="0.6",
        linestyle=":",
        label="a round, to compare",
    )
    left.set(title="Time of a round", ylabel="seconds")
    middle.set(title="Peak memory of all ranks together", ylabel="GB")
    right.set(title=f"The other stages, {_name(ranks, message)}", ylabel="seconds")
    for axes in (left, middle, right):
        axes.set(xlabel="peers", xscale="log", yscale="log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(frameon=False, fontsize=8)
    figure.suptitle(
        "Scale: softmax regression on 64 features, 60 examples each, four neighbours each"
    )
    return figure


def _proportional(axes: Axes, table: pd.DataFrame) -> None:
    """Draw a line of slope one through the largest time."""
    peers = table["peers"].to_numpy(float)
    seconds = table["round_seconds"].to_numpy()
    end = seconds.argmax()
    ends = np.array([peers.min(), peers[end]])
    axes.plot(
        ends, ends * seconds[end] / peers[end], color="0.6", linestyle=":", label="in proportion"
    )


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.scale"))
