"""Devices without images or without questions beside devices with both, which share a head.

Liang et al., "Think Locally, Act Globally" (LG-FedAvg), Table 2, keep encoders of image and
question on every device and share what follows them. Here a third of the devices answer questions
of easy-VQA from image and question, a third from the question and a third from the image alone,
and share the head over a server (LG-FedAvg) or over a ring (DFedAvgM with the same shared part).

Command, ten minutes on a core:

    python -m experiments.personal_layers.vqa_modalities --data-dir DIR --jobs 1

Finding: sharing the head is not shown to help any kind of device on its own questions: LG-FedAvg
and LG-DFedAvgM are 0.3 points below to 1.3 points above local training, within the interval each
time. Devices without questions do not reach chance, 43 to 48 % against 52 %: of 60 with a shared
head 5 are above it. Devices without images answer better than chance, all 60 with a shared head:
73 % against 55 % with 1,000 questions, 69 % with 100; but so they do alone, 73 and 69 %: it is not
by what they share. Devices with both do not use their images yet: their 63 to 64 % on new questions
is no more than the question alone allows. Sharing shows on new questions for devices with both that
have 100: LG-FedAvg is 1.6 ± 1.1 points ahead of local training, LG-DFedAvgM 1.4 ± 0.9. Of the ten
other differences on new questions one is beyond its interval, that of devices without questions on
the ring with 1,000, 0.9 ± 0.7. A ± is half a 95 % confidence interval of differences paired by
seed; of twelve such on a test one or none is expected beyond it by chance.

Grid: easy-VQA, images of 16 x 16 pixels, 9 devices of 1,000 questions in the mean, answers by
Dirichlet 1; vqa, in turn with both encoders, without that of images and without that of questions,
one epoch a round, batches of 25, learning rate 0.03, momentum 0.9, fixed before the first run, five
seeds. The devices of 100 questions, with four epochs a round, were added after it. On the ring a
device has neighbours of both other kinds. Figures are means over the last tenth of the rounds: own
test is of a device's own part of the test set, new test of 900 of its questions. Chance is the
share of the most frequent answer in a device's own test part, the accuracy of that one answer.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray

import dfl
from dfl.config import Run
from dfl.simulation.components import sources_of
from dfl.simulation.defaults import settle
from dfl.simulation.distribute_data import read
from dfl.sweep import Cell
from experiments import common

KINDS = {"both": "vqa", "question only": "vqa:inputs=question", "image only": "vqa:inputs=image"}
METHODS: dict[str, dict[str, Any]] = {
    "local only": {"algorithm": "local_only", "share": "nothing"},
    "LG-FedAvg": {"algorithm": "fedavg", "share": "head.*"},
    "LG-DFedAvgM": {"algorithm": "dfedavgm", "topology": "ring", "share": "head.*"},
}
EPOCHS = {1000: None, 100: 4}
"""Mean number of training examples of a device -> epochs in a round; None is one."""
RUN = ["questions", "method", "seed"]
"""What distinguishes runs."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/vqa_modalities")
    dataset: str = "easy_vqa:side=16"
    """The data set, of images and questions."""
    rounds: int = 40
    """Rounds of training and mixing."""
    devices: int = 9
    """Number of devices."""
    look: int = 900
    """Number of test examples of the new test."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy on own and new questions by method and kind of device."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    each = by_device(common.ends(rows, RUN), options)
    kind = ["questions", "method", "devices"]
    seeds = each.groupby([*kind, "seed"], sort=False).mean(numeric_only=True).reset_index()
    table = tabulate(seeds, kind)
    common.publish(options, table, draw(table), finding(seeds), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every number of questions, method and seed."""
    return [
        Cell(
            {"questions": questions, "method": name, "seed": seed},
            setting(options, questions, name, seed),
        )
        for questions, seed, name in product(EPOCHS, range(options.seeds), METHODS)
    ]


def setting(options: Options, questions: int, name: str, seed: int) -> Run:
    """Return the run of a method."""
    return Run(
        dataset=options.dataset,
        data_dir=options.data_dir,
        partition="dirichlet:alpha=1",
        peers=options.devices,
        examples_per_peer=questions,
        eval_examples=options.look,
        model="+".join(KINDS.values()),
        rounds=options.rounds,
        local_epochs=EPOCHS[questions],
        eval_every=options.rounds,
        batch_size=25,
        lr=0.03,
        seed=seed,
        **METHODS[name],
    )


