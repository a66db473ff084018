"""Rounds of FedAvg and FedSGD on CIFAR-10 beside the updates of SGD, with a smaller network.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, Table 3: SGD on all images, FedSGD and FedAvg to 80, 82 and 85 %, with a network of a
million parameters. Here it is LeNet with 64,102 parameters, and lower targets.

Command, an hour and a half of a core:

    python -m experiments.servers_and_robustness.cifar10_mcmahan2017 --data-dir DIR --jobs 2

Finding: with a smaller network and lower accuracies than published, the ratios are of the published
size. To 55 % FedAvg takes 47 ± 4 rounds, FedSGD 833 ± 6, 17.8 times as many (published, 3,750 and
280 to 80 %: 13.4), and SGD 2,430 ± 97 updates, 52 times as many (18,000: 64.3). To 45 % they are 27
and 71 times as many. What follows ± is a standard error over three seeds. FedAvg saves rounds and
not work: to 55 % SGD processes 0.24 million images, FedAvg 1.2, FedSGD 4.2. The rate of FedAvg,
0.215, is the largest of its three; that of SGD is 0.1, that of FedSGD 0.215.

Grid: CIFAR-10, 100 clients of 500 images, IID, ten of them in a round; LeNet, images cropped and
mirrored. FedAvg takes five epochs in a round with batches of 50, as published, FedSGD one step with
all images of a client, SGD batches of 100 of all 50,000 images; momentum 0. The learning rate is
constant (published: it decays by 0.99 a round with FedAvg and 0.9934 with FedSGD), and is chosen
among three by validation accuracy, as in `fedavg_mcmahan2017`, whose rules on rounds and runs
apply. A run ends at 55 %, or at a cap. An update of SGD is a round of communication, as published.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from experiments import common
from experiments.servers_and_robustness import fedavg_mcmahan2017
from experiments.servers_and_robustness.fedavg_mcmahan2017 import Case, every, measure

TARGETS = (0.45, 0.5, 0.55)
UPDATES = 100
"""Updates of SGD between evaluations, which are a round of its run."""
SHARED = {"model": "lenet", "augment": "crop_flip"}
CASES = {
    "fedavg": Case(
        title="FedAvg", published=280, source="Table 3", target=TARGETS[-1],
        setting=SHARED | {"local_epochs": 5, "batch_size": 50},
        rates=(0.0464, 0.1, 0.215), tuning=8, every=2, cap=120, seeds=3,
    ),
    "sgd": Case(
        title="SGD", published=18_000, source="Table 3", target=TARGETS[-1],
        setting=SHARED | {
            "peers": 1, "algorithm": "fedavg", "local_epochs": None, "local_steps": UPDATES,
            "batch_size": 100,
        },
        rates=(0.0464, 0.1, 0.215), tuning=20, every=2, cap=200, seeds=3,
    ),
    "fedsgd": Case(
        title="FedSGD", published=3750, source="Table 3", target=TARGETS[-1],
        setting=SHARED | {"batch_size": 0},
        rates=(0.1, 0.215, 0.464), tuning=150, every=25, cap=1200, seeds=3,
    ),
}  # fmt: skip
"""Published: rounds to 80 %; of SGD the updates."""
IMAGES = {"fedavg": 25_000, "sgd": 100, "fedsgd": 5000}
"""The images of a round, or of an update of SGD."""


@dataclass(frozen=True, kw_only=True)
class Options(fedavg_mcmahan2017.Options):
    """The options of this experiment."""

    known: ClassVar[Mapping[str, Case]] = CASES
    out: Path = Path("results/cifar10_mcmahan2017")
    dataset: str = "cifar10"
    cases: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(CASES)
    """The methods to compare."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the rounds of FedAvg, FedSGD and SGD to several accuracies."""
    if options.only is not None:
        return common.rerun(options.out, options.only, every(options))
    rows, tried = measure(options)
    seeds = by_seed(rows)
    table = tabulate(seeds)
    common.publish(options, table, draw(rows), finding(table), seeds)
    tried.to_csv(options.out / "tuning.csv", index=False, float_format="%.6g")


def by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: the rounds to each target, NaN where it is missed, and the best
    accuracy.
    """
    return pd.DataFrame(
        [
            {
                "case": name,
                "seed": seed,
                "lr": float(run["lr"].iloc[0]),
                **{
                    _column(target): common.rounds_to_accuracy(run, target) * _rounds(name)
                    for target in TARGETS
                },
                "best": run["accuracy_mean"].max(),
                "rounds_run": run["round"].max() * _rounds(name),
            }
            for (name, seed), run in common.groups(rows, ["case", "seed"])
        ]
    )


def _column(target: float) -> str:
    return f"rounds_to_{100 * target:.0f}"


def _rounds(name: str) -> int:
    """Return the rounds of communication that a round of a run stands for."""
    return UPDATES if name == "sgd" else 1


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method: the means over the seeds; NaN where a seed missed the target.
    `images` is to the last target, in millions; `times_fedavg` the rounds to it over those of
    FedAvg, ours and published.
    """
    last = _column(TARGETS[-1])
    means = seeds.groupby("case", sort=False)[last].mean()
    rows = []
    for name, own in common.groups(seeds, ["case"]):
        case = CASES[name]
        figures = {"case": case.title, "lr": own["lr"].iloc[0], "seeds": len(own)}
        for target in TARGETS:
            column = _column(target)
            figures[column] = own[column].mean(skipna=False)
            figures[f"{column}_std"] = own[column].std(skipna=False)
        figures["images"] = figures[last] * IMAGES[name] / 1e6
        figures["times_fedavg"] = figures[last] / means.get("fedavg", np.nan)
        figures["published_rounds_to_80"] = case.published
        figures["published_times_fedavg"] = case.published / CASES["fedavg"].published
        figures["best"] = own["best"].mean()
        figures["rounds_run"] = own["rounds_run"].max()
        rows.append(figures)
    return pd.DataFrame(rows)


def finding(table: pd.DataFrame) -> str:
    """Return the rounds of every method to the last target, in those of FedAvg, and published."""
    last, parts = _column(TARGETS[-1]), []
    for row in table.to_dict("records"):
        if np.isnan(row[last]):
            parts.append(f"{row['case']} NOT in {row['rounds_run']:.0f} rounds")
            continue
        times = (
            f", {row['times_fedavg']:.1f} times those of FedAvg (published, to 80 %: "
            f"{row['published_times_fedavg']:.1f})"
        )
        parts.append(f"{row['case']} {row[last]:.0f} rounds{times * (row['case'] != 'FedAvg')}")
    return (
        "LeNet in place of a network of a million parameters, to "
        f"{100 * TARGETS[-1]:.0f} %: {'; '.join(parts)}."
    )


def draw(rows: pd.DataFrame) -> Figure:
    """Draw accuracy against rounds of communication, a line per method and seed."""
    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for k, (name, own) in enumerate(common.groups(rows, ["case"])):
        for seed, run in common.groups(own[own["round"] > 0], ["seed"]):
            axes.plot(
                run["round"] * _rounds(name), 100 * run["accuracy_mean"], linewidth=1.2,
                color=common.COLOURS[k], label="" if seed else CASES[name].title,
            )  # fmt: skip
    axes.axhline(100 * TARGETS[-1], color="black", linestyle="--", linewidth=0.8)
    axes.set(xscale="log", xlabel="rounds; updates of SGD", ylabel="right on test images, %")
    axes.grid(alpha=0.3)
    common.caption(figure, axes, "CIFAR-10, LeNet, 100 clients, 10 in a round; a line is a seed", 3)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.cifar10_mcmahan2017"))
