"""Which rules of a server survive which lies, as in the tables of the FLTrust paper?

Command, 50 runs of half a minute on an idle core, 25 minutes:

    python -m experiments.robust_fltrust2021 --data-dir DIR

Finding: two of the paper's claims hold here and two do not. The krum attack breaks Krum (error 0.908, published 0.91),
and the trim attack hurts the mean (its model is lost in all three seeds, rounds 23 to 28) and the trimmed mean (0.312).
FLTrust does NOT stay within 0.03 of the 0.062 of the mean unattacked: 0.102 under trim, over seeds 0.071, 0.159 and
0.075, and the median (0.091) loses less. It is the seed rather than the attack: at that seed FLTrust has 0.118 when
nobody lies; against its own 0.086 unattacked, trim costs it 0.016. And the backdoor opens in 65 % of the images with
FLTrust (published: none). Why is not known; that a poisoned update still points along the server's after five local
steps would explain it, but was not tested. Krum, median and trimmed mean keep it to 4 % at most; the mean is lost in
round 4 to updates made 100 times as long.

A second setting is nearer to the paper's: one local step a round, 200 rounds (`--steps 1 --rounds 200 --rates 0.2 0.4
--out DIR`; rates 0.2 for the mean, 0.4 for FLTrust). There the first of the failed claims holds: FLTrust has 0.063
under trim (0.052, 0.074, 0.063 over seeds 0 to 2) where the mean unattacked has 0.053 (three seeds), and the others
lose more: median 0.129 and 0.177 (seeds 0 and 1), trimmed mean 0.275 (seed 0). The backdoor was not tried there.

Grid: rules x attacks on MNIST, 100 clients of whom 20 attack, all of them in every round, partition biased:q=0.5, 2NN,
batches of 32, no momentum, FLTrust with 100 root examples without bias. Other than the paper: an MLP and no CNN, five
local steps and not one, 30 rounds and not 2,000. Three seeds where something is asked, ONE elsewhere (`--others`);
which rows these are was decided while the page ran. The learning rate is chosen for the mean (0.4 of 0.1 to 0.8) and
for FLTrust (0.2) by validation accuracy under no attack at one seed; FLTrust was given a rate of its own after it did
badly at that of the mean, and some of the figures that chose were entered by hand from earlier runs. `adaptive` needs
the server's own step, so other rules have no figure for it. Published figures are from memory of the paper and worth
an order only: 25 of 34 clear pairs stand in it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.errors import InputError
from experiments import inline, lab

MODELS = {"mnist": "2nn", "digits": "mlp"}
"""What is trained on a data set."""
RULES = ("mean", "krum", "trimmed_mean", "median", "fltrust")
PUBLISHED = {
    "none": (0.04, 0.10, 0.06, 0.06, 0.05),
    "label_flip": (0.06, 0.10, 0.06, 0.06, 0.05),
    "krum": (0.10, 0.91, 0.14, 0.15, 0.05),
    "trim": (0.28, 0.10, 0.23, 0.43, 0.06),
    "backdoor": (0.02, 0.09, 0.06, 0.06, 0.05),
    "adaptive": (0.13, 0.10, 0.22, 0.90, 0.06),
}
"""Attack -> test error of every rule with a CNN on MNIST-0.5, from memory of the paper's Table II: an order, no bar."""
PUBLISHED_SUCCESS = (1.00, 0.01, 0.02, 0.01, 0.00)
"""How often the backdoor opened, likewise."""
CLEAR = 0.03
"""Published errors that are this far apart say which rule is better; and how much FLTrust may lose."""
BROKEN = 0.5
"""The error of a rule that is broken."""
BARS = {
    ("none", "mean"), ("none", "fltrust"), ("krum", "krum"), ("backdoor", "fltrust"),
    *(("trim", rule) for rule in RULES if rule != "krum"),
}  # fmt: skip
"""Attacks and rules that something is asked of."""
LABELS = ["attack", "rule"]


