"""Mixtures of a device's own model and a common model: least squares, where the best mixture is
known.

Figures 2 and 4 of Liang et al., "Think Locally, Act Globally: Federated Learning with Local and
Global Representations", arXiv 2001.01523.

Command, ten seconds on one core:

    python -m experiments.personal_layers.alpha_interpolation

Finding: the best mixture is that of the formula. For rho = 0.5, 0.1, 0.06 and 0.02 the best alpha
is 0.970, 0.564, 0.322 and 0.050 in the mean over 20 seeds, 0.004 from rho^2 / (rho^2 + 3 sigma^4
/ n) at most, with a std over seeds of 0.014 at most. Mixing pays where devices differ about as
much as the estimates from their own data: at rho = 0.1 the best mixture has 57% of the excess
risk of the better end, at 0.06 69%; at 0.5 and 0.02 it lies next to one of the ends and is worth
3 and 4%. Excess risks are within 2.7% of their formulas; that of the own models is 1 to 2% above
for every rho (the formula leaves out terms of d / n = 1%). All of it is small compared with the
noise, whose variance is 5.06: the own models' excess is 0.051.

Grid: rho = 0.5, 0.1, 0.06 and 0.02, 20 seeds each with data of their own. As in the paper's
program, d = 20 features, M = 100 devices with n = 2,000 examples each, v ~ U[0, 1)^d, u_m = v +
N(0, rho^2 I), x ~ U[-1, 1]^d and y = u_m x + noise, where sigma = 1.5. numpy is given sigma^2
there as the standard deviation of the noise, so its variance is sigma^4 = 5.06; so it is here,
and the axes of its figures fit that alone. A device's own model is least squares on its examples,
the common model is least squares on all; the ensemble is w_m = alpha u^_m + (1 - alpha) v^.
Measured is the excess risk, the mean over the devices of (w_m - u_m)^T Sigma (w_m - u_m) with
Sigma = I / 3, the covariance of x: the error on infinitely many test examples, less the noise.
The paper draws that on 1,000 test examples a device, noise included.

The formula that is drawn over it is exact up to the difference between a sample's covariance and
Sigma, with c = 3 sigma^4 / n:

    d / 3 [ (1 - alpha)^2 ((M - 1) / M rho^2 + c / M) + 2 alpha (1 - alpha) c / M + alpha^2 c ]

It is least at alpha* = rho^2 / (rho^2 + c), whatever M is: the share that differs from device to
device.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray

import dfl
from dfl.core import randomness
from experiments import common

Floats = NDArray[np.float64]

ALPHAS = np.linspace(0, 1, 101)
"""Shares of a device's own model that are drawn."""
VARIANCE = 1 / 3
"""Variance of a feature, which is uniform from -1 to 1."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/alpha_interpolation")
    rhos: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.5, 0.1, 0.06, 0.02)
    """Standard deviations of a coefficient over the devices."""
    sigma: float = 1.5
    """The root of the standard deviation of the noise."""
    devices: int = 100
    """Number of devices, M."""
    examples: int = 2000
    """Number of examples of a device, n."""
    features: int = 20
    """Number of features, d."""
    seeds: int = 20
    """Number of seeds, from 0."""

    def __post_init__(self) -> None:
        for name, least in (("devices", 2), ("features", 1), ("seeds", 2)):
            if getattr(self, name) < least:
                raise dfl.InputError(
                    f"--{name} must be at least {least}, not {getattr(self, name)}"
                )
        super().__post_init__()
        if self.examples < self.features:
            raise dfl.InputError(
                f"--examples {self.examples} must be at least --features {self.features}"
            )
        for name, value in (("sigma", self.sigma), *(("rhos", rho) for rho in self.rhos)):
            if value <= 0:
                raise dfl.InputError(f"--{name} must be positive, not {value:g}")

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise: sigma squared, as in the paper's program."""
        return self.sigma**2

    @property
    def doubt(self) -> float:
        """c = 3 sigma^4 / n, the variance of a coefficient of a device's least squares."""
        return self.deviation**2 / (self.examples * VARIANCE)


class Parabola(NamedTuple):
    """An excess risk by alpha: square alpha^2 + 2 slope alpha + start."""

    square: float
    slope: float
    start: float

    def at(self, alpha: Any) -> Any:
        """Return its value at an alpha, or at many."""
        return self.square * alpha**2 + 2 * self.slope * alpha + self.start

    @property
    def least_at(self) -> float:
        """The alpha where it is least."""
        return -self.slope / self.square


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the excess risk of mixtures of a device's own and the common model."""
    measured = {
        rho: [risk(options, rho, seed) for seed in range(options.seeds)] for rho in options.rhos
    }
    table = pd.DataFrame([_row(options, rho, found) for rho, found in measured.items()])
    seeds = pd.DataFrame(
        [
            {"rho": rho, "seed": seed, **figures(each)}
            for rho, found in measured.items()
            for seed, each in enumerate(found)
        ]
    )
    common.publish(options, table, draw(measured, options), finding(table, options), seeds)


def risk(options: Options, rho: float, seed: int) -> Parabola:
    """Return the excess risk measured on the data of one seed."""
    x, y, u = sample(options, rho, seed)
    own, pooled = least_squares(x, y)
    return excess(own, pooled, u)


def sample(options: Options, rho: float, seed: int) -> tuple[Floats, Floats, Floats]:
    """Return examples x (M, n, d) and y (M, n) of every device, and their coefficients u (M, d)."""
    rng = randomness.generator(seed, "alpha interpolation", f"{rho:g}")
    M = options.devices
    n = options.examples
    d = options.features
    u = rng.random(d) + rng.normal(0, rho, (M, d))
    x = rng.uniform(-1, 1, (M, n, d))
    return x, np.einsum("mnd,md->mn", x, u) + rng.normal(0, options.deviation, (M, n)), u


