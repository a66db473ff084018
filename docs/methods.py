"""Write the table of all methods, docs/methods.md: python docs/methods.py.

The table is read off the methods: their docstrings, their state on two small graphs, and what they
declare in `dfl/algorithms/base.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.algorithms.assumptions import Assumption
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression import COMPRESSORS
from dfl.core.layout import Layout
from dfl.environment.faults import FAULTS, Fault
from dfl.simulation.cost import blank_models, blank_state, numbers_of_state
from topologies import MIXINGS, TOPOLOGIES, build

PAGE = Path(__file__).with_name("methods.md")
SHAPE = (20, 50)
"""The one parameter of the model; only what `power_gossip` remembers depends on it."""
WIDTH = 1000
"""Coordinates of the model."""
TOP = """# Methods

What each `--algorithm` needs with its default options, written by `python docs/methods.py`.

Memory is in rows of as many numbers as a message, for each peer, besides its model; where it
depends on the degree, that is the number of neighbours; `power_gossip`'s is that of a matrix of 20
x 50. A run is refused, or a warning printed, where something that the last two columns name does
not hold. `--dry-run` shows the same for the options of a run.

| method | memory of a peer | messages to each neighbour | refused without | warned without |
|---|---|---|---|---|
"""


def network(peers: int, faults: tuple[Fault, ...]) -> Network:
    """Return a chain of some peers."""
    graph = build(TOPOLOGIES["chain"], MIXINGS["metropolis"], peers, np.random.default_rng(0))
    threat_model = ThreatModel(COMPRESSORS["none"](), faults=faults)
    return Network(
        Layout(peers, 1),
        MixingMatrices(graph.weights, graph.stationary),
        World(),
        threat_model,
        0,
        shapes=(SHAPE,),
    )


def memory(algorithm: Algorithm[Any], faults: tuple[Fault, ...]) -> str:
    """Return the rows that a peer remembers, from those on chains of 3 and of 5 peers."""
    found = []
    for peers in (3, 5):
        chain = network(peers, faults)
        models = blank_models(algorithm, chain, WIDTH, torch.float32)
        numbers, own = numbers_of_state(blank_state(algorithm, chain, models))
        found.append(numbers / own - 1)
    per_neighbour = round((found[1] - found[0]) / (8 / 5 - 4 / 3), 2)
    rows = round(found[0] - per_neighbour * 4 / 3, 2)
    parts = [f"{rows:g}"] if rows or not per_neighbour else []
    parts += [f"{per_neighbour:g} per neighbour"] if per_neighbour else []
    return " + ".join(parts)


def memories(algorithm: Algorithm[Any]) -> str:
    """Return the memory of a method, and that under faults where it differs."""
    without, with_faults = (memory(algorithm, each) for each in ((), (FAULTS["link_loss"](),)))
    return without if without == with_faults else f"{without}; with faults {with_faults}"


def assumed(assumptions: Mapping[Assumption, str]) -> str:
    """Return assumptions as a cell."""
    return ", ".join(each.text for each in assumptions)


def row(name: str, algorithm: Algorithm[Any]) -> str:
    """Return the line of a method."""
    if algorithm.has_server or not algorithm.gossips:
        kind = "a server" if algorithm.has_server else "none"
        return f"| `{name}` | | {kind} | | |"
    cells = (
        f"`{name}`",
        memories(algorithm),
        f"{algorithm.messages}{', 1 more within a cluster' if algorithm.within_clusters else ''}",
        assumed(algorithm.requires),
        assumed(algorithm.expects),
    )
    return f"| {' | '.join(cells)} |"


def page() -> str:
    """Return the page."""
    return TOP + "".join(f"{row(name, ALGORITHMS[name]())}\n" for name in sorted(ALGORITHMS))


if __name__ == "__main__":
    PAGE.write_text(page())