def by_device(ends: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per run and device: percentages right on both tests, chance, whether its own
    test is above it, and MB of the run.
    """
    found = []
    for (questions, seed), runs in common.groups(ends, ["questions", "seed"]):
        chances = chance(setting(options, questions, "local only", seed))
        for run in runs.to_dict("records"):
            values = {name: run[name] for name in RUN}
            history = dfl.load(common.cell_folder(options.out, **values)).history
            peers = common.tail(history).groupby("peer").mean()
            figures = {
                "devices": [list(KINDS)[i % len(KINDS)] for i in range(options.devices)],
                "own_test": 100 * peers["local_accuracy"].to_numpy(),
                "chance": 100 * chances,
                "above_chance": peers["local_accuracy"].to_numpy() > chances,
                "new_test": 100 * peers["accuracy"].to_numpy(),
                "MB": run["payload_bytes"] / 1e6,
            }
            found.append(pd.DataFrame(values | figures))
    return pd.concat(found, ignore_index=True)


def chance(run: Run) -> NDArray[np.float64]:
    """Return the share of the most frequent answer in the own test part of every device, (P,)."""
    settled = settle(run, 1)
    data, split = read(settled, sources_of(settled), None)
    return np.array([np.bincount(data.test_labels[own]).max() / len(own) for own in split.test])


def tabulate(seeds: pd.DataFrame, kind: list[str]) -> pd.DataFrame:
    """Return a row per number of questions, method and kind of device: means and std over seeds."""
    by = seeds.drop(columns="seed").groupby(kind, sort=False)
    table, std = by.mean(), by.std()
    table.insert(1, "own_test_std", std["own_test"])
    table.insert(5, "new_test_std", std["new_test"])
    return table.reset_index()


def finding(seeds: pd.DataFrame) -> str:
    """Return what every kind of device gains by a shared head, on both tests, and how many devices
    answer better than chance.
    """
    parts, tests = [], {"own_test": "own", "new_test": "new"}
    for (questions, kind), own in common.groups(seeds, ["questions", "devices"]):
        alone, *others = (own[own["method"] == name].set_index("seed") for name in METHODS)
        for shared in others:
            points = shared[[*tests]] - alone[[*tests]]
            widths = common.half_width(points.std(), len(points))
            ahead = ", ".join(
                f"{points[column].mean():+.1f} ± {widths[column]:.1f} {test}"
                for column, test in tests.items()
            )
            parts.append(f"{shared['method'].iloc[0]}, {kind}, {questions:,} questions: {ahead}")
    above = ", ".join(
        f"{kind} {own['above_chance'].mean():.0%}"
        for kind, own in common.groups(seeds[seeds["method"] != "local only"], ["devices"])
    )
    return (
        "points above local training, ± half the 95 % confidence interval over seeds; "
        f"{'; '.join(parts)}. With a shared head a device answers its own questions better than "
        f"chance: {above}."
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw accuracy on own questions by kind of device, a bar per method, and chance."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels = figure.subplots(1, len(EPOCHS), sharey=True)
    for axes, (questions, part) in zip(panels, common.groups(table, ["questions"]), strict=True):
        for k, (method, own) in enumerate(common.groups(part, ["method"])):
            places = [place + 0.26 * (k - 1) for place in range(len(KINDS))]
            axes.bar(
                places, own["own_test"], 0.25, yerr=own["own_test_std"], capsize=3,
                color=common.COLOURS[k], label=method,
            )  # fmt: skip
        levels = part[part["method"] == "local only"]["chance"]
        starts, ends = ([place + end for place in range(len(KINDS))] for end in (-0.42, 0.42))
        axes.hlines(levels, starts, ends, color="black", ls="--", label="chance")
        axes.set_xticks(range(len(KINDS)), list(KINDS))
        axes.set(title=f"{questions:,} questions a device", ylim=(0, 100))
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("right on own questions, %")
    common.caption(figure, panels[0], "easy-VQA, devices of three kinds that share a head", 4)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.vqa_modalities"))
