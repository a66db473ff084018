"""The tilted score over graphs: error and coverage by gossip rounds and by bytes.

Command, 52 settings of 40 studies of 12 sites, one minute of one core:

    python -m experiments.inference.graph

Finding: a graph costs much more than a centre, and lost messages hurt sparse sequences most. With a
centre, and every site leading, 424 bytes a site bring the mean square distance from the pooled
estimate to 1.6e-5 of that estimate's mean square error. With 8 rounds to a mean Base-2 is exact
and takes 3,667 bytes for the same, 1,687 with 8 bits, which end at 4.0e-4; the ring is at 0.25
after 8 rounds and at 6.4e-5 after 32, for 29,402 bytes, or 8,282 with 8 bits. Too few rounds are
worse than meta-analysis, which is at 0.43 for 112 bytes: two rounds on the ring are at 1.9 and
cover in 0.79. With 30 % of the messages lost Base-2 needs the most rounds: after 8 only 28 of 40
studies have an estimate, which cover in 0.49, and after 32 it is at 0.85, where the ring is at
7.2e-4 and torus and complete graph at 1.6e-5. Gradient tracking goes on to the pooled estimate
itself, to 4e-8 on Base-2 for 23,040 bytes and 4e-21 on the torus for 115,200; on the ring it
is slower, 0.007 after 300 rounds, where the tilted score is at 6.4e-5 after 178.

A study is that of `coverage.py` with 12 sites of 100 examples and seed 0. The estimate is that of
the first site. `rounds_of_a_mean` are the gossip rounds of each of the five means of two
iterations; `rounds` are those of all messages, flooded tables and the wait for the beginning of a
period included, and `bytes` are those that a site sends in one study. Tables are flooded in
float64, which is most of the bytes with 8 bits. `from_pooled` and `excess` are the mean square
distance from the pooled estimate, and the mean square error less its own, both over its own; the
excess is within its Monte-Carlo error where the distance is small. Studies without an estimate are
left out, and `repetitions` counts the others. Standard errors are those of the studies; ten
studies travel in one message and lose it together, so those of `30 % lost`, of four draws of
losses, are too small. Messages of 8 bits have one scale per study; a flooded row has a mark besides
its number, which ten studies share, and which a study by itself would send alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from torch import Tensor

import topologies
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression.exact import Exact
from dfl.compression.quantize import Quantize
from dfl.core import randomness
from dfl.core.layout import Layout
from dfl.core.registry import choose
from dfl.environment.faults import LinkLoss
from dfl.inference.estimators import (
    Estimator,
    GradientTracking,
    Meta,
    Pooled,
    TiltedScore,
    TiltedScoreGraph,
)
from dfl.inference.exchange import Change, Exchange, Graph
from dfl.inference.study import Outcomes, Study, at_centre
from experiments import common
from experiments.inference.coverage import relative, standard_error

Connect = Callable[[int], Exchange]
"""Connect(seed) returns what connects the sites."""

STUDY = Study(sites=12, n=100, repetitions=40)

PART = 10
"""Repetitions that travel in one message, and lose it together."""

CENTRES: dict[str, Estimator] = {
    "pooled": Pooled(),
    "meta": Meta(),
    "tilted score, one lead": TiltedScore(),
    "tilted score, all lead": TiltedScore(leads=None),
}
"""What the estimates over graphs are compared with."""

GRAPHS = {"ring": "ring", "torus": "torus", "Base-2": "base_graph:k=1", "complete": "complete"}
"""Name -> spec of the topology."""

MESSAGES = ("float64", "30 % lost", "8 bits")

ROUNDS = (2, 8, 32)
"""Gossip rounds of a mean."""

TRACKED = (10, 30, 100)
"""Gossip rounds of gradient tracking, and of the means at its start and its end."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/inference_graph")
    repetitions: int = STUDY.repetitions
    """Repetitions of the study."""
    rounds: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = ROUNDS
    """Gossip rounds of a mean."""
    tracked: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = TRACKED
    """Gossip rounds of gradient tracking."""


@dataclass
class ScaledGraph(Graph):
    """A graph whose messages of 8 bits have a scale per repetition, as each would have alone."""

    def gossip(self, rows: Tensor, local: Change | None, rounds: int | None, what: str) -> Tensor:
        """See `Graph`."""
        quantized = Quantize(bits=8, block=rows.shape[-1])
        self.network.threat_model = ThreatModel(quantized)
        return super().gossip(rows, local, rounds, what)


