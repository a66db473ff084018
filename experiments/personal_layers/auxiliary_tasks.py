"""Auxiliary tasks of local representations, and the weights of the server, in LG-FedAvg.

Liang et al., "Think Locally, Act Globally" (LG-FedAvg), 2020, train representations with an
auxiliary model beside the shared one (section 2.1, Figure 1b to 1d), and found that weights by the
norm of the gradient sped up convergence (section 2.2). Neither has a number in the paper, and the
auxiliary models are not used in its released experiments on images.

Command, 75 runs of 5 to 25 s on a core that other programs shared:

    python -m experiments.personal_layers.auxiliary_tasks --data-dir DIR --jobs 1

Finding: no auxiliary task raises the local test, and weights by the norm of the gradient are NOT
shown to speed up convergence. Of eight tasks and weights four lower the local test, by 0.13 to 0.82
points, all with weight 1. Single models gain on new examples from the autoencoder, 2.8 ± 0.2 points
with weight 0.1 and 7.0 ± 0.8 with weight 1, and from the rotation, 1.2 ± 0.2 and 1.8 ± 1.0; all
models together do not. After four rounds no task is ahead. Weights by the norm of the gradient
change the local test after four rounds by -5.5 ± 6.9 points with shards and by -1.7 ± 3.7 with
Dirichlet data, at the end by -2.9 ± 4.5 and -0.04 ± 0.28. What follows ± is half the 95 %
confidence interval of differences paired by seed.

Grid: MNIST on 100 devices of 100 examples in the mean, two label shards each or by a Dirichlet
distribution with alpha 0.1, a fifth of them in a round; 784-64-32-10, batches of 20, one epoch a
round, learning rate 0.05, momentum 0.5; five seeds. All methods continue from one model of 40
rounds of FedAvg, and share the last two layers for 20 rounds. The auxiliary task trains the first
layer beside the loss of the labels, with weight 0.1 or 1, through two layers of its own. The server
weights updates by examples, by the norm of the gradient, or equally. Differences are to no task and
weights by examples, paired by seed. `local_test` is on test examples with the labels of the device,
`new_test` on 1,000 test examples by the mean output of all models, `new_alone` by single models,
all after the last round; `early_local` is the first after four rounds. `MB` are sent in all.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

import dfl
from dfl.config import Run
from dfl.sweep import Cell, run_grid
from dfl.sweep.grid import name_of
from experiments import common

SHARDS = "shards"
DIRICHLET = "dirichlet"
DATA = {SHARDS: "shards:per_peer=2", DIRICHLET: "dirichlet:alpha=0.1"}
"""Data -> --partition: devices with the same number of examples, and with unequal numbers."""
TASKS = ("supervised", "autoencoder", "rotation", "jigsaw")
WEIGHTS = (0.1, 1.0)
"""Of the auxiliary loss in the objective of the local part."""
SHARED = 2
"""Number of shared layers, the last ones."""
EVERY = 4
"""Rounds between evaluations; the early test is after so many."""
SERVER = "fedavg:fraction=0.2"
LABELS = ["data", "auxiliary", "weight", "weighting"]
BASE = {"auxiliary": "none", "weight": 0.0, "weighting": "examples"}
"""The method to which others are compared."""
FIGURES = {
    "local_test": "local test",
    "new_test": "new test, all models together",
    "new_alone": "new test, single models",
    "early_local": f"local test after {EVERY} rounds",
}
"""Column -> title."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/auxiliary_tasks")
    rounds: int = 20
    """Rounds in which the last layers are shared."""
    before: int = 40
    """Rounds before, in which everything is shared, without an auxiliary task."""
    devices: int = 100
    """Number of devices."""
    examples: int = 100
    """Training examples of each device, in the mean."""
    look: int = 1000
    """Number of test examples of the new test."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure both tests by auxiliary task and by the weights of the server."""
    grid = values(options)
    if options.only is not None:
        grid = [common.named(options.only, {name_of(cell): cell for cell in grid})]
    before = {(cell["data"], cell["seed"]): first(options, cell) for cell in grid}
    run_grid(list(before.values()), options.out / "cells", jobs=options.jobs)
    cells = [Cell(cell, second(options, cell)) for cell in grid]
    rows = figures(common.measure(options.out, cells, in_process=True))
    if options.only is not None:
        return common.print_rows(rows)
    seeds = with_differences(rows)
    table = tabulate(seeds)
    shown = common.with_intervals(table, options.seeds)
    common.publish(options, table, draw(shown, options), finding(shown), seeds)


def values(options: Options) -> list[dict[str, Any]]:
    """Return the values of every cell: tasks on devices of the same size, weights of the server on
    both kinds of data.

    With devices of the same size uniform weights are those by examples.
    """
    by_gradient = BASE | {"weighting": "gradient"}
    tasks = [
        BASE | {"auxiliary": task, "weight": weight} for task, weight in product(TASKS, WEIGHTS)
    ]
    methods = {
        SHARDS: [BASE, *tasks, by_gradient],
        DIRICHLET: [BASE, BASE | {"weighting": "uniform"}, by_gradient],
    }
    return [
        {"data": data} | method | {"seed": seed}
        for seed in range(options.seeds)
        for data in DATA
        for method in methods[data]
    ]


