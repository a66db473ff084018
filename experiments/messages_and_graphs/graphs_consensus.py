"""Consensus by the graph of the peers: rounds and bytes until the peers agree.

Command, five minutes on one core:

    python -m experiments.messages_and_graphs.graphs_consensus

Finding: Base-(k+1) graphs average exactly for every number of peers. With one neighbour a round (k
= 1) they take 4, 9, 11 and 16 rounds for 16, 25, 100 and 1,000 peers, 64 MB sent by a peer at
1,000; with up to four (k = 4) 2, 2, 3 and 5 rounds, for the same 64 MB. To a disagreement of a
thousandth, graphs that draw one neighbour at random take about 20 rounds whatever the number of
peers (random matching 20, EquiTopo one-peer directed 19 and undirected 24 at 1,000 peers, 75 to 86
MB); the one-peer exponential graph, exact for powers of two only, 19 (76 MB). With ceil(log2 P)
random neighbours every round, as in epidemic learning, 6 to 8 rounds are enough throughout, for 240
MB at 1,000 peers. Static graphs of constant degree fall behind: at 1,000 peers a random 4-regular
graph takes 37 rounds (595 MB), the torus 772 (12,355 MB), and ring, chain, tree, star, grid,
caveman, D-Cliques on a ring and the geometric graph more than 1,000; D-Cliques on a small world
take 22 (1,308 MB), and two binary trees in turn 134, where one takes more than 1,000. EquiTopo with
ceil(log2 P) basis graphs takes 8 to 13 rounds throughout, at 20 messages a round for 1,000 peers.
Teleportation moves one average among the peers and does not keep the mean.

Grid: every graph that accepts 16, 25, 100 and 1,000 peers; random ones as drawn from five seeds.
Peers start from 16 standard normal values and average for up to 1,000 rounds without training.
Disagreement is the root mean square distance of the peers from their mean, as a share of that at
the start; the bytes are those of a model of a million float32 parameters. Weights are Metropolis
unless the graph comes with its own; on directed random graphs peers run push-sum.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

import topologies
from experiments import common
from topologies.consensus import degree, disagreement, messages_per_round, rounds_until
from topologies.specs import choose

GRAPHS = (
    "chain", "ring", "star", "tree", "double_tree", "spanning_tree:of=torus", "caveman",
    "clustered", "d_cliques", "d_cliques:between=small_world", "geometric", "grid", "torus",
    "small_world", "barabasi_albert", "regular:k=4", "directed_random", "equitopo",
    "equitopo:directed=true", "equitopo:one_peer=true", "equitopo:one_peer=true,directed=true",
    "random_matching", "random_regular", "random_out", "teleportation", "hypercube",
    "one_peer_hypercube", "exponential", "one_peer_exponential", "directed_exponential:k=2",
    "base_graph:k=1,simple=true", "base_graph:k=1", "base_graph:k=2", "base_graph:k=4", "complete",
)  # fmt: skip
PUSH_SUM = ("directed_random", "random_out")
"""The graphs on which peers run push-sum."""
DRAWN = {
    "ring": "-", "torus": "-", "random_matching": "--", "equitopo:one_peer=true": "--",
    "exponential": "-", "one_peer_exponential": ":", "base_graph:k=1": "-",
}  # fmt: skip
"""The graphs in the figure, and their lines."""
MB_PER_MESSAGE = 4
"""A million float32 parameters."""
LABELS = 10
"""The labels of the peers' examples for D-Cliques: every peer has one."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/graphs_consensus")
    peers: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (16, 25, 100, 1000)
    """Numbers of peers."""
    rounds: int = 1000
    """The most rounds of averaging."""
    seeds: int = 5
    """Number of seeds of random graphs, from 0."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the disagreement by round and bytes on every graph."""
    curves = {
        (graph, peers): found
        for peers in options.peers
        for graph in GRAPHS
        if (found := measure(graph, peers, options))
    }
    table = pd.DataFrame([row(*key, found) for key, found in curves.items()])
    common.publish(options, table, draw(curves, options), finding(table, options))


