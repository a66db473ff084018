"""Estimators, and FedAvg, on real data: high incomes by occupation, or by country.

Command, a minute of one core:

    python -m experiments.inference.adult --data-dir DIR

Finding: what differs by occupation matters more than the estimator, and FedAvg without it is the
farthest off. A model with one intercept has a coefficient of education 9.9 standard errors from
that with an intercept of each occupation, and FedAvg on it is off by 5.9 at a learning rate of 0.1
and by 8.1 at 0.03; it is also 4.7 and 2.1 from the maximum likelihood estimate of its own model.
With personal intercepts FedAvg is within 0.7, without standard errors. Of the one-step estimators
the average of bias-corrected estimates is farthest from the pooled one (1.8), then meta-analysis
(1.4, for 112 bytes a site), `debiased` (0.9), and the tilted score led by the first occupation
(0.4); its standard error of hours is 1.45 times the pooled one. Where all lead it is at 0.03 for
424 bytes, and the same over Base-2 for 3,904. With a quarter of the people `debiased` has no
estimate, and the others are about as far in standard errors, which are twice as large.

By country the United States have 27,405 of 28,627 people, and the other six sites 100 to 593. What
differs by country matters little: one intercept is 0.2 from the pooled estimate, as meta-analysis
and the average of bias-corrected estimates are, and the tilted score 0.015, led by the 107 people
from Canada, though two of its standard errors are 0.87 and 0.91 times the pooled ones. `debiased`
has no estimate. FedAvg, with or without intercepts, is 2.8 off at a learning rate of 0.1 and 1.1 at
0.03: nearly all of its steps are those of one client, whose last ones decide.

The data are adult.data of UCI Adult; people whose occupation is not known are left out, and
Armed-Forces (9 people) and Priv-house-serv (149, one with a high income). Sites are occupations, or
the countries of birth of at least 100 of these people.
Covariates are years of education, age, hours of work a week and whether a person is married, each
with mean 0 and deviation 1; whether a person is male separates the outcomes of some occupation
once there are half of the people, so it is left out. The truth is not known: `from_pooled` is the
largest distance of a coefficient from the pooled estimate, in its standard errors, and
`from_own_model` that from the estimate of the same model with all examples. FedAvg: every
site a client, batches of 50, one local epoch, 100 rounds and with a quarter of the people
400, so as many steps; the mean of two seeds at the last round, whose largest deviation is
`seeds_sd`. Whether it would go on is not measured. All other estimates have no random numbers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import dfl
import dfl.inference
from dfl.datasets.adult import COLUMNS, FILE, SOURCE
from dfl.datasets.files import find, locate
from dfl.inference.estimators import TiltedScore
from dfl.inference.result import Result
from dfl.store.callbacks import Callback, Outcome
from experiments import common

COVARIATES = ("education", "age", "hours", "married")

LEFT_OUT = ("?", "Armed-Forces", "Priv-house-serv")
"""Occupations that are left out: unknown; 9 people; 149 people, one of them with a high income."""

FEWEST = 100
"""The people of a country that is a site; those of smaller ones are left out there."""

ESTIMATORS: dict[str, dict[str, Any]] = {
    "pooled": {"estimator": "pooled"},
    "meta": {"estimator": "meta"},
    "one-shot": {"estimator": "one_shot"},
    "debiased": {"estimator": "debiased"},
    "tilted score": {"estimator": "tilted_score"},
    "tilted score, all lead": {"estimator": TiltedScore(leads=None)},
    "tilted score, Base-2": {"estimator": "tilted_score_graph", "topology": "base_graph:k=1"},
    "one intercept": {"estimator": "pooled", "site": "everyone"},
}

RATES = (0.1, 0.03)
"""Learning rates of FedAvg."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/inference_adult")
    data_dir: Path | None = None
    """Folder of the data sets; that of dfl.run where it is not given."""
    every: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 4)
    """Which people: each, or every so many of an occupation."""
    rounds: int = 100
    """Rounds of FedAvg with all people; as many times more with a part of them."""
    seeds: int = 2
    """Number of seeds of FedAvg, from 0."""


