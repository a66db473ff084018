"""Accuracy and bytes by the number of layers that devices share, at the input or at the output of
an MLP.

The question is that of alpha in Liang et al., "Think Locally, Act Globally", 2020: which part of
a model should be shared. In Figure 2d of its later version a split between the extremes wins on
private data, which are not public; this is the same experiment on MNIST.

Command, 45 runs, two minutes on two idle cores:

    python -m experiments.personal_layers.lg_depth --data-dir DIR

Finding: the position of the split matters little; on their own labels, that there is a split
matters a lot. With any personal part, devices have 96.9 to 97.6 % of their own two labels right,
with FedAvg, which shares all, 93.1 %. The best is in between, as published, with two layers at the
input (97.6 %), but nothing shared at all has 97.2 %, and one layer at the output (97.4 %) is better
than nothing for each of 5 seeds, by 0.01 to 0.55 points, and sends 0.8 MB where FedAvg sends 136.
Sharing three layers at the output is worse than sharing one (96.9 %). On the new test, by the mean
output of all models, layers shared at the output are no better than FedAvg (93.1 % each), and
layers at the input are a little better (93.6 to 93.7 %, with a std of 0.4 to 0.5 over the seeds,
FedAvg 0.6). This is no limit of FedAvg, which rose from 89.8 % in round 60 to 93.1 % over rounds 88
to 90, and falls in single ones. Single models are the less accurate on the new test the less is
shared: 58 % with nothing, 68 to 69 % with one layer, 81 to 83 % with three.

Grid: MNIST, 100 devices of 300 examples, two label shards each; 784-64-64-32-10; FedAvg with a
tenth of the devices in a round for 60 rounds, then 30 rounds with each split from the same
models; one epoch a round, batches of 10, learning rate 0.05, momentum 0.5; five seeds, lengths
fixed beforehand. Local test is the mean over the devices on their own parts of the test set, new
test is of 2,000 test examples by the mean output. Published for MNIST: 512, 256, 256 and 128
hidden units, all examples, 400 rounds before and 50 of the split: `--hidden 512+256+256+128
--examples 600 --before 400 --rounds 50 --seeds 10`, not run here.
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

from dfl.config import Run
from dfl.sweep import Cell, run_grid
from experiments import common
from experiments.personal_layers.accuracies import by_seeds

SERVER = "fedavg:fraction=0.1"


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/lg_depth")
    rounds: int = 30
    """Rounds in which a part is shared."""
    before: int = 60
    """Rounds before, in which everything is shared."""
    devices: int = 100
    """Number of devices."""
    examples: int = 300
    """Training examples of each device."""
    hidden: str = "64+64+32"
    """Units of the hidden layers."""
    look: int = 2000
    """Number of test examples of the new test."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure local test, new test and bytes by the shared part."""
    before = [
        Cell({"share": "before", "seed": seed}, first(options, seed))
        for seed in range(options.seeds)
    ]
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options), before)
    run_grid(before, options.out / "cells", jobs=options.jobs)
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    seeds = by_seed(rows)
    table = tabulate(seeds)
    common.publish(options, table, draw(table, options), finding(table), seeds)


def setting(options: Options, seed: int, **changes: Any) -> Run:
    """Return a run of devices with two label shards each, a tenth of which train in a round."""
    shared_settings: dict[str, Any] = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "peers": options.devices,
    }
    data: dict[str, Any] = {
        "partition": "shards:per_peer=2",
        "examples_per_peer": options.examples,
        "eval_examples": options.look,
    }
    learning: dict[str, Any] = {
        "model": f"mlp:hidden={options.hidden}",
        "batch_size": 10,
        "lr": 0.05,
        "momentum": 0.5,
        "seed": seed,
    }
    return Run(**shared_settings, **data, **learning, algorithm=SERVER, **changes)


def first(options: Options, seed: int) -> Run:
    """Return the run in which everything is shared, from which all splits continue."""
    return setting(options, seed, rounds=options.before, eval_every=options.before)


def folder(options: Options, seed: int) -> Path:
    """Return the folder of that run."""
    return common.cell_folder(options.out, share="before", seed=seed)


def splits(options: Options) -> tuple[str, ...]:
    """Return the values of --share: nothing, more and more layers at the output, then at the input,
    all.
    """
    k = range(1, len(options.hidden.split("+")) + 1)
    return ("nothing", *(f"head:{n}" for n in k), *(f"first:{n}" for n in k), "all")


def grid(options: Options) -> list[Cell]:
    """Return a cell for every split and seed."""
    continued: dict[str, Any] = {
        "rounds": options.rounds,
        "eval_every": options.rounds,
        "ensemble": True,
    }
    return [
        Cell(
            {"share": share, "seed": seed},
            setting(options, seed, share=share, init_from=folder(options, seed), **continued),
        )
        for seed in range(options.seeds)
        for share in splits(options)
    ]


def by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per split and seed at the end, and one per seed for the start."""
    labels = ["share", "seed"]
    ends = common.ends(rows, labels)
    begun = rows[rows["share"] == "all"].groupby(labels, sort=False).head(1).assign(share="before")
    figures = ["local_accuracy_mean", "accuracy_ensemble", "accuracy_mean", "payload_bytes"]
    return pd.concat([begun, ends], ignore_index=True)[[*labels, *figures]]


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per split, means and std over the seeds at the end, and one for the start."""
    return by_seeds(seeds, ["share"])


def finding(table: pd.DataFrame) -> str:
    """Return the best split by each test."""
    by = common.by_label(table[table["share"] != "before"], ["share"])
    parts = []
    for test in ("local_test", "new_test"):
        figures = {share: row[test] for share, row in by.items()}
        best = max(figures, key=lambda share: figures[share])
        ends = ", ".join(f"{end} {figures[end]:.1f} %" for end in ("nothing", "all"))
        parts.append(
            f"{test.replace('_', ' ')} is best with {best} ({figures[best]:.1f} %), ends: {ends}"
        )
    return "; ".join(parts) + "."


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw both tests and the bytes by the shared part."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    own = table[table["share"] != "before"]
    places = np.arange(len(own))
    for k, (column, name) in enumerate(
        (("local_test", "local test"), ("new_test", "new test, all models together"))
    ):
        style: dict[str, Any] = {
            "color": common.COLOURS[k],
            "marker": "o",
            "linestyle": "none",
            "label": name,
        }
        left.errorbar(places, own[column], own[f"{column}_std"], **style)
        left.axhline(
            float(table[column].iloc[0]), color=common.COLOURS[k], linestyle=":", linewidth=1
        )
    right.bar(places, own["MB"], color=common.COLOURS[2])
    for place, value in zip(places, own["MB"], strict=True):
        right.annotate(
            f"{value:.1f}",
            (place, value),
            (0, 3),
            textcoords="offset points",
            fontsize=8,
            ha="center",
        )
    for axes in (left, right):
        axes.set_xticks(places, own["share"].tolist(), rotation=45)
        axes.set_xlabel("shared part")
        axes.grid(axis="y", alpha=0.3)
    left.set(ylabel="right, %", title=f"after {options.rounds} rounds (dotted: before them)")
    right.set(ylabel="MB", title="sent in these rounds, up and down")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.suptitle(
        f"{options.dataset}, MLP {options.hidden}, {options.devices} devices with two label "
        f"shards, after {options.before} rounds of FedAvg"
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.lg_depth"))
