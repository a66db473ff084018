"""Messages that cross between ranks by the graph, where ranks host consecutive peers and where
peers that are close in the graph share a rank.

Command, half a minute on one core:

    python -m experiments.speed.placement

Finding: on ring, torus, caveman and small-world graphs, whose peers are numbered along the graph,
another order saves nothing, and the ranks keep consecutive peers. On geometric graphs, whose
numbers do not follow places, it saves 88, 88 and 82 % of the messages between 2, 4 and 16 ranks,
on hypercubes 51, 34 and 11 %, on random regular graphs of degree 4 28, 23 and 15 %, on a grid 0, 18
and 28 %, on a tree 50, 17 and 0 %. Least is saved where a graph has no small cuts: 11 to 14 % on
Erdős-Rényi graphs, 12 % on 2 ranks and nothing on more on Barabási-Albert graphs.

Grid: 1,024 peers with Metropolis weights on each graph, as drawn from seeds 0 to 2, on 2, 4 and
16 ranks. `consecutive` and `cuthill_mckee` count the messages of one round that cross to another
rank when ranks host peers in ascending order, and in reverse Cuthill-McKee order; a message
crosses to a rank once for each sending peer with a neighbour there. `used` is the smaller number
that `dfl.comm.placement` takes: another order must save a tenth. Bytes between ranks are in
proportion. Means over the seeds; the order of the peers on the ranks changes no result.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

import topologies
from dfl.comm.placement import close_together, crossing, placed
from dfl.comm.plan import all_edges
from dfl.core.layout import Layout
from experiments import common
from topologies.specs import choose

GRAPHS = (
    "ring", "torus", "grid", "caveman", "small_world", "tree", "hypercube", "exponential",
    "regular:k=4", "erdos_renyi:p=0.006", "barabasi_albert", "geometric",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/placement")
    peers: int = 1024
    """Number of peers."""
    ranks: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (2, 4, 16)
    """Numbers of ranks."""
    seeds: int = 3
    """Number of seeds of random graphs, from 0."""
    graphs: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = GRAPHS
    """The graphs."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Count the messages that cross between ranks on every graph."""
    seeds = pd.DataFrame(
        [
            row
            for graph in options.graphs
            for seed in range(options.seeds)
            for row in counted(graph, seed, options)
        ]
    )
    table = tabulate(seeds)
    common.publish(options, table, draw(table, options), finding(table), seeds)


def counted(graph: str, seed: int, options: Options) -> list[dict[str, Any]]:
    """Return a row for each number of ranks."""
    built = topologies.build(
        choose(graph, topologies.TOPOLOGIES),
        topologies.MIXINGS["metropolis"],
        options.peers,
        np.random.default_rng(seed),
    )
    sender, receiver = np.divmod(all_edges(built.weights, options.peers), options.peers)
    rows = []
    for ranks in options.ranks:
        layouts = {
            "consecutive": Layout(options.peers, ranks),
            "cuthill_mckee": close_together(sender, receiver, Layout(options.peers, ranks)),
            "used": placed(built.weights, options.peers, ranks),
        }
        counts = {name: crossing(layout, sender, receiver) for name, layout in layouts.items()}
        rows.append({"graph": graph, "ranks": ranks, "seed": seed} | counts)
    return rows


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per graph and number of ranks: means over the seeds, and the share that is
    saved.
    """
    table = seeds.groupby(["graph", "ranks"], sort=False).mean().drop(columns="seed")
    table["saved"] = 1 - table["used"] / table["consecutive"]
    return table.reset_index()


def finding(table: pd.DataFrame) -> str:
    """Return the share of messages that is saved on every graph where some are."""
    parts = []
    for graph, own in common.groups(table, ["graph"]):
        if own["saved"].max() > 0:
            shares = ", ".join(f"{100 * share:.0f}" for share in own["saved"])
            parts.append(f"{graph} {shares} %")
    ranks = ", ".join(map(str, table["ranks"].unique()))
    return f"on {ranks} ranks the order saves: {'; '.join(parts)}."


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw the messages between ranks on every graph, of consecutive and of placed peers."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    names = list(table["graph"].unique())
    axes = figure.subplots(1, len(options.ranks), sharey=True, squeeze=False)[0]
    for each, (ranks, own) in zip(axes, common.groups(table, ["ranks"]), strict=True):
        places = np.arange(len(names))
        for k, (column, label) in enumerate(
            (("consecutive", "consecutive peers"), ("used", "as placed"))
        ):
            each.barh(
                places + 0.4 * k - 0.2, own[column], 0.38, color=common.COLOURS[k], label=label
            )
        each.set_yticks(places, names)
        each.set(title=f"{ranks} ranks", xlabel="messages between ranks in a round")
        each.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    common.caption(figure, axes[0], f"Messages between ranks, {options.peers:,} peers", 2)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.placement"))
