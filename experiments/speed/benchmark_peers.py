"""Seconds of a round of dfl, five other frameworks and a plain loop of torch on the same work.

Command, 40 minutes on two idle cores (published with `--repetitions 2`, 25 minutes); first `pip
install -e ".[mpi,bench]"`, then the baselines, from PyPI into environments of their own (4 GB):

    python -m experiments.speed.baselines.install
    python -m experiments.speed.benchmark_peers

`--works`, `--baselines` and `--keep` measure in portions: launches that an earlier run left in
`--out` are reused.

Finding: no system is faster than dfl. The next one takes 1.21 times as long on A (the loop of
torch), 10.8 times on B (FedJAX), 23 times on C (FedJAX), 1.10 times on D (pfl) and 1.69 times on E
(FedJAX). Medians of 10 rounds in two launches of each system's fastest set-up, A to D on one day
and E on another, when all systems were slower; compare ratios. A: dfl 56 ms a round on two ranks,
the loop 68, pfl 79 in two processes, FedJAX 98 and BlazeFL 101 in two threads, gossipy 145, Flower
260. D: dfl 349, pfl 385, BlazeFL 420, the loop 452, gossipy 539, Flower 608, FedJAX 1,540. Where
models are small, calls cost more than arithmetic, and dfl makes them for all peers at once; FedJAX
makes one compiled call for each client. The loop of torch takes 17.9, 30.5 and 2.0 times as long on
B, C and E.

Grid: five kinds of work on synthetic float32 numbers in memory, an epoch of heavy-ball steps
(momentum 0.9) a round: A, 16 peers with 600 examples of 784 features, a perceptron 784-200-200-10,
batches of 50; B, 100 peers with 60 of 64, a perceptron 64-32-10, batches of 10; C, 1,000 peers with
60 of 64, softmax regression, batches of 10; D, 16 peers with 600 images of 3 x 32 x 32, a LeNet,
batches of 50; E, 100 peers with 60 of 6 signals at 20 steps, an LSTM of 32 states, batches of 10.
dfl mixes on a ring, in float32; gossipy gossips on a ring; pfl, Flower, BlazeFL and FedJAX, which
have a server, and the loop of torch average all peers. No system evaluates in a timed round. Every
system is run in the ways that its documentation recommends, with all that two cores give it
(`experiments.speed.baselines.run.SETUPS`; the drivers state which API and why), and the fastest of
them counts. Each launch is a program of its own; two rounds warm up, five are timed; launches take
turns in three repetitions. A ratio compares medians over all rounds with dfl's fastest; its range
is that of the ratios within a repetition, and as the ratio is of all rounds it can lie outside. pfl
keeps the order of its batches, gossipy sends half as many messages as dfl, and BlazeFL makes a
network for every client in every round, as its own trainers do. Every driver checks that its models
learn.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from experiments import common
from experiments.speed.baselines import run
from experiments.speed.baselines.install import BASELINES, ENVS
from experiments.speed.stopwatch import WORK

LABELS = ["work", "system", "processes", "threads", "style"]
TITLES = {
    "A": "16 peers, 199,210 parameters",
    "B": "100 peers, 2,410 parameters",
    "C": "1,000 peers, 650 parameters",
    "D": "16 peers, 64,102 parameters",
    "E": "100 peers, 5,450 parameters",
}
COLOURS = dict(zip(("dfl", *BASELINES), common.COLOURS, strict=False))
COLUMNS = 3
"""Panels beside each other."""
Texts = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/benchmark_peers")
    envs: Path = ENVS
    """Folder of the baselines' environments."""
    works: Texts = tuple(WORK)
    """Kinds of work."""
    baselines: Texts = tuple(BASELINES)
    """Baselines to compare dfl with."""
    rounds: int = 5
    """Rounds to time in a launch."""
    warm_up: int = 2
    """Rounds before them."""
    repetitions: int = 3
    """Launches of every set-up."""
    prefix: Texts = ()
    """The start of every command, such as `taskset -c 0,1`."""
    keep: bool = False
    """Reuse the launches that an earlier run left in `--out`."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure seconds per round by work and system."""
    rows = measure(options)
    table = tabulate(rows)
    common.publish(options, table, draw(table), finding(table, rows))