def setting(options: Options, cell: dict[str, Any], **changes: Any) -> Run:
    """Return a run of devices with few examples, a fifth of which train in a round."""
    data: dict[str, Any] = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "peers": options.devices,
        "partition": DATA[cell["data"]],
        "examples_per_peer": options.examples,
        "eval_examples": options.look,
    }
    learning: dict[str, Any] = {"batch_size": 20, "lr": 0.05, "momentum": 0.5}
    return Run(seed=cell["seed"], **data, **learning, **changes)


def first(options: Options, cell: dict[str, Any]) -> Cell:
    """Return the run in which everything is shared, from whose model all methods continue."""
    run = setting(
        options, cell, model="mlp:hidden=64+32", algorithm=SERVER, rounds=options.before,
        eval_every=options.before,
    )  # fmt: skip
    return Cell({"before": cell["data"], "seed": cell["seed"]}, run)


def second(options: Options, cell: dict[str, Any]) -> Run:
    """Return the run of a method."""
    begun = dfl.load(options.out / "cells" / first(options, cell).name)
    task = f"{cell['auxiliary']}:weight={cell['weight']},head_layers={SHARED}"
    return setting(
        options,
        cell,
        model=begun.model(0),
        share=f"head:{SHARED}",
        auxiliary="none" if cell["auxiliary"] == "none" else task,
        algorithm=f"{SERVER},weighting={cell['weighting']}",
        rounds=options.rounds,
        eval_every=EVERY,
        ensemble=True,
    )


def figures(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: percentages right at the end, on own examples early, and MB."""
    labels = [*LABELS, "seed"]
    ends = common.ends(rows, labels)
    early = rows[rows["round"] == EVERY]["local_accuracy_mean"]
    return ends[labels].assign(
        local_test=100 * ends["local_accuracy_mean"],
        new_test=100 * ends["accuracy_ensemble"],
        new_alone=100 * ends["accuracy_mean"],
        early_local=100 * early.to_numpy(),
        MB=ends["payload_bytes"] / 1e6,
    )


def with_differences(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the differences of all figures to `BASE` on the same data and seed."""
    case = ["data", "seed"]
    base = rows[(rows[list(BASE)] == pd.Series(BASE)).all(axis=1)].set_index(case)
    of_same = base.loc[pd.MultiIndex.from_frame(rows[case])]
    differences = {f"{name}_minus": rows[name] - of_same[name].to_numpy() for name in FIGURES}
    return rows.assign(**differences)


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method: means over the seeds, and the std of differences."""
    by = seeds.groupby(LABELS, sort=False)
    columns: dict[str, pd.Series[float]] = {}
    for name in FIGURES:
        minus = by[f"{name}_minus"]
        columns |= {
            name: by[name].mean(), f"{name}_minus": minus.mean(), f"{name}_minus_std": minus.std(),
        }  # fmt: skip
    return pd.DataFrame({**columns, "MB": by["MB"].mean()}).reset_index()


def name_of_method(row: Mapping[Any, Any]) -> str:
    """Return the name of a method, as "jigsaw 0.1" or "gradient"."""
    if row["auxiliary"] == "none":
        return str(row["weighting"])
    return f"{row['auxiliary']} {row['weight']:g}"


def finding(table: pd.DataFrame) -> str:
    """Return how many tasks change the local test, and all differences to `BASE`.

    Args:
        table: with intervals.
    """
    tasks = table[table["auxiliary"] != "none"]
    minus, half = tasks["local_test_minus"], tasks["local_test_minus_ci95"]
    parts = [
        f"of {len(tasks)} tasks and weights, {int((minus > half).sum())} raise the local test and "
        f"{int((-minus > half).sum())} lower it, by intervals of 95 %"
    ]
    for row in others(table).to_dict("records"):
        differences = ", ".join(
            f"{title} {row[f'{name}_minus']:+.2f} ± {row[f'{name}_minus_ci95']:.2f}"
            for name, title in FIGURES.items()
        )
        parts.append(f"{row['data']}, {name_of_method(row)}: {differences}")
    return "; ".join(parts) + "."


def others(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of all methods but `BASE`."""
    return table[(table[list(BASE)] != pd.Series(BASE)).any(axis=1)]


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw the differences to `BASE` of every method, a panel per figure.

    Args:
        table: with intervals.
        options: of the experiment.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    panels = figure.subplots(1, len(FIGURES), sharey=True)
    own = others(table).reset_index(drop=True)
    for axes, (name, title) in zip(panels, FIGURES.items(), strict=True):
        for k, (data, some) in enumerate(common.groups(own, ["data"])):
            minus, half = some[f"{name}_minus"], some[f"{name}_minus_ci95"]
            axes.errorbar(
                minus, some.index, xerr=half, fmt="o", capsize=3, color=common.COLOURS[k],
                label=data,
            )  # fmt: skip
        axes.axvline(0, color="black", linewidth=1)
        axes.set(title=title.replace(", ", ",\n"), xlabel="difference, points")
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(own.index, [name_of_method(row) for row in own.to_dict("records")])
    panels[0].invert_yaxis()
    title = f"LG-FedAvg on {options.dataset}, {options.devices} devices: difference to no auxiliary"
    common.caption(figure, panels[0], f"{title} task and weights by examples, 95 % intervals", 2)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.auxiliary_tasks"))
