"""Times of dfl compared with the limits of the machine.

Seven comparisons: (training) a round of work A with its floating-point operations at the speed of a
matrix product; (models) a round of convolutional and recurrent models with a loop of torch;
(exchange) one exchange with the same bytes through bare MPI; (codec) encoding and decoding with a
copy of the same floats; (strong scaling, weak scaling) a round on 1, 2, 4 and 16 ranks with one
that is divided without loss; (start) the time until round 0 with ranks that only import torch and
meet.

Command, on an idle 2-core machine:

    python -m experiments.speed.benchmark_limits

Finding: 15 of 24 figures with a bound are within it. A round of A takes 1.12 times its operations
at the speed of a matrix product, 89 % of that speed, where 70 % is the aim. Of seven models three
are within the bound on the time of a loop of torch: the CNN takes 1.05 and 0.80 of it, ResNet-20
0.92. The LSTM of 256 states takes 1.16, where 1.05 is the bound; LeNet takes 1.15 and 0.97, and the
LSTM of 32 states 0.53, where narrow models are to take a half. An exchange has a fixed cost of 0.02
to 0.11 ms, the Python and torch calls around MPI's, and the cost of fresh memory: 2.3 to 2.8 times
bare MPI at 100 kB, 1.2 to 2.1 at 1 MB and 1.5 to 1.6 at 10 MB. One of the six with a bound meets
it. Encoding takes 1.2 to 1.5 nanoseconds a coordinate and decoding 0.2 to 0.4, all within their
bounds of 4 and 1. Ranks beyond the cores cost: 69 ms with 4 and 96 with 16, where 2 take 57. A
start takes 0.97 times the imports of torch and mpi4py on one rank and 0.90 times on 16, both within
their bounds. All was measured in one session of four minutes on an idle machine.

Grid: work A is 16 peers on a ring with 600 examples of 784 numbers each and the 2NN, one epoch of
batches of 50; its limit is 6 d operations for each of 9,600 examples at the float32 speed that
two processes reach at once in products of 2,048 x 2,048, one thread each. Messages of 10 kB to 10
MB go around a ring of two ranks with one and with eight peers each; the exchange and bare MPI
take turns, the slower rank counts, and of 30 turns the median. Four and eight bits are coded as
in `codec`. Strong scaling has work A on more ranks, its limit the time on one rank over as many
cores as the ranks can use; weak scaling has four of its peers on every rank. The start is
`--dry-run` of 16 peers on digits, from the shell. Programs are launched three times in turn with
their limit, except for scaling; medians count.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure

from dfl.core.errors import InputError
from experiments import common
from experiments.speed.limits import QUESTIONS, Options

WHAT = {
    "training": "a round against its operations at the speed of a matrix product",
    "models": "a round of other models against a loop of torch",
    "exchange": "an exchange against bare MPI",
    "codec": "coding against a copy of the floats",
    "strong scaling": "a round on more ranks against one divided without loss",
    "weak scaling": "four peers on every rank against as much work without loss",
    "start": "start-up against importing torch and meeting",
}
"""Question -> what is compared."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:  # noqa: B008
    """Measure the times of dfl and the limits of the machine."""
    if unknown := [name for name in options.questions if name not in QUESTIONS]:
        raise InputError(f"--questions are {', '.join(QUESTIONS)}, not {unknown[0]!r}")
    table = tabulate(options)
    common.publish(options, table, draw(table), finding(table))


def tabulate(options: Options) -> pd.DataFrame:
    """Return a row per case of every question."""
    rows = []
    for name in options.questions:
        rows += [{"question": name} | row for row in QUESTIONS[name](options)]
        print(f"{name}: done", file=sys.stderr, flush=True)
    return pd.DataFrame(rows).astype({"at_most": float})


def finding(table: pd.DataFrame) -> str:
    """Return the ratios of every question, and how many are within their bound."""
    return (
        "; ".join(
            _of_question(name, own.to_dict("records"))
            for name, own in common.groups(table, ["question"])
        )
        + "."
    )


def _of_question(name: str, rows: list[dict[Any, Any]]) -> str:
    ratios = [f"{row['ratio']:.2f} ({row['case']})" for row in rows]
    bound = [row for row in rows if row["at_most"] == row["at_most"]]
    kept = sum(row["ratio"] <= row["at_most"] for row in bound)
    bar = f", {kept} of {len(bound)} within their bounds" if bound else ""
    return f"{WHAT[name]}: {', '.join(ratios)}{bar}"


def draw(table: pd.DataFrame) -> Figure:
    """Draw a bar per case, in multiples of its limit, with its bound as a mark."""
    figure = Figure(figsize=(9, 1.6 + 0.27 * len(table)), layout="constrained")
    axes = figure.subplots()
    places = table.index.to_numpy(float)
    colours = dict(zip(WHAT, common.COLOURS, strict=False))
    for name, own in common.groups(table, ["question"]):
        axes.barh(places[own.index], own["ratio"] - 1, left=1, color=colours[name], label=name)
    if table["at_most"].notna().any():
        axes.scatter(
            table["at_most"], places, marker="|", s=120, color="red", zorder=3, label="at most"
        )
    for place, row in zip(places, table.to_dict("records"), strict=True):
        text = f"{row['ratio']:.2f}   {_short(row['ours'])} / {_short(row['limit'])} {row['unit']}"
        axes.annotate(
            text,
            (np.nanmax([row["ratio"], row["at_most"], 1]), place),
            (6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.axvline(1, color="0.4", linewidth=0.8)
    axes.set_yticks(places, table["case"].tolist(), fontsize=8)
    axes.set_ylim(len(table) - 0.4, -0.6)
    axes.set(
        xscale="log",
        xlabel="times the limit (beside the bars: this ratio, and what is divided by what)",
        xlim=(0.8 * table[["ratio", "at_most"]].min().min(), 4 * table["ratio"].max()),
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title("What dfl takes, in multiples of what the machine could do")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.benchmark_limits"))
