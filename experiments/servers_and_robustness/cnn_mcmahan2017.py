"""Rounds of FedAvg with a CNN to 99 % on MNIST, by local epochs, batch and share of clients.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017: the rows of the CNN in Table 1 (five local epochs, client fraction C = 0, which is one
client, 0.1, 0.2, 0.5 and 1) and in Table 2 (C = 0.1, and 1, 5 or 20 local epochs).

Command, about 24 hours of a core for the first twelve cases; the last took eight minutes of an
H200, with `--jobs 3`. The other 20 cases take weeks of a core, or six to eleven hours of an H200
with nine runs at a time, by an estimate:

    python -m experiments.servers_and_robustness.cnn_mcmahan2017 --data-dir DIR \\
        --cases iid_e1_b50_c0.1 iid_e1_b10_c0.1 iid_e5_b50_c0.1 iid_e5_b10_c0.1 \\
        iid_e20_b10_c0.1 iid_e20_b50_c0.1 iid_e5_b10_c0 iid_e5_binf_c0 iid_e5_b10_c0.2 \\
        iid_e5_b10_c0.5 shards_e1_b10_c0.1 shards_e1_b50_c0.1 shards_e1_binf_c0.1

Finding: six of 13 cases miss the published number. With one client in a round (C = 0), five epochs
and batches of 10, one of three seeds does not reach 99 % in 100 rounds, the others do in 92 and 94
(published 50). With all examples in a batch instead, one does not in 774, the others do in 608 and
588 (387). With C = 0.1, five epochs and batches of 50 take 45.5 rounds (29). With 20 epochs and
batches of 50 they take 41, 38 and 44.7 (32). With shards and C = 0.1, one epoch with batches of 10
takes 191 and 193 rounds with two seeds (350), and the model of the third is no longer finite after
round 113. One epoch with all examples in a batch (FedSGD) does not reach 99 % in 966 rounds with
one seed, and does in 920 and 782 with the others (483).

The rule that chooses the rate is a cause of two of these misses, as runs with other rates show.
They are not in the table; `--only case=iid_e5_b50_c0.1,lr=0.464,seed=2` runs one of them. It takes
the best of one seed after a sixth of the published rounds, four at least, where a rate may be
behind that is ahead later, or ahead that diverges. Five epochs with batches of 50 take 47, 32 and
33 rounds with 0.464, 37 in the mean, and 45.5 with 0.215, which is chosen. One epoch with batches
of 10 diverges with the chosen 0.215 and seed 1; with 0.1 this seed takes 257 rounds, and seed 2
takes 176 in place of 193 (published 350). Four others are not explained. Twenty epochs with batches
of 50 take 29 rounds with 0.464 and seed 0, in place of 41; with seed 1 they have 98.98 % right at
best in 34 rounds, where 0.215 takes 38, and with seed 2 the model is no longer finite after round
13. FedSGD with shards, seed 2 and 0.464 is behind the chosen 0.215 at round 80 and ahead from 120
to 360, where it has 98.7 % right and 0.215 has 98.1, but 18 % at round 400 and 15 at 440. With
0.316, of the grid of 10^(1/6) that the paper uses for some cases, it has 98.45 % right at round
320, which 0.215 first passes at 440; it was stopped after 399. The initial weights of Glorot and
Bengio (2010), set by hand, are no faster, on FedSGD with IID data and seed 0: 71 % right after 52
rounds, and 89 with torch's.

Three runs of seed 1 with an evaluation in every round do not explain the miss with one client and
batches of 10. The best accuracy in 50 rounds is 98.9 % with 0.1, which is chosen, with 0.0464, and
with 0.0464 and standardised pixels. The first was stopped after 82 rounds, at 98.98 %, the others
after 60 and 64, at 98.9. From one round to the next the accuracy changes by about 0.1 percentage
points, so the first round at 99 % may depend on chance; the paper states one number per case. 0.215
passes 98.8 % in 100 rounds with no seed. With all examples in a batch, the best accuracy in 304
rounds of seed 0 is 98.45 % with 0.1, where 0.215 has passed 98.8, and 0.464 has 11 % right after
64. The initial weights of TensorFlow's example of this network, normal and truncated with a
standard deviation of 0.1, are no faster in a plain loop of torch with seed 1: batches of 10 have
98.2 % right at best in 40 rounds with 0.0215, and 98.4 in 30 with 0.0464 and the example's pixels
from -0.5 to 0.5, where the three runs with 0.1 have 98.3 to 98.5 in 30.

The other seven cases are within two standard errors of the number they are compared with, or within
10 %, or exceed it. With IID data and C = 0.1, one epoch with batches of 50 takes 67.6 rounds (65),
one with batches of 10 31.4 (34), five with batches of 10 21.0 (20 in Table 2, but 18 in Table 1),
and 20 with batches of 10 20.0 (18), 1.4 standard errors from it: 21.8, 21 and 17.3 with the three
seeds. With C = 0.2, five with batches of 10 take 17.4 (18), and with C = 0.5 16.8 (18). With
shards, one with batches of 50 takes 388, 606 and 569 rounds, 521 in the mean (600), 1.2 standard
errors from it. Three seeds each. Not run: other shards, IID data with all examples in a batch and
more than one client, others with 20 epochs, and C = 1.

FedSGD was run with torch 2.11 on an H200, which trains some 100,000 images a second; on another
machine the last digits differ, and with them the rounds. cells.zip has finished cells of other
cases, too. One is FedSGD with IID data, the chosen rate of 0.215 and seed 1: it takes 1,102 rounds
(626); the other two seeds were stopped after 572. Standardised pixels are no faster with this seed:
the best of 640 rounds with 0.1 is 98.79 %, at round 560, and the accuracy falls to 35 % at 580. Six
runs went on after a round at exactly 99 %, where a run now ends.

Grid: 100 clients of 600 examples, IID or two label shards each, pixels from 0 to 1 as in the paper;
momentum 0; batches of 10 or 50, or all 600 examples of a client. FedSGD is one epoch with all of
them. The learning rate is chosen for every case by validation accuracy among three, as in
`fedavg_mcmahan2017`, whose rules on rounds and runs apply.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from experiments import common
from experiments.servers_and_robustness import fedavg_mcmahan2017
from experiments.servers_and_robustness.client_fraction import CLIENTS, PARTITIONS, by_seed
from experiments.servers_and_robustness.fedavg_mcmahan2017 import UNIT, Case, every, measure

TARGET = 0.99
TABLE_2 = {
    (1, 0): (626, 483),
    (5, 0): (179, 1000),
    (1, 50): (65, 600),
    (20, 0): (234, 672),
    (1, 10): (34, 350),
    (5, 50): (29, 334),
    (20, 50): (32, 426),
    (5, 10): (20, 229),
    (20, 10): (18, 173),
}
"""Local epochs and batch -> rounds with IID data and with shards, at C = 0.1."""
TABLE_1 = {
    ("iid", 0): (387, 339, 337, 164, 246),
    ("iid", 10): (50, 18, 18, 18, 16),
    ("shards", 0): (1181, 1100, 978, 1067, None),
    ("shards", 10): (956, 206, 200, 261, 97),
}
"""Partition and batch -> rounds at each C with five local epochs; None where there is a dash. At C
= 0.1 the two tables differ: 339 and 179, 18 and 20, 1100 and 1000, 206 and 229.
"""
RATES = (0.0215, 0.0464, 0.1, 0.215, 0.464)
"""Three of these learning rates are tried; those of one client and of small batches are lower."""


def _case(partition: str, epochs: int, batch: int, fraction: float, published: int) -> Case:
    clients = CLIENTS[fraction]
    first = (clients > 1) + (batch != 10)
    return Case(
        title=f"CNN, {'IID' if partition == 'iid' else partition}, E={epochs}, "
        f"B={batch or 'inf'}, C={fraction:g}",
        published=published,
        source="Tables 1 and 2",
        target=TARGET,
        setting={
            "model": "cnn",
            "partition": PARTITIONS[partition],
            "local_epochs": epochs,
            "batch_size": batch,
            "algorithm": f"fedavg:fraction={clients / 100:g}",
        },
        rates=RATES[first : first + 3],
        tuning=max(4, published // 6),
        every=max(1, published // 12),
        cap=2 * published,
        seeds=3,
    )


def _cases() -> dict[str, Case]:
    """Return the published cases; where both tables have one, with the number of Table 2."""
    keyed: dict[tuple[str, int, int, float], int | None] = {
        (partition, 5, batch, fraction): published
        for (partition, batch), numbers in TABLE_1.items()
        for fraction, published in zip(CLIENTS, numbers, strict=True)
    } | {
        (partition, epochs, batch, 0.1): published
        for (epochs, batch), numbers in TABLE_2.items()
        for partition, published in zip(PARTITIONS, numbers, strict=True)
    }
    return {
        f"{partition}_e{epochs}_b{batch or 'inf'}_c{fraction:g}": _case(
            partition, epochs, batch, fraction, published
        )
        for (partition, epochs, batch, fraction), published in keyed.items()
        if published is not None
    }


CASES = _cases()
"""Partition, local epochs, batch and C -> the case."""


@dataclass(frozen=True, kw_only=True)
class Options(fedavg_mcmahan2017.Options):
    """The options of this experiment."""

    known: ClassVar[Mapping[str, Case]] = CASES
    out: Path = Path("results/cnn_mcmahan2017")
    dataset: str = UNIT
    """The data set: MNIST with pixels from 0 to 1, or another one of images."""
    eval_examples: int | None = 10_000
    """Test examples of an evaluation, and as many training examples; all if not given."""
    cases: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(CASES)
    """The published numbers to reproduce."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the rounds of FedAvg with a CNN to 99 %, and compare with the paper."""
    if options.only is not None:
        return common.rerun(options.out, options.only, every(options))
    rows, tried = measure(options)
    seeds = by_seed(rows, TARGET)
    table = tabulate(seeds, options.rounds)
    common.publish(options, table, draw(table), finding(table), seeds)
    tried.to_csv(options.out / "tuning.csv", index=False, float_format="%.6g")


