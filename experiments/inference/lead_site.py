"""The tilted score by its lead site: rare outcomes, covariates that differ by site, several leads.

Command, four studies of 60 repetitions, one minute of one core:

    python -m experiments.inference.lead_site

Finding: where outcomes are rare and covariates differ by site, the lead decides, and a second
iteration makes a bad lead worse. There the mean square distance from the pooled estimate, over that
estimate's mean square error, is 0.46 with the first site as the lead, and 3.4 with the worst one
(0.14 and 0.74 after one iteration), where meta-analysis is at 0.20. The lead whose outcomes are
most balanced, known beforehand, is at 0.004, but its intervals cover in 0.895 and those of the
pooled estimate in 0.947; the best lead, known in hindsight only, is at 0.0002. The average over
leads is safer: 0.08 with two, 0.01 with five, 0.002 where all lead, with coverage 0.943.
With only one of the two difficulties even the worst lead is within 0.006, and meta-analysis is at
0.13 to 0.23.

A study is that of `coverage.py` with 10 sites of 200 examples and seed 0: intercepts are uniform
from -2 to 2, where rare from -3.5 to -2; where shifted, the mean of each covariate is uniform from
-1 to 1 at every site. Best and worst are the leads whose estimate is closest to the pooled one and
farthest from it in each repetition, so their figures are those of a selection. One iteration has
profiled intercepts as well. `unsolved` is the share of leads and repetitions in which the equation
of the lead has no solution. The figures are those of `graph.py`; a repetition in which some site
has no estimate is left out, 3 of 240. Standard errors are those of the repetitions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dfl.inference.estimators import Meta, Pooled, TiltedScore
from dfl.inference.study import Outcomes, Study
from experiments import common
from experiments.inference.graph import row

ALIKE = Study(sites=10, n=200, repetitions=60)

STUDIES = {
    "alike": ALIKE,
    "shifted": replace(ALIKE, shift=1.0),
    "rare": replace(ALIKE, lowest=-3.5, highest=-2.0),
    "rare, shifted": replace(ALIKE, lowest=-3.5, highest=-2.0, shift=1.0),
}
"""`shifted` has means of the covariates that differ by site, uniform from -1 to 1."""

ITERATIONS = (1, 2)

CHOICES = (
    "pooled", "meta", "best lead", "balanced lead", "first lead", "worst lead", "2 leads",
    "5 leads", "all lead",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/inference_lead_site")
    repetitions: int = ALIKE.repetitions
    """Repetitions of every study."""


def page(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure, and write table and figure."""
    rows: list[dict[str, Any]] = []
    for name, study in STUDIES.items():
        rows += measured(name, replace(study, repetitions=options.repetitions))
        print(name, file=sys.stderr, flush=True)
    table = pd.DataFrame(rows)
    common.publish(options, table, draw(table), finding(table))


def measured(name: str, study: Study) -> list[dict[str, Any]]:
    """Return a row per number of iterations and choice of leads."""
    pooled, meta = (study.estimate(each) for each in (Pooled(), Meta()))
    finite = np.isfinite([meta.beta, pooled.beta])
    kept: NDArray[np.bool_] = np.logical_and.reduce(finite, axis=(0, 2))
    pooled, meta = (chosen(each, kept) for each in (pooled, meta))
    ones = study.draw(0, study.repetitions).y.mean(-1).numpy()
    balanced = np.abs(ones - 0.5).argmin(1)[kept]
    rows: list[dict[str, Any]] = [
        {"study": name, "iterations": 0, "leads": leads, **row(study, each, pooled)}
        for leads, each in (("pooled", pooled), ("meta", meta))
    ]
    for iterations in ITERATIONS:
        found = {
            lead: chosen(study.estimate(TiltedScore(iterations=iterations, leads=lead)), kept)
            for lead in [(k,) for k in range(study.sites)]
            + [tuple(range(2)), tuple(range(5)), tuple(range(study.sites))]
        }
        single = [found[k,] for k in range(study.sites)]
        away = np.stack([np.square(each.beta - pooled.beta).sum(1) for each in single], 1)
        unsolved = float(np.isnan(away).mean())
        solved = ~np.isnan(away).all(1)
        away[~solved] = 0.0
        picked = {
            "best lead": at(single, np.nanargmin(away, 1)),
            "balanced lead": at(single, balanced),
            "first lead": single[0],
            "worst lead": at(single, np.nanargmax(away, 1)),
            "2 leads": found[0, 1],
            "5 leads": found[tuple(range(5))],
            "all lead": found[tuple(range(study.sites))],
        }
        rows += [
            {
                "study": name,
                "iterations": iterations,
                "leads": leads,
                **row(study, each, pooled),
                "unsolved": unsolved,
            }
            for leads, each in picked.items()
        ]
    return rows