def page(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure, and write table and figure."""
    study = replace(STUDY, repetitions=options.repetitions)
    pooled, _ = measured(study, CENTRES["pooled"], in_centre)
    rows: list[dict[str, Any]] = []

    def add(names: dict[str, Any], estimator: Estimator, connect: Connect) -> None:
        outcomes, sent = measured(study, estimator, connect)
        rows.append(names | sent | row(study, outcomes, pooled))
        print(names, file=sys.stderr, flush=True)

    for name, each in CENTRES.items():
        add({"estimator": name, "graph": "centre", "messages": "float64"}, each, in_centre)
    for graph in GRAPHS:
        for messages in MESSAGES:
            for rounds in options.rounds:
                names = {"estimator": "tilted score", "graph": graph, "messages": messages}
                own = names | {"rounds_of_a_mean": rounds}
                add(own, TiltedScoreGraph(), over(graph, messages, rounds))
        for rounds in options.tracked:
            names = {"estimator": "gradient tracking", "graph": graph, "messages": "float64"}
            own = names | {"rounds_of_a_mean": rounds}
            add(own, GradientTracking(rounds=rounds), over(graph, "float64", rounds))
    columns = ["estimator", "graph", "messages", "rounds_of_a_mean"]
    table = pd.DataFrame(rows)
    table = table[columns + [each for each in table if each not in columns]]
    table["rounds_of_a_mean"] = table["rounds_of_a_mean"].astype("Int64")
    common.publish(options, table, draw(table), finding(table))


def in_centre(seed: int) -> Exchange:
    """Return a centre that no message is lost on the way to."""
    return at_centre(STUDY.sites)


def over(graph: str, messages: str, rounds: int) -> Connect:
    """Return what connects sites over a graph, with some rounds to a mean."""

    def connect(seed: int) -> Exchange:
        topology = choose("--topology", GRAPHS[graph], topologies.TOPOLOGIES)
        metropolis = topologies.MIXINGS["metropolis"]
        generator = randomness.generator(seed, "topology")
        weights = topologies.build(topology, metropolis, STUDY.sites, generator).weights
        faults = (LinkLoss(p=0.3),) if messages == "30 % lost" else ()
        network = Network(
            Layout(STUDY.sites, 1),
            MixingMatrices(weights),
            World(),
            ThreatModel(Exact(), faults=faults),
            seed,
        )
        return (ScaledGraph if messages == "8 bits" else Graph)(network, rounds=rounds)

    return connect


def measured(
    study: Study, estimator: Estimator, connect: Connect
) -> tuple[Outcomes, dict[str, float]]:
    """Return the estimates of the first site, and what each site sent for one repetition."""
    nets: list[Exchange] = []

    def kept(sites: int) -> Exchange:
        nets.append(connect(len(nets)))
        return nets[-1]

    outcomes = study.estimate(estimator, kept, at_once=PART)
    sent = sum(net.network.traffic.payload.mean() for net in nets) / study.repetitions
    rounds = np.mean([net.t for net in nets])
    return outcomes, {"rounds": float(rounds), "bytes": float(sent)}


def row(study: Study, outcomes: Outcomes, pooled: Outcomes) -> dict[str, Any]:
    """Return the figures of an estimator, each with its Monte-Carlo standard error."""
    kept = np.isfinite(outcomes.beta).all(1) & np.isfinite(outcomes.errors).all(1)
    n = int(kept.sum())
    if n < 2:
        return {"repetitions": n}
    error, reference = (each.beta[kept] - study.beta for each in (outcomes, pooled))
    square, best = (np.square(each).mean(1) for each in (error, reference))
    away = np.square(error - reference).mean(1)
    covers = np.abs(error) < 1.959964 * outcomes.errors[kept]
    excess, excess_se = relative(square - best, best)
    distance, distance_se = relative(away, best)
    return {
        "repetitions": n,
        "excess": excess, "excess_se": excess_se,
        "from_pooled": distance, "from_pooled_se": distance_se,
        "coverage": covers.mean(), "coverage_se": standard_error(covers.mean(1)),
    }  # fmt: skip


def finding(table: pd.DataFrame) -> str:
    """Return the finding, read off the table."""
    most = int(table.loc[table["estimator"] == "tilted score", "rounds_of_a_mean"].max())
    last = table[(table["estimator"] == "tilted score") & (table["rounds_of_a_mean"] == most)]
    parts = [
        f"{graph} "
        + ", ".join(
            f"{each['from_pooled']:.1e} ({each['messages']}, {each['bytes']:,.0f} bytes)"
            for each in own.to_dict("records")
        )
        for graph, own in common.groups(last, ["graph"])
    ]
    server = table.set_index("estimator").loc["tilted score, all lead"]
    return (
        f"after {most} rounds of a mean the mean square distance from the pooled estimate, over "
        f"that estimate's mean square error, is on {'; '.join(parts)}; with a centre it is "
        f"{server['from_pooled']:.1e} for {server['bytes']:,.0f} bytes."
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw the distance from the pooled estimate by rounds and by bytes, and the coverage."""
    figure = Figure(figsize=(13.5, 5), layout="constrained")
    by_rounds, by_bytes, coverage = figure.subplots(1, 3)
    panels = (
        (by_rounds, "rounds", "from_pooled"),
        (by_bytes, "bytes", "from_pooled"),
        (coverage, "rounds", "coverage"),
    )
    own = table[table["graph"] != "centre"]
    styles = {"float64": "-o", "30 % lost": "--s", "8 bits": ":^", "tracking": "-.x"}
    for (graph, rows), colour in zip(common.groups(own, ["graph"]), common.COLOURS, strict=False):
        kinds = rows["messages"].where(rows["estimator"] == "tilted score", "tracking")
        for kind, style in styles.items():
            for axes, x, y in panels:
                some = rows[kinds == kind]
                label = f"{graph}, {kind}"
                axes.plot(some[x], some[y], style, color=colour, markersize=4, label=label)
    lines = {"meta": "0.6", "tilted score, all lead": "0.2"}
    for (name, shade), (axes, x, y) in ((a, b) for a in lines.items() for b in panels):
        (centre,) = table[table["estimator"] == name].to_dict("records")
        axes.plot(centre[x], centre[y], "*", color=shade, markersize=11, label=f"centre, {name}")
    for axes, x, _ in panels:
        what = "rounds of messages" if x == "rounds" else "bytes that a site sends"
        axes.set(xscale="log", xlabel=what)
    for axes in (by_rounds, by_bytes):
        axes.set(
            yscale="log", ylim=(1e-8, 1e3), ylabel="square distance from pooled / its square error"
        )
    coverage.axhline(0.95, color="0.6", linewidth=0.8)
    coverage.set(ylabel="coverage of 95 % intervals")
    title = f"The tilted score over graphs of {STUDY.sites} sites with {STUDY.n} examples each"
    common.caption(figure, by_rounds, f"{title} (tracking: gradient tracking)", 5)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(page, "inference.graph"))
