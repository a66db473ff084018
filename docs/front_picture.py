"""Draw the picture of the README: python docs/front_picture.py, in some seconds.

Left: accuracy by bytes of 16 peers on a ring, in float32 and in 4 bits, with the range over the
peers. Right: the ring, each peer coloured by the accuracy of its model. Every peer has examples of
few labels.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import networkx as nx
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dfl

PICTURE = Path(__file__).with_name("front.png")
PEERS = 16
WIDTHS = ((None, "32 bits", "#0072B2"), (4, "4 bits", "#D55E00"))
"""Bits of a message, label and colour of each run."""


def run(bits: int | None, out: Path) -> dfl.Run:
    """Return the run of one width."""
    return dfl.Run(
        topology="ring",
        peers=PEERS,
        partition="shards:per_peer=2",
        rounds=100,
        eval_every=2,
        bits=bits,
        out=out,
    )


def draw(folder: Path) -> Figure:
    """Simulate the runs in a folder and draw them."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_bytes, ring = figure.subplots(1, 2, width_ratios=(1.35, 1))
    for bits, label, colour in WIDTHS:
        out = folder / label.replace(" ", "-")
        for _ in dfl.simulate(run(bits, out)):
            pass
        rows = dfl.load(out).rows.iloc[1:]
        sent = rows["payload_bytes"] / PEERS / 1e6
        by_bytes.plot(sent, rows["accuracy_mean"], color=colour, label=label, linewidth=2)
        by_bytes.fill_between(
            sent, rows["accuracy_min"], rows["accuracy_max"], color=colour, alpha=0.15, linewidth=0
        )
    by_bytes.set(xscale="log", ylim=(0, 1), xlabel="sent by a peer (MB)", ylabel="accuracy")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    by_bytes.set_title("Ring of 16 peers: mean, worst and best peer")
    by_bytes.legend(title="message", loc="upper left")
    by_bytes.grid(alpha=0.3)
    by_bytes.spines[["top", "right"]].set_visible(False)
    _colour(ring, dfl.load(out).peers["accuracy"].to_numpy())
    return figure


def _colour(axes: Axes, accuracy: np.ndarray) -> None:
    """Draw the ring with every peer coloured by its accuracy."""
    graph = nx.cycle_graph(PEERS)
    places = nx.circular_layout(graph)
    nx.draw_networkx_edges(graph, places, ax=axes, edge_color="0.7", width=1.5)
    nodes = nx.draw_networkx_nodes(
        graph, places, ax=axes, node_color=accuracy, cmap="viridis", node_size=420
    )
    dark = accuracy < accuracy.min() + 0.6 * np.ptp(accuracy)
    for colour, chosen in (("white", dark), ("black", ~dark)):
        nx.draw_networkx_labels(
            graph.subgraph(np.flatnonzero(chosen).tolist()), places, ax=axes, font_size=9,
            font_color=colour,
        )  # fmt: skip
    axes.figure.colorbar(nodes, ax=axes, label="accuracy of the peer's model", shrink=0.85)
    axes.set_title("Peers after 100 rounds at 4 bits")
    axes.set_aspect("equal")
    axes.axis("off")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        draw(Path(folder)).savefig(PICTURE, dpi=150)
