"""The gain of a new device, with another architecture, from a head that other devices trained.

Liang et al., "Think Locally, Act Globally" (LG-FedAvg), 2020, section 2.4: a new device first
trains a local model under the shared one, and then optionally both. Their new device has the
architecture of the others.

Command, minutes on a core that other programs shared:

    python -m experiments.personal_layers.new_architecture --data-dir DIR

Finding: the given head gains little or nothing, except for a CNN with 50 examples and 10 epochs,
which is not trained yet by itself: there it gains 30 to 37 points (intervals 7 to 14), also where
the first devices are all MLPs. With 40 epochs of the same examples no gain of a CNN is shown. A new
MLP gains 2.0 to 3.9 points with 50 examples and 10 epochs (intervals 2.4 to 2.9), and with 1,000
examples it loses 1.2 ± 0.5 and 1.3 ± 0.3 points under a head that stays as it is. A head of first
devices of both kinds is not shown to be better for a CNN than one of MLPs alone. What follows ± is
half the 95 % confidence interval of differences paired by seed.

Grid: MNIST, 20 first devices with 200 examples of two label shards each, whose encoders end in 64
numbers, under a shared head 64-32-10: all encoders are one layer (MLPs), or every second has two
convolutions (MLPs+CNNs). They train for 20 rounds, half of them in each, in batches of 10 with
learning rate 0.05 and momentum 0.5. A new device with examples of all labels trains with a head of
its own (`others` is alone), or under the given head, which stays as it is (`given, fixed`) or
learns too (`given, learns`). Its encoder is of either kind. Accuracies are on the common test set,
in the mean over the last tenth of the epochs; five seeds. `minus_alone` is the difference to a head
of its own, paired by seed, `minus_mlp` that of this difference to the one with an MLP.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import nn

import dfl
from dfl.config import Run
from dfl.core import randomness
from dfl.core.registry import choose
from dfl.datasets import DATASETS, Data
from dfl.models.layers import Conv2d
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.store.callbacks import Callback, Outcome
from experiments import common

Shape = tuple[int, ...]

WIDTH = 64
"""Outputs of an encoder."""
CASES = ((50, 10), (50, 40), (200, 20), (1000, 10))
"""Training examples of the new device, and its epochs."""
MOST = max(examples for examples, _ in CASES)
"""Training examples that are kept for the new device."""
MLP = "MLP"
CNN = "CNN"
KINDS = (MLP, CNN)
"""Kinds of encoders."""
ALONE = "alone"
OTHERS = {"MLPs": (MLP,), "MLPs+CNNs": (MLP, CNN)}
"""First devices -> the kinds of their encoders, in turn."""
OWN = "own"
FIXED = "given, fixed"
LEARNS = "given, learns"
LABELS = ["others", "head", "new", "examples", "epochs"]


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/new_architecture")
    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    dataset: str = "mnist"
    """The data set: mnist, or digits for a quick look."""
    seeds: int = 5
    """Number of seeds, from 0."""
    rounds: int = 20
    """Rounds of the first devices."""
    devices: int = 20
    """Number of first devices."""
    each: int = 200
    """Training examples of each first device."""
    only: str | None = None
    """Run only the cell of this name, as others=MLPs,seed=0, and print its rows."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the accuracy of a new device by encoder, head, examples and epochs."""
    grid: list[dict[str, Any]] = [
        {"others": others, "seed": seed}
        for seed, others in product(range(options.seeds), (ALONE, *OTHERS))
    ]
    rows = common.keep(options, grid, measured)
    if options.only is not None:
        return common.print_rows(rows)
    seeds = with_differences(rows)
    table = tabulate(seeds)
    shown = common.with_intervals(table, options.seeds)
    common.publish(options, table, draw_gains(shown, options), finding(shown), seeds)