def chosen(outcomes: Outcomes, kept: NDArray[np.bool_]) -> Outcomes:
    """Return some repetitions."""
    return Outcomes(outcomes.beta[kept], outcomes.errors[kept])


def at(single: list[Outcomes], lead: NDArray[np.int64]) -> Outcomes:
    """Return the outcomes of one lead of every repetition.

    Args:
        single: the outcomes with each site as the lead.
        lead: (repetitions,), the lead of each.
    """
    repetitions = np.arange(len(lead))
    beta, errors = (np.stack(part, 1)[repetitions, lead] for part in zip(*single, strict=True))
    return Outcomes(beta, errors)


def finding(table: pd.DataFrame) -> str:
    """Return the finding, read off the table."""
    found = table.set_index(["study", "iterations", "leads"])["from_pooled"]
    parts = [
        f"{study} {found[study, 0, 'meta']:.2g} of meta-analysis, "
        + ", ".join(f"{found[study, last, leads]:.2g} of the {leads}" for leads in CHOICES[2:6])
        + f" and {found[study, last, 'all lead']:.2g} where all lead"
        for study in STUDIES
        for last in ITERATIONS[-1:]
    ]
    return (
        f"the mean square distance from the pooled estimate, over that estimate's mean square "
        f"error, after {ITERATIONS[-1]} iterations is at {'; '.join(parts)}."
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw distance from the pooled estimate, excess and coverage by leads, a colour per study."""
    figure = Figure(figsize=(13.5, 5), layout="constrained")
    wanted = {
        "from_pooled": "square distance from pooled / its square error",
        "excess": "excess mean square error / that of pooled",
        "coverage": "coverage of 95 % intervals",
    }
    lines = {"excess": 0.0, "coverage": 0.95}
    for axes, (column, title) in zip(
        figure.subplots(1, 3, sharey=True), wanted.items(), strict=True
    ):
        if column in lines:
            axes.axvline(lines[column], color="0.6", linewidth=0.8)
        for k, (study, colour) in enumerate(zip(STUDIES, common.COLOURS, strict=False)):
            for iterations, mark in ((0, "*"), (1, "o"), (2, "D")):
                own = table[(table["study"] == study) & (table["iterations"] == iterations)]
                shift = 0.2 * (k - 1.5) + 0.08 * (iterations == 2)
                places = [CHOICES.index(each) + shift for each in own["leads"]]
                label = f"{study}, {iterations} iteration{'s' * (iterations > 1)}"
                axes.errorbar(
                    own[column], places, xerr=2 * own[f"{column}_se"], fmt=mark, markersize=4,
                    color=colour, mfc=colour if iterations != 1 else "none", capsize=2,
                    label=label if iterations else None,
                )  # fmt: skip
        axes.set(xlabel=title, yticks=range(len(CHOICES)), yticklabels=CHOICES)
        if column == "from_pooled":
            axes.set(xscale="log", xlim=(1e-7, 20))
    axes.invert_yaxis()
    title = f"The tilted score by its lead: {ALIKE.sites} sites of {ALIKE.n} examples"
    common.caption(figure, axes, f"{title} (bars: 2 standard errors)", 4)
    return figure


if __name__ == "__main__":
    sys.exit(common.start(page, "inference.lead_site"))
