"""Label coverage of neighbourhoods, beside the spectral gap, as explanation of accuracy.

Bounds on gossip have the graph by its spectral gap, which does not depend on the data. D-Cliques
(Bellet, Kermarrec, Lavoie, SRDS 2022) argue from the labels in a neighbourhood instead.

Command, 33 runs of 19 s; 11 minutes of a core that other programs shared:

    python -m experiments.messages_and_graphs.label_coverage --data-dir DIR --jobs 1

Finding: within the other graphs together the coverage is NOT shown to explain the accuracy; on the
ring it does. Over 13 seeds of the ring, which all have the same gap, the correlation of coverage
and accuracy is 0.92 (95 % interval 0.73 to 0.97): the coverage is 5.25 to 6.38 labels, the accuracy
0.500 to 0.655, in the mean 0.567 ± 0.031. Within chain, star and torus, five seeds each, it is 0.46
(-0.12 to 0.81); on the complete graph the coverage is the same in every run. From graph to graph
the coverage orders the accuracy better than the gap does: over all 33 runs the rank correlation is
0.98 with the coverage and 0.54 with the gap, over the means of the five graphs 1.00 and 0.70. The
star contradicts the gap: it has a larger one than the ring (0.062 and 0.051), and less than half
the accuracy (0.261 and 0.567), with a coverage of 4.4 and 5.8. The chain has a quarter of the gap
of the ring, a coverage of 5.6 and an accuracy of 0.534. The experiment does not separate the
coverage from the number of neighbours, with which it rises from graph to graph, nor from their
weights: a leaf of the star gives its one neighbour 1/16. What follows ± is half the 95 % confidence
interval over seeds.

Grid: the ring at 13 seeds, chain, star, torus (4 x 4) and complete graph at five, in the standard
setting: MNIST, 16 peers, Metropolis weights, two label shards of 300 examples each, 2NN, learning
rate 0.01, momentum 0.9, batches of 50, one local epoch, 50 rounds. The partition, and so the
coverage, is another at every seed. The label coverage of a peer is the number of distinct labels,
of 10, among the training examples of the peer and of its neighbours; that of a run is its mean over
the peers, and `coverage_min` its minimum. Accuracies are on 2,000 test examples.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from scipy.sparse import csr_array

import topologies
from dfl.core import randomness
from dfl.core.registry import choose
from dfl.simulation import distribute_data
from dfl.simulation.components import sources_of
from dfl.simulation.defaults import settle
from dfl.sweep import Cell
from experiments import common

RING = "ring"
"""The graph with more seeds than the others."""
GRAPHS = (RING, "chain", "star", "torus", "complete")
"""The graphs, as --topology of dfl.run."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/label_coverage")
    seeds: int = 13
    """Number of seeds of the ring, from 0."""
    others: int = 5
    """Number of seeds of every other graph, from 0."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy by label coverage and by spectral gap."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(
        options.out, grid(options), jobs=options.jobs, in_process=options.jobs == 1
    )
    seeds = by_seed(rows, options)
    table, found = tabulate(seeds), correlations(seeds)
    common.publish(options, table, draw(seeds, options), finding(table, found), seeds)
    found.to_csv(options.out / "correlations.csv", index=False, float_format="%.6g")


def grid(options: Options) -> list[Cell]:
    """Return a cell for every graph and seed."""
    return [
        Cell(
            {"graph": graph, "seed": seed},
            common.standard(
                options,
                topology=graph,
                seed=seed,
                eval_every=options.rounds,
                eval_examples=common.SUBSETS.get(options.dataset),
            ),
        )
        for graph in GRAPHS
        for seed in range(options.seeds if graph == RING else options.others)
    ]


def by_seed(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per run: its spectral gap, its label coverage and its accuracy at the end."""
    counts = {seed: label_counts(options, seed) for seed in map(int, rows["seed"].unique())}
    each = common.by_seed(rows, ["graph"])
    known = []
    for graph, seed in zip(each["graph"], each["seed"], strict=True):
        network = network_of(graph, seed)
        (weights,) = network.weights
        labels = coverage(weights, counts[seed])
        known.append((network.spectrum.gap, labels.mean(), labels.min()))
    about = pd.DataFrame(known, columns=["spectral_gap", "coverage", "coverage_min"])
    return pd.concat(
        [each[["graph", "seed"]], about, each[["accuracy_mean", "accuracy_min"]]], axis=1
    )


def label_counts(options: Options, seed: int) -> NDArray[np.int64]:
    """Return the training examples of every label at every peer, (P, labels), of a seed's runs."""
    run = settle(common.standard(options, seed=seed), 1)
    return distribute_data.count_labels(*distribute_data.read(run, sources_of(run), None))


def network_of(graph: str, seed: int) -> topologies.WeightedGraph:
    """Return the graph with Metropolis weights that a run has."""
    return topologies.build(
        choose("--topology", graph, topologies.TOPOLOGIES),
        topologies.MIXINGS["metropolis"],
        common.PEERS,
        randomness.generator(seed, "topology"),
    )


