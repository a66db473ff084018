"""Processor time of a round of every method, against a round of DFedAvgM on the same graph.

A round may take at most 1.15 times as long as one of DFedAvgM, and as much longer as its further
messages take. What a message takes is measured in DFedAvgM's own rounds: e is the part of a round
in which messages are encoded, sent, decoded and mixed. A method with r times the bytes may take
1.15 + (r - 1) e, and one with g gradients in a local step 1.15 + (g - 1) f more, where f is the
part of the forward and backward passes.

Command, five minutes on one core; the published table is of `--works B --turns 20`, a minute:

    python -m experiments.methods.method_speed

Finding: with work B, 16 of 20 are within what they may take. Longer take PowerGossip (1.16, at most
1.15), which multiplies matrices for each edge; RelaySGD, which gathers and writes the messages of
every edge, 1.18 on one tree and 1.56 on two; and DFedSAM (1.86, at most 1.78), which besides its
second gradient makes the ascended models and their norms. Gradient tracking has 1.13 with atc and
1.14 with cta, and momentum tracking 1.175 (at most 1.184). No other program used the cores.
DFedAvgM against itself came to 1.00, with quartiles of 0.995 and 1.01, so PowerGossip and momentum
tracking are within 0.02 of their bounds and not decided. Before models were corrected and moved in
one pass, and norms taken in one, another measurement had gradient tracking at 1.21 and 1.15,
momentum tracking at 1.26, PowerGossip at 1.31, RelaySGD at 1.25 and DFedSAM at 2.05, with quartiles
of 0.96 and 1.09.

Grid: works B and C of `experiments.speed.stopwatch` (100 peers of 2,410 parameters and 1,000 peers
of 650), one process, one thread. Methods for any graph run on the ring, RelaySGD on trees, clique
averaging on a ring of cliques of 10, epidemic learning on the graphs that it draws. Every method
takes turns with DFedAvgM on its graph, `--rounds` rounds each, after one turn to warm up. A turn
counts by the median of its rounds, and the ratio is that of two turns which follow each other: its
median over all pairs of turns, and its quartiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dfl
from dfl.config import Run
from dfl.core.profiling import PHASES
from dfl.datasets.data import Data
from dfl.store.callbacks import Callback, Outcome, Row
from experiments import common
from experiments.speed.stopwatch import WORK, examples

MOST = 1.15
"""The most that a method may take, without further messages and gradients."""
EXCHANGE = ("encode", "send", "decode", "mix")
"""The phases in which messages are exchanged."""
GRADIENTS = ("forward and backward",)
"""The phases that a further gradient repeats."""
Texts = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


class Method(NamedTuple):
    """A method, the graph on which it is timed, and the gradients of its local steps."""

    algorithm: str
    topology: str = "ring"
    gradients: int = 1


METHODS = {
    "dfedavgm": Method("dfedavgm"),
    "qdfedavgm": Method("qdfedavgm"),
    "choco": Method("choco:gamma=1"),
    "dpsgd, atc": Method("dpsgd"),
    "dpsgd, cta": Method("dpsgd:order=cta"),
    "dsgdm": Method("dsgdm"),
    "qg_dsgdm": Method("qg_dsgdm"),
    "decentlam": Method("decentlam"),
    "d2": Method("d2"),
    "exact_diffusion": Method("exact_diffusion"),
    "gradient_tracking, atc": Method("gradient_tracking"),
    "gradient_tracking, cta": Method("gradient_tracking:order=cta"),
    "momentum_tracking": Method("momentum_tracking"),
    "push_sum": Method("push_sum"),
    "power_gossip": Method("power_gossip"),
    "dfedsam": Method("dfedsam:rho=0.1", gradients=2),
    "relay_sgd": Method("relay_sgd", "tree"),
    "relay_sgd, two trees": Method("relay_sgd", "double_tree"),
    "clique_averaging": Method("clique_averaging", "caveman:size=10"),
    "epidemic": Method("epidemic", "random_out"),
}
"""Label -> method; the first one is timed against itself, which shows the noise."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/method_speed")
    works: Texts = ("B", "C")
    """Kinds of work."""
    methods: Texts = tuple(METHODS)
    """Labels of the methods."""
    turns: int = 20
    """Turns of each method that are timed, one or more."""
    rounds: int = 6
    """Rounds of a turn, three or more."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the ratio of a round of every method to one of DFedAvgM."""
    common.among("works", options.works, WORK)
    common.among("methods", options.methods, METHODS)
    if options.turns < 1 or options.rounds < 3:
        raise dfl.InputError(
            "--turns must be at least 1 and --rounds at least 3, not "
            f"{options.turns} and {options.rounds}"
        )
    table = pd.DataFrame(
        [measure(work, label, options) for work in options.works for label in options.methods]
    )
    common.publish(options, table, draw(table), finding(table))


