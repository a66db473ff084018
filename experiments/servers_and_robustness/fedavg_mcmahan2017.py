"""Rounds of FedAvg to a target accuracy, compared with those of its paper.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017: Table 1 (2NN and CNN, client fraction 0.1) and Table 4 (2NN, more local epochs).

Command, 27 short runs to choose the learning rates and 21 that count; an hour and a half on two
cores that other programs shared:

    python -m experiments.servers_and_robustness.fedavg_mcmahan2017 --data-dir DIR \\
        --cases iid_b10 shards_b10 iid_b10_unit shards_b10_unit iid_full shards_full iid_b10_e20

Finding: fewer rounds than published, 0.27 to 0.48 of them. 97 % takes 31 rounds (30 to 32 over
three seeds; published 87) with IID data and B=10, 192 (168 to 220; 664) with shards and B=10, 398
(289 to 597; 1474) with IID data and all 600 examples a step, 552 (513 to 571; 1796) with shards
and all 600; these are in Table 1. With 20 epochs, IID, B=10, it takes 18 (17 to 19); the 32 beside
it is from memory of Table 4, was not checked, and is not drawn. The paper's conclusion from Table 1
holds: small batches save a factor of 12.8 with IID data (published 16.9) and of 2.9 with shards
(2.7). Inputs here are standardised, which explains a small part of the gap: on pixels from 0 to 1
the first two cases take 41 (40 to 42) and 222 (177 to 269) rounds. The rest is not explained; at a
learning rate of 0.0464, a fifth of the one that validation chooses, the first takes 98 on such
pixels (one seed, by hand), more than published.

Not run here: the CNN, which `cnn_mcmahan2017` has, and, for want of time, 20 epochs on shards (5 s
a round, 738 rounds published) and CIFAR-10. `--cases` has the first two, with rates given and not
chosen.

Grid: MNIST, 100 clients of 600 examples, 10 of them in a round, split IID or as two label shards
each; momentum 0 and one constant learning rate. Rounds to a target are counted on test accuracy
as in the paper: best so far, linear between evaluations (2, 20, 50, 50 and 1 rounds between
evaluations, in the first order above), the learning rate optimised. Here the rate is chosen by
validation accuracy, on a tenth of every client's examples that are set aside, in short runs of
seed 0 over a grid of 10^(1/3); the runs that count then have all 600 examples, and no choice uses
test data. A run ends at its target, or at a cap.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.sweep import Cell
from experiments import common

SHARDS = "shards:per_peer=2"
MEMORY = "Table 4, from memory"
UNIT = "mnist:unit=true"
"""Pixels from 0 to 1, as in the paper; they are standardised else."""
PUBLISHED = ("published", "published_for_pixels_0_to_1", "from_memory")
"""Columns of published numbers: at the setting of the row, at another one, and not checked."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A published number of rounds, and the setting that reproduces it."""

    title: str
    published: int
    """Rounds to the target in the paper."""
    source: str = "Table 1"
    """The table of the paper; a figure from memory has not been checked against the paper."""
    target: float = 0.97
    setting: Mapping[str, Any] = field(default_factory=dict)
    """The fields of `Run` that differ from those of `run_of`."""
    rates: tuple[float, ...]
    """Learning rates to choose from; a single one is given and not chosen."""
    tuning: int = 0
    """Rounds of a run that serves the choice of the rate."""
    every: int
    """Rounds between evaluations."""
    cap: int
    """Maximum number of rounds of a run."""
    seeds: int = 1

    @property
    def column(self) -> str:
        """The column of the published number: `published` is at the same setting only."""
        same, other, memory = PUBLISHED
        return memory if self.source == MEMORY else same if self.setting.get("dataset") else other