def encoder(kind: str, shape: Shape) -> nn.Sequential:
    """Return an encoder of images: a layer, or two convolutions and a layer."""
    if kind == MLP:
        layers: list[nn.Module] = [nn.Flatten(), nn.Linear(prod(shape), WIDTH)]
    else:
        channels, height, width = shape
        layers = [
            Conv2d(channels, 8, 5, stride=2, padding=2), nn.ReLU(),
            Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * -(-height // 4) * -(-width // 4), WIDTH),
        ]  # fmt: skip
    return nn.Sequential(*layers, nn.ReLU())


def model(kind: str, data: Data, seed: int, device: int) -> nn.Sequential:
    """Return a model with `encoder` and `head`, whose initial values are drawn for a device."""
    parts: OrderedDict[str, nn.Module] = OrderedDict(
        encoder=encoder(kind, np.shape(data.train_inputs)[1:]),
        head=nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, data.classes)),
    )
    made = nn.Sequential(parts)
    layout = ParameterLayout.of(made)
    made.load_state_dict(layout.views(draw(made, layout, seed, [device])[0]))
    return made


def halves(options: Options, seed: int) -> tuple[Data, Data]:
    """Return the data of the new device and those of the others, which have no common training
    examples.
    """
    data = choose("--dataset", options.dataset, DATASETS)(options.data_dir)
    order = randomness.generator(seed, "new device").permutation(len(data.train_labels))
    return some(data, order[:MOST]), some(data, order[MOST:])


def some(data: Data, which: NDArray[np.int64] | slice) -> Data:
    """Return a data set with some of its training examples."""
    inputs = np.asarray(data.train_inputs)[which]
    return replace(data, train_inputs=inputs, train_labels=data.train_labels[which])


class Ended(Callback):
    """Keeps the models at the end of a run."""

    def __init__(self) -> None:
        self.state: Mapping[str, NDArray[np.floating]] = {}

    def finish(self, outcome: Outcome) -> None:
        """Keep the models."""
        self.state = outcome.state


def first(options: Options, others: str, seed: int, data: Data) -> Run:
    """Return the run of the first devices, which share their heads."""
    return run_of(
        options.rounds,
        seed,
        dataset=data,
        peers=options.devices,
        partition="shards:per_peer=2",
        examples_per_peer=options.each,
        model=[model(kind, data, seed, 0) for kind in OTHERS[others]],
        algorithm="fedavg:fraction=0.5",
        share="head.*",
        eval_examples=options.devices,
    )


def run_of(rounds: int, seed: int, **changes: Any) -> Run:
    """Return a run that is evaluated in its last tenth."""
    tail = max(1, len(common.tail_rounds(rounds)))
    learning: dict[str, Any] = {"batch_size": 10, "lr": 0.05, "momentum": 0.5, "seed": seed}
    return Run(rounds=rounds, eval_every=rounds, eval_last=tail, **learning, **changes)


def measured(options: Options, others: str, seed: int) -> pd.DataFrame:
    """Return a row per encoder, head, number of examples and of epochs of the new device."""
    own, rest = halves(options, seed)
    given: Mapping[str, torch.Tensor] = {}
    heads: tuple[str, ...] = (OWN,)
    local_test = np.nan
    if others != ALONE:
        ended = Ended()
        rows = list(dfl.simulate(first(options, others, seed, rest), callbacks=[ended]))
        given, heads = head_of(ended.state), (FIXED, LEARNS)
        local_test = 100 * common.tail_mean(pd.DataFrame(rows), "local_accuracy_mean")
    found = []
    for kind, (examples, epochs), head in product(KINDS, CASES, heads):
        start = model(kind, own, seed, options.devices)
        start.load_state_dict(given, strict=False)
        start.get_submodule("head").requires_grad_(head != FIXED)
        accuracy = 100 * learned(seed, start, some(own, slice(examples)), epochs)
        values = (others, head, kind, examples, epochs)
        figures = {"seed": seed, "accuracy": accuracy, "others_test": local_test}
        found.append(dict(zip(LABELS, values, strict=True)) | figures)
    return pd.DataFrame(found)


def head_of(state: Mapping[str, NDArray[np.floating]]) -> dict[str, torch.Tensor]:
    """Return the shared parameters of the server, which all devices have."""
    return {
        name: torch.from_numpy(rows[0]) for name, rows in state.items() if name.startswith("head.")
    }


