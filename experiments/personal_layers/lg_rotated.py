"""Forgetting when a device with rotated digits joins: Table 3 of LG-FedAvg.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020, sections 3.2 and 7.2.

Command, 50 minutes of a slow core for a partition of a seed:

    python -m experiments.personal_layers.lg_rotated --data-dir DIR

Finding: LG-FedAvg is NOT ahead on normal digits where old devices train too; where they do not, it
retains what FedAvg forgets, as published, and FedAvg forgets more than published with non-IID
devices. Three seeds. One of the three runs of FedProx with non-IID devices diverged after 133
rounds; its figures are of two. Where only the new device trains (C = 0), of normal digits 30.9 %
are still right with IID devices and 26.8 % with non-IID ones (98.1 % before; published 32.0 and
35.7 after), of rotated ones 95.1 and 95.8 %. The number of rounds hardly explains that gap: the
published share is reached after three rounds only (`--rounds 3`, seeds 1 and 2: 35.6 and 33.9 %, of
rotated digits 90.0 and 88.2; published 93.6), and 27.9 and 28.4 % are right with `--rounds 10`.
LG-FedAvg, which retains the old devices' layers below the new head, has 98.0 and 97.8 % of the
normal digits; where the new device first trains its local part under the unchanged head, and then
both, as the text of section 3.2 has it, 98.1 % with both (published 96.6 and 96.3). To train the
head too is not shown to be of use: the local part alone, which costs no normal digit, has 95.3 and
95.5 % of the rotated ones right, and 95.3 and 95.4 % after both parts. With a tenth of the old
devices (C = 0.1) LG-FedAvg is ahead on rotated digits at every seed, 95.9 and 95.6 % (FedAvg 92.9
and 92.5, FedProx 92.7 and 92.0), and not on normal ones, 98.1 % with both (98.4 and 98.1; 98.4 and
98.2). There `normal` is by the mean output of the old devices' models; single models have 97.4 and
94.2 %. Rotated digits are 1.2 to 5.6 points better here than published, except for FedProx with
non-IID devices, 0.5.

Grid: MNIST on 100 devices, IID or two label shards each, FedAvg with a tenth of them in a round
until 98 % of their test examples are right, as published, after 80 to 100 and 350 to 420 rounds; a
new device with 3,000 training and 500 test images rotated by 90 degrees; 784-512-256-256-128-10, of
which the last two layers are shared; batches of 10, one epoch a round, learning rate 0.05, momentum
0.5. C = 0: only the new device trains, for 500 rounds; where the local part learns first, 250 of it
and 250 of both. C = 0.1: 500 rounds of the new device, in every round, and ten of the others.
FedProx's mu is 0.1, which the paper does not give. Figures are means over ten rounds of the last
tenth. Published: ten seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import Module, Sequential

from dfl.config import Run
from dfl.core import randomness
from dfl.core.errors import DivergedError, InputError
from dfl.core.registry import choose
from dfl.datasets import DATASETS, PARTITIONS, Data
from dfl.datasets.partitions.base import DataSplit, split_data
from dfl.store.results import load
from dfl.sweep import Cell, run_grid
from experiments import common
from experiments.personal_layers.new_device import (
    Kept,
    Models,
    OnFixed,
    as_inputs,
    cut_of,
    filled,
    learn,
    outputs,
    rotated,
)
from experiments.personal_layers.published import insert_published

PARTITION = {"iid": "iid", "non-iid": "shards:per_peer=2"}
BEFORE = "before"
FEDAVG = "FedAvg"
FEDPROX = "FedProx"
LG = "LG-FedAvg"
FIRST = "LG-FedAvg, local part alone"
BOTH = "LG-FedAvg, local part first"
PUBLISHED = {
    (FEDAVG, 0.0): (32.01, 91.83, 35.70, 93.58), (LG, 0.0): (96.55, 92.92, 96.31, 94.12),
    (FEDAVG, 0.1): (97.35, 89.29, 96.89, 89.62), (FEDPROX, 0.1): (94.82, 87.19, 97.86, 91.58),
    (BOTH, 0.0): (96.55, 92.92, 96.31, 94.12), (LG, 0.1): (97.66, 93.16, 98.16, 93.88),
}  # fmt: skip
"""Percent right on normal and on rotated digits, with IID and with non-IID devices; LG-FedAvg with
C = 0 is published once, for both readings of its training.
"""

MU = 0.1
"""Of FedProx; not given in the paper."""

TOGETHER = {
    FEDAVG: ("newest_fedavg:fraction=0.1", "all"),
    FEDPROX: (f"newest_fedprox:fraction=0.1,mu={MU}", "all"),
    LG: ("newest_fedavg:fraction=0.1", "head:2"),
}
"""Method -> the algorithm and the shared layers of C = 0.1."""

Pair = tuple[Sequence[Module], Module]
"""The models of the first devices, one where all have the same, and that of the new device."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """The options of this experiment."""

    out: Path = Path("results/lg_rotated")
    seeds: int = 3
    rounds: int = 500
    """Rounds after the new device has joined."""
    goal: float = 0.98
    """Mean accuracy on the first devices' own test examples at which they stop."""
    most: int = 1500
    """Maximum number of rounds of the first devices."""
    devices: int = 100
    """Number of first devices."""
    model: str = "mlp:hidden=512+256+256+128"
    """Their model."""
    examples: int = 3000
    """Training examples of the new device; its test set is a sixth as large."""