def least_squares(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return the coefficients of every device by its own examples, (M, d), and by all, (d,)."""
    squares = x.swapaxes(1, 2) @ x
    products = np.einsum("mnd,mn->md", x, y)
    own: Floats = np.linalg.solve(squares, products[..., None])[..., 0]
    return own, np.linalg.solve(squares.sum(0), products.sum(0))


def excess(own: Floats, pooled: Floats, u: Floats) -> Parabola:
    """Return the mean over devices of ||alpha own + (1 - alpha) pooled - u||^2 / 3, by alpha."""
    towards = own - pooled
    off = pooled - u
    sums = (
        (a * b).sum(1).mean() * VARIANCE
        for a, b in ((towards, towards), (towards, off), (off, off))
    )
    return Parabola(*map(float, sums))


def expected(options: Options, rho: float) -> Parabola:
    """Return the excess risk by the formula in the docstring of this file."""
    M = options.devices
    d = options.features
    devices = (M - 1) / M * rho**2
    data = options.doubt
    return Parabola(
        d * VARIANCE * (devices + data - data / M),
        -d * VARIANCE * devices,
        d * VARIANCE * (devices + data / M),
    )


def figures(found: Parabola) -> dict[str, float]:
    """Return the best alpha of a seed, and the excess risk at both ends and there."""
    best = found.least_at
    return {"alpha": best, "pooled": found.at(0.0), "own": found.at(1.0), "best": found.at(best)}


def _row(options: Options, rho: float, found: list[Parabola]) -> dict[str, float]:
    """Return the measured figures and those of the formula."""
    theory = expected(options, rho)
    least = np.array([each.least_at for each in found])
    row = {
        "rho": rho,
        "alpha_formula": theory.least_at,
        "alpha": least.mean(),
        "std_over_seeds": least.std(ddof=1),
    }
    for name, alpha in (("pooled", 0.0), ("own", 1.0)):
        row |= {
            name: np.mean([each.at(alpha) for each in found]),
            f"{name}_formula": theory.at(alpha),
        }
    best = [each.at(each.least_at) for each in found]
    return row | {"best": np.mean(best), "best_formula": theory.at(theory.least_at)}


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    difference = (table["alpha"] - table["alpha_formula"]).abs()
    off = max(
        (table[name] / table[f"{name}_formula"] - 1).abs().max()
        for name in ("pooled", "own", "best")
    )
    left = table["best"] / table[["pooled", "own"]].min(axis=1)
    return (
        f"for rho = {_listed(table['rho'], 'g')} the best alpha is "
        f"{_listed(table['alpha'], '.3f')} in the mean over {options.seeds} seeds, by formula "
        f"{_listed(table['alpha_formula'], '.3f')}, a difference of {difference.max():.3f} at "
        f"most. Every excess risk is within {off:.1%} of its formula. At the best alpha it is "
        f"{_listed(left, '.0%')} of that of the better end."
    )


def _listed(values: pd.Series[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


def draw(measured: dict[float, list[Parabola]], options: Options) -> Figure:
    """Draw the excess risk by alpha, a panel per rho: measured, with its std over the seeds, and by
    formula.
    """
    figure = Figure(figsize=(max(3.5 * len(measured), 7), 4.4), layout="constrained")
    panels = figure.subplots(1, len(measured), squeeze=False)[0]
    for axes, (rho, found) in zip(panels, measured.items(), strict=True):
        _panel(axes, found, expected(options, rho))
        axes.set(
            title=rf"$\rho$ = {rho:g}",
            xlabel=r"$\alpha$, share of the device's own model",
            xlim=(0, 1),
        )
    panels[0].set_ylabel("excess risk, mean over the devices")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5)
    figure.suptitle(
        rf"A device's own least squares and those of all, mixed: $\sigma$ = {options.sigma:g}, "
        f"{options.devices} devices with {options.examples:,} examples each, {options.seeds} seeds"
    )
    return figure


def _panel(axes: Axes, found: list[Parabola], theory: Parabola) -> None:
    """Draw one rho, with the excess risk on a logarithmic axis."""
    curves = np.array([each.at(ALPHAS) for each in found])
    least = np.array([each.least_at for each in found])
    mean = curves.mean(0)
    std = curves.std(0, ddof=1)
    blue = common.COLOURS[0]
    axes.fill_between(
        ALPHAS,
        mean - std,
        mean + std,
        color=blue,
        alpha=0.25,
        linewidth=0,
        label="± one standard deviation over seeds",
    )
    axes.plot(ALPHAS, mean, color=blue, linewidth=2, label="measured, mean over seeds")
    axes.plot(
        ALPHAS, theory.at(ALPHAS), "--", color=common.COLOURS[6], linewidth=1, label="by formula"
    )
    axes.axvline(
        theory.least_at,
        color=common.COLOURS[1],
        linestyle=":",
        label=r"$\alpha^* = \rho^2 / (\rho^2 + 3 \sigma^4 / n)$",
    )
    height = np.mean([each.at(least.mean()) for each in found])
    axes.errorbar(
        least.mean(),
        height,
        xerr=least.std(ddof=1),
        fmt="o",
        color=blue,
        markersize=5,
        capsize=3,
        label="measured least, ± one standard deviation",
    )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 4, 5, 7)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "personal_layers.alpha_interpolation"))
