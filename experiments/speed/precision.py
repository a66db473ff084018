"""Accuracy and time with products in bfloat16 against float32.

`--precision bf16` rounds the operands and results of the products of local training to bfloat16;
models, momentum, averages and messages stay float32. The claim to test is that the accuracy is
within 0.005 of that of float32, in the mean over seeds that are paired.

Command, 20 minutes on two cores:

    python -m experiments.speed.precision --data-dir DIR --jobs 2

Finding: on both settings the accuracy is within 0.005 of float32 in the mean over ten paired seeds:
the difference is 0.0000 ± 0.0003 on MNIST, at most 0.0008 on one seed, and -0.0001 ± 0.0003 on
CIFAR-10, at most 0.0011. A round on MNIST is 1.46 times as fast with a perceptron, and no faster on
CIFAR-10 with a LeNet, on a processor with AVX512-BF16 and without AMX. An earlier measurement on
MNIST, on a machine that others used as well, gave 1.07.

Grid: the standard setting on MNIST (16 peers on a ring, two label shards each, 2NN, batches of 50),
and LeNet on CIFAR-10 (16 peers on a ring, Dirichlet 0.5, batches of 50, 2,000 test images at every
evaluation), each with both precisions. A round is timed after the runs: medians of 4 rounds of all
peers on one rank and thread, both precisions in turn three times, of which the best counts.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.sweep import Cell
from experiments import common
from experiments.speed.stopwatch import examples, seconds

PRECISIONS = {"cpu": ("float32", "bf16"), "cuda": ("float32", "tf32", "bf16")}
"""Device -> the precisions of products that it has."""
SETTINGS: dict[str, dict[str, Any]] = {
    "mnist": {"partition": "shards:per_peer=2", "rounds": 50},
    "cifar10": {
        "model": "lenet", "lr": 0.02, "batch_size": 50, "examples_per_peer": 600,
        "partition": "dirichlet:alpha=0.5", "rounds": 40, "eval_examples": 2000,
    },
    "digits": {"partition": "shards:per_peer=2", "rounds": 10},
}  # fmt: skip
"""Data set -> the settings that differ from the standard ones."""
SHAPES = {"mnist": (784,), "cifar10": (3, 32, 32), "digits": (64,)}
"""Data set -> the shape of an example."""
BAR = 0.005


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/precision")
    seeds: int = 10
    rounds: int | None = None  # type: ignore[assignment]
    """Rounds; those of the setting where not given."""
    jobs: int = 1
    datasets: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ("mnist", "cifar10")
    """The data sets: mnist, cifar10, or digits for a quick look."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device of training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        common.among("datasets", self.datasets, SETTINGS)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy and time with products in float32 and in bfloat16."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    seeds = common.by_seed(rows, ["dataset", "precision"])
    table = tabulate(seeds, {name: timed(options, name) for name in options.datasets})
    common.publish(options, table, draw(seeds), finding(table), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every data set, precision and seed."""
    return [
        Cell(
            {"dataset": name, "precision": precision, "seed": seed},
            run_of(options, name, precision, seed),
        )
        for name in options.datasets
        for seed in range(options.seeds)
        for precision in PRECISIONS[options.device]
    ]


def run_of(options: Options, name: str, precision: str, seed: int = 0) -> Run:
    """Return a run on a data set in a precision."""
    settings = {**common.SETTINGS.get(name, {}), **SETTINGS[name]}
    rounds = options.rounds or settings["rounds"]
    return Run(
        **{
            **settings,
            "peers": common.PEERS,
            "dataset": name,
            "data_dir": options.data_dir,
            "precision": precision,
            "device": options.device,
            "seed": seed,
            "rounds": rounds,
            "eval_every": rounds,
        }
    )


def timed(options: Options, name: str) -> dict[str, float]:
    """Return the milliseconds of a round by precision."""
    rounds = 7  # two to warm up, and the last, which ends in an evaluation
    data = examples(SHAPES[name], common.PEERS * 600)
    found: dict[str, list[float]] = {each: [] for each in PRECISIONS[options.device]}
    for _ in range(3):
        for precision, times in found.items():
            run = replace(
                run_of(options, name, precision), partition="iid", examples_per_peer=None,
                eval_examples=10, rounds=rounds, eval_every=rounds, eval_last=1,
            )  # fmt: skip
            times.append(1000 * median(seconds(run, data)))
    return {precision: min(times) for precision, times in found.items()}


def tabulate(seeds: pd.DataFrame, times: dict[str, dict[str, float]]) -> pd.DataFrame:
    """Return a row per data set and precision; differences are paired by seed.

    Args:
        seeds: a row per run.
        times: data set -> precision -> milliseconds of a round.
    """
    rows = []
    for name, own in common.groups(seeds, ["dataset"]):
        by_precision = own.pivot(index="seed", columns="precision", values="accuracy_mean")
        worst = own.groupby("precision")["accuracy_min"].mean()
        for precision in times[name]:
            minus = by_precision[precision] - by_precision["float32"]
            rows.append(
                {
                    "dataset": name, "precision": precision, "seeds": len(minus),
                    "accuracy": by_precision[precision].mean(),
                    "std_over_seeds": by_precision[precision].std(),
                    "worst_peer": worst[precision],
                    "minus_float32": minus.mean(), "minus_float32_std": minus.std(),
                    "largest_difference": minus.abs().max(),
                    "ms_per_round": times[name][precision],
                    "speed_up": times[name]["float32"] / times[name][precision],
                }
            )  # fmt: skip
    return pd.DataFrame(rows)


def finding(table: pd.DataFrame) -> str:
    """Return whether bfloat16 stays within the bar, and what it saves."""
    parts = []
    table = common.with_intervals(table, None)
    for row in table[table["precision"] != "float32"].to_dict("records"):
        inside = "within" if abs(row["minus_float32"]) <= BAR else "NOT within"
        parts.append(
            f"{row['dataset']}, {row['precision']}: {inside} {BAR} of float32 in the mean over "
            f"{row['seeds']} paired seeds, {row['minus_float32']:+.4f} ± "
            f"{row['minus_float32_ci95']:.4f}, at most {row['largest_difference']:.4f} on one; a "
            f"round is {row['speed_up']:.2f} times as fast"
        )
    return f"{'; '.join(parts)}."


def draw(seeds: pd.DataFrame) -> Figure:
    """Draw the accuracy with other precisions against that with float32, a point per seed."""
    names = list(seeds["dataset"].unique())
    figure = Figure(figsize=(4.6 * len(names), 4.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False).flat, names, strict=True):
        own = seeds[seeds["dataset"] == name]
        both = own.pivot(index="seed", columns="precision", values="accuracy_mean")
        ends = [both.min(axis=None) - BAR, both.max(axis=None) + BAR]
        axes.plot(ends, ends, color="0.7", label="equal")
        axes.fill_between(
            ends, np.subtract(ends, BAR), np.add(ends, BAR), color="0.93", label=f"within {BAR}"
        )
        others = [each for each in ("bf16", "tf32") if each in both]
        for precision, marker, colour in zip(others, "ox", common.COLOURS, strict=False):
            axes.plot(
                both["float32"], both[precision], marker, color=colour,
                label=f"a seed, {precision}" if len(others) > 1 else "a seed",
            )  # fmt: skip
        axes.set(
            title=name, xlabel="accuracy, float32", ylabel=f"accuracy, {' or '.join(others)}",
            xlim=ends, ylim=ends,
        )  # fmt: skip
        axes.set_aspect("equal")
        axes.legend()
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.precision"))