class Incomes(torch.nn.Module):
    """A logistic regression: (n, p) -> logits (n,)."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.zeros(len(COVARIATES), dtype=torch.float64))
        self.intercept = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return x @ self.beta + self.intercept


class Last(Callback):
    """Keeps the coefficients at the end of a run."""

    beta: NDArray[np.float64]

    def finish(self, outcome: Outcome) -> None:
        """Keep those of the server."""
        self.beta = outcome.state["beta"][0]


def page(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure, and write table and figure."""
    people = read(options.data_dir)
    rows: list[dict[str, Any]] = []
    for every in options.every:
        some = people[people.groupby("occupation").cumcount() % every == 0]
        name = "all people" if every == 1 else f"1 of {every}"
        rows += measured(name, some, options, options.rounds * every)
    rows += measured("by country", by_country(people), options, options.rounds)
    table = pd.DataFrame(rows)
    common.publish(options, table, draw(table), finding(table))


def read(data_dir: Path | None) -> pd.DataFrame:
    """Return a row per person with a known occupation: covariates of mean 0 and deviation 1.

    Sites are occupations.
    """
    path = find(locate("adult", data_dir, SOURCE), FILE)
    table = pd.read_csv(path, names=list(COLUMNS), skipinitialspace=True)
    table = table[~table["occupation"].isin(LEFT_OUT)].reset_index(drop=True)
    raw = {
        "education": table["education_num"],
        "age": table["age"],
        "hours": table["hours_per_week"],
        "married": table["marital_status"].str.startswith("Married-civ"),
    }
    people = pd.DataFrame(raw).astype(np.float64)
    people = (people - people.mean()) / people.std()
    rich = (table["income"] == ">50K").astype(np.float64)
    places = {name: table[name] for name in ("occupation", "native_country")}
    return people.assign(rich=rich, everyone="everyone", site=table["occupation"], **places)


def by_country(people: pd.DataFrame) -> pd.DataFrame:
    """Return the people of known countries with enough of them, which are the sites."""
    country = people["native_country"]
    size = country.map(country.value_counts())
    return people.assign(site=country)[(country != "?") & (size >= FEWEST)]


def measured(
    name: str, people: pd.DataFrame, options: Options, rounds: int
) -> list[dict[str, Any]]:
    """Return a row per estimator, and per FedAvg of some rounds."""
    pooled, single = (fitted(people, ESTIMATORS[each]) for each in ("pooled", "one intercept"))
    assert pooled is not None
    assert single is not None
    rows: list[dict[str, Any]] = []
    for each, how in ESTIMATORS.items():
        found = fitted(people, how)
        own = single if each == "one intercept" else pooled
        figures = {} if found is None else of(found, pooled, own)
        rows.append({"people": name, "n": len(people), "estimator": each, **figures})
    for share, own in (("all", single), ("beta", pooled)):
        for lr in RATES:
            label = f"FedAvg{', own intercepts' * (share == 'beta')}, lr {lr:g}"
            runs = [fedavg(people, share, lr, rounds, seed) for seed in range(options.seeds)]
            beta: NDArray[np.float64] = np.stack(runs).mean(0)
            figures = distances(beta, pooled, own) | {"seeds_sd": np.std(runs, 0, ddof=1).max()}
            labels = {"people": name, "n": len(people), "estimator": label}
            rows.append({**labels, **named(beta), **figures})
            print(name, label, file=sys.stderr, flush=True)
    return rows


def fitted(people: pd.DataFrame, how: dict[str, Any]) -> Result | None:
    """Return an estimator's result; None where it refuses these people."""
    settings = {"site": "site", **how}
    try:
        return dfl.inference.fit(people, outcome="rich", covariates=COVARIATES, **settings)
    except dfl.InputError as error:
        print(error, file=sys.stderr, flush=True)
        return None


