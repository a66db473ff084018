"""FedAvg and LG-FedAvg on questions about images, with both encoders personal.

The claim is that of Table 2 and Figure 2 of Liang et al., "Think Locally, Act Globally"
(LG-FedAvg), on VQA: with the encoders of image and question on the devices, LG-FedAvg reaches the
accuracy of FedAvg on the devices' own data and sends less. Here it is easy-VQA, 13 answers about
one shape, and a small model, with the paper's rounds and its share of numbers that are sent, and
with three times the rounds.

Command, fifty minutes on a core:

    python -m experiments.personal_layers.easy_vqa --data-dir DIR --jobs 1

Finding: LG-FedAvg's lead on own questions is gone with three times the published rounds, -1.1 ± 7.2
points (79.6 % against 80.7 %), and with the published rounds it is 4.5 ± 1.5 points (75.7 % against
71.2 %), each time at 72 % of the bytes, the published share. On new questions, which its models
answer together as in the paper, it is 4.1 ± 3.4 points behind after the longer runs and level after
the others (0.3 ± 1.4); single models are 14.7 and 8.5 points behind. The longer runs differ by
seed: FedAvg has 65 to 91 % on own questions, and where it has least, with seed 4, LG-FedAvg is 8.4
points ahead. What follows ± is half the 95 % confidence interval of differences paired by seed, of
which there are five. The published rounds end before either method has converged: the question
alone allows 67 %, which FedAvg has by round 20.

Grid: easy-VQA, images of 16 x 16 pixels, 10 devices of 1,000 questions, answers by Dirichlet 1;
vqa of width 24, whose head is 9.5 % of its 9,733 numbers as in the paper, all devices in every
round, one epoch, batches of 25, learning rate 0.03, momentum 0.9, five seeds. FedAvg has 47
rounds; LG-FedAvg shares everything in 32 and the head in 17; `length` multiplies all three. Figures
are means over the last tenth of the rounds: local test is of a device's own part of the test set,
new test of the mean output of all models on 1,000 questions of it, and new_alone of single models.
Published, of local test: 50 devices, ResNet and LSTM encoders, 40.02 % with 13.97e10 numbers sent
against 40.94 % with 9.99e10.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.sweep import Cell
from experiments import common
from experiments.personal_layers import accuracies

METHODS = ("FedAvg", "LG-FedAvg")
LENGTHS = (1, 3)
"""Multiples of the published numbers of rounds."""
KIND = ["length", "method"]
"""What distinguishes the rows of the table."""
TESTS = {
    "local_accuracy_mean": "on own questions",
    "accuracy_ensemble": "on new ones by all models together",
    "accuracy_mean": "on new ones by single models",
}
"""Column of metrics.csv -> the test of which it is the accuracy."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/easy_vqa")
    dataset: str = "easy_vqa:side=16"
    """The data set, of images and questions."""
    rounds: int = 47
    """Rounds of FedAvg at length 1."""
    before: int = 32
    """Rounds at length 1 in which LG-FedAvg shares everything."""
    after: int = 17
    """Rounds after these, at length 1, in which LG-FedAvg shares the head."""
    devices: int = 10
    """Number of devices."""
    examples: int = 1000
    """Mean number of training examples of a device."""
    look: int = 1000
    """Number of test examples of the new test."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy on own and new questions and what is sent, by length and method."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    seeds = common.ends(rows, [*KIND, "seed"])[[*KIND, "seed", *TESTS, "payload_bytes"]]
    common.publish(options, tabulate(seeds), draw(rows), finding(seeds), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every length, method and seed."""
    return [
        Cell(
            {"length": length, "method": name, "seed": seed},
            setting(options, length, name, seed),
        )
        for length, seed, name in product(LENGTHS, range(options.seeds), METHODS)
    ]


def setting(options: Options, length: int, name: str, seed: int) -> Run:
    """Return the run of a method."""
    rounds, before, after = (
        length * number for number in (options.rounds, options.before, options.after)
    )
    data: dict[str, Any] = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "partition": "dirichlet:alpha=1",
        "peers": options.devices,
        "examples_per_peer": options.examples,
        "eval_examples": options.look,
    }
    learning: dict[str, Any] = {
        "model": "vqa:width=24",
        "algorithm": "fedavg",
        "eval_every": max(1, rounds // 10),
        "ensemble": True,
        "batch_size": 25,
        "lr": 0.03,
        "seed": seed,
    }
    split: dict[str, Any] = {"rounds": rounds}
    if name == "LG-FedAvg":
        split = {"rounds": before + after, "share": "head.*", "share_all_until": str(before)}
    return Run(**data, **learning, **split)


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per length and method: means and std over the seeds, in percent, megabytes."""
    return accuracies.by_seeds(seeds, KIND)


def finding(seeds: pd.DataFrame) -> str:
    """Return by how many points LG-FedAvg is ahead, and its share of the bytes, by length."""
    parts = []
    for length, own in common.groups(seeds, ["length"]):
        fedavg, lg = (own[own["method"] == name].set_index("seed") for name in METHODS)
        points = 100 * (lg[[*TESTS]] - fedavg[[*TESTS]])
        widths = common.half_width(points.std(), len(points))
        ahead = ", ".join(
            f"{points[column].mean():+.1f} ± {widths[column]:.1f} {test}"
            for column, test in TESTS.items()
        )
        share = lg["payload_bytes"].sum() / fedavg["payload_bytes"].sum()
        rounds = "the published rounds" if length == 1 else f"{length} times the rounds"
        parts.append(f"{rounds}, {share:.0%} of the bytes: {ahead}")
    return (
        "points of LG-FedAvg above FedAvg, ± half the 95 % confidence interval over seeds; "
        f"{'; '.join(parts)}."
    )


def draw(rows: pd.DataFrame) -> Figure:
    """Draw accuracy on own questions against rounds, a panel per length and a line per method."""
    figure = Figure(figsize=(8.4, 3.6), layout="constrained")
    panels = figure.subplots(1, len(LENGTHS), sharey=True)
    for axes, (length, part) in zip(panels, common.groups(rows, ["length"]), strict=True):
        for k, (method, own) in enumerate(common.groups(part, ["method"])):
            right = own.assign(right=100 * own["local_accuracy_mean"])
            common.curve(
                axes, right, ("round", "right"), marker="o", markersize=3,
                color=common.COLOURS[k], label=method,
            )  # fmt: skip
        times = "" if length == 1 else f"{length} times "
        axes.set(xlabel="rounds", title=f"{times}the published rounds")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("right on own questions, %")
    panels[0].legend()
    figure.suptitle("easy-VQA, encoders of image and question")
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.easy_vqa"))
