"""Seconds that dfl, other frameworks and a plain loop of torch take to learn the same data.

Command, some five minutes on two idle cores; the baselines are those of
`experiments.speed.benchmark_peers`:

    python -m experiments.speed.learning_speed --data-dir DIR

Finding: to an accuracy of 0.850, without its first round, dfl takes 0.52 s, the loop of torch 0.59
s, 1.13 times that, pfl 0.69 s, FedJAX 1.05 s, BlazeFL 1.21 s, gossipy 1.39 s and Flower 2.26 s: 9
or 10 rounds, 13 with gossipy. One seed was run, so differences between the numbers of rounds are
not significant. First rounds take 0.06 s with dfl, 0.12 with gossipy, 0.14 with pfl, 0.68 with
FedJAX, a second with the loop of torch and with BlazeFL, and 5.8 s with Flower. Final accuracies:
0.889 with dfl and 0.878 with gossipy, in the mean over all models on a ring, and 0.892 to 0.895 of
the average model with the others.

Grid: work A of the benchmark on MNIST in place of random numbers: 16 peers with 600 training images
each, drawn at random, a perceptron 784-200-200-10, an epoch of heavy-ball steps (momentum 0.9,
learning rate 0.01) in batches of 50 a round, 40 rounds. After each round the model is tested on
2,000 test images, which is not timed: the average model where there is a server, and in the mean
over all 16 models where peers keep their own, with dfl and gossipy on a ring. Each system has the
set-up that was its fastest in the benchmark, within 5 %. The target is 95 % of the best system's
final accuracy, a mean over the last tenth of the rounds; a time is that of the rounds until the
first one at or above it, except the first round, before or in which systems start and import what
they need, dfl, gossipy and pfl much of it before, and in which pfl evaluates. gossipy trains an
epoch before its first round. Systems draw their own first weights and orders. Launches of the
systems take turns.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.core.registry import choose
from dfl.datasets import DATASETS
from experiments import common
from experiments.speed.baselines import run
from experiments.speed.baselines.install import BASELINES, ENVS
from experiments.speed.stopwatch import WORK

SETUPS = (
    run.Setup("dfl", 2, 1),
    run.Setup("pfl", 2, 1),
    run.Setup("gossipy", 1, 2, "tutorial"),
    run.Setup("flower", 2, 1),
    run.Setup("blazefl", 1, 2),
    run.Setup("fedjax", 1, 2),
    run.Setup("torch", 2, 1),
)
"""The fastest set-up of each system on this work, within 5 %."""
LABELS = ("system", "processes", "threads", "version", "repetition")
IMAGES = 2000
"""Test images."""
SHARE = 0.95
"""The part of the best final accuracy that is the target."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/learning_speed")
    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    dataset: str = "mnist"
    """The data set, of images of 784 pixels."""
    envs: Path = ENVS
    """Folder of the baselines' environments."""
    baselines: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(BASELINES)
    """Baselines to compare dfl with."""
    rounds: int = 40
    """Rounds of training."""
    repetitions: int = 3
    """Launches of every system."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the accuracy over time of every system."""
    rows = measure(options)
    table = tabulate(rows)
    common.publish(options, table, draw(rows, table), finding(table))
    rows.to_csv(options.out / "rounds.csv", index=False, float_format="%.6g")


def measure(options: Options) -> pd.DataFrame:
    """Return the seconds since the start and the accuracy after every round of every launch.

    Raises:
        InputError: an unknown baseline, or one that is missing or fails.
    """
    common.among("baselines", options.baselines, BASELINES)
    options.out.mkdir(parents=True, exist_ok=True)
    data = (options.out / "examples.npz").absolute()
    terms = run.Terms(options.envs, options.rounds, warm_up=0, data=data)
    run.check(terms, ("dfl", *options.baselines))
    setups = [each for each in SETUPS if each.system in ("dfl", *options.baselines)]
    np.savez(data, **examples(options))
    try:
        launches = [
            {**asdict(setup), "repetition": k, **run.answer(setup, "A", terms)}
            for k, setup in product(range(options.repetitions), setups)
        ]
    finally:
        data.unlink()
    made = []
    for launched in launches:
        times = [0.0, *np.cumsum(launched["seconds"])]
        labels = {name: launched[name] for name in LABELS}
        made += [
            {**labels, "round": t, "seconds": time, "accuracy": accuracy}
            for t, (time, accuracy) in enumerate(zip(times, launched["accuracies"], strict=True))
        ]
    return pd.DataFrame(made)


