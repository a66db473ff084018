"""Simulated time to an accuracy on slow and fast links, by graph and bits of a message, with and
without a server.

Command, 60 runs, eight minutes on two idle cores:

    python -m experiments.messages_and_graphs.time_to_accuracy --data-dir DIR

Finding: on slow links the bits of a message determine the time, on fast ones only the number of
rounds does. On phones a round of the complete graph takes 12.4 s in float32 and 1.8 s in 4 bits,
0.3 s of it computing. To 0.5 the complete graph takes 21 s in float32 and 2.9 s in 4 bits, the
exponential graph 27 s and 5.6 s, the ring 59 s and 16 s: even on slow links a well connected graph
saves more time by its fewer rounds than its messages cost. But averages over all peers lose again
what they gain in the first rounds. To stay above 0.75 takes the exponential graph 109 s in float32,
the complete one 170 s; in 4 bits 22 s and 25 s; the ring never reaches it. FedAvg is faster than
any graph, 18 s and, with uploads in 4 bits, 9.1 s, as long as its server has no limit; on a link of
100 Mbit/s that 16 phones share it takes 32 s, and 20 s with uploads in 4 bits, where the
exponential graph in 4 bits takes 22 s. In a data center all rounds take 0.33 to 0.34 s, in which
the slowest of 16 devices computes: there 4 bits gain nothing, and the methods that average over all
peers reach 0.5 after 0.5 s and keep 0.75 after 4.6 to 4.8 s, the exponential graph after 2.5 s and
10 s, the ring reaches 0.5 after 10 s.

Grid: ring, exponential and complete graph, and FedAvg with all clients; float32, 8 and 4 bits (of
FedAvg the uploads only, without error feedback); five seeds, in the standard setting: MNIST, 16
peers with two label shards of 300 examples each, 2NN, learning rate 0.01, momentum 0.9, batches
of 50, one local epoch (12 steps), 50 rounds. Links are those of `phone` with an uplink of 1 MB/s,
and of `datacenter`; devices are the same on both, a local step takes 10 ms in the median and
differs between them by a lognormal factor of sigma 0.5. Learning does not depend on the links, so
every cell is trained once, and timed on each.

Models are evaluated every two rounds, and in each of the last five, on 2,000 test examples. Seconds
to an accuracy are by the best accuracy so far, seconds until it is kept by the worst accuracy from
then on, linear between evaluations: the complete graph and FedAvg are beyond 0.5 at the first
evaluation, so their seconds to 0.5 are coarse. Not measured: with more peers the messages of the
complete graph, and the link of a server, take longer, and those of a sparse graph do not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

import dfl
from dfl.comm.plan import Arcs, all_edges
from dfl.core.registry import choose
from dfl.environment.clock import Clock
from dfl.environment.link_models import LINK_MODELS, LinkModel
from dfl.evaluation.metrics import rounds_to
from dfl.store.results import Result
from dfl.sweep import Cell
from experiments import common
from experiments.messages_and_graphs.graphs import network

WIDTHS = {"float32": None, "8": 8, "4": 4}
GRAPHS = ("ring", "exponential", "complete")
SERVERS = {"server": "", "server_line": ",server_mbps={}"}
"""FedAvg with an unlimited and with a limited server -> what to add to the link model."""

DEVICES = "compute=lognormal,step_ms=10,sigma=0.5"
LINKS = {"phone": f"phone:mbps=8,{DEVICES}", "datacenter": f"datacenter:{DEVICES}"}
"""The link models of the peers, as --links, with the same compute times."""
LIMITS = {"phone": 100, "datacenter": 10_000}
"""Mbit/s of a limited server."""

NAMES = {
    "server": "FedAvg, server without a limit",
    "server_line": "FedAvg, server with a limit",
    "phone": "Phones: 8 Mbit/s up, 36 down, 40 ms",
    "datacenter": "A data center: 10 Gbit/s, 0.5 ms",
}
"""Names in the figure; graphs have their own."""

LABELS = ["graph", "width"]
SHOWN = ("float32", "4")
"""The widths in the figure."""

Target = tuple[float, bool]
"""An accuracy, and whether it must be kept from then on."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/time_to_accuracy")
    every: int = 2
    """Rounds between evaluations."""
    low: float = 0.5
    """An accuracy that even the ring reaches."""
    high: float = 0.75
    """An accuracy that only servers and well connected peers reach."""
    graphs: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (*GRAPHS, "server")
    """The graphs to compare, as --topology of dfl.run; server is FedAvg."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy by simulated time on slow and fast links, by graph and bits."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = timed(common.measure(options.out, grid(options), jobs=options.jobs), options)
    table = tabulate(rows, options)
    common.publish(options, table, draw(rows, options), finding(table, options))


def grid(options: Options) -> list[Cell]:
    """Return a cell for every graph, width and seed, which serves all links."""
    shared_settings: dict[str, Any] = {
        "eval_every": options.every,
        "eval_examples": common.SUBSETS.get(options.dataset),
        "links": LINKS["phone"],
    }
    return [
        Cell(
            {"graph": graph, "width": width, "seed": seed},
            common.standard(options, seed=seed, bits=bits, **_method(graph), **shared_settings),
        )
        for seed in range(options.seeds)
        for graph in options.graphs
        for width, bits in WIDTHS.items()
    ]


def _method(graph: str) -> dict[str, str]:
    return {"algorithm": "fedavg"} if graph == "server" else {"topology": graph}


def timed(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return the rows with the simulated seconds on every link; those of the server also with a
    limited server.
    """
    parts = []
    for (graph, width, seed), own in common.groups(rows, [*LABELS, "seed"]):
        run = dfl.load(common.cell_folder(options.out, graph=graph, width=width, seed=seed))
        for name, limit in SERVERS.items() if graph == "server" else ((graph, ""),):
            specs = {link: spec + limit.format(LIMITS[link]) for link, spec in LINKS.items()}
            after = {link: seconds(run, spec)[own["round"]] for link, spec in specs.items()}
            parts.append(own.assign(graph=name, **after))
    parts.sort(key=lambda part: str(part["graph"].iloc[0]) == "server_line")  # the last of all
    return pd.concat(parts, ignore_index=True)


