"""Bias, efficiency and coverage of estimators of a parameter that sites share.

Command, 3,200 studies, three minutes of one core:

    python -m experiments.inference.coverage

Finding: with 10 sites of 500 examples all that model the intercepts are within 1 % of the pooled
estimate, but `debiased` (0.86). With 50 sites of 200 meta-analysis has relative efficiency 0.69 and
covers all four coefficients in 0.896 of the studies, the first two, 1 and -1, in 0.826 and 0.846;
the tilted score is at 1.01 and covers in 0.954. With 400 sites of 80, beyond K = o(n), one
iteration of the tilted score covers in 0.866 and meta-analysis in 0.319; the pooled estimate
itself, with 400 nuisance parameters, is biased and covers in 0.899, and the average of
bias-corrected estimates is best (1.31, 0.971). Two iterations with profiled intercepts have a
relative efficiency of 1.00 to 1.09 throughout. One intercept for all sites is biased by -0.2 where
intercepts differ widely. Halves of the examples cost `debiased` efficiency, and with rare outcomes
9 of 300 studies have an estimate in every half.

Of 36 figures of an independent computation, `INDEPENDENT`, 35 are within 3 standard errors of both.
Beyond is the coverage of the tilted score with rare outcomes, 0.965 and not 0.936. Selection is not
the cause: 25 of 300 studies, in which some site has no estimate of its own, are left out, and
`tilted score, all studies` keeps all 300, where such a site has no part in the start and gets the
intercept of Firth's penalized likelihood, and covers in 0.963. Its standard errors, from the tilted
examples of one lead, are part of it: by those of the pooled estimate, which are smaller, it covers
in 0.953 of the 300. So is chance: of six times as many studies it covers in 0.956, or by the errors
of the pooled estimate in 0.954, with a standard error of 0.003. That of the other computation is
about 0.008, so the rest is 2.3 standard errors of both, or 2.1; its own choice of errors is not
known.

The last study has 80 examples a site: of six trial studies with 60, two were left out.

The independent computation was made before this code, in torch and numpy, from the formulas of the
paper as the R package pda has them (1.3.2, `odacath-misc.R`); its code is not kept. A study is a
logistic regression with beta = (1, -1, 0.5, 0), covariates N(0, I), and an intercept of each site's
own, uniform between two bounds. Relative efficiency is the mean square error of the pooled estimate
over that of another, over all four coefficients; coverage is that of the 95 % Wald interval, and
`coverage_by_pooled_errors` takes the standard errors of the pooled estimate. `one intercept` is the
pooled estimate of a model in which sites share the intercept, and `tilted score` is one iteration
with each site's own estimate of its intercept, as the independent computation has it; `tilted
score, 2` is the default, two iterations with profiled intercepts. A repetition in which some site
has no estimate is left out for all; the column `repetitions` counts those that stay. Standard
errors of the figures are those of the repetitions.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from dfl.inference.estimators import (
    Debiased,
    Estimate,
    Estimator,
    Meta,
    OneShot,
    Pooled,
    TiltedScore,
    at,
    fits,
    pack,
    product,
    sizes,
    solve,
    unpack,
)
from dfl.inference.exchange import Exchange
from dfl.inference.likelihood import efficient
from dfl.inference.models import Site
from dfl.inference.sites import Sites
from dfl.inference.study import Outcomes, Study
from experiments import common

Floats = NDArray[np.float64]

STUDIES = {
    "K = 10, n = 500": Study(sites=10, n=500, repetitions=400),
    "K = 50, n = 200": Study(sites=50, n=200, repetitions=500),
    "K = 20, n = 100, rare": Study(sites=20, n=100, lowest=-3.5, highest=-2.0, repetitions=300),
    "K = 400, n = 80": Study(sites=400, n=80, lowest=-1.0, highest=1.0, repetitions=200),
}
"""The last one has far more sites than theory allows, K = o(n)."""

ESTIMATORS: dict[str, Estimator] = {
    "pooled": Pooled(),
    "meta": Meta(),
    "one-shot": OneShot(),
    "debiased": Debiased(),
    "tilted score": TiltedScore(iterations=1, profile=False),
    "tilted score, 2": TiltedScore(),
    "one intercept": Pooled(),
}

INDEPENDENT = {
    "K = 10, n = 500": {
        "pooled": (0.008, 1.0, 0.947), "meta": (-0.005, 1.06, 0.953),
        "tilted score": (0.007, 1.01, 0.949), "one intercept": (-0.184, 0.08, 0.331),
    },
    "K = 50, n = 200": {
        "pooled": (0.003, 1.0, 0.939), "meta": (-0.033, 0.65, 0.865),
        "tilted score": (0.001, 1.0, 0.946), "one intercept": (-0.207, 0.035, 0.231),
    },
    "K = 20, n = 100, rare": {
        "pooled": (0.026, 1.0, 0.946), "meta": (-0.087, 0.79, 0.922),
        "tilted score": (0.001, 1.09, 0.936), "one intercept": (-0.013, 1.13, 0.943),
    },
}  # fmt: skip
"""Bias of the first coefficient, relative efficiency and coverage by another computation."""

REPEATED = {"K = 10, n = 500": 400, "K = 50, n = 200": 200, "K = 20, n = 100, rare": 300}
"""The repetitions of that computation."""

RARE = "K = 20, n = 100, rare"

MORE = 6
"""How many times the studies whose coverage is not that of the other computation are repeated."""


@dataclass(frozen=True, kw_only=True)
class Kept(TiltedScore):
    """`tilted_score` where a site without an estimate of its own stays: it has no part in the
    start, and its intercept maximizes Firth's penalized likelihood at the start.
    """

    iterations: int = 1
    profile: bool = False

    def estimate(self, sites: Sites, net: Exchange) -> Estimate:
        """See `Estimator`."""
        p = sites.width

        def own(site: Site, theta: Tensor) -> Tensor:
            information = efficient(sites.model, site, theta, p).information
            row = torch.cat([product(information, theta[..., :p]), pack(information)], -1)
            return row.nan_to_num(nan=0.0)

        theta = fits(sites)
        rows = net.mean(sites.each(own, theta), "estimates and information")
        pull, packed = rows.tensor_split((p,), -1)
        start = solve(unpack(packed), pull)
        intercepts = sites.each(firth, start.expand(*theta.shape[:-1], p))
        gamma = torch.where(theta[..., p:].isnan(), intercepts, theta[..., p:])
        point = at(sites, start, torch.cat([theta[..., :p], gamma], -1))
        return self._iterate(sites, net, sizes(sites, net), start, point)


def firth(site: Site, beta: Tensor) -> Tensor:
    """Return the intercepts (..., 1) of logistic regressions that maximize Firth's penalized
    likelihood at β (..., p).
    """
    rate = (site.y.sum(-1) + 0.5) / (site.n + 1)
    intercept = torch.logit(rate)
    for _ in range(40):
        predictor = torch.einsum("...np,...p->...n", site.x, beta)
        chance = torch.sigmoid(predictor + intercept[..., None])
        spread = chance * (1 - chance)
        penalty = 0.5 * (spread * (1 - 2 * chance)).sum(-1) / spread.sum(-1)
        step = ((site.y - chance).sum(-1) + penalty) / spread.sum(-1)
        intercept = intercept + step.clamp(-2, 2)
    return intercept[..., None]


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/inference_coverage")
    repetitions: int | None = None
    """Repetitions of every study; those of `STUDIES` where not given."""


def page(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure, and write table and figure."""
    rows: list[dict[str, Any]] = []
    for name, study in STUDIES.items():
        some = replace(study, repetitions=options.repetitions or study.repetitions)
        rows += measured(name, some)
        if name == RARE:
            rows += [all_studies(some), all_studies(some, MORE)]
    table = pd.DataFrame(rows)
    common.publish(options, table, draw(table), finding(table))


