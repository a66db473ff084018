"""FedAvg without the updates of stragglers, FedAvg with their partial work, and FedProx.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks",
MLSys 2020, section 5.2: with 0, 50 and 90 % stragglers in a round, to take their partial work is
better than to drop them, and a proximal term helps further where the clients' data differ.

Command, 56 runs of 5 to 15 s; nine minutes of a core that other programs shared:

    python -m experiments.servers_and_robustness.stragglers --data-dir DIR

Finding: that a proximal term helps is NOT shown at any share of stragglers; that partial work helps
holds. With mu = 0.01, chosen on validation data, FedProx has an accuracy of 0.886 at 90 %
stragglers and 0.886 at 50 %, FedAvg that takes partial work 0.886 and 0.892, so that the difference
is -0.000 ± 0.011 and -0.005 ± 0.023; without stragglers it is +0.006 ± 0.010, and the training loss
falls by 0.030 ± 0.028. FedAvg that drops the stragglers has 0.834 at 50 %, which is 0.057 ± 0.010
less than with their partial work, and 0.349 at 90 %, 0.536 ± 0.090 less; there its training loss is
3.9 and its accuracy changes by 0.055 (std) from round to round, five times as much. Of 10 clients
in a round one then remains, and the model follows its two labels. The chosen rate, 0.215, is the
largest that was tried; mu = 1 has the lowest validation accuracy of four values, 0.848. What
follows ± is half the 95 % confidence interval over five seeds, differences paired by seed.

Grid: MNIST, 2NN, 100 clients with two label shards, 60 examples each; a tenth of the clients in a
round, five local epochs in batches of 20, momentum 0; 50 rounds, five seeds. FedAvg drops the
stragglers of a round (`drop`) or takes their updates after fewer epochs, drawn uniformly from 1 to
5 (`partial`); FedProx does the latter with a proximal term. The same clients are drawn, and the
same of them are stragglers, with every method at a seed. At 0 % both forms of FedAvg are one run.
The learning rate and mu are chosen by validation accuracy, on a fifth of every client's examples,
with a seed that is not measured: the rate for FedAvg without stragglers, then one mu by the mean
over the shares of stragglers. Accuracy, training loss and their std over the rounds (`spread`) are
of the last tenth of the rounds, of the server's model, which is evaluated after each of them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.sweep import Cell
from experiments import common

SHARES = (0.0, 0.5, 0.9)
"""Fractions of the clients of a round that are stragglers."""
METHODS = {
    "drop": "fedavg:straggler_policy=drop",
    "partial": "fedavg:straggler_policy=fewer",
    "fedprox": "fedprox:mu={mu},straggler_policy=fewer",
}
"""Method -> as --algorithm, without the clients of a round."""
NAMES = {"drop": "FedAvg, drop", "partial": "FedAvg, partial work", "fedprox": "FedProx"}
"""Method -> its name in the figure."""
RATES = (0.0215, 0.0464, 0.1, 0.215)
"""Learning rates to choose from."""
MUS = (0.001, 0.01, 0.1, 1.0)
"""Values of mu to choose from, those of the paper."""
TUNING_SEED = 1000
"""The seed of the runs that serve the choice of the rate and of mu."""
LABELS = ["stragglers", "method"]
VERDICTS = ("FAILS", "is NOT shown", "holds")
"""On a claim, the worst first."""
FIGURES = ("accuracy_mean", "train_loss", "accuracy_spread", "loss_spread")
"""Columns of a run that are reported; the spread is the std over the rounds of the last tenth."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/stragglers")
    rounds: int = 50
    jobs: int = 1
    examples: int = 60
    """Mean number of training examples of a client."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy and loss by the share of stragglers, with three ways to treat them."""
    if options.only is not None:
        return common.rerun(options.out, options.only, every(options))
    tried, lr, mu = tune(options)
    seeds = by_seed(measure(options, options.out, grid(options, lr, mu)))
    table, found = tabulate(seeds), differences(seeds)
    common.publish(options, table, draw(table, options), finding(table, found), seeds)
    found.to_csv(options.out / "differences.csv", index=False, float_format="%.6g")
    tried.to_csv(options.out / "tuning.csv", index=False, float_format="%.6g")


def measure(options: Options, out: Path, cells: list[Cell]) -> pd.DataFrame:
    """Return the evaluations of some cells; one at a time runs in this process."""
    return common.measure(out, cells, jobs=options.jobs, in_process=options.jobs == 1)


