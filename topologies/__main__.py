"""Compare graphs: python -m topologies ring torus base_graph:k=1 --peers 16 25.

A row per graph and number of peers: the most neighbours that a peer sends to in a round, the
messages of all peers in a round, the spectral gap per round, and the rounds of averaging until
disagreement is a thousandth.
"""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import numpy as np

from topologies import MIXINGS, TOPOLOGIES, GraphError, WeightedGraph, build
from topologies.consensus import degree, disagreement, messages_per_round, rounds_until
from topologies.specs import choose

ROUNDS = 2000
"""The most rounds of averaging."""
LEAST = 1e-3
"""The disagreement at which averaging ends, as a share of that at the start."""
COLUMNS = ("graph", "peers", "degree", "messages", "gap", "rounds to 1e-3")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are those of graphs, one line each."""

    def error(self, message: str) -> NoReturn:
        """Raise an error."""
        raise GraphError(message)


def main(arguments: list[str]) -> int:
    """Print the table, draw the figure, and return the exit code: 2 for bad input."""
    parser = Parser(prog="python -m topologies", description=__doc__)
    parser.add_argument("graphs", nargs="+", metavar="GRAPH", help=" · ".join(TOPOLOGIES))
    parser.add_argument("--peers", nargs="+", type=int, default=[16], help="numbers of peers")
    parser.add_argument("--mixing", default="metropolis", help=" · ".join(MIXINGS))
    parser.add_argument("--seed", type=int, default=0, help="of random graphs")
    parser.add_argument("--figure", type=Path, help="file for a drawing of disagreement by round")
    try:
        _compare(parser.parse_args(arguments))
    except (GraphError, OSError) as error:
        print(f"topologies: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(given: argparse.Namespace) -> None:
    if given.seed < 0:
        raise GraphError(f"--seed must be at least 0, not {given.seed}")
    if given.figure and not given.figure.suffix:
        raise GraphError(f"--figure {given.figure}: give a file name that ends in .png or .pdf")
    rows, curves = [COLUMNS], {}
    for spec in given.graphs:
        for peers in given.peers:
            network = _network(spec, given.mixing, peers, given.seed)
            found = disagreement(network, ROUNDS)
            until = rounds_until(found, LEAST)
            rows.append((
                spec,
                f"{peers:,}",
                f"{degree(network)}",
                f"{messages_per_round(network):,.6g}",
                f"{network.spectrum.gap:.4g}",
                f"more than {ROUNDS:,}" if until is None else f"{until:,}",
            ))  # fmt: skip
            curves[f"{spec}, {peers:,} peers"] = found[: (until or ROUNDS) + 1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        aligned = [cell.rjust(w) for cell, w in zip(cells, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *aligned]))
    if given.figure:
        _draw(curves, given.figure)


def _network(spec: str, mixing: str, peers: int, seed: int) -> WeightedGraph:
    if mixing not in MIXINGS:
        raise GraphError(f"--mixing: unknown {mixing!r}; choose from {', '.join(MIXINGS)}")
    try:
        graph = choose(spec, TOPOLOGIES)
        return build(graph, MIXINGS[mixing], peers, np.random.default_rng(seed))
    except GraphError as error:
        raise GraphError(f"{spec} with --peers {peers}: {error}") from None


def _draw(curves: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]], path: Path) -> None:
    """Write a figure of disagreement by round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.plot(np.maximum(curve, 1e-16), label=name)
    axes.set(xlabel="round", ylabel="disagreement, as a share of that at the start", yscale="log")
    axes.legend(fontsize="small")
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise GraphError(f"--figure {path}: {error}") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
