"""Which methods of decentralized optimisation serve the worst peer best where data differ?

The settings of two published comparisons, scaled to some six hours of one core: RelaySGD (Vogels
et al., "RelaySum for Decentralized Deep Learning on Heterogeneous Data", NeurIPS 2021, Table 2) and
Momentum Tracking (Takezawa et al., TMLR 2023).

Command, 344 runs of 56 s in this process; a run that is done is not run again, and the results
are written after each, so that it can be stopped at any time and called again:

    python -m experiments.methods.methods_cifar10 --data-dir DIR

Finding: with 4 classes each momentum tracking is NOT first, as it is in its notebook: DecentLaM's
mean over the peers is 4.6 ± 5.8 points larger, paired by seed. Every accuracy is far below the
published one, and the worst of 16 peers has 37 and 17 % with RelaySGD at alpha = 0.1 and 0.01 where
all-reduce has 59 and 60 %; published are 87 and 90 %. The five methods of RelaySGD's table have its
order in both cases, but with alpha = 0.01 the four without all-reduce are within their intervals.
With alpha = 1 all-reduce and QG-DSGDm are first and second, as published, and D2, RelaySGD and
D-PSGD are within 2.1 points of each other here and within 0.2 there. Of the methods that send to
neighbours RelaySGD serves the worst of 8 peers best where data differ much: by 15 points with alpha
= 0.01, by 5 with 0.1, which its interval does not exclude to be none. With alpha = 1 methods with
momentum are better: QG-DSGDm is 9.2 ± 4.9 points above it on 8 peers, where it is level with
all-reduce (+0.1 ± 3.0), and 12.2 ± 4.2 on 16, 3.3 ± 1.7 below all-reduce. CHOCO-SGD with a tenth of
the coordinates has the lowest accuracy of the worst peer wherever it runs. DFedAvgM with 5 steps,
at a fifth of the messages, is below D-PSGD in five of six cases, by more than its interval in two:
5.0 ± 4.0 and 3.1 ± 1.3 on 8 peers with alpha = 0.1 and 1. A ± is half a 95 % confidence interval of
a difference paired by seed, three seeds.

Grid, in this order: a ring of 8 peers with alpha = 0.1, with 4 classes for each peer, with alpha =
0.01 and 1; a ring of 16 with the same three alphas. Eleven methods, of which the published
comparisons have eight; within a case all methods with seed 0, then with seeds 1 and 2. LeNet
without normalisation, 62,006 parameters, batches of 32 images, not augmented; 1,600 local steps of
each of 8 peers or 800 of each of 16, which is 9 epochs; a constant learning rate, one local step a
round, momentum 0.9 where a method has momentum. DFedAvgM takes 5 local steps a round and a fifth of
the rounds, and CHOCO-SGD sends a tenth of the coordinates. DSGDm on a complete graph is the SGD
with momentum that all peers would do together. Dirichlet's parts are cut into equal parts, as in
RelaySGD's code.

The figure of a run is the mean over its last three evaluations, after three quarters of the rounds,
seven eighths and all, of the worst peer's accuracy, on 1,000 test images that depend on the seed.
Rates are multiples of about 3, chosen per method and case by the same figure with seed 0, on a
tenth of the training images that no run trains on; with 16 peers those of 8 peers are taken.

Published figures stand beside those here where graph, peers, partition and method are the same. All
are of a larger setting, so only the order of the methods can be compared:

- RelaySGD's Table 2, as its released notebook printed it, is of VGG-11 with random crops and flips,
  weight decay, 200 epochs and a learning rate that is divided by 10 twice; rates were chosen by the
  figure itself, on test images; and the mean over the last epochs is taken of each peer before the
  minimum over the peers. Its rows with momentum, but for all-reduce and QG-DSGDm, are of methods
  with local momentum that is kept between rounds, which D2 and RelaySGD do not have here; SGP's and
  those of binary trees are of other graphs.
- Momentum Tracking's figures are those of its released notebook: LeNet with group normalisation,
  random crops, flips and erasing, batches of 100, 500 epochs, one seed, and the mean over the peers
  in place of the worst, so `mean_peer` is what stands against them. Peers have four different
  classes there; here one may draw a class twice. The tables of the paper itself could not be read.
- The tables of QG-DSGDm (Lin et al., ICML 2021) are of ResNet-20 and could not be read either.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dfl
from dfl.config import Run
from dfl.sweep import Cell, run_grid
from experiments import common
from experiments.methods.cifar10_setting import CASES, METHODS

BATCH = 32
"""Examples of a local step, as in RelaySGD's runs."""
RATES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""The learning rates that may be chosen."""
EVALUATIONS = 8
"""Evaluations of a run after its start."""
LAST = 3
"""The last of them, of which a figure is the mean."""
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10": {"model": "lenet:fc2=84", "eval_examples": 1000},
    "digits": {"model": "mlp"},
}
"""Data set -> the settings that depend on it."""
LABELS = ["case", "method"]
COLUMNS = 3
"""Panels beside each other."""
PEERS = 8
"""The number of peers that take `Options.steps` local steps each."""
FIGURES = {
    "worst_peer": "accuracy_min",
    "mean_peer": "accuracy_mean",
    "consensus_distance": "consensus_distance",
}
"""Figure of a run -> column of metrics.csv, of whose last evaluations it is the mean."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/methods_cifar10")
    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    dataset: str = "cifar10"
    """The data set: cifar10, or digits for a quick look."""
    seeds: int = 3
    """Number of seeds, from 0."""
    steps: int = 1600
    """Local steps of each of 8 peers; 16 take half as many each."""
    cases: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(CASES)
    """The cases to run."""
    only: str | None = None
    """Run only the cell of this name, with the learning rate in it, and print its row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset not in SETTINGS:
            raise dfl.InputError(
                f"--dataset must be one of {', '.join(SETTINGS)}, not {self.dataset!r}"
            )
        common.among("cases", self.cases, CASES)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Compare the methods in every case; the results are written anew after every run that had not
    finished before, and after the last.
    """
    if options.only is not None:
        cells = {each.name: each for each in every(options)}
        row = measured(options.out, [common.named(options.only, cells)])
        return common.print_rows(row)
    tried: dict[tuple[str, str], pd.DataFrame] = {}
    ran: list[pd.DataFrame] = []
    runs = order(options)
    for case, seed, method in runs:
        tuned = CASES[case].rates_of or case, method
        if tuned not in tried:
            tried[tuned] = tune(options, *tuned)
        one = cell(options, case, method, seed, tried[tuned])
        finished = common.has_finished(options.out, one)
        ran.append(measured(options.out, [one]))
        if not finished or len(ran) == len(runs):
            write(options, pd.concat(tried.values()), pd.concat(ran, ignore_index=True))