@dataclass(frozen=True)
class Scene:
    """The first devices, their trained model, and the new device.

    Attributes:
        options: of the experiment.
        seed: of the run.
        data: normal digits.
        split: the examples of each of the first devices.
        newest: the examples of the new device.
        rotated: inputs and labels of its test set.
        start: the model of the first devices.
    """

    options: Options
    seed: int
    data: Data
    split: DataSplit
    newest: Data
    rotated: tuple[Tensor, Tensor]
    start: Sequential

    @property
    def normal(self) -> tuple[Tensor, Tensor]:
        """All normal test digits, inputs and labels."""
        return as_inputs(self.data, self.data.test_inputs), torch.from_numpy(self.data.test_labels)

    def run(self, **changes: Any) -> Run:
        """Return a run with the common hyper-parameters, with changes."""
        shared_settings: dict[str, Any] = {
            "lr": 0.05,
            "momentum": 0.5,
            "batch_size": 10,
            "seed": self.seed,
        }
        return Run(**shared_settings, **changes)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy on normal and rotated digits after a device with rotated ones joins."""
    if options.rounds < 2:
        raise InputError(f"--rounds must be at least 2, not {options.rounds}")
    grid: list[dict[str, Any]] = [
        {"data": partition, "seed": seed}
        for partition in PARTITION
        for seed in range(options.seeds)
    ]
    seeds = common.keep(options, grid, measured)
    if options.only is not None:
        return common.print_rows(seeds)
    table = tabulate(seeds)
    common.publish(options, table, draw(table, options), finding(table), seeds)


def first(options: Options, partition: str, seed: int) -> Run:
    """Return the run of the first devices, before the new one joins."""
    return Run(
        algorithm="fedavg:fraction=0.1",
        peers=options.devices,
        dataset=options.dataset,
        data_dir=options.data_dir,
        partition=PARTITION[partition],
        model=options.model,
        rounds=options.most,
        eval_every=10,
        until=f"local_accuracy={options.goal}",
        batch_size=10,
        lr=0.05,
        momentum=0.5,
        seed=seed,
    )


def scene(options: Options, partition: str, seed: int) -> Scene:
    """Train the first devices, and draw the examples of the new one."""
    run = first(options, partition, seed)
    cell = Cell({"data": partition, "seed": seed}, run)
    run_grid([cell], options.out / "cells")
    data = choose("--dataset", options.dataset, DATASETS)(options.data_dir)
    split = split_data(
        choose("--partition", str(run.partition), PARTITIONS),
        data,
        peers=options.devices,
        seed=run.seed,
        validation=run.validation,
    )
    train, test = (
        randomness.generator(seed, f"newest {name}").choice(known, number, replace=False)
        for name, known, number in (
            ("train", len(data.train_labels), options.examples),
            ("test", len(data.test_labels), options.examples // 6),
        )
    )
    newest = replace(
        data,
        train_inputs=rotated(data.train_inputs[train]),
        train_labels=data.train_labels[train],
        test_inputs=rotated(data.test_inputs[test]),
        test_labels=data.test_labels[test],
    )
    own_test = as_inputs(data, newest.test_inputs), torch.from_numpy(newest.test_labels)
    start = load(options.out / "cells" / cell.name).model(0)
    assert isinstance(start, Sequential)
    return Scene(options, seed, data, split, newest, own_test, start)


def measured(options: Options, data: str, seed: int) -> pd.DataFrame:
    """Return a row per method, of one partition of the data and one seed."""
    this = scene(options, data, seed)
    labels = {"data": data, "seed": seed}
    return pd.DataFrame([labels | row for row in (*alone(this), *together(this))])


def alone(this: Scene) -> list[dict[str, Any]]:
    """Return the rows of C = 0, where only the new device trains.

    The methods differ in the pairs of local part f and shared part g that are then combined. Where
    the local part learns first, it does in the first half of the rounds.
    """
    old, rounds = this.start, this.options.rounds
    cut, half = cut_of(old), max(1, rounds // 2)
    fixed = OnFixed(old[:cut], old[cut:])

    def on_head(models: Models) -> Sequential:
        return Sequential(*filled(fixed, models).f.children(), *old[cut:].children())

    def of_joint(models: Models) -> dict[str, Pair]:
        new = filled(old, models)
        return {FEDAVG: ([new], new), LG: ([old[:cut] + new[cut:]], new)}

    def of_local(models: Models) -> dict[str, Pair]:
        return {FIRST: ([old], on_head(models))}

    def of_both(models: Models) -> dict[str, Pair]:
        new = filled(old, models)
        return {BOTH: ([old[:cut] + new[cut:]], new)}

    def run_of(rounds: int) -> Run:
        return this.run(algorithm="fedavg", peers=1, **evaluated(rounds))

    joint, _ = followed(this, run_of(rounds), old, this.newest, of_joint)
    local, models = followed(this, run_of(half), fixed, this.newest, of_local)
    both, _ = followed(this, run_of(rounds - half), on_head(models), this.newest, of_both)
    after = {**joint, **both, **local}
    lengths = {FIRST: half}
    return [
        {"method": BEFORE} | scores(this, [old], old),
        *(
            {"method": name, "C": 0.0, "rounds": lengths.get(name, rounds)} | row
            for name, row in after.items()
        ),
    ]


def evaluated(rounds: int) -> dict[str, int]:
    """Return the settings of a run of so many rounds that is evaluated in its last tenth."""
    tail = len(common.tail_rounds(rounds))
    return {"rounds": rounds, "eval_every": rounds, "eval_last": max(1, tail)}


def followed(
    this: Scene, run: Run, module: Module, data: Data, pairs: Callable[[Models], dict[str, Pair]]
) -> tuple[dict[str, dict[str, float]], Models]:
    """Run from a model on own data.

    Args:
        this: the devices.
        run, module, data: as for `learn`.
        pairs: the models of the first devices and that of the new one, by method, from the models
            of a run.

    Returns:
        The mean scores by method over 10 to 19 rounds of the last tenth, evenly spaced, or over all
        where they are fewer; and the models.
    """
    tail = common.tail_rounds(run.rounds)
    some = {t for t in tail if (run.rounds - t) % max(1, len(tail) // 10) == 0}

    def measure(models: Models) -> dict[str, dict[str, float]]:
        return {name: scores(this, *pair) for name, pair in pairs(models).items()}

    kept = Kept(some, measure)
    models = learn(run, module, data, kept)
    return {
        name: {key: float(np.mean([one[name][key] for one in kept.found])) for key in figures}
        for name, figures in kept.found[0].items()
    }, models


def together(this: Scene) -> list[dict[str, Any]]:
    """Return the rows of C = 0.1, where the new device and a tenth of the others train; without
    figures where the run diverged.
    """
    own = [
        *this.split.train,
        np.arange(len(this.newest.train_labels)) + len(this.data.train_labels),
    ]
    places = np.concatenate(own)
    owners = np.repeat(np.arange(len(own)), [len(part) for part in own])
    inputs, labels = (
        np.concatenate([getattr(one, f"train_{name}") for one in (this.data, this.newest)])[places]
        for name in ("inputs", "labels")
    )
    data = replace(
        this.newest,
        train_inputs=inputs,
        train_labels=labels,
        train_groups=owners,
        test_groups=np.full(len(this.newest.test_labels), len(own) - 1),
    )
    rounds = this.options.rounds
    rows = []
    for name, (method, share) in TOGETHER.items():

        def split_up(models: Models, name: str = name) -> dict[str, Pair]:
            known = len(next(iter(models.values())))
            *old, new = (filled(this.start, models, i) for i in range(known))
            return {name: (old or [new], new)}

        run = this.run(
            algorithm=method,
            share=share,
            peers=len(own),
            partition="natural",
            eval_examples=len(own),
            **evaluated(rounds),
        )
        row: dict[str, Any] = {"method": name, "C": 0.1, "rounds": rounds}
        with suppress(DivergedError):
            found, _ = followed(this, run, this.start, data, split_up)
            row |= found[name]
        rows.append(row)
    return rows


def scores(this: Scene, old: Sequence[Module], new: Module) -> dict[str, float]:
    """Return the percentages right of the first devices on normal digits, and of the new device on
    rotated ones.

    `normal` is by the mean output of the first devices' models; `normal_alone` the mean over the
    single models; `local` that on each device's own part of the test set.
    """
    inputs, labels = this.normal
    out = [outputs(model, inputs) for model in old]
    right = torch.stack([each.argmax(1) == labels for each in out]).double().numpy()
    devices = len(this.split.test)
    rows = np.broadcast_to(right, (devices, right.shape[1]))
    local = [row[part].mean() for row, part in zip(rows, this.split.test, strict=True)]
    ensemble = torch.stack(out).mean(0).argmax(1) == labels
    on_rotated = outputs(new, this.rotated[0]).argmax(1) == this.rotated[1]
    return {
        "normal": 100 * float(ensemble.double().mean()),
        "normal_alone": 100 * float(right.mean()),
        "local": 100 * float(np.mean(local)),
        "rotated": 100 * float(on_rotated.double().mean()),
    }


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per partition, method and C: means and std over the `seeds` whose run did not
    diverge, the number of runs that did, and the published figures.
    """
    by = rows.groupby(["data", "C", "method"], sort=False, dropna=False)
    figures = ["normal", "normal_alone", "local", "rotated", "rounds"]
    table = by[figures].mean()
    table.insert(0, "seeds", by["normal"].count())
    table.insert(1, "diverged", by["normal"].size() - table["seeds"])
    std = by[figures].std()
    for k, column in enumerate(("normal", "rotated")):
        published = [_published(data, method, c)[k] for data, c, method in table.index]
        insert_published(table, column, published, std[column])
    return table.reset_index()