CASES = {
    "iid_b10": Case(
        title="2NN, IID, B=10, E=1", published=87, setting={},
        rates=(0.0464, 0.1, 0.215, 0.464), tuning=30, every=2, cap=300, seeds=3,
    ),
    "shards_b10": Case(
        title="2NN, shards, B=10, E=1", published=664, setting={"partition": SHARDS},
        rates=(0.0215, 0.0464, 0.1, 0.215), tuning=60, every=20, cap=1200, seeds=3,
    ),
    "iid_b10_unit": Case(
        title="2NN, IID, B=10, E=1, pixels 0 to 1", published=87,
        setting={"dataset": UNIT},
        rates=(0.0464, 0.1, 0.215, 0.464), tuning=30, every=2, cap=300, seeds=3,
    ),
    "shards_b10_unit": Case(
        title="2NN, shards, B=10, E=1, pixels 0 to 1", published=664,
        setting={"dataset": UNIT, "partition": SHARDS},
        rates=(0.0464, 0.1, 0.215), tuning=60, every=20, cap=1200, seeds=3,
    ),
    "iid_full": Case(
        title="2NN, IID, B=inf, E=1", published=1474, setting={"batch_size": 0},
        rates=(0.1, 0.215, 0.464, 1.0), tuning=100, every=50, cap=2500, seeds=3,
    ),
    "shards_full": Case(
        title="2NN, shards, B=inf, E=1", published=1796,
        setting={"batch_size": 0, "partition": SHARDS},
        rates=(0.1, 0.215, 0.464, 1.0), tuning=60, every=50, cap=3000, seeds=3,
    ),
    "iid_b10_e20": Case(
        title="2NN, IID, B=10, E=20", published=32, source=MEMORY,
        setting={"local_epochs": 20},
        rates=(0.0464, 0.1, 0.215, 0.464), tuning=2, every=1, cap=100, seeds=3,
    ),
    "cnn_iid_b10": Case(
        title="CNN, IID, B=10, E=5", published=18, target=0.99,
        setting={"model": "cnn", "local_epochs": 5},
        rates=(0.1,), every=2, cap=30,
    ),
    "shards_b10_e20": Case(
        title="2NN, shards, B=10, E=20", published=738, source=MEMORY,
        setting={"local_epochs": 20, "partition": SHARDS},
        rates=(0.0464,), every=5, cap=100,
    ),
}  # fmt: skip
"""In the order of their importance. Published: Table 1, and Table 4 where E is 20."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    known: ClassVar[Mapping[str, Case]] = CASES
    out: Path = Path("results/fedavg_mcmahan2017")
    seeds: int = 3
    """Maximum number of seeds of a case, from 0."""
    rounds: int = 10_000
    """Maximum number of rounds of any run, where its case has no lower cap."""
    jobs: int = 1
    eval_examples: int | None = None
    """Test examples of an evaluation, and at most as many training examples; all if not given."""
    cases: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(CASES)
    """The published numbers to reproduce."""

    def __post_init__(self) -> None:
        super().__post_init__()
        common.among("cases", self.cases, self.known)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the rounds of FedAvg to a target accuracy, and compare them with the paper."""
    if options.only is not None:
        return common.rerun(options.out, options.only, every(options))
    rows, tried = measure(options)
    table = tabulate(rows)
    common.publish(options, table, draw(table), finding(table))
    tried.to_csv(options.out / "tuning.csv", index=False, float_format="%.6g")


def measure(options: Options) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the evaluations of the runs that count, and the learning rates that were tried."""
    tried = []
    ran = []
    for name in options.cases:
        tried.append(tune(options, name))
        cells = grid(options, name, common.chosen(tried[-1]))
        ran.append(common.measure(options.out, cells, jobs=options.jobs))
    return pd.concat(ran, ignore_index=True), pd.concat(tried)


def run_of(options: Options, name: str, **changes: Any) -> Run:
    """Return a run of a case, with changes."""
    shared_settings = {
        "model": "2nn",
        "peers": 100,
        "algorithm": "fedavg:fraction=0.1",
        "momentum": 0.0,
        "batch_size": 10,
    }
    setting = options.known[name].setting
    places = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "eval_examples": options.eval_examples,
    }
    return Run(**{**places, **shared_settings, "local_epochs": 1, **setting, **changes})


def tune(options: Options, name: str) -> pd.DataFrame:
    """Return a row per learning rate of a case: the best validation accuracy of a short run; NaN
    where the rate is given.
    """
    case = options.known[name]
    if len(case.rates) == 1:
        return pd.DataFrame(
            {"case": [name], "lr": [case.rates[0]], "rounds": [0], "validation": [np.nan]}
        )
    rounds = min(case.tuning, options.rounds)
    change = {"rounds": rounds, "eval_every": -(-rounds // 5), "validation": 0.1}
    cells = [
        Cell({"case": name, "lr": f"{lr:g}"}, run_of(options, name, lr=lr, **change))
        for lr in case.rates
    ]
    rows = common.measure(options.out / "tuning", cells, jobs=options.jobs)
    best = [
        rows.loc[rows["lr"] == f"{lr:g}", "validation_accuracy_mean"].max() for lr in case.rates
    ]
    return pd.DataFrame({"case": name, "lr": case.rates, "rounds": rounds, "validation": best})


def grid(options: Options, name: str, lr: float) -> list[Cell]:
    """Return the cells of a case that count, one for each seed."""
    case = options.known[name]
    change = {
        "rounds": min(case.cap, options.rounds),
        "eval_every": case.every,
        "until": f"accuracy={case.target}",
    }
    return [
        Cell(
            {"case": name, "lr": f"{lr:g}", "seed": seed},
            run_of(options, name, lr=lr, seed=seed, **change),
        )
        for seed in range(min(case.seeds, options.seeds))
    ]


def every(options: Options) -> list[Cell]:
    """Return the cells of all cases and rates."""
    return [
        cell
        for name in options.cases
        for lr in options.known[name].rates
        for cell in grid(options, name, lr)
    ]


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per case: rounds to the target over the seeds and those of the paper; NaN where
    a seed missed the target.
    """
    return pd.DataFrame([_summary(str(name), own) for name, own in common.groups(rows, ["case"])])