def examples(options: Options) -> dict[str, Any]:
    """Return the peers' inputs (P, n, 784) and labels (P, n), and those of the test, as a model
    receives them.
    """
    work = WORK["A"]
    data = choose("--dataset", options.dataset, DATASETS)(options.data_dir)
    order = np.random.default_rng(0).permutation(len(data.train_labels))
    own = order[: work.peers * work.examples].reshape(work.peers, work.examples)

    def seen(images: Any) -> Any:
        return (images * data.scale + data.shift).astype(np.float32)

    labels = data.test_labels[:IMAGES]
    return {
        "inputs": seen(np.asarray(data.train_inputs)[own]).reshape(*own.shape, -1),
        "labels": data.train_labels[own],
        "test_inputs": seen(data.test_inputs[:IMAGES]).reshape(len(labels), -1),
        "test_labels": labels,
    }


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per system: its final accuracy, and the rounds to the target and the seconds of
    all of them but the first, in the median and over the launches; NaN where one does not reach it.
    """
    last = rows[rows["round"] > rows["round"].max() * 0.9]
    finals = last.groupby("system")["accuracy"].mean()
    target = SHARE * finals.max()
    made = []
    for (system, processes, threads, version), own in common.groups(
        rows, ["system", "processes", "threads", "version"]
    ):
        first = own.loc[own["round"] == 1, "seconds"]
        ends = [reached(each, target) for _, each in common.groups(own, ["repetition"])]
        times = np.subtract([end["seconds"] for end in ends], first.to_numpy())
        made.append(
            {
                "system": system, "version": version, "processes": processes, "threads": threads,
                "final_accuracy": finals[system], "target": target,
                "rounds_to_target": np.median([end["round"] for end in ends]),
                "seconds_to_target": np.median(times),
                "seconds_min": np.min(times), "seconds_max": np.max(times),
                "first_round": first.median(),
            }
        )  # fmt: skip
    table = pd.DataFrame(made)
    ours = table.loc[table["system"] == "dfl", "seconds_to_target"].iloc[0]
    return table.assign(ratio=table["seconds_to_target"] / ours)


def reached(rows: pd.DataFrame, target: float) -> dict[str, float]:
    """Return round and seconds of the first row at or above the target, NaN where there is none."""
    found = rows.loc[rows["accuracy"] >= target, ["round", "seconds"]]
    return dict(found.iloc[0]) if len(found) else {"round": np.nan, "seconds": np.nan}


def finding(table: pd.DataFrame) -> str:
    """Return the seconds of every system, the fastest first."""
    parts = [
        f"{row['system']} {row['seconds_to_target']:.2f} s ({row['rounds_to_target']:.0f} rounds, "
        f"{row['ratio']:.3g} times the time of dfl; first round {row['first_round']:.2f} s; "
        f"final accuracy {row['final_accuracy']:.3f})"
        for row in table.sort_values("seconds_to_target").to_dict("records")
    ]
    return f"to an accuracy of {table['target'].iloc[0]:.3f}: {'; '.join(parts)}."


def draw(rows: pd.DataFrame, table: pd.DataFrame) -> Figure:
    """Draw the accuracy over the seconds, a line per launch, and the target."""
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = dict(zip(("dfl", *BASELINES), common.COLOURS, strict=False))
    for system, colour in colours.items():
        for k, own in common.groups(rows[rows["system"] == system], ["repetition"]):
            after = own[own["round"] > 1]
            first = own.loc[own["round"] == 1, "seconds"].iloc[0]
            label = None if k else system
            axes.plot(
                after["seconds"] - first, after["accuracy"], color=colour, label=label, lw=1.2
            )
    axes.axhline(table["target"].iloc[0], color="0.6", ls="--", lw=1, label="target")
    axes.set(
        xscale="log", xlabel="seconds after the first round, logarithmic", ylabel="accuracy",
        title="Accuracy over time: 16 peers, two cores",
    )  # fmt: skip
    axes.grid(color="0.92")
    axes.legend(fontsize="small")
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.learning_speed"))