def run_of(options: Options, share: float, method: str, **changes: Any) -> Run:
    """Return a run of a method with a share of stragglers.

    Args:
        options: the options of the experiment.
        share: the share of stragglers.
        method: the method, as --algorithm without clients and stragglers.
        changes: further fields of `Run`.
    """
    shared_settings: dict[str, Any] = {
        "dataset": options.dataset,
        "data_dir": options.data_dir,
        "peers": 100,
        "partition": "shards:per_peer=2",
        "examples_per_peer": options.examples,
        "model": "2nn",
        "momentum": 0.0,
        "batch_size": 20,
        "local_epochs": 5,
        "rounds": options.rounds,
        "eval_every": options.rounds,
    }
    return Run(
        **shared_settings, algorithm=f"{method},fraction=0.1,stragglers={share:g}", **changes
    )


def tune(options: Options) -> tuple[pd.DataFrame, float, float]:
    """Choose the learning rate, then mu.

    Returns:
        A row per value that was tried, with its validation accuracy; the rate; and mu.
    """
    rates = [
        Cell(
            {"lr": f"{lr:g}"},
            run_of(options, 0.0, METHODS["drop"], lr=lr, seed=TUNING_SEED, validation=0.2),
        )
        for lr in RATES
    ]
    tried_rates = validated(measure(options, options.out / "tuning_lr", rates), "lr")
    lr = best(tried_rates)
    mus = [
        Cell(
            {"mu": f"{mu:g}", "stragglers": f"{share:g}"},
            run_of(
                options, share, METHODS["fedprox"].format(mu=f"{mu:g}"), lr=lr, seed=TUNING_SEED,
                validation=0.2,
            ),
        )
        for mu in MUS
        for share in SHARES
    ]  # fmt: skip
    tried_mus = validated(measure(options, options.out / "tuning_mu", mus), "mu")
    return pd.concat([tried_rates, tried_mus], ignore_index=True), lr, best(tried_mus)


def validated(rows: pd.DataFrame, parameter: str) -> pd.DataFrame:
    """Return a row per value of a parameter: its validation accuracy at the end, in the mean over
    its runs.
    """
    each = common.ends(rows, [name for name in (parameter, "stragglers") if name in rows])
    means = each.groupby(parameter, sort=False)["validation_accuracy_mean"].mean()
    return pd.DataFrame(
        {"parameter": parameter, "value": means.index.astype(float), "validation": means.to_numpy()}
    )


def best(tried: pd.DataFrame) -> float:
    """Return the value with the best validation accuracy, the first of equals."""
    return float(tried["value"].iloc[int(np.nanargmax(tried["validation"].to_numpy()))])


def grid(options: Options, lr: float, mu: float) -> list[Cell]:
    """Return a cell for every share of stragglers, method and seed; without stragglers FedAvg has
    one cell only.
    """
    return [
        Cell(
            {
                "stragglers": f"{share:g}", "method": method, "lr": f"{lr:g}",
                "mu": f"{mu if method == 'fedprox' else 0:g}", "seed": seed,
            },
            run_of(options, share, spec.format(mu=f"{mu:g}"), lr=lr, seed=seed),
        )
        for seed in range(options.seeds)
        for share in SHARES
        for method, spec in METHODS.items()
        if share or method != "partial"
    ]  # fmt: skip


def every(options: Options) -> list[Cell]:
    """Return the cells of all rates and values of mu."""
    cells = [cell for lr in RATES for mu in MUS for cell in grid(options, lr, mu)]
    return list({cell.name: cell for cell in cells}.values())