def tabulate(seeds: pd.DataFrame, rounds: int = Options.rounds) -> pd.DataFrame:
    """Return a row per case: the mean over the seeds and the published number; NaN where a seed
    missed the target. `rounds_run` are the most rounds of the seeds that missed it, if any did;
    `diverged` are the seeds that missed it since their models are no longer finite.

    Args:
        seeds: a row per run, as `by_seed` returns them.
        rounds: the most rounds of a run whose case has no lower cap.
    """
    return pd.DataFrame([_row(name, own, rounds) for name, own in common.groups(seeds, ["case"])])


def _row(name: str, seeds: pd.DataFrame, most: int) -> dict[str, Any]:
    case, rounds = CASES[name], float(seeds["rounds"].mean(skipna=False))
    missed = seeds["rounds"].isna()
    return {
        "case": case.title,
        "lr": seeds["lr"].iloc[0],
        "seeds": len(seeds),
        "rounds": rounds,
        "rounds_std": seeds["rounds"].std(skipna=False),
        "published": case.published,
        "ratio": rounds / case.published,
        "best": seeds["best"].mean(),
        "missed": missed.sum(),
        "diverged": (missed & (seeds["rounds_run"] < min(case.cap, most))).sum(),
        "rounds_run": seeds.loc[missed if missed.any() else ~missed, "rounds_run"].max(),
    }