def measured(name: str, study: Study) -> list[dict[str, Any]]:
    """Return a row per estimator."""
    found = {
        each: study.estimate(estimator, one_intercept=each == "one intercept")
        for each, estimator in ESTIMATORS.items()
    }
    needed = [outcomes for each, outcomes in found.items() if each != "debiased"]
    kept = np.all([np.isfinite(outcomes.beta).all(1) for outcomes in needed], axis=0)
    pooled = found["pooled"]
    return [
        {
            "study": name,
            "estimator": each,
            **row(study, outcomes, pooled, kept),
            **independent(name, each),
        }
        for each, outcomes in found.items()
    ]


def all_studies(study: Study, more: int = 1) -> dict[str, Any]:
    """Return a row of the tilted score with no study left out, of so many times the studies."""
    study = replace(study, repetitions=more * study.repetitions)
    found, pooled = study.estimate(Kept()), study.estimate(Pooled())
    figures = row(study, found, pooled, np.ones(study.repetitions, bool))
    name = f"tilted score, all studies{f', {more} times as many' * (more > 1)}"
    return {"study": RARE, "estimator": name, **figures}


def row(
    study: Study, outcomes: Outcomes, pooled: Outcomes, kept: NDArray[np.bool_]
) -> dict[str, Any]:
    """Return the figures of an estimator, each with its Monte-Carlo standard error."""
    kept = kept & np.isfinite(outcomes.beta).all(1) & np.isfinite(pooled.beta).all(1)
    n = int(kept.sum())
    if n < 2:
        return {"repetitions": n}
    error, reference = (each.beta[kept] - study.beta for each in (outcomes, pooled))
    square, best = (np.square(each).mean(1) for each in (error, reference))
    efficiency, efficiency_se = relative(best, square)
    covers, by_pooled = (
        np.abs(error) < 1.959964 * each.errors[kept] for each in (outcomes, pooled)
    )
    away = np.abs(outcomes.beta[kept] - pooled.beta[kept]).max(1)
    return {
        "repetitions": n,
        "bias": error[:, 0].mean(), "bias_se": standard_error(error[:, 0]),
        "efficiency": efficiency, "efficiency_se": efficiency_se,
        "coverage": covers.mean(), "coverage_se": standard_error(covers.mean(1)),
        "coverage_first": covers[:, 0].mean(), "coverage_second": covers[:, 1].mean(),
        "coverage_by_pooled_errors": by_pooled.mean(),
        "to_pooled": np.median(away),
    }  # fmt: skip


