"""Test error and backdoor of FLTrust with the CNN and the one local step of its paper.

Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS
2021.

Command, 80 minutes of a core for every cell:

    python -m experiments.servers_and_robustness.fltrust_cnn --data-dir DIR \\
        --attacks backdoor

Finding: the claim on the error fails by a little, and the backdoor stays closed. Under the scaling
attack FLTrust has an error of 0.069, 0.049 above that of the mean without an attack (claimed: at
most 0.04), and the backdoor succeeds on 0.6 % of the images (at most 3 %). In the end the trust in
attackers is 0.000, and in honest clients 0.092. From round 1,300 to 1,750 it is up to 0.35 in
attackers, often more than in honest clients; the backdoor stays closed. In `robust_fltrust2021`,
with five local steps or a large rate, it opens. One seed. Not run: FLTrust without an attack, and
under the other attacks.

Grid: MNIST, 100 clients, 20 of them attackers, all of them in every round, partition
biased:q=0.5, the CNN of the released code, batches of 32, one local step, no momentum, 2,000
rounds; FLTrust with 100 root examples without bias, all of them in the server's step. The number of
rounds is from memory: the tables of the paper were not at hand. The released code, for
Fashion-MNIST, has a rate of 0.006 and sums the losses of a step, 32 of a client and 100 of the
server: by the mean of the losses, as here, the server's step has a rate of 0.01875, which both
rules take. Nothing was tuned. Every twentieth round is evaluated, on 1,000 test images, and figures
are means over the ten evaluations in the last tenth of the rounds. Attacks as in
`robust_fltrust2021`; `adaptive` takes 3 s a round more and is not here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.sweep import Cell, run_grid
from experiments import common
from experiments.servers_and_robustness.robust_fltrust2021 import LOSES, OPENS

MODELS = {
    "mnist": "cnn:channels=30+50,kernel=3,padding=0,hidden=100",
    "digits": "cnn:channels=3+5,kernel=3,hidden=10",
}
"""Data set -> the CNN of the paper, and a smaller one for a quick look."""
RATE = 0.006 * 100 / 32
"""The learning rate of the mean loss that makes a step of the server as long as in the released
code.
"""
ATTACKS = ("none", "backdoor", "trim", "krum", "label_flip")
LABELS = ["attack", "rule"]
FIGURES = {
    "error": "accuracy_mean",
    "backdoor_success": "backdoor_success_mean",
    "trust": "trust_mean",
    "trust_of_attackers": "trust_mean_attackers",
}
"""Column of the table -> that of metrics.csv; the error is 1 minus the accuracy."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/fltrust_cnn")
    seeds: int = 1
    """Number of seeds, from 0."""
    rounds: int = 2000
    """Rounds, in each of which all clients take one local step."""
    clients: int = 100
    """Clients; a fifth of them attacks."""
    eval_examples: int = 1000
    """Test examples of an evaluation, and as many training examples."""
    attacks: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = ATTACKS
    """The attacks on FLTrust, none among them; the mean is run without an attack."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dataset not in MODELS:
            raise InputError(f"--dataset must be one of {', '.join(MODELS)}, not {self.dataset!r}")
        common.among("attacks", self.attacks, ATTACKS)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the error of FLTrust under every attack, and that of the mean without one."""
    cells = grid(options)
    if options.only is not None:
        cells = [common.named(options.only, {cell.name: cell for cell in cells})]
    rows = run_grid(cells, options.out / "cells", jobs=options.jobs, keep_models=False)
    seeds = by_seed(rows)
    if options.only is not None:
        return common.print_rows(seeds)
    table = tabulate(seeds)
    common.publish(options, table, draw(rows, options), finding(table), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every attack on FLTrust and seed, and for the mean without an attack."""
    cases = [("none", "mean"), *((attack, "fltrust") for attack in options.attacks)]
    return [
        Cell({"attack": attack, "rule": rule, "seed": seed}, setting(options, attack, rule, seed))
        for attack, rule in cases
        for seed in range(options.seeds)
    ]


def setting(options: Options, attack: str, rule: str, seed: int) -> Run:
    """Return the run of a cell."""
    return Run(
        dataset=options.dataset,
        data_dir=options.data_dir,
        model=MODELS[options.dataset],
        peers=options.clients,
        partition="biased:q=0.5",
        lr=RATE,
        momentum=0.0,
        batch_size=32,
        local_steps=1,
        rounds=options.rounds,
        eval_every=max(1, options.rounds // 100),
        eval_examples=options.eval_examples,
        attack=attack if attack == "none" else f"{attack}:fraction=0.2",
        algorithm="fltrust:root=100,bias=0.1,batch=0" if rule == "fltrust" else "fedavg",
        seed=seed,
    )


def by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: means over its evaluations in the last tenth of the rounds."""
    rows = rows.reindex(columns=[*rows, *({*FIGURES.values()} - {*rows})])
    end = common.ends(rows, [*LABELS, "seed"])
    figures = {name: end[column] for name, column in FIGURES.items()}
    return pd.DataFrame(
        {
            **end[[*LABELS, "seed"]],
            **figures,
            "error": 1 - end["accuracy_mean"],
            "rounds_run": end["round"],
        }
    )


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per attack and rule: means over the seeds, and the error above that of the mean
    without an attack.
    """
    by = seeds.groupby(LABELS, sort=False)
    table = by[[*FIGURES]].mean()
    table.insert(1, "error_std", by["error"].std())
    table.insert(2, "above_the_mean", table["error"] - table["error"]["none", "mean"])
    return table.assign(rounds_run=by["rounds_run"].min(), seeds=by.size()).reset_index()


def finding(table: pd.DataFrame) -> str:
    """Return whether the claims of the paper on FLTrust hold."""
    rows = common.by_label(table, LABELS)
    parts = [
        f"{attack.replace('_', ' ')}: {row['above_the_mean']:+.3f} above the error of the mean "
        f"without an attack, {_verdict(row['above_the_mean'], LOSES)}"
        for (attack, rule), row in rows.items()
        if rule == "fltrust"
    ]
    if opened := rows.get(("backdoor", "fltrust")):
        share = opened["backdoor_success"]
        parts.append(f"the backdoor succeeds on {share:.1%}, {_verdict(share, OPENS)}")
    return "; ".join(parts) + "."


def _verdict(value: float, most: float) -> str:
    return f"at most {most:g} {'holds' if value <= most else 'FAILS'}"


def draw(rows: pd.DataFrame, options: Options) -> Figure:
    """Draw error, success of the backdoor and trust over the rounds."""
    figure = Figure(figsize=(12, 4), layout="constrained")
    errors, opened, trust = figure.subplots(1, 3)
    runs = common.groups(rows, LABELS)
    for place, ((attack, rule), own) in enumerate(runs):
        own = own.assign(error=1 - own["accuracy_mean"])
        colour = common.COLOURS[place]
        label = f"{'FLTrust' if rule == 'fltrust' else 'mean'}, {attack.replace('_', ' ')}"
        common.curve(errors, own, ("round", "error"), color=colour, label=label)
        if rule == "fltrust":
            common.curve(trust, own, ("round", "trust_mean"), color=colour)
        if attack == "backdoor":
            common.curve(opened, own, ("round", "backdoor_success_mean"), color=colour)
        if attack != "none":
            style: Mapping[str, Any] = {"color": colour, "linestyle": "--"}
            common.curve(trust, own, ("round", "trust_mean_attackers"), **style)
    errors.set(title="Test error", xlabel="round", yscale="log")
    opened.axhline(OPENS, color="grey", linestyle=":")
    opened.set(title="Success of the backdoor", xlabel="round", ylim=(-0.02, 1.02))
    trust.set(title="Trust in clients (dashed: attackers)", xlabel="round")
    common.caption(
        figure, errors, f"FLTrust with a CNN: {options.dataset}, {options.clients} clients", 3
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.fltrust_cnn"))