def coverage(weights: csr_array, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of distinct labels among the training examples of every peer and of those
    that it receives from, (P,).

    Args:
        weights: the mixing matrix, (P, P).
        counts: the training examples of every label at every peer, (P, labels).
    """
    near = (weights.toarray() != 0) | np.eye(len(counts), dtype=np.bool_)
    known = near.astype(np.int64) @ (counts > 0).astype(np.int64)
    return np.asarray(np.count_nonzero(known, axis=1), np.int64)


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per graph: means over the seeds, and the correlation of accuracy and coverage
    over them with its 95 % interval; NaN where the coverage is the same at every seed.
    """
    each = seeds.groupby("graph", sort=False)
    table = pd.DataFrame(
        {
            "spectral_gap": each["spectral_gap"].mean(),
            "seeds": each.size(),
            "coverage": each["coverage"].mean(),
            "coverage_std": each["coverage"].std(),
            "coverage_min": each["coverage_min"].mean(),
            "accuracy": each["accuracy_mean"].mean(),
            "accuracy_std": each["accuracy_mean"].std(),
            "worst_peer": each["accuracy_min"].mean(),
        }
    )
    found = [pearson(own["coverage"], own["accuracy_mean"]) for _, own in each]
    columns = ["correlation", "correlation_low", "correlation_high"]
    return table.assign(**dict(zip(columns, zip(*found, strict=True), strict=True))).reset_index()


def pearson(
    x: pd.Series[float], y: pd.Series[float], groups: int = 1
) -> tuple[float, float, float]:
    """Return the Pearson correlation and its 95 % interval by Fisher's z, whose variance is
    1 / (n - groups - 2); NaN where x is constant, or the interval needs more runs.

    Args:
        x, y: figures of n runs.
        groups: the number of means that were subtracted from each of them, at least one.
    """
    if np.ptp(x) < 1e-12:
        return math.nan, math.nan, math.nan
    r = float(stats.pearsonr(x, y).statistic)
    free = len(x) - groups - 2
    if free < 1:
        return r, math.nan, math.nan
    half = stats.norm.ppf((1 + common.LEVEL) / 2) / math.sqrt(free)
    return r, math.tanh(math.atanh(r) - half), math.tanh(math.atanh(r) + half)


def correlations(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return the correlations of accuracy with the coverage and with the gap.

    Within graphs they are Pearson's, of differences from the means of each graph. Graphs whose
    coverage is the same in every run, as the complete graph's, are left out of these. Over all
    runs, and over the means of the graphs, they are Spearman's and have no interval, since graphs
    are few and runs of one graph are not independent.
    """
    columns = ["spectral_gap", "coverage", "accuracy_mean"]
    ring = seeds["graph"] == RING
    rows = []
    within = {"the ring": seeds[ring], "the other graphs": seeds[~ring], "all graphs": seeds}
    for over, runs in within.items():
        varies = runs.groupby("graph")["coverage"].transform(np.ptp) > 0
        own = runs[varies] if varies.any() else runs
        inside = own[columns] - own.groupby("graph")[columns].transform("mean")
        found = pearson(inside["coverage"], inside["accuracy_mean"], own["graph"].nunique())
        rows.append((f"within {over}", "pearson", "coverage", len(own), *found))
    means = seeds.groupby("graph", sort=False)[columns].mean()
    for over, own in (("runs", seeds), ("graphs", means)):
        for column in ("spectral_gap", "coverage"):
            r = float(stats.spearmanr(own[column], own["accuracy_mean"]).statistic)
            rows.append((over, "spearman", column, len(own), r, math.nan, math.nan))
    names = ["over", "kind", "with", "points", "correlation", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def finding(table: pd.DataFrame, found: pd.DataFrame) -> str:
    """Return the correlations, and accuracy and coverage by graph."""
    by = common.by_label(found, ["over", "with"])
    ranks = "; ".join(
        f"over {by[over, 'coverage']['points']} {over} "
        f"{by[over, 'spectral_gap']['correlation']:.2f} with the gap and "
        f"{by[over, 'coverage']['correlation']:.2f} with the coverage"
        for over in ("runs", "graphs")
    )
    graphs = ", ".join(
        f"{row['graph']} {row['accuracy']:.3f} (gap {row['spectral_gap']:.3f}, coverage "
        f"{row['coverage']:.2f})"
        for row in table.sort_values("spectral_gap").to_dict("records")
    )
    shown = "; ".join(
        f"the coverage {_explains(row)} the accuracy {over}, {row['points']} runs: {_number(row)}"
        for (over, _), row in by.items()
        if row["kind"] == "pearson"
    )
    return f"{shown}. Rank correlations of the accuracy: {ranks}. By rising gap: {graphs}."


def _explains(row: Mapping[str, Any]) -> str:
    return "explains part of" if row["low"] > 0 else "is NOT shown to explain"


def _number(row: Mapping[str, Any]) -> str:
    return f"{row['correlation']:.2f} (95 % interval {row['low']:.2f} to {row['high']:.2f})"


def draw(seeds: pd.DataFrame, options: Options) -> Figure:
    """Draw the accuracy by coverage and by gap, a point per run."""
    figure = Figure(figsize=(10.5, 4.8), layout="constrained")
    by_coverage, by_gap = figure.subplots(1, 2, sharey=True)
    for (graph, own), colour, marker in zip(
        common.groups(seeds, ["graph"]), common.COLOURS, "osv^D", strict=False
    ):
        style = {"color": colour, "linestyle": "", "marker": marker, "alpha": 0.8}
        by_coverage.plot(own["coverage"], own["accuracy_mean"], label=graph, **style)
        by_gap.plot(own["spectral_gap"], own["accuracy_mean"], **style)
    by_coverage.set(
        xlabel="label coverage: labels in a neighbourhood, mean over the peers",
        ylabel="accuracy, mean over the peers",
    )
    by_gap.set(xlabel="spectral gap of the mixing matrix (per round)", xscale="log")
    by_gap.xaxis.set_major_formatter("{x:g}")
    title = f"Label coverage: {options.dataset}, 16 peers, two label shards each, a marker per run"
    common.caption(figure, by_coverage, title, len(GRAPHS))
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.label_coverage"))