def order(options: Options) -> list[tuple[str, int, str]]:
    """Return case, seed and method of the runs that count, in their order."""
    return [
        (case, seed, method)
        for case in options.cases
        for seed in range(options.seeds)
        for method in CASES[case].methods
    ]


def every(options: Options) -> list[Cell]:
    """Return the runs that count, with each learning rate that the search may choose."""
    return [
        cell(options, case, method, seed, pd.DataFrame({"lr": [lr], "validation": [1.0]}))
        for case, seed, method in order(options)
        for lr in RATES
    ]


def write(options: Options, tried: pd.DataFrame, seeds: pd.DataFrame) -> None:
    """Write the results of the methods that have run."""
    table = tabulate(options, seeds)
    common.publish(options, table, draw(table, seeds), finding(table, options), seeds)
    tried.to_csv(options.out / "tuning.csv", index=False, float_format="%.6g")


def run_of(options: Options, case: str, method: str, lr: float, **changes: Any) -> Run:
    """Return a run of a method in a case, with changes."""
    given = METHODS[method]
    rounds = options.steps * PEERS // CASES[case].peers // given.steps
    shared_settings: dict[str, Any] = {
        "data_dir": options.data_dir,
        "dataset": dataset(options),
        **SETTINGS[options.dataset],
        "topology": "ring",
        "batch_size": BATCH,
        "rounds": rounds,
        "eval_every": max(1, rounds // EVALUATIONS),
    }
    return Run(
        **{
            **shared_settings,
            "peers": CASES[case].peers,
            "partition": CASES[case].partition,
            "algorithm": given.algorithm,
            "momentum": given.momentum,
            "local_steps": given.steps,
            "lr": lr,
            **given.setting,
            **changes,
        }
    )


def dataset(options: Options, *, validate: bool = False) -> str:
    """Return the data set, tested on official test images or, to validate, on those held out."""
    return f"held_out:of={options.dataset},validate={str(validate).lower()}"


def tune(options: Options, case: str, method: str) -> pd.DataFrame:
    """Return a row per learning rate that was tried: the accuracy of the worst peer on the images
    that are held out.

    The search goes from the method's first rate to its neighbours in `RATES`, and on while the best
    rate, of equals the lowest, has a neighbour that was not tried. A run that diverged counts as 0.
    """
    found: dict[float, float] = {}
    new = [METHODS[method].rate]
    while new:
        cells = [
            Cell(
                {"case": case, "method": method, "lr": f"{lr:g}"},
                run_of(options, case, method, lr, dataset=dataset(options, validate=True)),
            )
            for lr in new
        ]
        ends = measured(options.out / "tuning", cells)
        found |= dict(zip(new, ends["worst_peer"].fillna(0.0), strict=True))
        at = RATES.index(max(sorted(found), key=found.__getitem__))
        new = [lr for lr in RATES[max(0, at - 1) : at + 2] if lr not in found]
    rows = [(lr, found[lr]) for lr in sorted(found)]
    return pd.DataFrame(rows, columns=["lr", "validation"]).assign(case=case, method=method)


def cell(options: Options, case: str, method: str, seed: int, tried: pd.DataFrame) -> Cell:
    """Return a run that counts, with the best of the learning rates that were tried."""
    lr = common.chosen(tried)
    return Cell(
        {"case": case, "method": method, "lr": f"{lr:g}", "seed": seed},
        run_of(options, case, method, lr, seed=seed),
    )


def measured(out: Path, cells: Sequence[Cell]) -> pd.DataFrame:
    """Run the cells that have not finished, one after the other, and return a row for each.

    Returns:
        The values of the cell and means over its last evaluations: accuracy of the worst peer and
        of all peers, consensus distance. They are NaN where a run diverged.
    """
    rows = run_grid(cells, out / "cells", in_process=True, report=False)
    found = []
    for cell in cells:
        own = rows[(rows[list(cell.values)] == pd.Series(cell.values)).all(axis=1)]
        last = own.tail(LAST).mean(numeric_only=True)
        whole = own["round"].max() == cell.run.rounds
        figures = {name: last[column] if whole else np.nan for name, column in FIGURES.items()}
        found.append({**cell.values, **figures})
    return pd.DataFrame(found)


def tabulate(options: Options, seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per case and method, also of those that have not run: means over the seeds, in
    percent, and the published figure.
    """
    each = dict(common.groups(seeds, LABELS))
    return pd.DataFrame(
        [
            _row(case, method, each.get((case, method), seeds.head(0)))
            for case in options.cases
            for method in CASES[case].methods
        ]
    )


def _row(case: str, method: str, seeds: pd.DataFrame) -> dict[str, Any]:
    worst = 100 * seeds["worst_peer"]
    published = CASES[case].published.get(method, np.nan)
    return {
        "case": CASES[case].title,
        "method": METHODS[method].title,
        "lr": ", ".join(seeds["lr"].unique()),
        "seeds": len(seeds),
        "diverged": int(worst.isna().sum()),
        "worst_peer": worst.mean(),
        "std_over_seeds": worst.std(),
        "mean_peer": 100 * seeds["mean_peer"].mean(),
        "consensus_distance": seeds["consensus_distance"].mean(),
        "published_full_setting": published,
        "source": "" if np.isnan(published) else CASES[case].source,
    }


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding: the worst peers of every case in order, and what is missing."""
    parts = [
        f"{case}: {_ranked(own, options.seeds)}" for case, own in common.groups(table, ["case"])
    ]
    return (
        "percent right of the worst peer, mean over the seeds that have finished and not diverged; "
        f"{table['seeds'].sum()} of {options.seeds * len(table)} runs have finished. "
        f"{'; '.join(parts)}."
    )


def _ranked(table: pd.DataFrame, seeds: int) -> str:
    """Return the methods of a case in order, and those of which runs are missing or diverged."""
    ran = table[table["seeds"] > table["diverged"]].sort_values("worst_peer", ascending=False)
    listed = ", ".join(f"{row['method']} {row['worst_peer']:.1f}" for row in ran.to_dict("records"))
    lacking = [
        (f"of {n} seed{'s' * (n > 1)} only" if n else "NOT run", table["seeds"] == n)
        for n in reversed(range(seeds))
    ]
    lacking += [
        (f"{n} run{'s' * (n > 1)} diverged", table["diverged"] == n) for n in range(1, seeds + 1)
    ]
    notes = [
        f"{what}: {', '.join(table[which]['method'])}" for what, which in lacking if which.any()
    ]
    if (table["seeds"] == 0).all():
        return "NOT run"
    return f"{listed} ({'; '.join(notes)})" if notes else listed


def draw(table: pd.DataFrame, seeds: pd.DataFrame) -> Figure:
    """Draw a panel per case that has run: the worst peer of every method, a dot per seed, and the
    published figure.
    """
    cases = list(seeds["case"].unique())
    columns = min(COLUMNS, len(cases))
    lines = -(-len(cases) // columns)
    figure = Figure(figsize=(13 / COLUMNS * columns, 3.8 * lines), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False, sharex=True).flat)
    for axes, case in zip(panels, cases, strict=False):
        own = table[(table["case"] == CASES[case].title) & (table["seeds"] > 0)]
        _panel(axes, own, seeds[seeds["case"] == case])
        axes.set_title(CASES[case].title)
        axes.tick_params(labelbottom=True)
    for axes in panels[len(cases) :]:
        axes.set_visible(False)
    figure.supxlabel("right on test images, worst peer (%); cross: published, see `source`")
    return figure


def _panel(axes: Axes, table: pd.DataFrame, seeds: pd.DataFrame) -> None:
    names = list(table["method"])
    axes.barh(names, table["worst_peer"], color=common.COLOURS[5])
    at = [names.index(METHODS[method].title) for method in seeds["method"]]
    axes.plot(100 * seeds["worst_peer"], at, ".", color=common.COLOURS[0])
    axes.plot(table["published_full_setting"], names, "x", color=common.COLOURS[1])
    axes.invert_yaxis()
    axes.set_xlim(0, 100)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "methods.methods_cifar10"))