def measure(options: Options) -> pd.DataFrame:
    """Return the seconds of every timed round of every launch.

    Raises:
        InputError: an unknown work or baseline, or one that is missing or fails.
    """
    common.among("works", options.works, WORK)
    common.among("baselines", options.baselines, BASELINES)
    terms = run.Terms(options.envs, options.rounds, options.warm_up, options.prefix)
    systems = ("dfl", *options.baselines)
    run.check(terms, systems)
    setups = [setup for setup in run.SETUPS if setup.system in systems]
    cells = options.out / "cells"
    cells.mkdir(parents=True, exist_ok=True)
    made: list[dict[str, Any]] = []
    for repetition, work, setup in product(range(options.repetitions), options.works, setups):
        cell = cells / f"{work}, {setup}, {repetition}.json"
        if not (options.keep and cell.exists()):
            cell.write_text(json.dumps(run.answer(setup, work, terms)))
        launched = json.loads(cell.read_text())
        print(
            f"{cell.stem}: {1e3 * np.median(launched['seconds']):.1f} ms",
            file=sys.stderr,
            flush=True,
        )
        labels = {
            "work": work,
            **asdict(setup),
            "version": launched["version"],
            "repetition": repetition,
        }
        made += [
            {**labels, "round": t, "seconds": seconds}
            for t, seconds in enumerate(launched["seconds"])
        ]
    return pd.DataFrame(made)


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per work and set-up: milliseconds a round, and their ratio to dfl's fastest
    set-up.
    """
    return pd.DataFrame(
        [row for _, own in common.groups(rows, ["work"]) for row in _of_work(own)], dtype=object
    )


def _of_work(rows: pd.DataFrame) -> list[dict[str, Any]]:
    cells = dict(common.groups(rows, LABELS))
    medians = {key: float(own["seconds"].median()) for key, own in cells.items()}
    fastest = {key[1]: key for key in sorted(cells, key=lambda key: -medians[key])}
    ours = cells[fastest["dfl"]]
    return [
        {
            **dict(zip(LABELS, key, strict=True)),
            "version": own["version"].iloc[0],
            "fastest": "yes" if key in fastest.values() else "no",
            **_milliseconds(own),
            "ratio": _digits(medians[key] / medians[fastest["dfl"]]),
            **_range(own, ours),
        }
        for key, own in cells.items()
    ]


def _milliseconds(rows: pd.DataFrame) -> dict[str, float]:
    """Return the median and the quartiles of the rounds."""
    shares = {"ms": 0.5, "ms_q1": 0.25, "ms_q3": 0.75}
    return {
        name: _digits(1e3 * float(rows["seconds"].quantile(share)))
        for name, share in shares.items()
    }


def _range(rows: pd.DataFrame, ours: pd.DataFrame) -> dict[str, float]:
    """Return the least and the largest ratio of medians within a repetition."""
    theirs, mine = (each.groupby("repetition")["seconds"].median() for each in (rows, ours))
    ratios = (theirs / mine).to_numpy()
    return {"ratio_min": _digits(ratios.min()), "ratio_max": _digits(ratios.max())}


def _digits(value: float) -> float:
    """Return a number with three digits, and a whole number from 100 on."""
    return float(f"{value:.3g}") if value < 100 else round(float(f"{value:.3g}"))


def finding(table: pd.DataFrame, rows: pd.DataFrame) -> str:
    """Return the time of a round of dfl, and its ratio to that of the others."""
    each = rows.groupby(LABELS)["seconds"].count().min()
    works = [_of_best(own) for _, own in common.groups(table[table["fastest"] == "yes"], ["work"])]
    return (
        f"median of {each} rounds in {rows['repetition'].nunique()} launches of the fastest set-up "
        "of each; " + ("; ".join(works) + ".")
    )


def _of_best(table: pd.DataFrame) -> str:
    """Return the finding on one kind of work."""
    by_system = {row["system"]: row for row in table.to_dict("records")}
    ours = by_system.pop("dfl")
    baselines = sorted(by_system.values(), key=lambda row: float(row["ms"]))
    parts = [
        f"{row['system']} {row['ms']:,g} ms, {row['ratio']:,g} times that "
        f"({row['ratio_min']:,g} to {row['ratio_max']:,g})"
        for row in baselines
    ]
    return f"{ours['work']}: dfl {ours['ms']:,g} ms a round, {', '.join(parts) or 'no baseline'}"


def draw(table: pd.DataFrame) -> Figure:
    """Draw a panel per kind of work, a row per system: its fastest set-up, and the others."""
    works = common.groups(table, ["work"])
    lines = -(-len(works) // COLUMNS)
    figure = Figure(figsize=(1.5 + 4.2 * min(len(works), COLUMNS), 0.7 + 2.9 * lines))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(lines, min(len(works), COLUMNS), sharey=True, squeeze=False).flat
    for (work, own), axes in zip(works, panels, strict=False):
        _panel(axes, own)
        axes.set_title(f"{work}: {TITLES[work]}", fontsize="medium")
    for axes in panels:
        axes.set_visible(False)
    figure.supxlabel(
        "milliseconds per round, logarithmic: median of the fastest set-up (filled) and of the "
        "others, with quartiles",
        fontsize="small",
    )
    figure.suptitle("A round of dfl and of its baselines, the same work on two cores")
    return figure


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    systems = [name for name in COLOURS if name in set(table["system"])]
    for row in table.to_dict("records"):
        place = systems.index(str(row["system"]))
        colour = COLOURS[str(row["system"])]
        best = row["fastest"] == "yes"
        axes.plot(
            [row["ms_q1"], row["ms_q3"]], [place, place], color=colour, alpha=1 if best else 0.4
        )
        axes.plot(
            row["ms"],
            place,
            "o",
            color=colour,
            markerfacecolor=colour if best else "white",
            zorder=2 + best,
        )
        if best:
            text = f"{row['ms']:,g} ms" + (
                "" if row["system"] == "dfl" else f", {row['ratio']:,g} times"
            )
            axes.annotate(
                text,
                (row["ms"], place),
                (0, 8),
                textcoords="offset points",
                ha="center",
                color=colour,
            )
    axes.set_xscale("log")
    wide = max(table["ms"]) > 30 * min(table["ms"])
    axes.xaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(systems)), systems)
    axes.set_ylim(len(systems) - 0.5, -0.7)
    axes.margins(x=0.2)
    axes.grid(axis="x", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.benchmark_peers"))