def of(found: Result, pooled: Result, own: Result) -> dict[str, Any]:
    """Return the figures of a result."""
    errors = {f"{name}_se": found.bse[name] for name in COVARIATES}
    sent = {"bytes": found.traffic["sent"].mean(), "rounds": found.revealed["rounds"].sum()}
    beta = np.asarray(found.params, np.float64)
    return named(beta) | errors | distances(beta, pooled, own) | sent


def named(beta: NDArray[np.float64]) -> dict[str, float]:
    """Return the coefficients by name."""
    return dict(zip(COVARIATES, beta.tolist(), strict=True))


def distances(beta: NDArray[np.float64], pooled: Result, own: Result) -> dict[str, float]:
    """Return the largest distances from two estimates, in their standard errors."""
    return {
        "from_pooled": (np.abs(beta - pooled.params) / pooled.bse).max(),
        "from_own_model": (np.abs(beta - own.params) / own.bse).max(),
    }


def fedavg(
    people: pd.DataFrame, share: str, lr: float, rounds: int, seed: int
) -> NDArray[np.float64]:
    """Return the coefficients at the end of FedAvg whose clients are the sites."""
    x, y = (people[list(each)].to_numpy() for each in (COVARIATES, ["rich"]))
    groups = np.unique(people["site"], return_inverse=True)[1].astype(np.int64)
    data = dfl.Data(
        x, y[:, 0], x[:1], y[:1, 0], classes=0, train_groups=groups, test_groups=groups[:1]
    )
    run = dfl.Run(
        algorithm="fedavg",
        peers=int(groups.max()) + 1,
        partition="natural",
        rounds=rounds,
        eval_every=rounds,
        batch_size=50,
        lr=lr,
        momentum=0.0,
        seed=seed,
        share=share,
        device="cpu",
        model=Incomes(),
        dataset=data,
        loss=loss,
    )
    last = Last()
    for _ in dfl.simulate(run, callbacks=[last]):
        pass
    return last.beta


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return -log likelihood of every example, (n,)."""
    return binary_cross_entropy_with_logits(logits, y, reduction="none")


def finding(table: pd.DataFrame) -> str:
    """Return the finding, read off the table."""
    parts = [
        f"{people}: "
        + ", ".join(
            f"{each['estimator']} {each['from_pooled']:.2g}"
            if pd.notna(each["from_pooled"])
            else f"{each['estimator']} refused"
            for each in own.to_dict("records")
        )
        for people, own in common.groups(table, ["people"])
    ]
    return (
        "the largest distance of a coefficient from the pooled estimate, in its standard errors, "
        f"is with {'; '.join(parts)}."
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw the difference of every coefficient from the pooled estimate, in standard errors."""
    figure = Figure(figsize=(13.5, 5.4), layout="constrained")
    studies = common.groups(table, ["people"])
    panels = figure.subplots(1, len(studies), sharey=True, squeeze=False)[0]
    for axes, (people, own) in zip(panels, studies, strict=True):
        (pooled,) = own[own["estimator"] == "pooled"].to_dict("records")
        for k, (name, colour) in enumerate(zip(COVARIATES, common.COLOURS, strict=False)):
            unit = pooled[f"{name}_se"]
            axes.errorbar(
                (own[name] - pooled[name]) / unit,
                np.arange(len(own)) + 0.16 * (k - 1.5),
                xerr=2 * own[f"{name}_se"].fillna(0) / unit,
                fmt="o", markersize=4, color=colour, capsize=2, label=name,
            )  # fmt: skip
        axes.axvline(0, color="0.6", linewidth=0.8)
        axes.set(
            title=f"{people}, {pooled['n']:,.0f}",
            xlabel="difference from pooled / its standard error",
            yticks=range(len(own)),
            yticklabels=own["estimator"],
        )
    panels[0].invert_yaxis()
    title = "High income among people of 12 occupations, or of the countries that they come from"
    common.caption(figure, panels[0], f"{title} (bars: 2 standard errors of an estimate)", 4)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(page, "inference.adult"))