def _published(data: str, method: str, c: float) -> tuple[float, ...]:
    found = PUBLISHED.get((method, c), (np.nan,) * 4)
    return found[:2] if data == "iid" else found[2:]


def finding(table: pd.DataFrame) -> str:
    """Return the accuracy on normal digits that LG-FedAvg retains beyond FedAvg, and the runs that
    diverged.
    """
    figures = common.by_label(table, ["data", "C", "method"])
    parts = []
    for (data, c, method), one in figures.items():
        if c == 0 and method != FEDAVG:
            gap = one["normal"] - figures[data, c, FEDAVG]["normal"]
            parts.append(
                f"{data}, C = 0, {method}: normal {one['normal']:.1f} % ({gap:+.1f} to FedAvg), "
                f"rotated {one['rotated']:.1f} %"
            )
        if one["diverged"]:
            runs = one["seeds"] + one["diverged"]
            parts.append(f"{data}, C = {c:g}, {method}: {one['diverged']} of {runs} runs diverged")
    return "; ".join(parts) + "."


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw the accuracy on normal and rotated digits of every method, and the published ones."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    for axes, data in zip(figure.subplots(1, 2, sharey=True), PARTITION, strict=True):
        own = table[table["data"] == data]
        places = np.arange(len(own))
        for k, column in enumerate(("normal", "rotated")):
            at = places + 0.4 * k - 0.2
            axes.barh(
                at,
                own[column],
                0.38,
                xerr=own[f"{column}_std"],
                color=common.COLOURS[k],
                label=f"{column} digits",
            )
            shown = "published" if k else None
            axes.plot(own[f"{column}_published"], at, "kd", markersize=5, label=shown)
        names = [
            name if np.isnan(c) else f"{name}, C = {c:g}"
            for name, c in zip(own["method"], own["C"], strict=True)
        ]
        axes.set_yticks(places, names)
        axes.set(title=f"{data} devices", xlabel="right, %", xlim=(0, 100))
        axes.grid(axis="x", alpha=0.3)
    figure.axes[0].invert_yaxis()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    figure.suptitle(
        f"A device with digits rotated by 90 degrees joins {options.devices} with normal ones"
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.lg_rotated"))
