"""Local training, FedAvg and LG-FedAvg by the number of labels per device, from ten down to one.

The claim is that of Figure 2c in the later version of Liang et al., "Think Locally, Act Globally"
(LG-FedAvg), which splits CIFAR-10: with fewer classes on a device LG-FedAvg is ahead of both
others throughout. Here it is MNIST.

Command, 60 runs, three minutes on two idle cores:

    python -m experiments.personal_layers.device_variance --data-dir DIR

Finding: LG-FedAvg is not ahead throughout, but never far behind. On own labels FedAvg is best with
ten labels a device (96.4 %), LG-FedAvg with five (96.0 %), and local training with two (98.0 %) and
one, where all examples of a device have one label. On new digits FedAvg is best with ten and five
(96.4 and 95.3 %), LG-FedAvg with two (93.1 % against 92.6 %, less than the std of FedAvg over
seeds, 0.9) and with one (86.6 % against 81.4 %). LG-FedAvg is behind the best by 1.4 points at most
on own labels and by 0.2 on new digits, while FedAvg loses up to 19 points on own labels and local
training up to 52 on new ones. It sends 36 % less than FedAvg. Its figures on new digits are by the
mean output of its models; single models are the less accurate there the fewer their labels are: 95,
90, 79 and 58 %. With one label FedAvg spikes: in round 80 alone its seeds have 61 to 84 % of the
new digits right, over the last eight rounds 80 to 84.

Grid: MNIST, 100 devices of 300 examples in the mean; ten labels is IID, else a device draws 5, 2
or 1, possibly the same one twice (`classes` is the number it has); 784-64-32-10. With a server 80
rounds of a tenth of the devices, of which LG-FedAvg shares everything in the first 50 and the
last two layers then; local training 8 rounds of all devices, as many passes. One epoch a round,
batches of 10, learning rate 0.05, momentum 0.5; five seeds, lengths fixed beforehand. New test is
of 2,000 test examples, by the mean output of all models. Published: CIFAR-10, in a setting that
is not stated.
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

import dfl
from dfl.config import Run
from dfl.core.registry import choose
from dfl.datasets import DATASETS, PARTITIONS
from dfl.datasets.partitions.base import split_data
from dfl.sweep import Cell
from experiments import common
from experiments.personal_layers.accuracies import by_seeds

METHODS = {
    "local only": "local_only",
    "FedAvg": "fedavg:fraction=0.1",
    "LG-FedAvg": "fedavg:fraction=0.1",
}


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/device_variance")
    rounds: int = 80
    """Rounds with a server, a tenth of the devices in each; local training has as many epochs per
    device.
    """
    before: int = 50
    """Number of these rounds, at the start, in which LG-FedAvg shares everything."""
    devices: int = 100
    """Number of devices."""
    examples: int = 300
    """Mean number of training examples of a device."""
    labels: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (10, 5, 2, 1)
    """Numbers of labels that a device draws."""
    model: str = "mlp:hidden=64+32"
    """The model; its last two layers are LG-FedAvg's shared part."""
    look: int = 2000
    """Number of test examples of the new test."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.labels or not all(1 <= k <= 10 for k in self.labels):
            raise dfl.InputError(f"--labels must be from 1 to 10, not {self.labels}")


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure local and new test by labels per device."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    table = tabulate(rows, {k: classes(options, k) for k in options.labels})
    common.publish(options, table, draw(table, options), finding(table))


def setting(options: Options, labels: int, seed: int, **changes: Any) -> Run:
    """Return a run of devices with this number of labels each; ten is IID."""
    shared_settings: dict[str, Any] = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "peers": options.devices,
    }
    partition = "iid" if labels == 10 else f"labels:per_peer={labels}"
    data: dict[str, Any] = {
        "partition": partition,
        "examples_per_peer": options.examples,
        "eval_examples": options.look,
    }
    learning: dict[str, Any] = {
        "model": options.model,
        "batch_size": 10,
        "lr": 0.05,
        "momentum": 0.5,
        "seed": seed,
    }
    return Run(**shared_settings, **data, **learning, **changes)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every method, number of labels and seed."""
    cases = product(options.labels, range(options.seeds), METHODS)
    return [
        Cell(
            {"labels": k, "method": name, "seed": seed},
            setting(options, k, seed, **method(options, name)),
        )
        for k, seed, name in cases
    ]


def method(options: Options, name: str) -> dict[str, Any]:
    """Return the fields that a method sets; devices have the same number of epochs in all."""
    n = max(1, options.rounds // 10) if name == "local only" else options.rounds
    split = (
        {"share": "head:2", "share_all_until": str(options.before)} if name == "LG-FedAvg" else {}
    )
    return {"algorithm": METHODS[name], "rounds": n, "eval_every": n, "ensemble": True, **split}


def classes(options: Options, labels: int) -> float:
    """Return the mean number of labels of a device: one that draws a label twice has fewer."""
    run = setting(options, labels, 0, algorithm="local_only")
    data = choose("--dataset", options.dataset, DATASETS)(options.data_dir)
    split = split_data(
        choose("--partition", str(run.partition), PARTITIONS),
        data,
        peers=options.devices,
        seed=run.seed,
        examples_per_peer=run.examples_per_peer,
    )
    return float(np.mean([len(np.unique(data.train_labels[own])) for own in split.train]))


def tabulate(rows: pd.DataFrame, classes: dict[int, float]) -> pd.DataFrame:
    """Return a row per number of labels and method: means and std over the seeds at the end."""
    ends = common.ends(rows, ["labels", "method", "seed"])
    table = by_seeds(ends, ["labels", "method"])
    table.insert(1, "classes", [classes[k] for k in table["labels"]])
    return table


def finding(table: pd.DataFrame) -> str:
    """Return the best method at every number of labels."""
    parts = []
    for labels, own in common.groups(table, ["labels"]):
        local, new = (own.set_index("method")[test] for test in ("local_test", "new_test"))
        parts.append(
            f"{labels} labels: local test best with {local.idxmax()} ({local.max():.1f} %), "
            f"new test with {new.idxmax()} ({new.max():.1f} %)"
        )
    return "; ".join(parts) + "."


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw both tests by labels per device, a line per method."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    known = list(dict.fromkeys(table["labels"]))
    for axes, test in zip(figure.subplots(1, 2), ("local_test", "new_test"), strict=True):
        for k, (method, own) in enumerate(common.groups(table, ["method"])):
            places = [known.index(labels) for labels in own["labels"]]
            axes.errorbar(
                places,
                own[test],
                own[f"{test}_std"],
                marker="o",
                color=common.COLOURS[k],
                label=method,
            )
        axes.set_xticks(range(len(known)), [str(k) for k in known])
        axes.set(
            title=test.replace("_", " "), xlabel="labels that a device draws", ylabel="right, %"
        )
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.suptitle(
        f"{options.dataset}, {options.devices} devices of {options.examples} examples, "
        f"{options.model}"
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.device_variance"))