def independent(study: str, estimator: str) -> dict[str, float]:
    """Return the figures of the independent computation."""
    figures = INDEPENDENT.get(study, {}).get(estimator, (np.nan,) * 3)
    return dict(zip(("other_bias", "other_efficiency", "other_coverage"), figures, strict=True))


def standard_error(values: Floats) -> float:
    """Return the standard error of a mean."""
    return float(values.std(ddof=1) / np.sqrt(len(values)))


def relative(values: Floats, to: Floats) -> tuple[float, float]:
    """Return a ratio of means and its standard error, linearized."""
    ratio = float(values.mean() / to.mean())
    return ratio, standard_error((values - ratio * to) / to.mean())


def beyond(table: pd.DataFrame) -> list[str]:
    """Return the figures beyond 3 standard errors of both from the independent ones."""
    found = []
    for each in table.dropna(subset=["other_bias"]).to_dict("records"):
        for figure in ("bias", "efficiency", "coverage"):
            error = max(each[f"{figure}_se"], 0.0005)  # theirs are rounded
            limit = 3 * error * np.sqrt(1 + each["repetitions"] / REPEATED[each["study"]])
            if abs(each[figure] - each[f"other_{figure}"]) > limit:
                found.append(f"{figure} of {each['estimator']} at {each['study']}")
    return found


def finding(table: pd.DataFrame) -> str:
    """Return the finding, read off the table."""
    at = {(each["study"], each["estimator"]): each for each in table.to_dict("records")}
    many, last = ("K = 50, n = 200", list(STUDIES)[-1])
    parts = [
        f"at {study} {name} has relative efficiency {at[study, name]['efficiency']:.2f} and "
        f"coverage {at[study, name]['coverage']:.3f} ({at[study, name]['coverage_first']:.3f} of "
        f"the first coefficient)"
        for study in (many, last)
        for name in ("meta", "tilted score", "tilted score, 2")
    ]
    outside = beyond(table)
    compared = 3 * int(table["other_bias"].notna().sum())
    return (
        f"{'; '.join(parts)}. Of {compared} figures of an independent computation, "
        f"{compared - len(outside)} are within 3 standard errors of both"
        f"{': beyond are ' if outside else ''}{', '.join(outside)}."
    )


def draw(table: pd.DataFrame) -> Figure:
    """Draw bias, efficiency and coverage of every estimator, a colour per study."""
    figure = Figure(figsize=(13.5, 4.8), layout="constrained")
    names = list(ESTIMATORS)
    wanted = (("bias", 0.0, "bias of β₁"), ("efficiency", 1.0, "relative efficiency"))
    for axes, (column, line, title) in zip(
        figure.subplots(1, 3, sharey=True), (*wanted, ("coverage", 0.95, "coverage")), strict=True
    ):
        axes.axvline(line, color="0.6", linewidth=0.8)
        for k, (study, colour) in enumerate(zip(STUDIES, common.COLOURS, strict=False)):
            own = table[(table["study"] == study) & table["estimator"].isin(names)]
            own = own.dropna(subset=[column])
            places = [names.index(each) + 0.15 * (k - 1.5) for each in own["estimator"]]
            axes.errorbar(
                own[column], places, xerr=2 * own[f"{column}_se"], fmt="o", markersize=4,
                color=colour, capsize=2, label=study,
            )  # fmt: skip
            axes.plot(
                own[f"other_{column}"], places, "x", color=colour, markersize=7, linestyle="none"
            )
        axes.set(xlabel=title, yticks=range(len(names)), yticklabels=names)
    axes.invert_yaxis()
    title = "Estimators of a parameter that sites share"
    marks = "bars: 2 standard errors; crosses: an independent computation"
    common.caption(figure, axes, f"{title} ({marks})", len(STUDIES))
    return figure


if __name__ == "__main__":
    sys.exit(common.start(page, "inference.coverage"))
