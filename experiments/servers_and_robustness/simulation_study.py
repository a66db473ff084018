"""Bias and error of FedAvg on a logistic regression, compared with the truth and with maximum
likelihood on all data.

Command, 100 runs, 8 minutes on one core:

    python -m experiments.servers_and_robustness.simulation_study

Finding: with a constant learning rate of 0.1 and batches of one example, FedAvg is not
consistent. From n = 1,000 to 10,000 the root mean square error of maximum likelihood on all data
falls from 0.069 to 0.019; that of FedAvg stays at 0.089 to 0.079 with 10 clients, and goes from
0.068 to 0.041 with 100. At n = 10,000 its bias is +0.035 to +0.040 whatever K is; it is beyond
two standard errors in 38 of 40 cells, though at n = 3,000 the data sets themselves are biased by
+0.015. The number of examples of a client decides: with 10 it takes 10 steps between two averages
and ends 0.008 from maximum likelihood, with 1,000 it reaches the stationary point of steps of
this size and is 0.074 from it. More clients are only better because each takes fewer steps, and
because their average has less noise. A tenth of the learning rate takes the bias from +0.035 to
+0.004 and the error from 0.079 to 0.022 (`--lr 0.01 --steps 20000 --examples 10000 --clients
10`). Read as batches of n_k, FedAvg is gradient descent to 2e-15 in all 50 cells.

The bias is there in every other setting, at n = 5,000. With 10 clients FedAvg is +0.033 off
maximum likelihood in the standard setting, +0.036 with a standard deviation of 2, +0.046 with an
intercept of -1 that is estimated as well, and +0.025 and +0.029 with slopes of 0.5 and 2; with 100
clients it is off by +0.025, +0.032, +0.040, +0.029 and +0.008. With 10 clients these differences
have standard errors of 0.004 to 0.007. Where it starts does not matter: from 1, the truth, it ends
as from 0, by both differences to four digits.

The estimators of `dfl.inference` that take a message or two of each client have less bias on the
same data. In the standard setting, where every client has an estimate in every replication, the
surrogate likelihood is within 0.0012 of maximum likelihood on all data in the mean, the average of
bias-corrected estimates within 0.006, and meta-analysis is below it by 0.003 with 1,000 examples of
a client, by 0.03 with 100 and by 0.076 with 40; FedAvg is above it by 0.022 to 0.044. With 10 to 30
examples some client has no estimate in 5 to all of 100 replications, and then they have none;
`one_step_kept` counts the others.

The study is that of slides on federated learning with which this project began: Z ~ N(1, 2), Y ~
Bernoulli(1 / (1 + exp(-beta Z))), n = 1,000 to 10,000 examples at K = 10 to 100 clients of n / K
each, E = 1, learning rate 0.1, and "No. of batches B = n_k". Their results are not in the text
that is left of them, so there is no number to compare with. What they leave open is settled here
as follows: 2 is the variance; x in their formula is Z; beta is 1, with no intercept; n_k batches
are batches of one example; every client takes part in every round, and rounds go on until each
client has taken 2,000 steps, and for ten at least. FedAvg starts at 0; the server's model at the
end is its estimate. Rows of `OTHERS` settle one of these otherwise: 2 as the standard deviation, an
intercept, another beta, a start at 1.

A replication is a coordinate: one model holds a beta for each of 100 replications, an example has
a Z and a Y for each, and the loss is the sum over them. So every beta is trained independently,
on data of its own, in one simulation; replications share only the order in which clients go
through their examples. All K see the same data.

Read the other way, as batches of n_k examples, a round of FedAvg is a step of gradient descent on
all data, whatever K is. That is checked for every n against four lines of numpy.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import dfl
from dfl.core import randomness
from dfl.core.isolation import isolated
from dfl.inference.estimators import Estimator, Meta, OneShot, Surrogate
from dfl.inference.models import Logistic, Site
from dfl.inference.sites import Stacked
from dfl.inference.study import at_centre
from dfl.store.callbacks import Callback, Outcome
from experiments import common

Floats = NDArray[np.float64]

ONE_STEP: dict[str, Estimator] = {
    "meta": Meta(), "one_shot": OneShot(), "surrogate": Surrogate(),
}  # fmt: skip
"""Estimators that take a message or two of each client: a column of the bias of each."""

STANDARD = "standard"
"""The setting of most rows."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/simulation_study")
    examples: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = tuple(
        range(1000, 10001, 1000)
    )
    """Total number of examples, n."""
    clients: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (10, 20, 50, 100)
    """Number of clients, K, each with n / K examples."""
    beta: float = 1.0
    """The true slope."""
    variance: float = 2.0
    """Variance of Z."""
    intercept: float | None = None
    """The true intercept, which is estimated as well; none where not given."""
    start: float = 0.0
    """Slope at which FedAvg and gradient descent start; an intercept starts at 0."""
    lr: float = 0.1
    """Learning rate."""
    replications: int = 100
    """Number of data sets of every size."""
    steps: int = 2000
    """Minimum number of local steps of a client with batches of one example; there are at least
    ten rounds.
    """
    descent: int = 300
    """Rounds with batches of all examples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for n, k in product(self.examples, self.clients):
            if k < 1 or n < 1 or n % k:
                raise dfl.InputError(f"--examples {n} cannot be split evenly among --clients {k}")


OTHERS: dict[str, dict[str, Any]] = {
    "standard deviation 2": {"variance": 4.0},
    "intercept -1": {"intercept": -1.0},
    "slope 0.5": {"beta": 0.5},
    "slope 2": {"beta": 2.0},
    "start at 1": {"start": 1.0},
}
"""The other settings, each with what it changes."""


class Slopes(torch.nn.Module):
    """A logistic regression with one slope, for each of R replications: (n, R) -> logits (n, R)."""

    def __init__(self, replications: int, start: float = 0.0, intercept: bool = False) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.full((replications,), start, dtype=torch.float64))
        self.alpha = (
            torch.nn.Parameter(torch.zeros(replications, dtype=torch.float64))
            if intercept
            else None
        )

    def forward(self, z: Tensor) -> Tensor:
        """Return the logits."""
        return z * self.beta if self.alpha is None else z * self.beta + self.alpha


class Last(Callback):
    """Keeps the model at the end of a run, (1, R), or (1, 2 R) with intercepts."""

    models: NDArray[Any]

    def finish(self, outcome: Outcome) -> None:
        """Keep the model."""
        self.models = np.concatenate(list(outcome.state.values()), -1)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure bias and error of FedAvg by examples and clients, and the difference to gradient
    descent.
    """
    tables = [study(options, n) for n in options.examples]
    few = replace(options, clients=tuple(sorted({min(options.clients), max(options.clients)})))
    middle = sorted(options.examples)[(len(options.examples) - 1) // 2]
    tables += [study(replace(few, **changes), middle, name) for name, changes in OTHERS.items()]
    table = pd.concat(tables, ignore_index=True)
    common.publish(options, table, draw(table, options), finding(table, options))


def study(options: Options, n: int, setting: str = STANDARD) -> pd.DataFrame:
    """Return a row per number of clients, all with the same n examples: means and errors of the
    slope over the replications.
    """
    z, y = sample(options, n)
    best = most_likely(z, y, options.intercept is not None)
    R = options.replications
    descended = descent(z, y, options)
    rows = []
    for k in options.clients:
        rounds = max(10, -(-options.steps * k // n))
        found = fedavg(z, y, k, rounds, options, batch_size=1)
        whole = fedavg(z, y, k, options.descent, options, batch_size=0)
        rows.append(
            {
                "setting": setting,
                "examples": n,
                "clients": k,
                "each": n // k,
                "rounds": rounds,
                **_errors(found[:R], best[:R], options.beta),
                **_biases(one_step(z, y, k, options.intercept is not None), options.beta),
            }
            | {
                "descent_distance": f"{np.abs(whole - descended).max():.0e}",
                "descent_to_mle": f"{np.abs(whole - best).max():.0e}",
            }
        )
        print(f"{setting}, n={n}, K={k}: {rows[-1]['bias']:+.4f}", file=sys.stderr, flush=True)
    return pd.DataFrame(rows)


def _errors(found: Floats, best: Floats, truth: float) -> dict[str, float]:
    """Return the errors of estimates (R,) against the truth and against maximum likelihood on all
    data.
    """
    error = found - truth
    difference = found - best
    floor = best - truth
    return {
        "bias": error.mean(),
        "bias_se": error.std(ddof=1) / np.sqrt(len(error)),
        "rmse": _root_mean_square(error),
        "mle_bias": floor.mean(),
        "mle_rmse": _root_mean_square(floor),
        "minus_mle": difference.mean(),
        "rms_from_mle": _root_mean_square(difference),
    }


def one_step(z: Floats, y: Floats, clients: int, intercept: bool = False) -> dict[str, Floats]:
    """Return the slopes (R,) by the estimators of `ONE_STEP` on examples (n, R), of which each
    client has as many as another; NaN where some client has no estimate of its own.
    """
    columns = np.stack([z, np.ones_like(z)] if intercept else [z], -1)
    x, outcomes = (
        torch.from_numpy(np.moveaxis(each.reshape(clients, -1, *each.shape[1:]), 2, 0).copy())
        for each in (columns, y)
    )
    site = Site(outcomes, x, x[..., :0], torch.zeros_like(outcomes))
    with isolated(1):
        sites = Stacked(Logistic(), site.p, site)
        return {
            name: each.estimate(sites, at_centre(clients)).beta[:, 0, 0].numpy()
            for name, each in ONE_STEP.items()
        }


def _biases(found: dict[str, Floats], truth: float) -> dict[str, float]:
    """Return the biases of estimators, and in how many replications all of them exist."""
    kept = np.all(np.isfinite(list(found.values())), axis=0)
    few = kept.sum() < 2
    biases = {
        f"{name}_bias": np.nan if few else (beta[kept] - truth).mean()
        for name, beta in found.items()
    }
    return biases | {"one_step_kept": int(kept.sum())}


def _root_mean_square(values: Floats) -> float:
    return float(np.sqrt((values**2).mean()))


def sample(options: Options, n: int) -> tuple[Floats, Floats]:
    """Return Z and Y of n examples in every replication, (n, R) each."""
    rng = randomness.generator(0, "simulation study", n)
    shape = (n, options.replications)
    z = rng.normal(1, np.sqrt(options.variance), shape)
    logit = options.beta * z + (options.intercept or 0.0)
    return z, (rng.random(shape) < chance(logit)).astype(np.float64)


def chance(logit: Floats) -> Floats:
    """Return 1 / (1 + exp(-logit))."""
    return 1 / (1 + np.exp(-logit))


def most_likely(z: Floats, y: Floats, intercept: bool = False) -> Floats:
    """Return the slopes (R,) of maximum likelihood on all examples (n, R), by Newton's method, and
    after them the intercepts (R,) where there are any.
    """
    columns = np.stack([z, np.ones_like(z)] if intercept else [z])
    theta = np.zeros((len(columns), z.shape[1]))
    for _ in range(30):
        p = chance((theta[:, None] * columns).sum(0))
        score = np.array([((y - p) * column).sum(0) for column in columns])
        information = np.array(
            [[(p * (1 - p) * one * other).sum(0) for one in columns] for other in columns]
        )
        theta = theta + np.linalg.solve(information.T, score.T[..., None])[..., 0].T
    return theta.ravel()


def descent(z: Floats, y: Floats, options: Options) -> Floats:
    """Return the slopes (R,), and after them any intercepts, of gradient descent on the mean loss
    of examples (n, R).
    """
    beta = np.full(z.shape[1], options.start)
    if options.intercept is None:
        for _ in range(options.descent):
            beta = beta + options.lr * ((y - chance(beta * z)) * z).mean(0)
        return beta
    alpha = np.zeros(z.shape[1])
    for _ in range(options.descent):
        away = y - chance(beta * z + alpha)
        beta, alpha = beta + options.lr * (away * z).mean(0), alpha + options.lr * away.mean(0)
    return np.concatenate([beta, alpha])


def fedavg(
    z: Floats, y: Floats, clients: int, rounds: int, options: Options, batch_size: int
) -> Floats:
    """Return the slopes (R,), and after them any intercepts, at the end of FedAvg on examples
    (n, R), by `dfl.simulate`.
    """
    run = dfl.Run(
        algorithm="fedavg",
        peers=clients,
        rounds=rounds,
        eval_every=rounds,
        batch_size=batch_size,
        lr=options.lr,
        momentum=0.0,
        engine="batched",
        device="cpu",
        model=Slopes(z.shape[1], options.start, options.intercept is not None),
        dataset=dfl.Data(z, y, z[:1], y[:1], classes=0),
        loss=loss,
    )
    last = Last()
    for _ in dfl.simulate(run, callbacks=[last]):
        pass
    slopes: Floats = last.models[0]
    return slopes


def loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return -log likelihood of every example, (n,), summed over the replications."""
    return binary_cross_entropy_with_logits(logits, y, reduction="none").sum(1)


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    everything, table = table, table[table["setting"] == STANDARD]
    by_size = table.sort_values("each")
    few = by_size.iloc[0]
    many = by_size.iloc[-1]
    significant = (table["bias"].abs() > 2 * table["bias_se"]).sum()
    off = everything["descent_distance"].astype(float).max()
    left = table["descent_to_mle"].astype(float).max()
    return (
        f"over {options.replications} replications and from n = {table['examples'].min():,} to "
        f"{table['examples'].max():,} the root mean square error of maximum likelihood on all data "
        f"goes {_ends(table, 'mle_rmse')}; that of FedAvg {_errors_by_clients(table)}. FedAvg's "
        f"bias is {table['bias'].min():+.4f} to {table['bias'].max():+.4f} (beyond two standard "
        f"errors in {significant} of {len(table)} cells), that of maximum likelihood "
        f"{table['mle_bias'].min():+.4f} to {table['mle_bias'].max():+.4f}; from maximum "
        f"likelihood on the same data FedAvg is {few['minus_mle']:+.4f} off in the mean where "
        f"clients have fewest examples ({few['each']:.0f}) and {many['minus_mle']:+.4f} where they "
        f"have most ({many['each']:.0f}). With batches of n_k, FedAvg is gradient descent on all "
        f"data to {off:.0e} for every n and K, and after {options.descent} rounds within "
        f"{left:.0e} of maximum likelihood in the standard setting. From maximum likelihood FedAvg "
        f"is off in the mean by {_by_setting(everything)}. Where every client has an estimate in "
        f"every replication, {_one_step(table, options)}."
    )


def _one_step(table: pd.DataFrame, options: Options) -> str:
    """Return the biases of the estimators of one step beside that of FedAvg."""
    rows = table[table["one_step_kept"] == options.replications]
    names = {"bias": "FedAvg"} | {f"{name}_bias": name for name in ONE_STEP}
    return ", ".join(
        f"{name} has a bias of {rows[column].min():+.4f} to {rows[column].max():+.4f}"
        for column, name in names.items()
    )


def _by_setting(table: pd.DataFrame) -> str:
    """Return the difference from maximum likelihood in every setting, at its examples."""
    others = table[table["setting"] != STANDARD]
    cells = table.merge(others[["examples", "clients"]].drop_duplicates())
    return "; ".join(
        ", ".join(
            f"{row['minus_mle']:+.4f} ({row['clients']} clients)" for row in own.to_dict("records")
        )
        + f" with {setting}"
        for setting, own in common.groups(cells, ["setting"])
    )


def _errors_by_clients(table: pd.DataFrame) -> str:
    own = table.groupby("clients")
    return ", ".join(f"{_ends(rows, 'rmse')} with {k} clients" for k, rows in own)


def _ends(table: pd.DataFrame, column: str) -> str:
    """Return a column at the fewest and at the most examples."""
    ordered = table.sort_values("examples", kind="stable")[column]
    return f"from {ordered.iloc[0]:.3f} to {ordered.iloc[-1]:.3f}"


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw bias and error by n, and the distance to maximum likelihood by examples of a client, of
    the standard setting.
    """
    table = table[table["setting"] == STANDARD]
    figure = Figure(figsize=(13.5, 4.8), layout="constrained")
    bias, error, distance = figure.subplots(1, 3)
    for (k, own), colour in zip(common.groups(table, ["clients"]), common.COLOURS, strict=False):
        style = {"color": colour, "marker": "o", "markersize": 4, "label": f"FedAvg, {k} clients"}
        bias.errorbar(own["examples"], own["bias"], 2 * own["bias_se"], capsize=2, **style)
        error.plot(own["examples"], own["rmse"], **style)
        distance.plot(own["each"], own["rms_from_mle"], **style)
    fewest = table[table["clients"] == table["clients"].min()]
    for name, shade in zip(ONE_STEP, ("0.35", "0.55", "0.75"), strict=True):
        label = f"{name}, {fewest['clients'].iloc[0]} clients"
        bias.plot(fewest["examples"], fewest[f"{name}_bias"], ":", color=shade, label=label)
    one = table.drop_duplicates("examples")
    for axes, column in ((bias, "mle_bias"), (error, "mle_rmse")):
        axes.plot(one["examples"], one[column], "k--", label="maximum likelihood, all data")
    bias.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    _label(
        bias,
        "Bias",
        "examples in all, n",
        "mean of the estimates, less β (bars: 2 standard errors)",
    )
    _label(error, "Error", "examples in all, n", "root mean square error of β", log=True)
    _label(
        distance,
        "Distance to maximum likelihood",
        "examples of a client, n / K",
        "root mean square distance",
        log=True,
    )
    title = (
        f"FedAvg on a logistic regression: β = {options.beta:g}, batches of one example, "
        f"one local epoch, learning rate {options.lr:g}, {options.replications} replications"
    )
    common.caption(figure, bias, title, 5)
    return figure


def _label(axes: Axes, title: str, across: str, up: str, log: bool = False) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    if log:
        axes.set(xscale="log", yscale="log")
        for each in (axes.xaxis, axes.yaxis):
            each.set_major_locator(LogLocator(subs=(1, 2, 5)))
            each.set_minor_locator(NullLocator())
            each.set_major_formatter("{x:g}")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.simulation_study"))