def seconds(run: Result, spec: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the simulated seconds of a run after 0, 1, ... rounds with the link model `spec`."""
    weights = network(str(run.run.topology)).weights if run.run.topology else ()
    steps = -(-run.peers["n_train"].to_numpy(np.int64) // run.run.batch_size)
    links: LinkModel = choose("--links", spec, LINK_MODELS)()
    seed = run.run.seed
    peers = common.PEERS
    edges = all_edges(weights, peers) if weights else None
    connections = links.connections(peers, seed, edges, lambda make: make())
    pace = links.step_seconds(peers, seed)
    assert connections is not None
    assert pace is not None
    train_seconds = pace * steps
    clock = Clock(peers, connections, lambda: train_seconds)
    end = run.rows.iloc[-1]
    rounds = int(run.rows["round"].max())
    if weights:
        arcs = [Arcs.of(matrix) for matrix in weights]
        messages = sum(len(arcs[t % len(arcs)].sender) for t in range(rounds))
        size = int(end["payload_bytes"] / messages)
        return np.array([0.0, *_seconds_of_peers(clock, arcs, size, rounds)])
    down, up = (int(end[f"{way}load_bytes"] / rounds / common.PEERS) for way in ("down", "up"))
    return np.array([0.0, *_seconds_of_server(clock, down, up, rounds)])


def _seconds_of_peers(clock: Clock, arcs: list[Arcs], size: int, rounds: int) -> Iterator[float]:
    """Yield the simulated seconds after every round of peers that send `size` bytes per message."""
    for t in range(rounds):
        edges = arcs[t % len(arcs)]
        clock.exchange(edges.sender, edges.receiver, size)
        clock.end_round()
        yield clock.seconds


def _seconds_of_server(clock: Clock, down: int, up: int, rounds: int) -> Iterator[float]:
    """Yield the simulated seconds after every round of a server; down, up: bytes per message."""
    everyone = np.arange(common.PEERS)
    for _ in range(rounds):
        clock.broadcast(down, everyone)
        clock.aggregate(up, everyone)
        clock.end_round()
        yield clock.seconds


def tabulate(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per graph and width: the end, and on every link the seconds of a round and to
    the two accuracies.
    """
    table = common.summary(rows, LABELS)[["accuracy", "std_over_seeds"]]
    each = dict(common.groups(rows, LABELS))
    end = common.ends(rows, [*LABELS, "seed"]).groupby(LABELS, sort=False)
    for link in LINKS:
        table[f"{link}_round_s"] = end[link].mean() / rows["round"].max()
        for name, target in targets(options).items():
            taken = {labels: to_target(own, link, target) for labels, own in each.items()}
            table[f"{link}_s_{name}"] = pd.Series(taken)
    return table.reset_index()


def targets(options: Options) -> dict[str, Target]:
    """Return the accuracies to reach and to keep, by their names in columns."""
    low, high = options.low, options.high
    return {
        f"to_{low:g}": (low, False),
        f"to_{high:g}": (high, False),
        f"keeps_{high:g}": (high, True),
    }


def to_target(rows: pd.DataFrame, link: str, target: Target) -> float:
    """Return the mean seconds to an accuracy over the seeds; NaN where a seed misses it."""
    return float(
        np.mean([_reached(run, link, *target) for _, run in common.groups(rows, ["seed"])])
    )


def _reached(run: pd.DataFrame, link: str, target: float, kept: bool) -> float:
    """Return when a run reaches an accuracy first, or for good; linear between evaluations."""
    accuracy = run["accuracy_mean"].to_numpy()
    if kept:  # an accuracy that falls below the target again does not count
        accuracy = np.minimum.accumulate(accuracy[::-1])[::-1]
    at = rounds_to(run["round"].tolist(), accuracy.tolist(), target)
    return float(np.interp(at, run["round"], run[link]))


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    return f"over {options.seeds} seeds and {options.rounds} rounds. " + " ".join(
        _fastest(table, link, target) for link in LINKS for target in targets(options)
    )


def _fastest(table: pd.DataFrame, link: str, target: str) -> str:
    """Return the bits in which each graph reaches an accuracy first, the fastest graph first, and
    the graphs that miss it.
    """
    column = f"{link}_s_{target}"
    order = table.dropna(subset=column).sort_values(column).drop_duplicates("graph")
    reached = [
        f"{row['graph']} in {common.in_bits(row['width'])} {row[column]:.3g} s"
        for _, row in order.iterrows()
    ]
    missed = [graph for graph in table["graph"].unique() if graph not in set(order["graph"])]
    missing = f" ({', '.join(missed)} NOT with every seed)" if missed else ""
    listed = ", ".join(reached) or "none"
    return f"On links of a {link} {target.replace('_', ' ')}{missing}: {listed}."


def draw(rows: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy by simulated time, a panel per link."""
    figure = Figure(figsize=(13.5, 5.2), layout="constrained")
    panels = figure.subplots(1, len(LINKS), sharey=True)
    colours = dict(zip(rows["graph"].unique(), common.COLOURS, strict=False))
    for axes, link in zip(panels, LINKS, strict=True):
        for (graph, width), own in common.groups(rows[rows["width"].isin(SHOWN)], LABELS):
            dash = "-" if width == "float32" else "--"
            label = f"{NAMES.get(graph, graph.replace('_', ' '))}, {common.in_bits(width)}"
            common.curve(
                axes,
                own[own["round"] > 0],
                (link, "accuracy_mean"),
                label=label,
                color=colours[graph],
                linestyle=dash,
            )
        _label(axes, link, (options.low, options.high))
    panels[0].set_ylabel("accuracy, mean over peers and seeds")
    peers = f"{common.PEERS} peers, two label shards each, {options.seeds} seeds"
    common.caption(figure, panels[0], f"Time to learn: {options.dataset}, {peers}", 5)
    return figure


def _label(axes: Axes, link: str, targets: tuple[float, ...]) -> None:
    axes.set(title=NAMES[link], xlabel="simulated time (s)", xscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for target in targets:
        axes.axhline(target, color="0.7", linestyle=":", linewidth=1, zorder=0)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.time_to_accuracy"))