def measure(
    graph: str, peers: int, options: Options
) -> list[tuple[topologies.WeightedGraph, NDArray[np.float64]]]:
    """Return a graph and the disagreement by round, for every seed; nothing where it does not
    accept so many peers.
    """
    mixing = topologies.MIXINGS["out_degree" if graph in PUSH_SUM else "metropolis"]
    found = []
    for seed in range(options.seeds):
        rng = np.random.default_rng(seed)
        labels = np.eye(LABELS, dtype=np.int64)[rng.permutation(np.arange(peers) % LABELS)]
        try:
            built = topologies.build(
                choose(graph, topologies.TOPOLOGIES), mixing, peers, rng, labels
            )
        except topologies.GraphError:
            return []
        found.append((built, disagreement(built, options.rounds, seed)))
    return found


def row(
    graph: str, peers: int, found: list[tuple[topologies.WeightedGraph, NDArray[np.float64]]]
) -> dict[str, Any]:
    """Return the row of a graph: means over the seeds, missing where a seed did not get there."""
    messages = float(np.mean([messages_per_round(each) for each, _ in found])) / peers
    small, exact = ([rounds_until(curve, least) for _, curve in found] for least in (1e-3, 1e-12))
    rounds = mean(small)
    return {
        "peers": peers,
        "graph": graph,
        "degree": max(degree(each) for each, _ in found),
        "messages_per_peer": messages,
        "spectral_gap": float(np.mean([each.spectrum.gap for each, _ in found])),
        "rounds_to_1e-3": rounds,
        "rounds_to_1e-12": mean(exact),
        "MB_per_peer_to_1e-3": rounds * messages * MB_PER_MESSAGE,
    }


def mean(rounds: list[int | None]) -> float:
    """Return the mean of some rounds, NaN if one of them is missing."""
    return float(np.mean([np.nan if each is None else each for each in rounds]))


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table: the graphs that agree in the fewest rounds and with
    the fewest bytes, for every number of peers.
    """
    parts = []
    for peers in options.peers:
        own = table[(table["peers"] == peers) & (table["graph"] != "complete")]
        fast = own.sort_values("rounds_to_1e-3", kind="stable").iloc[0]
        cheap = own.sort_values("MB_per_peer_to_1e-3", kind="stable").iloc[0]
        never = own["graph"][own["rounds_to_1e-3"].isna()]
        late = f"; {', '.join(never)} not in {options.rounds:,} rounds" if len(never) else ""
        parts.append(
            f"{peers:,} peers: fewest rounds {fast['graph']} ({fast['rounds_to_1e-3']:.0f}), "
            f"fewest bytes {cheap['graph']} ({cheap['MB_per_peer_to_1e-3']:.0f} MB a peer){late}"
        )
    return ". ".join(parts) + "."


def draw(
    curves: dict[tuple[str, int], list[tuple[topologies.WeightedGraph, NDArray[np.float64]]]],
    options: Options,
) -> Figure:
    """Draw disagreement by round and by bytes, a column per number of peers."""
    figure = Figure(figsize=(3.6 * len(options.peers) + 1, 7), layout="constrained")
    panels = figure.subplots(2, len(options.peers), sharey=True, squeeze=False)
    for column, peers in zip(panels.T, options.peers, strict=True):
        for (graph, line), colour in zip(DRAWN.items(), common.COLOURS, strict=True):
            if found := curves.get((graph, peers)):
                _curve(column, found, {"label": graph, "linestyle": line, "color": colour})
        column[0].set(title=f"{peers:,} peers", xlabel="round", xlim=(0, 60), yscale="log")
        column[1].set(xlabel="MB sent by a peer", xlim=(0, 600), ylim=(1e-16, 2))
    panels[0, 0].set_ylabel("disagreement")
    panels[1, 0].set_ylabel("disagreement")
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4)
    figure.suptitle("Averaging without training, a million float32 parameters")
    return figure


def _curve(
    column: NDArray[Any],
    found: list[tuple[topologies.WeightedGraph, NDArray[np.float64]]],
    style: dict[str, Any],
) -> None:
    """Draw the first seed's disagreement in both panels of a column."""
    network, curve = found[0]
    by_round: Axes = column[0]
    by_bytes: Axes = column[1]
    megabytes = MB_PER_MESSAGE * messages_per_round(network) / len(network.degrees)
    values = np.maximum(curve, 1e-17)
    by_round.plot(values, **style)
    by_bytes.plot(np.arange(len(values)) * megabytes, values, **style)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.graphs_consensus"))
