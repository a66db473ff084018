"""Accuracy and bytes with and without a server: in total, and at the busiest node.

Command, 45 runs, seven minutes on two idle cores:

    python -m experiments.servers_and_robustness.server_or_peers --data-dir DIR

Finding: with 16 peers in float32 a sparse graph saves little or nothing over the better server,
even by the bytes of its busiest node: to 0.5 the exponential graph takes 52 MB, FedAvg with all
clients 74 and with a quarter 53; to 0.75 (a target chosen afterwards: two of five seeds never reach
0.8 on the exponential graph) it takes more than the server. Few bits are the advantage of peers.
Over rounds 46 to 50 FedAvg has 0.905 and so has DFedAvgM on the complete graph, which computes the
same; FedAvg with a quarter of the clients 0.847, the exponential graph 0.804, the ring 0.564, alone
0.230, pooled 0.962. A node of the exponential graph carries a quarter of the server's bytes in a
round but needs six times the rounds: to 0.75 it takes 193 MB at the busiest node, FedAvg 122 MB,
with a quarter of the clients 167 MB, the complete graph 114 MB. To 0.5 the ring takes 94 MB there,
FedAvg 74 MB, with a quarter of the clients 53 MB; but the ring in 4 bits, which lose no accuracy,
12 MB. In total, to 0.5, peers send 750 MB on the ring and 417 MB on the exponential graph, FedAvg
74 MB. The ring never reaches 0.75 in 50 rounds, though the mean of its models has 0.836: no single
peer has what the peers have learned together. Not measured: FedAvg can send its updates in few bits
too, though not its downloads; and the server's bytes grow with the number of peers, those of a peer
on a ring do not.

Grid: FedAvg with all clients in a round and with a quarter of them; DFedAvgM on the ring, the
exponential and the complete graph; quantized DFedAvgM on the ring in 8 and in 4 bits; and the two
ends, local_only and pooled. Five seeds each, in the standard setting: MNIST, 16 peers with two
label shards of 300 examples each, 2NN, 50 rounds. Local training is the same for all: one epoch
in batches of 50, learning rate 0.01, momentum 0.9 that starts at zero in every round (the papers
on FedAvg have none). The rate is that of the design's setting for peers; it was not tuned for
either side, and no choice uses test data.

Bytes are those of models, as they would travel in the field. The busiest node of FedAvg is the
server, which sends and receives everything; a peer sends the bytes that peers.csv has of it, and
receives as many, since every node of these graphs has as many incoming edges as outgoing ones.
Accuracy is the mean over the peers, each with its own model, on the common test set. Models are
evaluated every five rounds and in each of the last five, and the cost to an accuracy is by the best
so far, linear between evaluations: figures below five rounds are coarse, and FedAvg falls back to
0.70 after its first five.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import dfl
from dfl.sweep import Cell
from experiments import common

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"algorithm": "fedavg"},
    "fedavg_quarter": {"algorithm": "fedavg:fraction=0.25"},
    "complete": {"topology": "complete"},
    "exponential": {"topology": "exponential"},
    "ring": {"topology": "ring"},
    "ring_8_bits": {"topology": "ring", "bits": 8},
    "ring_4_bits": {"topology": "ring", "bits": 4},
    "local_only": {"algorithm": "local_only"},
    "pooled": {"algorithm": "pooled"},
}
"""Method -> the fields of `Run` that it sets."""

NAMES = {
    "fedavg": "FedAvg, all clients",
    "fedavg_quarter": "FedAvg, a quarter",
    "complete": "DFedAvgM, complete",
    "exponential": "DFedAvgM, exponential",
    "ring": "DFedAvgM, ring",
    "ring_8_bits": "quantized, ring, 8 bits",
    "ring_4_bits": "quantized, ring, 4 bits",
    "local_only": "local only",
    "pooled": "pooled",
}
"""Method -> its name in the figure."""

ENDS = ("local_only", "pooled")
"""The methods without messages."""


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/server_or_peers")
    every: int = 5
    """Rounds between evaluations."""
    low: float = 0.5
    """An accuracy that even the ring reaches."""
    high: float = 0.75
    """An accuracy that only servers and well connected peers reach."""
    methods: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = tuple(METHODS)
    """The methods to compare."""

    def __post_init__(self) -> None:
        super().__post_init__()
        common.among("methods", self.methods, METHODS)


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy by round, by total bytes and by bytes of the busiest node."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = counted(common.measure(options.out, grid(options), jobs=options.jobs), options)
    table = tabulate(rows, options)
    seeds = common.by_seed(rows, ["method"])
    common.publish(options, table, draw(rows, options), finding(table, options), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every method and seed."""
    return [
        Cell(
            {"method": name, "seed": seed},
            common.standard(options, seed=seed, eval_every=options.every, **METHODS[name]),
        )
        for seed in range(options.seeds)
        for name in options.methods
    ]


