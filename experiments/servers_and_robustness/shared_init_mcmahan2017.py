"""Loss of averages of two models that were trained separately, from a common and from independent
initializations.

Figure 1 of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017: averages are useful only if both models start at the same point.

Command, ten runs, three minutes of a core:

    python -m experiments.servers_and_robustness.shared_init_mcmahan2017 --data-dir DIR

Finding: as published, averages are useful from a common initialization only. From a common
initialization the average of both parents has a lower loss than either for 5 of 5 seeds, 0.405 in
the mean where the parents have 0.472; from independent initializations it has a higher one for 5
of 5, 0.909 against 0.469. The best mixture from a common initialization lies near the middle
(theta 0.40 to 0.60), from independent ones next to a parent (0.09 or 0.89).

Grid: two 2NNs, trained on two disjoint IID sets of 600 examples of MNIST, each by 240 updates (20
epochs, batches of 50, learning rate 0.1, momentum 0), from a common or from independent random
initializations, five seeds. The loss of theta w + (1 - theta) w' on all 60,000 training
examples, for 50 values of theta from -0.2 to 1.2, and for 1/2.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dfl.config import Run
from dfl.core.registry import choose
from dfl.datasets import DATASETS
from dfl.store.results import load
from dfl.sweep import Cell, run_grid
from dfl.training.examples import normalize
from experiments import common

INITS = ("common", "independent")
THETAS = np.unique(np.round([*np.linspace(-0.2, 1.2, 50), 0.5], 9))
"""Weights of the first parent. 0 and 1, the parents, are among the paper's 50; 1/2 is added."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/shared_init_mcmahan2017")
    rounds: int = 20
    """Passes of each parent over its 600 examples."""
    examples: int = 600
    """Training examples of each parent."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the loss between two models, from common and independent initializations."""
    cells = grid(options)
    if options.only is not None:
        cells = [common.named(options.only, {cell.name: cell for cell in cells})]
    run_grid(cells, options.out / "cells", jobs=options.jobs)
    examples = training_set(options)
    rows = pd.concat(
        [between(options, **cell.values, examples=examples) for cell in cells], ignore_index=True
    )
    if options.only is not None:
        return common.print_rows(rows)
    table = tabulate(rows)
    common.publish(options, table, draw(rows, options), finding(table))


def grid(options: Options) -> list[Cell]:
    """Return a cell for every initialization and seed."""
    return [
        Cell({"init": init, "seed": seed}, run_of(options, init, seed))
        for seed in range(options.seeds)
        for init in INITS
    ]


def run_of(options: Options, init: str, seed: int) -> Run:
    """Return a run of two parents that train without communication."""
    return Run(
        algorithm="local_only",
        init=init,  # type: ignore[arg-type]
        peers=2,
        dataset=options.dataset,
        data_dir=options.data_dir,
        model="2nn",
        examples_per_peer=options.examples,
        rounds=1,
        local_epochs=options.rounds,
        batch_size=50,
        lr=0.1,
        momentum=0.0,
        seed=seed,
    )


def training_set(options: Options) -> tuple[Tensor, Tensor]:
    """Return all training examples as inputs of a model, (n, *shape), and their labels, (n,)."""
    data = choose("--dataset", options.dataset, DATASETS)(options.data_dir)
    scale, shift = (
        torch.as_tensor(value, dtype=torch.float32) for value in (data.scale, data.shift)
    )
    return normalize(torch.from_numpy(data.train_inputs), scale, shift), torch.from_numpy(
        data.train_labels
    )


def between(
    options: Options, init: str, seed: int, examples: tuple[Tensor, Tensor]
) -> pd.DataFrame:
    """Return the loss of the mixtures of two parents, a row per theta."""
    parents = load(common.cell_folder(options.out, init=init, seed=seed))
    losses = mixtures(parents.model(0), parents.model(1), examples)
    return pd.DataFrame({"init": init, "seed": seed, "theta": THETAS, "loss": losses})


@torch.no_grad()
def mixtures(first: Module, second: Module, examples: tuple[Tensor, Tensor]) -> list[float]:
    """Return the mean loss of theta w + (1 - theta) w' for every theta; `first` is overwritten."""
    inputs, labels = examples
    w, other = (parameters_to_vector(model.parameters()).clone() for model in (first, second))
    losses = []
    for theta in THETAS:
        vector_to_parameters(theta * w + (1 - theta) * other, first.parameters())
        each = [
            cross_entropy(first(x), y, reduction="sum")
            for x, y in zip(inputs.split(2048), labels.split(2048), strict=True)
        ]
        losses.append(float(sum(each)) / len(labels))
    return losses


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per initialization and seed: the loss of both parents and half-way, and the
    least loss.
    """
    return pd.DataFrame(
        [
            _summary(init, seed, own.set_index("theta")["loss"])
            for (init, seed), own in common.groups(rows, ["init", "seed"])
        ]
    ).sort_values(["init", "seed"], ignore_index=True)


def _summary(init: str, seed: int, loss: pd.Series[float]) -> dict[str, Any]:
    return {
        "init": init,
        "seed": seed,
        "loss_of_first": loss[1.0],
        "loss_of_second": loss[0.0],
        "loss_half_way": loss[0.5],
        "least_loss": loss.min(),
        "at_theta": loss.idxmin(),
    }


def finding(table: pd.DataFrame) -> str:
    """Return for how many seeds the claim of the paper holds."""
    return "; ".join(_sentence(init, own) for init, own in common.groups(table, ["init"])) + "."


def _sentence(init: str, table: pd.DataFrame) -> str:
    """Return for how many seeds the average is better, or worse, than both parents."""
    parents = table[["loss_of_first", "loss_of_second"]]
    half = table["loss_half_way"]
    holds = half < parents.min(axis=1) if init == "common" else half > parents.max(axis=1)
    verdict = "lower than either parent's" if init == "common" else "higher than either parent's"
    return (
        f"{init} start: half-way the loss is {verdict} for {holds.sum()} of {len(table)} seeds "
        f"({half.mean():.3f} in the mean, the parents' {parents.to_numpy().mean():.3f})"
    )


def draw(rows: pd.DataFrame, options: Options) -> Figure:
    """Draw the loss along the line through two parents, a panel per initialization."""
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    for axes, init in zip(figure.subplots(1, 2), reversed(INITS), strict=True):
        for seed, own in common.groups(rows[rows["init"] == init], ["seed"]):
            axes.plot(
                own["theta"],
                own["loss"],
                ".-",
                color=common.COLOURS[seed % 7],
                label=f"seed {seed}",
                linewidth=1,
            )
        for parent in (0, 1):
            axes.axvline(parent, color="0.6", linestyle=":", linewidth=1, zorder=0)
        axes.set(
            title=f"{init} start{'s' * (init != 'common')}", xlabel="weight θ of the first parent"
        )
        axes.legend()
    figure.axes[0].set_ylabel("loss on the whole training set")
    figure.suptitle(
        f"Two models and their mixtures θw + (1 - θ)v: {options.dataset}, 2NN, "
        f"{options.examples} examples each"
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.shared_init_mcmahan2017"))