def _summary(name: str, rows: pd.DataFrame) -> dict[str, Any]:
    case = CASES[name]
    seeds = [run for _, run in common.groups(rows, ["seed"])]
    reached = np.array([common.rounds_to_accuracy(run, case.target) for run in seeds])
    return {
        "case": case.title,
        "target": case.target,
        "lr": float(rows["lr"].iloc[0]),
        "seeds": len(seeds),
        "rounds": reached.mean(),
        "fewest": reached.min(),
        "most": reached.max(),
        **{column: case.published if column == case.column else np.nan for column in PUBLISHED},
        "source": case.source,
        "ratio": np.nan if case.source == MEMORY else reached.mean() / case.published,
        "best_accuracy": float(np.mean([run["accuracy_mean"].max() for run in seeds])),
        "rounds_run": max(int(run["round"].max()) for run in seeds),
        "seconds": float(np.mean([run["seconds"].max() for run in seeds])),
    }


def finding(table: pd.DataFrame) -> str:
    """Return the ratio of every number to the published one."""
    return "; ".join(_sentence(row) for row in common.by_label(table, ["case"]).values()) + "."


def _sentence(row: dict[str, Any]) -> str:
    name = row["case"]
    seeds = f"{row['seeds']} seed{'s' * (row['seeds'] != 1)}"
    column = next(each for each in PUBLISHED if not np.isnan(row[each]))
    known = f"{column.replace('_', ' ')} {row[column]:.0f}"
    if np.isnan(row["rounds"]):
        return (
            f"{name}: {row['target']:.0%} NOT reached by every one of {seeds} in "
            f"{row['rounds_run']} rounds (best {row['best_accuracy']:.4f}), {known}"
        )
    ratio = "" if np.isnan(row["ratio"]) else f", {row['ratio']:.2f} of it"
    return (
        f"{name}: {row['target']:.0%} in {row['rounds']:.0f} rounds ({row['fewest']:.0f} to "
        f"{row['most']:.0f} over {seeds}), {known}{ratio}"
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw the rounds of every case, with their range over the seeds, and the published ones; a
    number from memory is not drawn.
    """
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(table)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(table))
    spread = [table["rounds"] - table["fewest"], table["most"] - table["rounds"]]
    axes.errorbar(
        table["rounds"], places, xerr=spread, fmt="o", color=common.COLOURS[0], capsize=3,
        label="here, and range over the seeds",
    )  # fmt: skip
    for column, fill in zip(PUBLISHED[:2], (common.COLOURS[1], "white"), strict=True):
        label = column.replace("_", " ")
        axes.plot(
            table[column], places, "D", color=common.COLOURS[1], markerfacecolor=fill, label=label
        )
    axes.set(xlabel="rounds to the target", xscale="log", xlim=(10, 3000))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yticks(places, table["case"])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    common.caption(figure, axes, "FedAvg: rounds to a target, MNIST, 100 clients, 10 in a round", 3)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.fedavg_mcmahan2017"))
