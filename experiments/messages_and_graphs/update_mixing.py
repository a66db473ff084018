"""Mixing of updates, as published, compared with mixing of models.

The published exchange is x_i <- x_i + sum_j w_ij Q(z_j - x_j): a neighbour's update is added to
the peer's own model, and the models themselves are never averaged. The replica form averages
them: x_i <- z_i + sum_j w_ij y_j - y_i.

Command, 60 runs, four minutes of a core:

    python -m experiments.messages_and_graphs.update_mixing

Finding: with the published form the peers do not reach consensus. Means over the last tenth of 50
rounds on digits: with Metropolis weights the published form has a consensus distance of 9.82, and
growing (7.65 in round 25), at an accuracy of 0.362; replicas 0.96, and shrinking, at 0.744. With
neighbors it is 297 and 0.135 against 2.09 and 0.823. Lazy weights have no negative eigenvalue: the
distance hardly grows any more (2.40 in round 25, 2.53), each peer at its own optimum (0.233),
against 1.29 and 0.531. 8 bits change the peers' accuracy by 0.003 at most in the mean (by 0.022 at
one seed), so the form is the cause, not the quantizer; they change the mean model of the published
form by 0.012 in the mean (metropolis; by 0.058 at one seed). On the quadratic the distance of the
published form grows by a factor of 1.095 (neighbors) and 1.031 (metropolis) a round, in theory
1.096 and 1.032, to 2.5e7 and 156 after 200 rounds, replicas stay at 0.187 and 0.233; the mean of
all peers is right throughout there. On digits the mean model looks fine for some rounds only
(metropolis: 0.76 in round 6, 0.538 at the end, replicas 0.913), since gradients are taken ever
further from it.

Grid: both exchanges, in float32 and in 8 bits, with three mixing matrices on the ring: neighbors
(zero diagonal, as in slides 003; lambda_min -1), metropolis (-1/3), lazy (1/3), five seeds.

- Digits in their standard setting: 16 peers, two label shards each, a multilayer perceptron,
  learning rate 0.05, momentum 0.9, batches of 10, one local epoch, 50 rounds, each evaluated.
  `--dataset mnist --data-dir DIR` runs the same on MNIST, with 2,000 of its test examples.
- A quadratic with a known solution: peer i minimises ||x - c_i||^2 / 2 over 100 coordinates, c_i
  standard normal; 5 steps of learning rate 0.02 without momentum, 200 rounds. With a = 1 - (1 -
  0.02)^5 a mode of W with eigenvalue l grows by 1 - a l per round under update mixing: without
  bound where l < 0, and where l > 0 every peer goes to its own optimum.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import dfl
import topologies
from dfl.config import Run
from dfl.core import randomness
from dfl.sweep import Cell
from experiments import common

METHODS = {
    "published, float32": ("qdfedavgm:exchange=paper", "none"),
    "published, 8 bits": ("qdfedavgm:exchange=paper", "quantize:bits=8"),
    "replica, float32": ("qdfedavgm", "none"),
    "replica, 8 bits": ("qdfedavgm", "quantize:bits=8"),
}
STYLES = dict(
    zip(
        METHODS,
        (("#D55E00", "-"), ("#E69F00", "--"), ("#0072B2", "-"), ("#56B4E9", "--")),
        strict=True,
    )
)
LABELS = ["mixing", "method"]
LR = 0.02
STEPS = 5
COORDINATES = 100
EVALUATE_EVERY = 10
"""The quadratic: learning rate, local steps, coordinates, and rounds between evaluations."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    dataset: str = "digits"
    out: Path = Path("results/update_mixing")
    quadratic_rounds: int = 200
    """Rounds on the quadratic."""
    mixings: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        "neighbors",
        "metropolis",
        "lazy",
    )
    """Mixing matrices to compare, as --mixing of dfl.run."""