def learned(seed: int, start: nn.Module, data: Data, epochs: int) -> float:
    """Return the accuracy on the common test set of a device that trains alone from a model."""
    run = run_of(epochs, seed, dataset=data, peers=1, model=start, algorithm="local_only")
    return common.tail_mean(pd.DataFrame(list(dfl.simulate(run))), "accuracy_mean")


def with_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with differences within a seed.

    Returns:
        minus_alone: to training alone, with the same encoder, examples and epochs.
        minus_mlp: of that difference to that of a new device with an MLP, as the others have it.
    """
    case = ["new", "examples", "epochs", "seed"]
    gain = rows["accuracy"] - matched(rows, rows["others"] == ALONE, case, "accuracy")
    rows = rows.assign(minus_alone=gain)
    setting = ["others", "head", "examples", "epochs", "seed"]
    return rows.assign(minus_mlp=gain - matched(rows, rows["new"] == MLP, setting, "minus_alone"))


def matched(
    rows: pd.DataFrame, which: pd.Series[bool], labels: list[str], column: str
) -> NDArray[np.float64]:
    """Return for every row the value of a column in the one of some rows with the same labels."""
    known = rows[which].set_index(labels)[column]
    return known.loc[pd.MultiIndex.from_frame(rows[labels])].to_numpy(float)


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per case: means and std over the seeds."""
    by = seeds.groupby(LABELS, sort=False)
    columns: dict[str, pd.Series[float]] = {}
    for name in ("accuracy", "minus_alone", "minus_mlp"):
        columns |= {name: by[name].mean(), f"{name}_std": by[name].std()}
    return pd.DataFrame({**columns, "others_test": by["others_test"].mean()}).reset_index()


def finding(table: pd.DataFrame) -> str:
    """Return the gain of every new device from every head.

    Args:
        table: with intervals.
    """
    parts = []
    for (new, others, head), own in common.groups(
        table[table["others"] != ALONE].sort_values("new", ascending=False, kind="stable"),
        ["new", "others", "head"],
    ):
        gains = ", ".join(
            f"{row['minus_alone']:+.1f} ± {row['minus_alone_ci95']:.1f} with {row['examples']} "
            f"in {row['epochs']} epochs"
            for row in own.to_dict("records")
        )
        parts.append(f"{new}, head of {others} {head}: {gains}")
    return f"points ahead of training alone: {'; '.join(parts)}."


def draw_gains(table: pd.DataFrame, options: Options) -> Figure:
    """Draw the difference to training alone, a panel per encoder of the new device.

    Args:
        table: with intervals.
        options: of the experiment.
    """
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    panels = figure.subplots(1, len(KINDS), sharey=True)
    for axes, new in zip(panels, KINDS, strict=True):
        part = table[table["new"] == new]
        alone = part[part["others"] == ALONE]
        lines = common.groups(part[part["others"] != ALONE], ["others", "head"])
        for k, ((others, head), own) in enumerate(lines):
            axes.errorbar(
                np.arange(len(own)) + 0.08 * (k - 1.5), own["minus_alone"],
                own["minus_alone_ci95"], capsize=3, marker="o", color=common.COLOURS[k],
                linestyle="--" if head == FIXED else "-", label=f"head of {others}, {head}",
            )  # fmt: skip
        axes.axhline(0, color="black", linewidth=1)
        labels = [
            f"{row['examples']}, {row['epochs']}\n(alone {row['accuracy']:.1f} %)"
            for row in alone.to_dict("records")
        ]
        axes.set_xticks(np.arange(len(alone)), labels)
        axes.set(title=f"new device with {new}", xlabel="examples of the new device, epochs")
        axes.grid(axis="y", alpha=0.3)
    panels[0].set_ylabel("difference to training alone, points")
    title = f"A new device under the head of {options.devices} others, {options.dataset}"
    common.caption(figure, panels[0], f"{title}, 95 % intervals", 2)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.new_architecture"))