def by_seed(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: the means over the last tenth of its rounds, and the std over them."""
    found = []
    for (share, method, lr, mu, seed), run in common.groups(rows, [*LABELS, "lr", "mu", "seed"]):
        tail = run[run["round"] >= common.tail_rounds(int(run["round"].max())).start]
        found.append(
            {
                "stragglers": float(share),
                "method": method,
                "lr": float(lr),
                "mu": float(mu),
                "seed": seed,
                "accuracy_mean": tail["accuracy_mean"].mean(),
                "train_loss": tail["train_loss"].mean(),
                "accuracy_spread": tail["accuracy_mean"].std(),
                "loss_spread": tail["train_loss"].std(),
            }
        )
    return pd.DataFrame(found)


def tabulate(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return a row per share of stragglers and method: means over the seeds."""
    each = seeds.groupby(LABELS, sort=False)
    return pd.DataFrame(
        {
            "mu": each["mu"].first(),
            "seeds": each.size(),
            "accuracy": each["accuracy_mean"].mean(),
            "accuracy_std": each["accuracy_mean"].std(),
            "train_loss": each["train_loss"].mean(),
            "train_loss_std": each["train_loss"].std(),
            "accuracy_spread": each["accuracy_spread"].mean(),
            "loss_spread": each["loss_spread"].mean(),
        }
    ).reset_index()


def differences(seeds: pd.DataFrame) -> pd.DataFrame:
    """Return the differences between methods at a share of stragglers, paired by seed: of partial
    work and FedProx from dropping, and of FedProx from partial work.
    """
    cells = {key: own.set_index("seed") for key, own in common.groups(seeds, LABELS)}
    rows = []
    for share, method in cells:
        for other in list(METHODS)[: list(METHODS).index(method)]:
            if (share, other) not in cells:
                continue
            minus = cells[share, method][[*FIGURES]] - cells[share, other][[*FIGURES]]
            rows += [
                {
                    "stragglers": share,
                    "method": method,
                    "minus": other,
                    "figure": figure,
                    "seeds": len(minus),
                    "difference": minus[figure].mean(),
                    "difference_std": minus[figure].std(),
                }
                for figure in FIGURES
            ]
    return common.with_intervals(pd.DataFrame(rows), None)


def finding(table: pd.DataFrame, found: pd.DataFrame) -> str:
    """Return both claims of the paper and what the differences make of them, first what failed."""
    by = common.by_label(found, ["stragglers", "method", "minus", "figure"])
    claims = {"partial work": ("partial", "drop"), "the proximal term": ("fedprox", "partial")}
    parts = []
    for name, (method, minus) in claims.items():
        for share in SHARES:
            other = minus if share else "drop"
            if (share, method, other, "accuracy_mean") not in by:
                continue
            accuracy, loss, spread = (
                by[share, method, other, figure]
                for figure in ("accuracy_mean", "train_loss", "accuracy_spread")
            )
            parts.append(
                (
                    _verdict(accuracy),
                    f"that {name} helps at {share:.0%} stragglers {_verdict(accuracy)}: accuracy "
                    f"{_signed(accuracy)}, training loss {_signed(loss)}, std of the accuracy over "
                    f"rounds {_signed(spread)}",
                )
            )
    stated = "; ".join(text for _, text in sorted(parts, key=lambda part: VERDICTS.index(part[0])))
    listed = ", ".join(
        f"{NAMES[row['method']]} {row['accuracy']:.3f} at {row['stragglers']:.0%}"
        for row in table.to_dict("records")
    )
    mu = table["mu"].max()
    return f"with mu = {mu:g}, over {table['seeds'].iloc[0]} seeds: {stated}. {listed}."


def _verdict(row: Mapping[str, Any]) -> str:
    """Return what a difference in accuracy makes of a claim that it is positive."""
    fails, unknown, holds = VERDICTS
    if row["difference"] - row["difference_ci95"] > 0:
        return holds
    return fails if row["difference"] + row["difference_ci95"] < 0 else unknown


def _signed(row: Mapping[str, Any]) -> str:
    return f"{row['difference']:+.3f} ± {row['difference_ci95']:.3f}"


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy, training loss and the spread of the accuracy by the share of stragglers."""
    figure = Figure(figsize=(12.5, 4.4), layout="constrained")
    accuracy, loss, spread = figure.subplots(1, 3)
    table = common.with_intervals(table, None)
    for place, (method, name) in enumerate(NAMES.items()):
        own = table[table["method"] == method]
        x = 100 * own["stragglers"] + 1.5 * (place - 1)  # no interval covers another
        style = {"color": common.COLOURS[place], "marker": "osD"[place], "label": name}
        accuracy.errorbar(x, own["accuracy"], own["accuracy_ci95"], capsize=3, **style)
        loss.errorbar(x, own["train_loss"], own["train_loss_ci95"], capsize=3, **style)
        spread.plot(x, own["accuracy_spread"], **style)
    accuracy.set(title="Accuracy", ylabel="accuracy of the server's model")
    loss.set(title="Training loss", ylabel="mean over the clients")
    spread.set(title="Stability", ylabel="std of the accuracy over rounds", ylim=(0, None))
    for axes in (accuracy, loss, spread):
        axes.set_xlabel("stragglers (% of the clients in a round)")
        axes.set_xticks([100 * share for share in SHARES])
    title = (
        f"Stragglers: {options.dataset}, 100 clients, two label shards each, last tenth of "
        f"{options.rounds} rounds; bars are 95 % intervals"
    )
    common.caption(figure, accuracy, title, len(NAMES))
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.stragglers"))