def finding(table: pd.DataFrame) -> str:
    """Return the rounds of every case, ours and the published ones."""
    return "; ".join(_sentence(row) for row in table.to_dict("records")) + "."


def _sentence(row: Mapping[Any, Any]) -> str:
    name = row["case"].removeprefix("CNN, ")
    if np.isnan(row["rounds"]):
        diverged = f", {row['diverged']} diverged" if row["diverged"] else ""
        return (
            f"{name}: {row['missed']} of {row['seeds']} seeds NOT in {row['rounds_run']} rounds"
            f"{diverged} (published {row['published']})"
        )
    return f"{name}: {row['rounds']:.1f} rounds (published {row['published']})"


def draw(table: pd.DataFrame) -> Figure:
    """Draw the rounds of every case with their standard deviation, and the published ones."""
    figure = Figure(figsize=(8, 1.6 + 0.4 * len(table)), layout="constrained")
    axes = figure.subplots()
    places = np.arange(len(table))
    axes.errorbar(
        table["rounds"], places, xerr=table["rounds_std"], fmt="o", color=common.COLOURS[0],
        capsize=3, label="here, and standard deviation over the seeds",
    )  # fmt: skip
    axes.plot(table["published"], places, "D", color=common.COLOURS[1], label="published")
    missed = table["rounds"].isna()
    axes.plot(
        table["rounds_run"][missed], places[missed], ">", mfc="none", color=common.COLOURS[0],
        label="a seed ended here, below 99 %, or diverged",
    )  # fmt: skip
    axes.set(xlabel="rounds to 99 %", xscale="log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(places, table["case"])
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    common.caption(figure, axes, "FedAvg with a CNN: rounds to 99 %, MNIST, 100 clients", 3)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.cnn_mcmahan2017"))
