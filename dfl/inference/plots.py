"""Forest plots: the estimates of sites, and those that combine them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from scipy.special import ndtri

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dfl.inference.result import Result

BLUE, ORANGE = "#0072B2", "#D55E00"
NAMED = 60
"""The most sites that are labelled by their name."""


def forest(results: Sequence[Result]) -> Figure:
    """Return a plot of every coefficient: 95 % intervals of sites, then of each combined estimate.

    Args:
        results: of the same sites and covariates, one per estimator.
    """
    names = list(results[0].params.index)
    rows = len(results[0].sites) + len(results)
    size = (1.5 + 3 * len(names), 1.2 + 0.22 * min(rows, NAMED))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=True):
        _panel(axes, results, name)
    sites = [str(site) for site in results[0].sites["site"]]
    labels = [*(sites if len(sites) <= NAMED else [""] * len(sites))]
    labels += [result.estimator for result in results]
    panels[0].set_yticks(range(rows), labels)
    panels[0].set_ylim(rows - 0.5, -0.5)
    figure.suptitle(f"{results[0].model}: estimates and 95 % intervals of sites, and combined")
    return figure


def _panel(axes: Axes, results: Sequence[Result], name: str) -> None:
    sites = results[0].sites
    half = ndtri(0.975) * sites[f"{name} standard error"].to_numpy(float)
    places = np.arange(len(sites))
    weight = sites["n"].to_numpy(float)
    axes.errorbar(sites[name], places, xerr=half, fmt="none", ecolor=BLUE, elinewidth=0.8)
    axes.scatter(sites[name], places, s=30 * weight / weight.max(), marker="s", color=BLUE)
    for k, result in enumerate(results):
        low, high = result.conf_int().loc[name]
        place = len(sites) + k
        middle = float(result.params[name])
        axes.fill(
            [low, middle, high, middle], [place, place - 0.3, place, place + 0.3], color=ORANGE
        )
    axes.axvline(float(results[-1].params[name]), color=ORANGE, linewidth=0.6, linestyle="--")
    axes.axvline(0, color="0.6", linewidth=0.6)
    axes.axhline(len(sites) - 0.5, color="0.6", linewidth=0.6)
    axes.set_xlabel(name)
