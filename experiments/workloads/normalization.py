"""A ResNet-20 on a ring of 8 peers, with GroupNorm, and with BatchNorm by each policy for its
running statistics.

Command, two to four minutes a run on a core; a run that is done is not run again, and the
results are written after each, so that it can be stopped at any time and called again:

    python -m experiments.workloads.normalization --data-dir DIR

Finding: in a setting reduced to 400 local steps on images of 16 x 16 pixels, far from converged,
BatchNorm by every policy is ahead of GroupNorm and of no normalization on images of all classes,
with each of five seeds. With Dirichlet parts it has 20 to 22 % in the mean over the peers, the
other two 17 %; with IID parts 39 to 43 %, the others 29 and 30 %. `recompute` is the best policy in
both with each seed: it is ahead of `local` by 2.1 ± 0.8 points with Dirichlet parts and by 3.6 ±
0.6 with IID ones (95 % intervals of differences paired by seed). With Dirichlet parts `share` costs
a peer on its own distribution 2.1 ± 1.7 points against `local`. The other differences there vary
with the seed: no normalization is 3.2 ± 7.7 points behind `local`, and ahead of it with two of five
seeds. No run diverged. GroupNorm's place on IID parts is not due to the common learning rate: with
seed 0 it had 25.8 % at a rate of 0.15, 28.6 % at 0.05 and 30.5 % at 0.02, in the mean of the
evaluations after three quarters of the rounds and all.

Grid: DFedAvgM on a ring of 8 peers; Dirichlet parts with alpha = 0.1, and IID ones; GroupNorm with
two groups, BatchNorm with `--norm-stats local`, `share` and `recompute`, and no normalization. All
with seed 0 first, then with further seeds.

The setting is reduced to what a core trains in minutes: images of 16 x 16 pixels, each the mean of
2 x 2 of CIFAR-10's, not augmented, 2,500 of them for each peer, and 400 local steps of 16 images, 5
a round, which is 2.6 epochs. Published runs of ResNet-20 are of some 200 epochs of 32 x 32 pixels.
The learning rate, 0.05 with momentum 0.9 within a round, is constant and was not tuned to any row.
Rows can be compared in this setting; none shows what accuracy a ResNet-20 reaches.

The figures of a run are means over the last tenth of its rounds. `common_test` is the mean over the
peers on test images of all classes, `worst_peer` their minimum, `mean_model` the accuracy of the
mean of the models, and `own_test` the mean over the peers on test images that are distributed as
their own training images. Of `local`, the mean model has the mean of the statistics. `minus_local`
and `own_minus_local` are the differences of `common_test` and `own_test` to those of `local`,
paired by seed.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray

import dfl
from dfl.config import Run
from dfl.core import randomness
from dfl.core.options import Count
from dfl.core.registry import choose
from dfl.datasets import DATASETS, Data
from dfl.sweep import Cell
from experiments import common

NORMS: dict[str, dict[str, str]] = {
    "GroupNorm": {"model": "resnet20:norm=group"},
    "BatchNorm, local": {"model": "resnet20:norm=batch", "norm_stats": "local"},
    "BatchNorm, share": {"model": "resnet20:norm=batch", "norm_stats": "share"},
    "BatchNorm, recompute": {"model": "resnet20:norm=batch", "norm_stats": "recompute"},
    "none": {"model": "resnet20:norm=none"},
}
"""Normalization -> the settings that it depends on."""
PARTITIONS = {"Dirichlet 0.1": "dirichlet:alpha=0.1", "IID": "iid"}
STEPS = 5
"""Local steps of a round."""
EVALUATIONS = 4
"""Evaluations of a run after its start, before those of the last tenth."""
FIGURES = {
    "common_test": "accuracy_mean",
    "worst_peer": "accuracy_min",
    "mean_model": "accuracy_mean_model",
    "own_test": "local_accuracy_mean",
}
"""Figure of a run -> column of metrics.csv, of which it is the mean over the last tenth."""
BASE = "BatchNorm, local"
MINUS = {"minus_local": "common_test", "own_minus_local": "own_test"}
"""Difference to `BASE` -> the figure."""
LABELS = ["partition", "normalization"]


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/normalization")
    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    seeds: int = 5
    """Number of seeds, from 0."""
    rounds: int = 80
    """Rounds of 5 local steps."""
    peers: int = 8
    """Number of peers on the ring."""
    batch: int = 16
    """Images of a local step."""
    lr: float = 0.05
    """Learning rate."""
    dataset: str = "cifar10"
    """The data set of images."""
    side: int = 16
    """Pixels on a side of an image, a divisor of the data set's."""
    test: int = 500
    """Number of test images, by random choice."""
    train: int = 2500
    """Number of training images for each peer, in the mean."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Compare the normalizations on both partitions; the results are written anew after every run
    that had not finished before, and after the last.
    """
    done: list[pd.DataFrame] = []
    cells = grid(options)
    for cell in cells:
        finished = common.has_finished(options.out, cell)
        done.append(measured(options.out, cell))
        if finished and cell is not cells[-1]:
            continue
        seeds = pd.concat(done, ignore_index=True)
        table = tabulate(seeds)
        common.publish(options, table, draw(table, seeds), finding(table, options), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every seed, partition and normalization, in the order of their runs."""
    cells = [
        Cell(
            {"partition": partition, "normalization": norm, "seed": seed},
            setting(options, partition, norm, seed),
        )
        for seed in range(options.seeds)
        for partition in PARTITIONS
        for norm in NORMS
    ]
    return sorted(
        cells, key=lambda cell: (cell.values["seed"], cell.values["normalization"] == "none")
    )


def setting(options: Options, partition: str, norm: str, seed: int) -> Run:
    """Return the run of a normalization."""
    learning: dict[str, Any] = {
        "rounds": options.rounds,
        "local_steps": STEPS,
        "batch_size": options.batch,
        "lr": options.lr,
        "eval_every": max(1, options.rounds // EVALUATIONS),
        "eval_examples": options.test,
    }
    return Run(
        dataset=f"excerpt:of={options.dataset},side={options.side},test={options.test}",
        data_dir=options.data_dir,
        partition=PARTITIONS[partition],
        examples_per_peer=options.train,
        topology="ring",
        algorithm="dfedavgm",
        peers=options.peers,
        seed=seed,
        **learning,
        **NORMS[norm],  # type: ignore[arg-type]
    )


@DATASETS.register("excerpt")
def excerpt(
    directory: Path | None, *, of: str = "cifar10", side: Count = 16, test: Count = 1000
) -> Data:
    """A data set of square images with fewer pixels, and with fewer test images.

    Args:
        directory: as for the data set.
        of: its spec.
        side: pixels on a side, each the mean of a square, rounded.
        test: test images, drawn at random, the same ones in every run.

    Raises:
        InputError: the side of its images is no multiple of `side`.
    """
    data = _read(of, directory)
    inputs = np.asarray(data.test_inputs)
    if inputs.shape[-1] % side:
        raise dfl.InputError(
            f"--side must divide {inputs.shape[-1]}, the pixels of {of}, not {side}"
        )
    chosen = np.sort(randomness.generator(0, "excerpt").permutation(len(inputs))[:test])
    return replace(
        data,
        train_inputs=smaller(np.asarray(data.train_inputs), side),
        test_inputs=smaller(inputs[chosen], side),
        test_labels=np.asarray(data.test_labels)[chosen],
    )


@cache
def _read(of: str, directory: Path | None) -> Data:
    """Return a data set, which is read once."""
    return choose("--dataset", of, DATASETS)(directory)


def smaller(images: NDArray[Any], side: int) -> NDArray[Any]:
    """Return images (n, channels, side, side), means of squares of larger ones, in their dtype."""
    n, channels, height, width = images.shape
    squares = images.reshape(n, channels, side, height // side, side, width // side)
    means: NDArray[Any] = squares.mean((3, 5), dtype=np.float32)
    if np.issubdtype(images.dtype, np.integer):
        means = means.round()
    return means.astype(images.dtype)


def measured(out: Path, cell: Cell) -> pd.DataFrame:
    """Run a cell that has not finished.

    Returns:
        A row with its values and `FIGURES` in percent, NaN where the run diverged.
    """
    rows = common.measure(out, [cell], in_process=True)
    whole = rows["round"].max() == cell.run.rounds
    figures = {
        name: 100 * common.tail_mean(rows, column) if whole else np.nan
        for name, column in FIGURES.items()
    }
    return pd.DataFrame([{**cell.values, **figures}])


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per partition and normalization that has run: means over the seeds, in
    percent.
    """
    case = ["partition", "seed"]
    base = seeds[seeds["normalization"] == BASE].set_index(case)
    of_same = base.reindex(pd.MultiIndex.from_frame(seeds[case]))
    minus = {name: seeds[of] - of_same[of].to_numpy() for name, of in MINUS.items()}
    by = seeds.assign(**minus).groupby(LABELS, sort=False)
    table = by[list(FIGURES)].mean()
    table.insert(1, "std_over_seeds", by["common_test"].std())
    for name in MINUS:
        table[[name, f"{name}_std"]] = by[name].agg(["mean", "std"])
    table.insert(0, "diverged", by["common_test"].agg(lambda values: int(values.isna().sum())))
    table.insert(0, "seeds", by.size())
    order = [(partition, norm) for partition in PARTITIONS for norm in NORMS]
    return table.reindex([each for each in order if each in table.index]).reset_index()


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding: what is reduced, what failed or is missing, and the figures."""
    parts = [f"{partition}: {_ranked(own)}" for partition, own in common.groups(table, LABELS[:1])]
    planned = options.seeds * len(PARTITIONS) * len(NORMS)
    failed = [
        f"{row['partition']} {row['normalization']} ({row['diverged']} of {row['seeds']})"
        for row in table.to_dict("records")
        if row["diverged"]
    ]
    return (
        f"reduced: {options.side} x {options.side} pixels, {options.rounds * STEPS} local steps of "
        f"{options.batch} images, one learning rate, {options.lr:g}; {table['seeds'].sum()} of "
        f"{planned} runs have finished; diverged: {', '.join(failed) or 'none'}. "
        f"Right on the common test in the mean over the peers, and on a peer's own test, %. "
        f"{'. '.join(parts)}."
    )


def _ranked(table: pd.DataFrame) -> str:
    """Return the normalizations of a partition that did not diverge, the best first."""
    ran = table.dropna(subset="common_test").sort_values("common_test", ascending=False)
    return "; ".join(
        f"{row['normalization']} {row['common_test']:.1f} and {row['own_test']:.1f}"
        for row in ran.to_dict("records")
    )


def draw(table: pd.DataFrame, seeds: pd.DataFrame) -> Figure:
    """Draw a panel per partition: the common test and the own test, a dot per seed."""
    partitions = [name for name in PARTITIONS if name in set(table["partition"])]
    figure = Figure(figsize=(5.4 * len(partitions), 3.8), layout="constrained")
    panels = figure.subplots(1, len(partitions), squeeze=False, sharex=True)[0]
    shown = {"common_test": "common test, mean of the peers", "own_test": "own test"}
    for axes, partition in zip(panels, partitions, strict=True):
        own, runs = (each[each["partition"] == partition] for each in (table, seeds))
        names = list(own["normalization"])
        for k, (column, label) in enumerate(shown.items()):
            at = {name: place + 0.38 * k - 0.19 for place, name in enumerate(names)}
            axes.barh(
                list(at.values()), own[column], 0.36, color=common.COLOURS[(5, 4)[k]], label=label
            )
            axes.plot(runs[column], runs["normalization"].map(at), ".", color=common.COLOURS[6])
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set(xlim=(0, 100), xlabel="right, %", title=partition)
        axes.grid(axis="x", alpha=0.3)
    common.caption(figure, panels[0], "ResNet-20 on a ring of 8 peers; a dot is a seed", 2)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "workloads.normalization"))