def counted(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return the rows with the megabytes so far, in total and at the busiest node, sent and
    received.
    """
    rows = rows.assign(total_MB=rows["payload_bytes"] / 1e6, busiest_MB=np.nan)
    for (name, seed), own in common.groups(rows, ["method", "seed"]):
        run = dfl.load(common.cell_folder(options.out, method=name, seed=seed))
        rows.loc[own.index, "busiest_MB"] = busiest(own, run.peers["payload_bytes_sent"]) / 1e6
    return rows


def busiest(run: pd.DataFrame, sent: pd.Series) -> pd.Series:
    """Return the bytes that the busiest node of a run has sent and received up to each row.

    Where all rounds have the same graph, a peer sends the same number of bytes in every round.

    Args:
        run: the rows of the run.
        sent: bytes that each peer has sent at the end.
    """
    if (
        "download_bytes" in run
        and run["download_bytes"].notna().all()
        and run["download_bytes"].any()
    ):
        return run[["upload_bytes", "download_bytes"]].sum(axis=1)
    return run["round"] * (2 * float(sent.max()) / max(float(run["round"].max()), 1))


def tabulate(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per method, means over the seeds: the end, and the cost to two accuracies."""
    table = common.summary(rows, ["method"]).drop(columns="MB_per_peer")
    end = common.ends(rows, ["method", "seed"]).groupby("method", sort=False)
    table["mean_model"] = end["accuracy_mean_model"].mean()
    table[["total_MB", "busiest_MB"]] = end[["total_MB", "busiest_MB"]].mean()
    for target in (options.low, options.high):
        taken = {name: to_target(own, target) for name, own in common.groups(rows, ["method"])}
        for column in ("rounds", "total_MB", "busiest_MB"):
            table[f"{column}_to_{target:g}"] = pd.Series(
                {name: one[column] for name, one in taken.items()}
            )
    return table.reset_index()


def to_target(rows: pd.DataFrame, target: float) -> Mapping[str, float]:
    """Return the mean rounds and megabytes to an accuracy over the seeds; NaN where a seed misses
    it.
    """
    each = []
    for _, run in common.groups(rows, ["seed"]):
        reached = common.rounds_to_accuracy(run, target)
        megabytes = (
            np.interp(reached, run["round"], run[column]) for column in ("total_MB", "busiest_MB")
        )
        each.append((reached, *megabytes))
    return dict(
        zip(("rounds", "total_MB", "busiest_MB"), np.mean(each, axis=0).tolist(), strict=True)
    )


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    rows = common.by_label(table, ["method"])
    tail = common.tail_rounds(options.rounds)
    ends = ", ".join(f"{name} {row['accuracy']:.3f}" for name, row in rows.items())
    return (
        f"over {options.seeds} seeds and rounds {tail[0]} to {tail[-1]} the accuracies are {ends}. "
        + " ".join(_cheapest(rows, f"{target:g}") for target in (options.low, options.high))
    )


def _cheapest(rows: dict[Any, dict[str, Any]], target: str) -> str:
    """Return the methods that reach an accuracy by bytes, in total and at the busiest node."""
    sending = {name: row for name, row in rows.items() if name not in ENDS}
    reached = {
        name: row for name, row in sending.items() if not np.isnan(row[f"rounds_to_{target}"])
    }
    missed = [name for name in sending if name not in reached]
    if not reached:
        return f"No method with messages reaches {target} with every seed."
    parts = []
    for column, what in (("total_MB", "in all"), ("busiest_MB", "at the busiest node")):
        order = sorted(reached, key=lambda name: float(reached[name][f"{column}_to_{target}"]))
        costs = ", ".join(f"{name} {reached[name][f'{column}_to_{target}']:.1f}" for name in order)
        parts.append(f"{what} {costs}")
    missing = f" ({', '.join(missed)} NOT with every seed)" if missed else ""
    return f"Megabytes to {target}{missing}: {'; '.join(parts)}."


def draw(rows: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy by round, by total bytes and by bytes of the busiest node."""
    figure = Figure(figsize=(13.5, 5.2), layout="constrained")
    panels = figure.subplots(1, 3, sharey=True)
    for (name, own), style in zip(common.groups(rows, ["method"]), _styles(rows), strict=True):
        common.curve(panels[0], own, ("round", "accuracy_mean"), label=NAMES[name], **style)
        sending = own[(own["round"] > 0) & (name not in ENDS)]
        for axes, column in zip(panels[1:], ("total_MB", "busiest_MB"), strict=True):
            common.curve(axes, sending, (column, "accuracy_mean"), **style)
    titles = (
        "Accuracy by round",
        "Accuracy by bytes of all",
        "Accuracy by bytes of the busiest node",
    )
    labels = ("round", "sent by all nodes (MB)", "sent and received by the busiest node (MB)")
    for axes, title, label in zip(panels, titles, labels, strict=True):
        _label(axes, title, label, (options.low, options.high))
    panels[0].set_ylabel("accuracy, mean over peers and seeds")
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.suptitle(
        f"A server or peers: {options.dataset}, 16 peers, two label shards each, "
        f"{options.seeds} seeds"
    )
    return figure


def _label(axes: Axes, title: str, label: str, targets: tuple[float, ...]) -> None:
    axes.set(title=title, xlabel=label)
    for target in targets:
        axes.axhline(target, color="0.7", linestyle=":", linewidth=1, zorder=0)
    if "MB" in label:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")


def _styles(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a style for every method in the rows: servers with squares, peers with dots, dashed
    where curves coincide.
    """
    colours = dict(zip((name for name in METHODS if name not in ENDS), common.COLOURS, strict=True))
    dashes = {
        "complete": "--",
        "ring_8_bits": "--",
        "ring_4_bits": ":",
        "local_only": "--",
        "pooled": "-.",
    }
    looks = {
        name: {"color": colour, "marker": ".", "markersize": 8} for name, colour in colours.items()
    }
    looks |= {"local_only": {"color": "0.6"}, "pooled": {"color": "0.4"}}
    for name in ("fedavg", "fedavg_quarter"):
        looks[name] |= {"marker": "s", "markersize": 4}
    return [
        {"linestyle": dashes.get(str(name), "-"), **looks[str(name)]}
        for name in rows["method"].unique()
    ]


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.server_or_peers"))