@dataclass(frozen=True, kw_only=True)
class Options(lab.Place):
    """What this page can be asked for."""

    out: Path = Path("results/robust_fltrust2021")
    data_dir: Path | None = None
    """Folder of the data sets; as for dfl.run where it is not given."""
    dataset: str = "mnist"
    """The data set: mnist, or digits for a quick look."""
    seeds: int = 3
    """How many seeds, from 0, where something is asked of a rule."""
    others: int = 1
    """How many seeds elsewhere."""
    rounds: int = 30
    """Rounds of every client."""
    steps: int = 5
    """Local steps in a round; the paper takes one."""
    peers: int = 100
    """Clients; a fifth of them attacks."""
    rates: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.1, 0.2, 0.4, 0.8)
    """Learning rates to choose from, by validation accuracy under no attack, for the mean and for FLTrust."""


def page(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """The error of every rule under every attack."""
    rates = {rule: chosen(options, rule) for rule in ("mean", "fltrust")}
    table = tabulate(inline.measure(options, grid(options, rates)), options.rounds)
    said = f"{finding(table, options)} The learning rate is {rates['fltrust']} for FLTrust and {rates['mean']} else."
    lab.publish(options, table, draw(table, options), said)


def chosen(options: Options, rule: str) -> float:
    """The learning rate with which a rule does best under no attack on examples that were set aside, one seed."""
    runs: list[lab.Cell] = [
        ({"tuned": rule, "lr": str(lr), "seed": 0}, setting(options, "none", rule, lr=lr, seed=0, validation=0.1))
        for lr in options.rates
    ]
    tried = lab.last(inline.measure(options, runs), ["lr"])
    return float(max(zip(tried["validation_accuracy_mean"], tried["lr"], strict=True))[1])


def setting(options: Options, attack: str, rule: str, **changes: Any) -> Run:
    """One attack on one rule, in the setting of the paper but for the model and the local steps.

    Raises:
        InputError: there is no model for the data set.
    """
    if options.dataset not in MODELS:
        raise InputError(f"--dataset must be one of {', '.join(MODELS)}, not {options.dataset!r}")
    f = options.peers // 5
    algorithm = "fltrust:root=100,bias=0.1" if rule == "fltrust" else "fedavg"
    return Run(
        dataset=options.dataset, data_dir=options.data_dir, model=MODELS[options.dataset], peers=options.peers,
        partition="biased:q=0.5", momentum=0.0, batch_size=32, local_steps=options.steps, rounds=options.rounds,
        eval_every=options.rounds, attack=attack if attack == "none" else f"{attack}:fraction=0.2",
        algorithm=algorithm, aggregator=f"{rule}:f={f}" if rule in ("krum", "trimmed_mean") else rule, **changes,
    )  # fmt: skip


def grid(options: Options, rates: Mapping[str, float]) -> list[lab.Cell]:
    """Every attack on every rule with its seeds; the adaptive one, which needs the server's own step, on FLTrust.

    A rule without a learning rate of its own takes that of the mean.
    """
    return [
        (
            {"attack": attack, "rule": rule, "seed": seed},
            setting(options, attack, rule, lr=rates.get(rule, rates["mean"]), seed=seed),
        )
        for seed in range(max(options.seeds, options.others))
        for attack in PUBLISHED
        for rule in RULES
        if seed < (options.seeds if (attack, rule) in BARS else options.others)
        if attack != "adaptive" or rule == "fltrust"
    ]


def tabulate(rows: pd.DataFrame, rounds: int) -> pd.DataFrame:
    """A row per attack and rule: test error and success of the backdoor, means over the seeds, beside the paper's.

    A server whose model was lost on the way guesses one label of ten.
    """
    rows = rows if "backdoor_success_mean" in rows else rows.assign(backdoor_success_mean=float("nan"))
    end = lab.last(rows, [*LABELS, "seed"])
    lost = end["round"] < rounds
    end = end.assign(error=(1 - end["accuracy_mean"]).mask(lost, 0.9), lost=lost)
    end["backdoor_success_mean"] = end["backdoor_success_mean"].mask(lost)
    each = end.groupby(LABELS, sort=False)
    table = pd.DataFrame(
        {
            "error": each["error"].mean(),
            "std_over_seeds": each["error"].std(),
            "backdoor_success": each["backdoor_success_mean"].mean(),
            "lost_runs": each["lost"].sum(),
            "seeds": each.size(),
        }
    )
    order = pd.MultiIndex.from_product([end["attack"].unique(), RULES], names=LABELS)
    table = table.reindex(order).astype({"lost_runs": "Int64", "seeds": "Int64"}).reset_index()
    table["paper_error"] = [PUBLISHED[attack][RULES.index(rule)] for attack, rule in order]
    opened = dict(zip(RULES, PUBLISHED_SUCCESS, strict=True))
    table["paper_success"] = table["rule"].map(opened).where(table["attack"] == "backdoor")
    return table


def finding(table: pd.DataFrame, options: Options) -> str:
    """What the table says, beside the paper."""
    errors = {key: float(row["error"]) for key, row in lab.by_label(table, LABELS).items()}
    free, broken = errors["none", "mean"], errors["krum", "krum"]
    lost = {rule: errors["trim", rule] - free for rule in ("fltrust", "mean", "median", "trimmed_mean")}
    own = lost.pop("fltrust")
    opened = table[table["attack"] == "backdoor"].set_index("rule")["backdoor_success"]
    alike, pairs = ordered(table)
    worst = max((errors[attack, "fltrust"], attack) for attack in PUBLISHED)
    return (
        f"over {options.seeds} seeds the mean has an error of {free:.3f} when nobody lies. Under the trim attack "
        f"FLTrust loses {own:+.3f} of that ({_verdict(own <= CLEAR)}: at most {CLEAR}), "
        f"{', '.join(f'the {rule} {value:+.3f}' for rule, value in lost.items())} "
        f"({_verdict(own < min(lost.values()))}: more than FLTrust). The krum attack leaves Krum an error of "
        f"{broken:.3f} ({_verdict(broken > BROKEN)}: above {BROKEN}). FLTrust's worst error is {worst[0]:.3f} "
        f"({worst[1]}). The backdoor opens in {', '.join(f'{_share(opened[rule])} ({rule})' for rule in RULES)} of the "
        f"images. Of {pairs} pairs of rules whose published errors are {CLEAR} or more apart, {alike} stand in the "
        "same order here."
    )


def ordered(table: pd.DataFrame) -> tuple[int, int]:
    """How many pairs of rules stand in the published order under an attack, of those that clearly have one."""
    found = []
    for _, own in table.dropna(subset="error").groupby("attack"):
        values = list(zip(own["paper_error"], own["error"], strict=True))
        pairs = [(a, b) for a, b in combinations(values, 2) if abs(a[0] - b[0]) > CLEAR - 1e-9]
        found += [(a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs]
    return sum(found), len(found)


def _share(value: float) -> str:
    return "lost" if pd.isna(value) else f"{value:.0%}"


def _verdict(held: bool) -> str:
    return "holds" if held else "FAILS"


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Errors and successes of the backdoor, bars for what was measured and marks for what was published."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    errors, opened = figure.subplots(1, 2, width_ratios=(6, 1.4))
    _bars(errors, table, ("error", "paper_error"))
    _bars(opened, table[table["attack"] == "backdoor"], ("backdoor_success", "paper_success"))
    errors.set(title="Test error of the server's model", xlabel="attack of a fifth of the clients", ylabel="test error")
    opened.set(title="Success of the backdoor", xlabel="attack", ylabel="share of triggered images")
    errors.legend(ncols=6, fontsize="small", loc="upper left")
    figure.suptitle(f"Rules and attacks: {options.dataset}, {options.peers} clients, biased by 0.5, "
                    f"{options.others} to {options.seeds} seeds")  # fmt: skip
    return figure


def _bars(axes: Axes, table: pd.DataFrame, columns: tuple[str, str]) -> None:
    """A group of bars per attack, one per rule."""
    attacks = list(table["attack"].unique())
    for place, (rule, own) in enumerate(lab.groups(table, ["rule"])):
        x = [attacks.index(attack) + 0.16 * (place - 2) for attack in own["attack"]]
        spread = own["std_over_seeds"] if columns[0] == "error" else None
        axes.bar(x, own[columns[0]], 0.15, yerr=spread, color=lab.COLOURS[place], label=rule.replace("_", " "))
        label = "published, a CNN" if rule == RULES[-1] else None
        axes.plot(x, own[columns[1]], "D", color="white", markeredgecolor="black", markersize=4, label=label)
    axes.set_xticks(range(len(attacks)), [attack.replace("_", " ") for attack in attacks])
    axes.set_ylim(0, 1.12)


if __name__ == "__main__":
    sys.exit(lab.start(page, "robust_fltrust2021"))