class Centre(nn.Module):
    """x - c for an example c."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        """Return x - c."""
        return self.x - c


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the consensus distance by round of the published and the replica form."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    exact = quadratics(options)
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    table = tabulate(rows, exact)
    seeds = common.by_seed(rows, LABELS)
    common.publish(options, table, draw(rows, exact, options), finding(table, options), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every mixing matrix, method and seed."""
    change = partial(
        common.standard, options, eval_every=1, eval_examples=common.SUBSETS.get(options.dataset)
    )
    return [
        Cell(
            {"mixing": mixing, "method": method, "seed": seed},
            change(mixing=mixing, algorithm=algorithm, compressor=compressor, seed=seed),
        )
        for seed in range(options.seeds)
        for mixing in options.mixings
        for method, (algorithm, compressor) in METHODS.items()
    ]


def quadratics(options: Options) -> pd.DataFrame:
    """Return the rows of every mixing matrix and method on the quadratic, with the consensus
    distance per coordinate as `distance`.
    """
    tables = []
    for mixing in options.mixings:
        for method, (algorithm, compressor) in METHODS.items():
            rows = pd.DataFrame(quadratic(mixing, algorithm, compressor, options.quadratic_rounds))
            rows["distance"] = rows["consensus_distance"] / COORDINATES**0.5
            tables.append(rows.assign(mixing=mixing, method=method))
    return pd.concat(tables, ignore_index=True)


def quadratic(mixing: str, algorithm: str, compressor: str, rounds: int) -> list[dict[str, float]]:
    """Return the rows of one run on the quadratic, one per EVALUATE_EVERY rounds."""
    run = Run(
        peers=common.PEERS,
        mixing=mixing,
        algorithm=algorithm,
        compressor=compressor,
        rounds=rounds,
        eval_every=EVALUATE_EVERY,
        lr=LR,
        momentum=0.0,
        batch_size=0,
        local_steps=STEPS,
    )
    centres = np.random.default_rng(0).normal(size=(common.PEERS, COORDINATES))
    labels = np.zeros(common.PEERS, np.int64)
    data = dfl.Data(centres, labels, centres[:1], labels[:1], classes=0)
    return list(
        dfl.simulate(
            replace(run, model=Centre(), dataset=data, loss=lambda out, _: out.square().sum(-1) / 2)
        )
    )


def smallest_eigenvalue(mixing: str) -> float:
    """Return lambda_min of a mixing matrix on the ring."""
    rng = randomness.generator(0, "topology")
    network = topologies.build(
        topologies.TOPOLOGIES["ring"], topologies.MIXINGS[mixing], common.PEERS, rng
    )
    return network.spectrum.smallest


def growth(mixing: str) -> float:
    """Return the largest factor by which update mixing scales a mode of W in a round of the
    quadratic.
    """
    return 1 - (1 - (1 - LR) ** STEPS) * smallest_eigenvalue(mixing)