def measure(work: str, label: str, options: Options) -> dict[str, Any]:
    """Return the row of a method."""
    method = METHODS[label]
    mine, base = (
        Timed(_run(work, each, options)) for each in (method, Method("dfedavgm", method.topology))
    )
    for each in (mine, base):
        each.turn()  # to warm up
    pairs = np.array([(mine.turn(), base.turn()) for _ in range(options.turns)])
    for each in (mine, base):
        each.close()
    ratios = pairs[:, 0] / pairs[:, 1]
    shares = _shares(work, method.topology, options.rounds * options.turns)
    bytes_ratio = mine.bytes / base.bytes
    most = (
        MOST
        + max(0.0, bytes_ratio - 1) * shares["exchange"]
        + (method.gradients - 1) * shares["gradients"]
    )
    print(f"{work}, {label}: {np.median(ratios):.3f}", file=sys.stderr, flush=True)
    return {
        "work": work,
        "method": label,
        "graph": method.topology,
        "milliseconds": float(1e3 * np.median(pairs[:, 0])),
        "of_dfedavgm": float(1e3 * np.median(pairs[:, 1])),
        "ratio": float(np.median(ratios)),
        "ratio_q1": float(np.quantile(ratios, 0.25)),
        "ratio_q3": float(np.quantile(ratios, 0.75)),
        "ratio_of_least": float(pairs[:, 0].min() / pairs[:, 1].min()),
        "bytes_ratio": bytes_ratio,
        "exchange_share": shares["exchange"],
        "gradients": method.gradients,
        "at_most": most,
        "within": "yes" if np.median(ratios) <= most else "no",
    }


class _Marks(Callback):
    """Records the processor time at which every round ended that ends in no evaluation."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round(self, t: int) -> None:
        """Record the time."""
        self.times.append(time.process_time())


class Timed:
    """A run whose rounds are timed a turn at a time.

    Attributes:
        bytes: what all peers have sent.
    """

    def __init__(self, run: Run) -> None:
        self.bytes = 0.0
        self._marks = _Marks()
        self._rows: Iterator[Row] = dfl.simulate(run, callbacks=[self._marks])
        next(self._rows)  # before round 0

    def turn(self) -> float:
        """Return the median processor time of the rounds of a turn, but for its first one, before
        which another run had the turn, and its last one, which ends in an evaluation.
        """
        self._marks.times.clear()
        self.bytes = float(next(self._rows)["payload_bytes"])
        return float(np.median(np.diff(self._marks.times)))

    def close(self) -> None:
        """End the run."""
        for _ in self._rows:
            pass


class _Shares(Callback):
    """Records the parts of a run's rounds that its exchanges and its gradients take."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}

    def finish(self, outcome: Outcome) -> None:
        """Read the profile."""
        assert outcome.profile is not None
        spent = dict(zip(PHASES, outcome.profile.table[0, :, 1], strict=True))
        whole = sum(int(ns) for name, ns in spent.items() if name not in ("evaluate", "write"))
        self.found = {
            name: sum(int(spent[phase]) for phase in phases) / whole
            for name, phases in (("exchange", EXCHANGE), ("gradients", GRADIENTS))
        }


@cache
def _shares(work: str, topology: str, rounds: int) -> dict[str, float]:
    """Return the parts of a round of DFedAvgM."""
    run = _setting(work, Method("dfedavgm", topology), rounds, rounds)
    shares = _Shares()
    with TemporaryDirectory() as folder:  # to which a profile is written
        for _ in dfl.simulate(replace(run, profile=True, out=Path(folder)), callbacks=[shares]):
            pass
    return shares.found


def _run(work: str, method: Method, options: Options) -> Run:
    return _setting(work, method, options.rounds * (options.turns + 1), options.rounds)


def _setting(work: str, method: Method, rounds: int, eval_every: int) -> Run:
    shape = WORK[work]
    return Run(
        peers=shape.peers,
        algorithm=method.algorithm,
        topology=method.topology,
        dataset=_data(work),
        model=shape.model,
        batch_size=shape.batch_size,
        momentum=0.9,
        lr=0.001,
        rounds=rounds,
        eval_every=eval_every,
    )


@cache
def _data(work: str) -> Data:
    shape = WORK[work]
    return examples(shape.shape, shape.peers * shape.examples)


def finding(table: pd.DataFrame) -> str:
    """Return the methods that take longer than they may, by work."""
    works = []
    for work, own in common.groups(table, ["work"]):
        over = [
            f"{row['method']} {row['ratio']:.2f} (at most {row['at_most']:.2f})"
            for row in own[own["within"] == "no"].to_dict("records")
        ]
        works.append(
            f"{work}: {len(own) - len(over)} of {len(own)} are within what they may take"
            + (f"; longer take {', '.join(over)}" if over else "")
        )
    return ". ".join(works) + "."


def draw(table: pd.DataFrame) -> Figure:
    """Draw a panel per work: the ratio of every method with its quartiles, and the most that it
    may be.
    """
    works = common.groups(table, ["work"])
    figure = Figure(figsize=(2 + 4.5 * len(works), 6), layout="constrained")
    panels = figure.subplots(1, len(works), sharey=True, squeeze=False)[0]
    for axes, (work, own) in zip(panels, works, strict=True):
        _panel(axes, own)
        axes.set_title(f"{work}: {WORK[work].peers:,} peers", fontsize="medium")
    figure.supxlabel("processor time of a round / that of DFedAvgM on the same graph")
    return figure


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    places = np.arange(len(table))
    over = np.where(table["within"] == "no", common.COLOURS[1], common.COLOURS[0])
    axes.hlines(places, table["ratio_q1"], table["ratio_q3"], color=over)
    axes.scatter(table["ratio"], places, color=over, label="median of turns, with quartiles")
    axes.plot(table["at_most"], places, "k|", markersize=12, label="at most")
    axes.set_yticks(places, table["method"])
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.grid(axis="x", color="0.9")
    axes.legend(fontsize="small")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "methods.method_speed"))
