"""Accuracy by the graph of the peers and the bits of a message.

Command, 50 runs, twelve minutes on two idle cores:

    python -m experiments.messages_and_graphs.graphs --data-dir DIR

Finding: on these static graphs accuracy rises with the spectral gap, and every sparse graph stays
well below the complete one. Over rounds 46 to 50 the peers have an accuracy of 0.564 on the ring
(gap 0.051, 80 MB sent by a peer), 0.783 on the torus and 0.804 on the exponential graph (gap 0.400
both, 159 MB) and 0.905 on the complete one (gap 1, 598 MB). The torus is ahead of the exponential
graph at two of five seeds. After 64 MB, in round 20, the exponential graph has 0.68, more than the
ring ends with. 4 bits change these by 0.0013 at most in the mean (ring), and by 0.008 at most at
one seed (torus), at an eighth of the bytes: the exponential graph in 4 bits has 0.803 for 20 MB,
the complete one 0.905 for 75 MB, less than the ring sends in float32 for 0.564. The one-peer
exponential graph takes four rounds for an exact average, and local training on different labels
keeps the consensus distance at 0.33 to 0.34 in every round from 46 to 50: it has an accuracy of
0.639, far from what its gap of 1 suggests, but for half the bytes of the ring, and in 4 bits for 5
MB.

Grid: ring, torus (4 x 4), exponential, one-peer exponential (another graph every round) and
complete graph, each in float32 and in 4 bits, five seeds, in the standard setting: MNIST, 16 peers,
Metropolis weights, two label shards of 300 examples each, 2NN, learning rate 0.01, momentum 0.9,
batches of 50, one local epoch, 50 rounds. The spectral gap is the rate of averaging: with a gap of
1 a static graph needs one round, and the one-peer graph four; with 0 the peers never agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import topologies
from dfl.core import randomness
from dfl.core.registry import choose
from dfl.sweep import Cell
from experiments import common

WIDTHS = {"float32": None, "4": 4}
LABELS = ["graph", "width"]


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/graphs")
    graphs: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        "ring", "torus", "exponential", "one_peer_exponential", "complete",
    )  # fmt: skip
    """The graphs to compare, as --topology of dfl.run."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy by rounds and bytes for every graph."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    table = tabulate(rows)
    seeds = common.by_seed(rows, LABELS)
    common.publish(options, table, draw(rows, table, options), finding(table, options), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every graph, width and seed."""
    return [
        Cell(
            {"graph": graph, "width": width, "seed": seed},
            common.standard(options, topology=graph, bits=bits, seed=seed, eval_every=5),
        )
        for seed in range(options.seeds)
        for graph in options.graphs
        for width, bits in WIDTHS.items()
    ]


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per graph and width: the gap, and means over the seeds at the end."""
    table = common.summary(rows, LABELS).reset_index()
    networks = {graph: network(graph) for graph in rows["graph"].unique()}
    gaps = {graph: each.spectrum.gap for graph, each in networks.items()}
    neighbours = {graph: neighbours_per_round(each) for graph, each in networks.items()}
    table.insert(2, "spectral_gap", table["graph"].map(gaps))
    table.insert(3, "neighbours_per_round", table["graph"].map(neighbours))
    return table


def network(graph: str) -> topologies.WeightedGraph:
    """Return the graph with Metropolis weights that a run with seed 0 has."""
    build = choose("--graphs", graph, topologies.TOPOLOGIES)
    return topologies.build(
        build, topologies.MIXINGS["metropolis"], common.PEERS, randomness.generator(0, "topology")
    )


def neighbours_per_round(network: topologies.WeightedGraph) -> float:
    """Return the mean number of neighbours that a peer sends to in a round."""
    others = [(weights != 0).sum() - (weights.diagonal() != 0).sum() for weights in network.weights]
    return float(sum(others) / len(others) / common.PEERS)


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    cells = common.by_label(table, LABELS)
    exact = {graph: cells[graph, "float32"] for graph in options.graphs}
    order = sorted(exact, key=lambda graph: float(exact[graph]["spectral_gap"]))
    best = [
        max(exact[graph]["accuracy"] for graph in order[: place + 1]) for place in range(len(order))
    ]
    behind = [
        graph for graph, score in zip(order, best, strict=True) if exact[graph]["accuracy"] < score
    ]
    differences = {
        graph: abs(cells[graph, "4"]["accuracy"] - row["accuracy"]) for graph, row in exact.items()
    }
    most = max(differences, key=differences.__getitem__)
    listed = ", ".join(
        f"{graph} {row['accuracy']:.3f} (gap {row['spectral_gap']:.3f}, "
        f"{row['MB_per_peer']:.0f} MB a peer)"
        for graph, row in ((graph, exact[graph]) for graph in order)
    )
    return (
        f"over {options.seeds} seeds in float32, by rising spectral gap: {listed}; accuracy rises "
        f"with the gap{' but NOT to ' if behind else ''}{', '.join(behind)}. 4 bits change it by "
        f"at most {differences[most]:.3f} ({most}), at an eighth of the bytes."
    )


def draw(rows: pd.DataFrame, table: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy by round, by bytes and by gap."""
    figure = Figure(figsize=(13.5, 4.6), layout="constrained")
    by_round, by_bytes, by_gap = figure.subplots(1, 3)
    rows = rows.assign(megabytes=rows["payload_bytes"] / common.PEERS / 1e6)
    colours = dict(zip(options.graphs, common.COLOURS, strict=False))
    for (graph, width), own in common.groups(rows, LABELS):
        style = {
            "color": colours[graph],
            "linestyle": "-" if width == "float32" else "--",
            "marker": ".",
        }
        name = f"{graph.replace('_', ' ')}, {common.in_bits(width)}"
        common.curve(by_round, own, ("round", "accuracy_mean"), label=name, **style)
        common.curve(by_bytes, own[own["round"] > 0], ("megabytes", "accuracy_mean"), **style)
    by_round.set(
        title="Accuracy by round", xlabel="round", ylabel="accuracy, mean over peers and seeds"
    )
    by_bytes.set(title="Accuracy by bytes", xlabel="payload sent by a peer (MB)", xscale="log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    _by_gap(by_gap, table, colours)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(
        f"The graph: {options.dataset}, 16 peers, two label shards each, {options.seeds} seeds"
    )
    return figure


def _by_gap(axes: Axes, table: pd.DataFrame, colours: dict[str, str]) -> None:
    """Draw the accuracy at the end of every graph over its gap, with the std over seeds."""
    for (graph, width), row in common.by_label(table, LABELS).items():
        face = colours[graph] if width == "float32" else "white"
        axes.errorbar(
            row["spectral_gap"],
            row["accuracy"],
            row["std_over_seeds"],
            color=colours[graph],
            marker="o",
            capsize=3,
            markerfacecolor=face,
        )
    axes.set(
        title="Accuracy at the end by spectral gap",
        xlabel="spectral gap of the mixing matrix (per round)",
        xscale="log",
    )
    axes.set_ylabel("accuracy, mean over peers and seeds")
    axes.xaxis.set_major_formatter("{x:g}")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.graphs"))
