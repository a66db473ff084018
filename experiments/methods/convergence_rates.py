"""Are the rates of DFedAvgM and of its quantized form those of their theory?

Sun, Li, Wang, "Decentralized Federated Averaging", arXiv 2104.11375: T = O(1/eps^2) rounds for a
squared gradient norm of eps, with eta proportional to 1 / (L K sqrt T), and, but for a logarithm,
T = O(1/eps) for f - min f = eps under the Polyak-Lojasiewicz inequality; the quantizer's fixed step
s adds a term in d s^2. The rates are those of the abstract and of slides 003; the theorems'
constants could not be read, and no result here depends on them.

Command, 46 minutes of one core, while other programs ran beside it:

    python -m experiments.methods.convergence_rates

Finding: they are. The exponents of the non-convex problem are 1.96 to 1.98 (theory 2) while eps
falls by a factor of 101, those under the Polyak-Lojasiewicz inequality 1.00 to 1.01 (theory 1)
while it falls by 102; 95 % intervals reach 0.07 to each side in both. Against T without the
logarithm that theory has, the latter are 1.26 to 1.27. At the same seed 8 bits change eps by at
most 0.03 % and 4 bits by 1.3 %, since messages keep the mean of the models and their step shrinks
with eta. A fixed step does not shrink: after 3,000 rounds s = 0.01, 0.03 and 0.1 add 0.05, 0.33 and
3.8 to an eps of 1.04, which is about in proportion to s^2 and 54 to 70 % of the bound.

Grid: 8 peers, a ring with weights 1/3, 200 coordinates in float64, gradients with noise of standard
deviation 3 in every coordinate; K = 2 local steps with momentum 0.5, which move R = 2.5 learning
rates by a constant gradient. A run of T rounds has a learning rate of its own, and eps is that of
the mean of all models at its end, so T is chosen per eps and no run serves for two. The exponent is
minus the inverse of the slope of log eps against log T, by seed; its interval is that of Student's
t over five seeds. Centralized SGD takes one step of length R eta a round on as many examples. 8
and 4 bits are the quantized method as it is by default, with public copies and a step s that is in
proportion to the largest coordinate of a message.

- non-convex: peer i has sum_k u^2 / (1 + u^2), u = x_k - c_ik, whose gradient is bounded; eta = 1 /
  (L R sqrt T), L = 2, T from 3 to 30,000.
- Polyak-Lojasiewicz: a_i ||Q x - c_i||^2 / 2 with 100 rows in Q, so that f is constant in 100
  directions; eta = log T / (nu R T), T from 10 to 4,000, and the exponent is that of T / log T.
- non-convex, fixed step: the published exchange, which has a fixed s, on equal peers and a W
  without negative eigenvalues, since with unlike peers it does not reach consensus
  (`messages_and_graphs.update_mixing`); `added` is eps minus that with exact messages, and `bound`
  is d L s^2 / (8 P R eta), to which a variance of s^2/4 adds up to first order in eta.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor, nn

import dfl
from dfl.compression.base import Draw, as_bytes
from dfl.config import Run
from experiments import common
from experiments.methods.quadratic import Last

PEERS = 8
COORDINATES = 200
RANK = 100
"""Coordinates on which least squares depend."""
EXAMPLES = 64
"""Examples of a peer. They differ in the noise of their gradients, whose mean over them is 0."""
NOISE = 3.0
"""Standard deviation of the noise of a coordinate of a gradient."""
START = 0.2
"""Standard deviation of the coordinates of the centre of all peers; models start at 0."""
SPREAD = 0.2
"""Standard deviation of the coordinates of the peers' centres around it."""
STEPS = 2
"""Local steps of a round, K."""
MOMENTUM = 0.5
"""Their momentum θ."""
REACH = 2.5
"""R, how far K steps move by a constant gradient of 1, in learning rates."""
LEVEL = 0.95
"""Coverage of a confidence interval over the seeds."""
WITHIN = 0.15
"""The largest difference to theory that passes, relative to theory."""

Floats = NDArray[np.float64]


