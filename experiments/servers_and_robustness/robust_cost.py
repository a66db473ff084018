"""Time of aggregation rules by the number of clients.

Command, 20 s of one core:

    python -m experiments.servers_and_robustness.robust_cost

Finding: the time of FLTrust grows as that of the mean, with the power 1.05 of the number of
clients, and is 4.4 times as long (158 ms for 200 clients); so does clipping (1.08, 142 ms). Krum
and the two others that compare all pairs are as cheap up to 50 clients, where conversion of the
updates to float64 still takes most of their time, and the most expensive with 200: 302 to 337 ms,
8.5 to 9.4 times the mean, their power 1.6 to 1.7 between 100 and 200 clients and rising towards
the 2 of theory. Median and trimmed mean, which sort every coordinate, take about 200 ms.

Grid: every rule, 10 to 200 clients, random updates of 199,210 numbers as those of a 2NN, the
least of five processor times in one process; the machine was busy, so wall time is not reported.
Rules that expect a number of attackers expect a fifth.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.figure import Figure
from numpy.typing import NDArray

from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates
from experiments import common

THEORY = {
    "mean": 1, "median": 1, "trimmed_mean": 1, "clipping": 1, "fltrust": 1,
    "krum": 2, "multi_krum": 2, "geometric_median": 2,
}  # fmt: skip
"""Rule -> power of the number of clients with which its cost grows, up to a logarithm where
coordinates are sorted.
"""
COUNTING = ("trimmed_mean", "clipping", "krum", "multi_krum")
"""Rules with a number of expected attackers, f: a fifth of the clients."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    clients: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (10, 20, 50, 100, 200)
    """Numbers of clients, ascending, each more than five."""
    parameters: int = 199_210
    """Number of coordinates of an update; that of the 2NN by default."""
    repeats: int = 5
    """Number of measurements of each, of which the least counts."""
    out: Path = Path("results/robust_cost")


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the time of every rule by the number of clients."""
    table = tabulate(measure(options))
    common.publish(options, table, draw(table), finding(table))


def measure(options: Options) -> pd.DataFrame:
    """Return the processor seconds of every rule by number of clients; the rules take turns."""
    rows = []
    for n in options.clients:
        updates = random_updates(n, options.parameters)
        turns = [
            {name: seconds(rule, updates) for name, rule in rules(n).items()}
            for _ in range(options.repeats)
        ]
        rows += [
            {"rule": rule, "clients": n, "seconds": min(turn[rule] for turn in turns)}
            for rule in THEORY
        ]
    return pd.DataFrame(rows)


def rules(clients: int) -> dict[str, Callable[[Updates], Aggregate]]:
    """Return the rules by name; those with f expect that a fifth of the clients attack."""
    f = clients // 5
    return {
        rule: partial(AGGREGATORS[rule], **({"f": f} if rule in COUNTING else {}))
        for rule in THEORY
    }


def random_updates(clients: int, parameters: int) -> Updates:
    """Return updates as those of honest clients, a common vector and noise; the server's own is
    drawn likewise.
    """
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((clients + 1, parameters), np.float32) + rng.standard_normal(
        parameters, np.float32
    )
    return Updates(rows[1:], np.full(clients, 1 / clients), rows[0])


def seconds(rule: Callable[[Updates], Aggregate], updates: Updates) -> float:
    """Return the processor seconds of a rule, without values that the updates have cached."""
    fresh = Updates(updates.rows, updates.weights, updates.reference)
    begun = time.process_time()
    rule(fresh)
    return time.process_time() - begun


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per rule: milliseconds by clients, the ratio to the mean with the most clients,
    and the fitted powers.
    """
    times = rows.pivot(index="rule", columns="clients", values="seconds").loc[list(THEORY)]
    clients = times.columns.to_numpy()
    table = (1000 * times).add_prefix("ms_")
    table["times_the_mean"] = times[clients[-1]] / times[clients[-1]]["mean"]
    table["power"] = [power(clients, own) for own in times.to_numpy()]
    table["power_at_the_end"] = [power(clients[-2:], own[-2:]) for own in times.to_numpy()]
    table["theory"] = list(THEORY.values())
    return table.rename_axis(columns=None).reset_index()


def power(clients: NDArray[np.int64], seconds: NDArray[np.float64]) -> float:
    """Return b of the best fit seconds = a clients^b, by least squares of logarithms."""
    return float(np.polyfit(np.log(clients), np.log(seconds), 1)[0])


def finding(table: pd.DataFrame) -> str:
    """Return the finding, read off the table, and the powers of theory."""
    most = [name for name in table if str(name).startswith("ms_")][-1]
    parts = [
        f"{row['rule']} {row[most]:.0f} ms, {row['times_the_mean']:.1f} times the mean, power "
        f"{row['power']:.2f} ({row['power_at_the_end']:.2f} from the last but one, theory "
        f"{row['theory']})"
        for row in table.to_dict("records")
    ]
    return f"with {str(most)[3:]} clients: {'; '.join(parts)}."


def draw(table: pd.DataFrame) -> Figure:
    """Draw the time by clients, and its ratio to that of the mean, on logarithmic axes."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    plain, relative = figure.subplots(1, 2)
    columns = [str(name) for name in table if str(name).startswith("ms_")]
    clients = [int(name[3:]) for name in columns]
    times = table.set_index("rule")[columns]
    for place, (rule, own) in enumerate(times.iterrows()):
        style = {"marker": "o+sv^d*x"[place], "color": common.COLOURS[place % len(common.COLOURS)]}
        style["linestyle"] = "--" if THEORY[str(rule)] == 2 else "-"
        plain.plot(clients, own, label=str(rule).replace("_", " "), **style)
        relative.plot(clients, own / times.loc["mean"], **style)
    plain.set(title="Time of a rule", ylabel="milliseconds of one core")
    relative.set(title="Time beside the mean's", ylabel="times the mean")
    for axes in (plain, relative):
        axes.set(xlabel="clients", xscale="log", yscale="log")
        axes.set_xticks(clients, clients)
        axes.minorticks_off()
        axes.yaxis.set_major_formatter("{x:g}")
    figure.legend(
        loc="outside right center", title="solid: linear\ndashed: quadratic", fontsize="small"
    )
    figure.suptitle("What a rule costs a server, by the number of its clients")
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.robust_cost"))