def tabulate(rows: pd.DataFrame, exact: pd.DataFrame) -> pd.DataFrame:
    """Return a row per mixing matrix and method: accuracy and consensus distance on the data set,
    then the consensus distance on the quadratic.
    """
    table = common.summary(rows, LABELS).drop(columns=["MB_per_peer", "worst_peer"]).reset_index()
    table.insert(1, "lambda_min", table["mixing"].map(smallest_eigenvalue))
    end = common.ends(rows, [*LABELS, "seed"]).groupby(LABELS, sort=False)
    half = rows[rows["round"] == rows["round"].max() // 2].groupby(LABELS, sort=False)
    table["mean_model"] = end["accuracy_mean_model"].mean().to_numpy()
    table["consensus_distance_halfway"] = half["consensus_distance"].mean().to_numpy()
    table["consensus_distance"] = end["consensus_distance"].mean().to_numpy()
    each = exact.groupby(LABELS, sort=False)["distance"]
    table["quadratic_distance"] = each.last().to_numpy()
    table["quadratic_growth"] = each.agg(
        lambda distance: (distance.iloc[-1] / distance.iloc[-2]) ** (1 / EVALUATE_EVERY)
    ).to_numpy()
    published = table["method"].str.startswith("published")
    table["theory_growth"] = (
        table["mixing"].map(growth).where(published & (table["lambda_min"] < 0))
    )
    return table


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding on the published form, by mixing matrix."""
    cells = common.by_label(table, LABELS)
    parts = [
        _of_mixing(mixing, *(cells[mixing, method] for method in METHODS))
        for mixing in options.mixings
    ]
    return f"over {options.seeds} seeds and {options.rounds} rounds, " + "; ".join(parts) + "."


def _of_mixing(mixing: str, *cells: dict[str, Any]) -> str:
    """Return the comparison on one matrix; the cells are those of METHODS, in their order."""
    paper, _, replica, short = cells
    theory = ""
    if paper["lambda_min"] < 0:
        theory = (
            f", growing by {paper['quadratic_growth']:.3f} a round "
            f"(theory {paper['theory_growth']:.3f})"
        )
    return (
        f"{mixing} (lambda_min {paper['lambda_min']:.2f}): update mixing ends at a consensus "
        f"distance of {paper['consensus_distance']:.2f} (halfway "
        f"{paper['consensus_distance_halfway']:.2f}) "
        f"at {paper['accuracy']:.3f} each and {paper['mean_model']:.3f} for their mean model; "
        f"replicas {replica['consensus_distance']:.2f} (halfway "
        f"{replica['consensus_distance_halfway']:.2f}) at {replica['accuracy']:.3f} and "
        f"{replica['mean_model']:.3f}, in 8 bits {short['accuracy']:.3f}; on the quadratic "
        f"{paper['quadratic_distance']:.3g} against {replica['quadratic_distance']:.3g}{theory}"
    )


def draw(rows: pd.DataFrame, exact: pd.DataFrame, options: Options) -> Figure:
    """Draw a column per mixing matrix: consensus distance, accuracy of the peers and of their mean,
    and the quadratic.
    """
    figure = Figure(figsize=(13, 9.5), layout="constrained")
    panels = figure.subplots(3, len(options.mixings), sharey="row", squeeze=False)
    for column, mixing in zip(panels.T, options.mixings, strict=True):
        _column(column, rows[rows["mixing"] == mixing], exact[exact["mixing"] == mixing])
        column[0].set_title(f"{mixing}, $\\lambda_{{min}}$ = {smallest_eigenvalue(mixing):.2f}")
    names = (
        f"distance of the peers from\ntheir mean, {options.dataset}",
        f"accuracy, {options.dataset}\n(thin: of the mean model)",
        "distance per coordinate,\nquadratic",
    )
    for axes, name in zip(panels[:, 0], names, strict=True):
        axes.set_ylabel(name)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(METHODS))
    figure.suptitle(
        f"Mixing updates or models: 16 peers on a ring, two label shards each, "
        f"{options.seeds} seeds"
    )
    return figure


def _column(column: Sequence[Axes], rows: pd.DataFrame, exact: pd.DataFrame) -> None:
    """Draw the panels of one mixing matrix, from top to bottom."""
    for method, (colour, line) in STYLES.items():
        style = {"color": colour, "linestyle": line}
        own = rows[rows["method"] == method]
        common.curve(
            column[0], own[own["round"] > 0], ("round", "consensus_distance"), label=method, **style
        )
        common.curve(column[1], own, ("round", "accuracy_mean"), **style)
        common.curve(
            column[1], own, ("round", "accuracy_mean_model"), linewidth=0.8, alpha=0.7, **style
        )
        common.curve(
            column[2],
            exact[(exact["method"] == method) & (exact["round"] > 0)],
            ("round", "distance"),
            **style,
        )
    for axes in column:
        axes.set_xlabel("round")
    column[0].set_yscale("log")
    column[2].set_yscale("log")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.update_mixing"))