class Problem(ABC):
    """A problem of `PEERS` peers whose gradients have noise.

    Attributes:
        name: of the problem.
        error: what ε is.
        power: the theory, T = O(ε^-power) rounds.
        ladder: numbers of rounds T; each has its own learning rate.
        centres: (P, k), c_i.
        weights: (P,), a_i, by which the losses of a peer are multiplied, but not their noise.
    """

    name: str
    error: str
    power: int
    ladder: tuple[int, ...]
    centres: Floats
    weights: Floats

    @abstractmethod
    def rate(self, rounds: int) -> float:
        """Return η for a run of T rounds."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Return the model, which gives the loss of an example (c, n), and the noise in it."""

    @abstractmethod
    def epsilon(self, x: Floats) -> float:
        """Return ε of a model (d,)."""

    def scale(self, rounds: int) -> float:
        """Return the number of rounds without the logarithm of the theory."""
        return rounds

    def data(self) -> dfl.Data:
        """Return the examples, those of peer 0 first."""
        k = self.centres.shape[1]
        half = np.random.default_rng(1).normal(0, NOISE, (PEERS, EXAMPLES // 2, k))
        noise = np.concatenate([half, -half], axis=1)
        centres = np.broadcast_to(self.centres[:, None], noise.shape)
        inputs = np.stack([centres, noise], axis=2).reshape(-1, 2, k)
        labels = np.repeat(self.weights, EXAMPLES)
        return dfl.Data(inputs, labels, inputs[:1], labels[:1], classes=0)


def centres(k: int, spread: float) -> Floats:
    """Return the centres of the peers, (P, k)."""
    rng = np.random.default_rng(0)
    return rng.normal(0, START, k) + rng.normal(0, spread, (PEERS, k))


class NonConvex(Problem):
    """f_i(x) = sum_k u²/(1 + u²), u = x_k - c_ik; ε is the squared norm of the gradient of f at the
    mean of all models.

    f_i is smooth, L = 2, its gradient is bounded, and it is concave where |u| > 0.58. As in theory,
    η is proportional to 1 / (L √T).
    """

    name = "non-convex"
    error = "squared norm of the gradient"
    power = 2
    ladder: tuple[int, ...] = (3, 10, 30, 100, 300, 1000, 3000, 30_000)
    spread = SPREAD

    def __init__(self) -> None:
        self.centres = centres(COORDINATES, self.spread)
        self.weights = np.ones(PEERS)

    def rate(self, rounds: int) -> float:
        """Return 1 / (L R √T)."""
        return 1 / (2 * REACH * math.sqrt(rounds))

    def model(self) -> nn.Module:
        """Return x."""
        return Bowl()

    def epsilon(self, x: Floats) -> float:
        """Return ||grad f(x)||²."""
        u = x - self.centres
        return float(np.square((2 * u / np.square(1 + u * u)).mean(0)).sum())


class FixedStep(NonConvex):
    """The same for equal peers: the published exchange, in which s is fixed, does not make unlike
    peers agree (`messages_and_graphs.update_mixing`).
    """

    name = "non-convex, fixed step"
    ladder = (30, 100, 300, 1000, 3000)
    spread = 0.0


class LeastSquares(Problem):
    """f_i(x) = a_i sum_k (u_k - c_ik)² / 2, u = Q x; ε is f - min f at the mean of all models.

    a_i is uniform on [1, 2]. Q has orthonormal rows, fewer than columns, so f satisfies the
    Polyak-Lojasiewicz inequality, where ν is the mean of the a_i, and is not strongly convex. As in
    theory, η is proportional to log T / (ν T).
    """

    name = "Polyak-Lojasiewicz"
    error = "f - min f"
    power = 1
    ladder = (10, 30, 100, 300, 1000, 4000)

    def __init__(self) -> None:
        self.centres = centres(RANK, SPREAD)
        rng = np.random.default_rng(2)
        self.weights = rng.uniform(1, 2, PEERS)
        self.best: Floats = np.average(self.centres, axis=0, weights=self.weights)
        self.rows: Floats = np.linalg.qr(rng.normal(size=(COORDINATES, RANK)))[0].T

    def rate(self, rounds: int) -> float:
        """Return log T / (ν R T)."""
        return math.log(rounds) / (float(self.weights.mean()) * REACH * rounds)

    def scale(self, rounds: int) -> float:
        """Return T / log T."""
        return rounds / math.log(rounds)

    def model(self) -> nn.Module:
        """Return x, seen through Q."""
        return Valley(self.rows)

    def epsilon(self, x: Floats) -> float:
        """Return f(x) - min f."""
        return float(self.weights.mean() * np.square(self.rows @ x - self.best).sum() / 2)


class Bowl(nn.Module):
    """The loss of an example (c, n), sum_k u²/(1 + u²), u = x_k - c_k, and its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64))

    def forward(self, example: Tensor) -> Tensor:
        """Return losses and noise, (n, 2)."""
        centre, noise = example.unbind(1)
        squares = (self.x - centre).square()
        return torch.stack([squares / (1 + squares), noise * self.x], 1).sum(-1)


class Valley(nn.Module):
    """The loss of an example (c, n), sum_k (u_k - c_k)² / 2, u = Q x, and its noise."""

    def __init__(self, rows: Floats) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64))
        self.rows = torch.from_numpy(rows)

    def forward(self, example: Tensor) -> Tensor:
        """Return losses and noise, (n, 2)."""
        centre, noise = example.unbind(1)
        u = self.rows @ self.x
        return torch.stack([(u - centre).square() / 2, noise * u], 1).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Multiples of a fixed step s, the quantizer of theory: unbiased, with a variance of at most
    s²/4 per coordinate.

    Codes have 16 bits, enough for all messages here.

    Attributes:
        step: s.
    """

    step: float

    def encode(self, messages: Tensor, draw: Draw) -> Tensor:
        """Return messages (q, m) as bytes (q, 2m)."""
        bits = draw(slice(0, messages.shape[0]), slice(0, messages.shape[1]))
        chance = (bits & 0xFFFFFF).double() / 2**24
        return as_bytes((messages / self.step + chance).floor().to(torch.int16))

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        """Return the messages (q, m) that bytes (q, 2m) hold."""
        return encoded.contiguous().view(torch.int16).to(dtype) * self.step


METHODS: dict[str, dict[str, Any]] = {
    "centralized SGD": {
        "algorithm": "fedavg", "local_steps": 1, "batch_size": STEPS, "momentum": 0.0,
    },
    "DFedAvgM": {"algorithm": "dfedavgm"},
    "DFedAvgM, 8 bits": {"algorithm": "qdfedavgm", "bits": 8},
    "DFedAvgM, 4 bits": {"algorithm": "qdfedavgm", "bits": 4},
}  # fmt: skip
"""Centralized SGD takes one step a round, of length R η, on as many examples."""

FIXED = FixedStep()
GRIDS: dict[str, dict[str, Any]] = {
    f"s = {step:g}": {
        "algorithm": "qdfedavgm:exchange=paper",
        "mixing": "lazy",
        "compressor": Grid(step=step) if step else "none",
    }
    for step in (0.0, 0.01, 0.03, 0.1)
}
"""The published exchange, with a W without negative eigenvalues; s = 0 is exact."""
EXACT = "s = 0"
COMPARISONS = ((NonConvex(), METHODS), (LeastSquares(), METHODS), (FIXED, GRIDS))


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/convergence_rates")
    seeds: int = 5
    """Number of seeds, from 0; two or more."""
    rounds: int = 30_000
    """Most rounds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.seeds < 2:
            raise dfl.InputError(f"--seeds must be 2 or more, not {self.seeds}")


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure ε by rounds, and the exponents of its decline, for every problem and method."""
    rows = measure(options)
    table = tabulate(rows)
    common.publish(options, table, draw(rows), finding(table), rows)


def weighted(out: Tensor, weights: Tensor) -> Tensor:
    """Return the losses (n,) of losses and noise, (n, 2), by the weights of their peers."""
    return weights * out[:, 0] + out[:, 1]


def setting(problem: Problem, rounds: int, seed: int, **method: Any) -> Run:
    """Return a run of a method of T rounds."""
    central = method["algorithm"] == "fedavg"
    given: dict[str, Any] = {
        "topology": None if central else "ring",
        "peers": PEERS,
        "rounds": rounds,
        "eval_every": rounds,
        "seed": seed,
        "lr": problem.rate(rounds) * (REACH if central else 1),
        "local_steps": STEPS,
        "momentum": MOMENTUM,
        "batch_size": 1,
        "model": problem.model(),
        "dataset": problem.data(),
        "partition": list(np.arange(PEERS * EXAMPLES).reshape(PEERS, EXAMPLES)),
        "loss": weighted,
    }
    return Run(**{**given, **method})


def ended(problem: Problem, run: Run) -> float:
    """Return ε at the end of a run."""
    last = Last()
    for _ in dfl.simulate(run, callbacks=[last]):
        pass
    return problem.epsilon(last.models.reshape(-1, COORDINATES).mean(0))


def measure(options: Options) -> pd.DataFrame:
    """Return ε by problem, method, rounds and seed."""
    return pd.DataFrame(
        {
            "problem": problem.name,
            "method": method,
            "rounds": rounds,
            "seed": seed,
            "epsilon": ended(problem, setting(problem, rounds, seed, **given)),
        }
        for problem, methods in COMPARISONS
        for method, given in methods.items()
        for rounds in problem.ladder
        if rounds <= options.rounds
        for seed in range(options.seeds)
    )


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per problem and method: ε of the shortest and of the longest runs, the exponent
    of T = O(ε^-exponent), and, with a fixed step, what the step adds to ε.
    """
    table = []
    for problem, methods in COMPARISONS:
        own = rows[rows["problem"] == problem.name]
        exact = own[own["method"] == EXACT]
        for method, given in methods.items():
            runs = own[own["method"] == method]
            means = runs.groupby("rounds")["epsilon"].mean()
            row = {
                "problem": problem.name,
                "method": method,
                "rounds": f"{means.index[0]:,} to {means.index[-1]:,}",
                "eps_first": means.iloc[0],
                "eps_last": means.iloc[-1],
            }
            more = _added(given["compressor"], means, exact) if len(exact) else _rate(problem, runs)
            table.append({**row, **more})
    return pd.DataFrame(table)


def _rate(problem: Problem, rows: pd.DataFrame) -> dict[str, float]:
    """Return the exponent, its confidence interval, theory, and the plain exponent, without the
    logarithm of the theory.
    """
    found = [exponent(problem.scale, own) for _, own in common.groups(rows, ["seed"])]
    plain = [exponent(float, own) for _, own in common.groups(rows, ["seed"])]
    half = stats.t.ppf((1 + LEVEL) / 2, len(found) - 1) * stats.sem(found)
    mean = float(np.mean(found))
    return {
        "exponent": mean,
        "low": mean - half,
        "high": mean + half,
        "theory": float(problem.power),
        "plain": float(np.mean(plain)),
    }


def exponent(scale: Callable[[int], float], rows: pd.DataFrame) -> float:
    """Return the exponent of a seed: minus the inverse of the slope of log ε against log T.

    Args:
        scale: T -> the number of rounds that takes the place of T.
        rows: ε by rounds.
    """
    at = np.log([scale(rounds) for rounds in rows["rounds"]])
    return float(-1 / stats.linregress(at, np.log(rows["epsilon"])).slope)


def _added(
    compressor: Grid | str, means: pd.Series[float], exact: pd.DataFrame
) -> dict[str, float]:
    """Return what a fixed step adds to ε in the longest runs, and its bound."""
    if isinstance(compressor, str):
        return {}
    rounds = int(means.index[-1])
    without = exact[exact["rounds"] == rounds]["epsilon"].mean()
    return {"added": means.iloc[-1] - without, "bound": bound(compressor.step, rounds)}


def bound(step: float, rounds: int) -> float:
    """Return what a variance of s²/4 in every coordinate of every message adds to ε of `FIXED`, to
    first order in η: d L s² / (8 P R η).

    A round adds the variance s²/(4 P) to a coordinate of the mean model, and multiplies what was
    there by (1 - L R η)².
    """
    return COORDINATES * 2 * step**2 / (8 * PEERS * REACH * FIXED.rate(rounds))


def finding(table: pd.DataFrame) -> str:
    """Return the finding: the exponents against theory, and what a fixed step adds."""
    parts = []
    for problem, _ in COMPARISONS[:2]:
        own = table[table["problem"] == problem.name]
        off = (own["exponent"] / own["theory"] - 1).abs().max()
        listed = ", ".join(
            f"{row['method']} {row['exponent']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            for row in own.to_dict("records")
        )
        fall = (own["eps_first"] / own["eps_last"]).min()
        parts.append(
            f"{problem.name}: exponents {listed}; theory {problem.power}; within {WITHIN:.0%}: "
            f"{'holds' if off <= WITHIN else 'FAILS'} (off by {off:.1%} at most, while eps falls "
            f"by a factor of {fall:.0f} or more)"
        )
    steps = table[table["bound"].notna()]
    listed = ", ".join(
        f"{row['method']} adds {row['added']:.2g} to eps (bound {row['bound']:.2g})"
        for row in steps.to_dict("records")
    )
    return f"{'; '.join(parts)}. A fixed step: {listed}."


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a panel per problem: ε by rounds, the mean over the seeds and its confidence band."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    panels = figure.subplots(1, len(COMPARISONS))
    for axes, (problem, methods) in zip(panels, COMPARISONS, strict=True):
        own = rows[rows["problem"] == problem.name]
        for method, colour in zip(methods, common.COLOURS, strict=False):
            _band(axes, own[own["method"] == method], label=method, color=colour)
        at = np.array(sorted(own["rounds"].unique()))
        first = own[own["rounds"] == at[0]]["epsilon"].mean()
        scale = np.array([problem.scale(rounds) for rounds in at])
        axes.plot(
            at, first * (scale / scale[0]) ** (-1 / problem.power), ":", color="0.5", label="theory"
        )
        axes.set(title=problem.name, xlabel="rounds T", ylabel=problem.error)
        axes.set(xscale="log", yscale="log")
        axes.legend(fontsize="small")
    return figure


def _band(axes: Axes, rows: pd.DataFrame, **style: Any) -> None:
    logs = rows.assign(log=np.log(rows["epsilon"]))
    each = logs.pivot_table(index="rounds", columns="seed", values="log")
    mean = each.mean(axis=1)
    half = stats.t.ppf((1 + LEVEL) / 2, each.shape[1] - 1) * each.sem(axis=1)
    axes.plot(each.index, np.exp(mean), marker=".", **style)
    axes.fill_between(
        each.index, np.exp(mean - half), np.exp(mean + half), alpha=0.15, color=style["color"]
    )


if __name__ == "__main__":
    sys.exit(common.start(experiment, "methods.convergence_rates"))
