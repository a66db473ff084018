"""Accuracy of honest peers on graphs with two attackers, by the rule with which peers aggregate.

Command, 1,160 runs of half a second to a second, 30 minutes on a core that other programs shared:

    python -m experiments.servers_and_robustness.robust_gossip

Finding: where peers have two label shards no rule protects a ring from two attackers, who send a
third of the messages that four peers receive and cut the ring in two: clipping keeps 0.407 ± 0.048
of the 0.709 of the mean without an attack, and the median 0.258, little better than a peer alone
(0.233), and this even without an attack (0.268): it takes the middle one of three models that all
know other labels. More neighbours help: under the worst attack clipping keeps 0.683 ± 0.057 on the
torus, 0.706 ± 0.131 on random graphs of four neighbours and 0.790 ± 0.091 on the complete graph,
where trimming keeps 0.804 ± 0.059. On the ring dissensus is the worst attack on the mean and on
clipping. That sign flip is the worst on clipping elsewhere, with two shards, holds on the complete
graph ONLY: it leaves 0.016 ± 0.045 more than dissensus on the torus, 0.034 ± 0.061 more on random
graphs, and 0.075 ± 0.064 less on the complete graph. A peer that trusts messages that agree with
its own step (FLTrust) excludes the attackers, and all peers with other labels: 0.233 at most on
every graph.

Where data are IID a ring withstands them: under dissensus clipping ends at 0.923 ± 0.005 and the
median, which is the trimmed mean of three messages, at 0.912 ± 0.006; a peer alone gets 0.877. The
mean gets 0.957 without an attack and falls to 0.718 ± 0.021. On the other graphs median, trimming
and clipping have at least 0.941 under every attack; those on clipping are within 0.010 of each
other. FLTrust ends below a peer alone under dissensus on the complete graph, by 0.014 ± 0.004.

On two of the five random graphs an honest peer receives two attackers' messages of five, more than
f = 1 expects: under dissensus the consensus distance with trimming and clipping ends at 223 to 924
there, and at 1.1 at most on the other three. Means over the last tenth of the rounds, on digits.
What follows ± is half the 95 % confidence interval over five seeds; differences are paired by seed.

Grid: ring, torus (4 x 4), regular:k=4 and complete graph, 16 peers, of whom 0 and 10 attack; six
rules; no attack, label flip, sign flip, ALIE (z = 1.5; its formula gives 0 for 2 of 16) and
dissensus; IID and two label shards; five seeds. dfedavgm, digits, mlp, learning rate 0.05, momentum
0.9, batches of 10, one local epoch, 40 rounds: the standard setting of the experiments, nothing was
tuned. Rules expect one attacker, on the complete graph two. Figures are over the honest peers.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import topologies
from dfl.core import randomness
from dfl.core.registry import choose
from dfl.sweep import Cell
from experiments import common

RULES = ("mean", "median", "trimmed_mean", "clipping", "krum", "fltrust")
COUNTING = ("trimmed_mean", "clipping", "krum")
"""Rules with a number of expected attackers, f."""
ATTACKS = {
    "none": "none",
    "label_flip": "label_flip",
    "sign_flip": "sign_flip",
    "alie": "alie:z=1.5",
    "dissensus": "dissensus",
}
"""Name -> as --attack, without the attackers."""
DATA = {"alike": "iid", "two_shards": "shards:per_peer=2"}
"""Name of a partition -> as --partition."""
LABELS = ["data", "graph", "rule"]
ALONE = "alone"
"""The graph and the rule of peers that send no messages."""
GUESS = 0.1
"""The accuracy of models that are no longer finite."""


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """The options of this experiment."""

    out: Path = Path("results/robust_gossip")
    dataset: str = "digits"
    """The data set: digits, or mnist, which takes forty times as long."""
    rounds: int = 40
    attackers: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (0, 10)
    """The peers that attack."""
    graphs: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        "ring",
        "torus",
        "regular:k=4",
        "complete",
    )
    """The graphs to compare, as --topology of dfl.run."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the accuracy of honest peers by graph, rule and attack."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    # A run takes seconds, which a process of its own would double.
    rows = common.measure(options.out, grid(options), in_process=True)
    seeds = by_seed(rows, options)
    table = tabulate(seeds, options)
    common.publish(options, table, draw(table, options), finding(table, options), seeds)


def grid(options: Options) -> list[Cell]:
    """Return a cell for every graph, rule, attack and seed, and for peers that train alone."""
    return [
        cell
        for seed in range(options.seeds)
        for data in DATA
        for cell in _cells(options, data, seed)
    ]


def _cells(options: Options, data: str, seed: int) -> list[Cell]:
    shared_settings: dict[str, Any] = {
        "seed": seed, "partition": DATA[data], "eval_every": options.rounds,
    }  # fmt: skip
    own: dict[str, str | int] = {
        "data": data,
        "graph": ALONE,
        "rule": ALONE,
        "attack": "none",
        "seed": seed,
    }
    cells = [Cell(own, common.standard(options, algorithm="local_only", **shared_settings))]
    for graph in options.graphs:
        cells += [
            Cell(
                own | {"graph": graph, "rule": rule, "attack": attack},
                common.standard(
                    options,
                    topology=graph,
                    aggregator=spec,
                    attack=attack_spec(options, attack),
                    **shared_settings,
                ),
            )
            for rule, spec in rules(options, graph).items()
            for attack in ATTACKS
        ]
    return cells


def attack_spec(options: Options, attack: str) -> str:
    """Return an attack with its attackers, as --attack."""
    spec = ATTACKS[attack]
    peers = f"peers={'+'.join(map(str, options.attackers))}"
    return spec if attack == "none" else f"{spec}{',' if ':' in spec else ':'}{peers}"


def rules(options: Options, graph: str) -> dict[str, str]:
    """Return the rules that are defined on a graph, by name, as --aggregator.

    They expect one attacker in a neighbourhood, and all attackers on the complete graph; Krum needs
    more than 2f + 2 messages.
    """
    f = len(options.attackers) if graph == "complete" else 1
    messages = int((network(graph, 0).weights[0].toarray() != 0).sum(1).min())
    fitting = [rule for rule in RULES if rule != "krum" or messages > 2 * f + 2]
    return {rule: f"{rule}:f={f}" if rule in COUNTING else rule for rule in fitting}


def network(graph: str, seed: int) -> topologies.WeightedGraph:
    """Return the graph with Metropolis weights that a run with this seed has."""
    build = choose("--graphs", graph, topologies.TOPOLOGIES)
    return topologies.build(
        build,
        topologies.MIXINGS["metropolis"],
        common.PEERS,
        randomness.generator(seed, "topology"),
    )


def attacker_share(graph: str, options: Options) -> float:
    """Return the largest share of attackers among the models that an honest peer aggregates, its
    own included; NaN for peers that train alone.
    """
    if graph == ALONE:
        return float("nan")
    near = [network(graph, seed).weights[0].toarray() != 0 for seed in range(options.seeds)]
    shares = [links[:, list(options.attackers)].sum(1) / links.sum(1) for links in near]
    return float(max(np.delete(share, options.attackers).max() for share in shares))


def by_seed(rows: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per run: accuracy of the honest peers and of the worst one of them, and their
    consensus distance.

    Models that are no longer finite have accuracy `GUESS`, worst peer 0 and distance infinity.
    """
    end = common.ends(rows, [*LABELS, "attack", "seed"])
    lost = end["round"] < options.rounds
    return end[[*LABELS, "attack", "seed"]].assign(
        accuracy=end["accuracy_mean"].mask(lost, GUESS),
        worst_peer=end["accuracy_min"].mask(lost, 0.0),
        consensus_distance=end["consensus_distance"].mask(lost, float("inf")),
    )


def tabulate(seeds: pd.DataFrame, options: Options) -> pd.DataFrame:
    """Return a row per partition, graph and rule, means over the seeds: the accuracy of honest
    peers by attack.

    The worst peer and the consensus distance are those of the worst attack; the std and the
    half-width of the confidence interval are the largest of all attacks.

    Args:
        seeds: a row per run, as `by_seed` returns them.
    """
    each = seeds.groupby([*LABELS, "attack"], sort=False)
    accuracy = each["accuracy"].mean().unstack()[list(ATTACKS)]
    table = accuracy.assign(
        worst_peer=each["worst_peer"].mean().unstack().min(axis=1),
        consensus_distance=each["consensus_distance"].mean().unstack().max(axis=1),
        largest_std=each["accuracy"].std().unstack().max(axis=1),
        seeds=each.size().unstack()["none"],
    ).loc[list(dict.fromkeys(map(tuple, seeds[LABELS].to_numpy())))]
    place = list(table).index("seeds")
    table.insert(place, "largest_ci95", common.half_width(table["largest_std"], table["seeds"]))
    table = table.reset_index()
    table.insert(
        3,
        "attacker_share",
        table["graph"].map({graph: attacker_share(graph, options) for graph in table["graph"]}),
    )
    return table


def finding(table: pd.DataFrame, options: Options) -> str:
    """Return which rules keep honest peers above a peer alone under every attack."""
    attackers = " and ".join(map(str, options.attackers))
    parts = [f"over {options.seeds} seeds, attackers {attackers} of {common.PEERS}"]
    for data, own in common.groups(table, ["data"]):
        alone = float(own[own["graph"] == ALONE]["none"].iloc[0])
        parts.append(f"{data.replace('_', ' ')}: a peer alone learns {alone:.3f}")
        parts += [
            _of_graph(graph, each, alone)
            for graph, each in common.groups(own[own["graph"] != ALONE], ["graph"])
        ]
    return "; ".join(parts) + "."


def _of_graph(graph: str, table: pd.DataFrame, alone: float) -> str:
    """Return the rules of one graph that keep honest peers above a peer alone under every attack,
    and the figures of the best one.
    """
    least = table.set_index("rule")[list(ATTACKS)]
    floor = least.min(axis=1)
    good = [rule for rule in floor.index if floor[rule] >= alone]
    best = max(floor.index, key=floor.__getitem__)
    how = min(ATTACKS, key=least.loc[best].__getitem__)
    return (
        f"{graph} ({table['attacker_share'].iloc[0]:.0%} of the messages are attackers' at worst): "
        f"{', '.join(good) or 'no rule'} {'stay' if len(good) > 1 else 'stays'} above that under "
        f"every attack, best {best} with {floor[best]:.3f} at worst ({how}), "
        f"{least.loc[best, 'none']:.3f} unattacked"
    )


def draw(table: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy by graph, rule and attack, coloured by the difference to a peer alone."""
    figure = Figure(figsize=(13, 8.4), layout="constrained")
    panels = figure.subplots(1, table["data"].nunique(), squeeze=False)[0]
    for axes, (data, own) in zip(panels, common.groups(table, ["data"]), strict=True):
        _panel(axes, own)
        axes.set_title(f"{data.replace('_', ' ')}: {DATA[data]}")
    shown = panels[-1].images[0]
    figure.colorbar(shown, ax=panels, label="accuracy less that of a peer alone", shrink=0.6)
    figure.suptitle(
        f"Mean accuracy of honest peers: {options.dataset}, {len(options.attackers)} attackers, "
        f"{options.seeds} seeds"
    )
    return figure


def _panel(axes: Axes, table: pd.DataFrame) -> None:
    alone = float(table[table["graph"] == ALONE]["none"].iloc[0])
    table = table[table["graph"] != ALONE]
    values = table[list(ATTACKS)].to_numpy()
    axes.imshow(values - alone, cmap="RdBu", vmin=-0.8, vmax=0.8, aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        light = abs(value - alone) > 0.5
        axes.text(
            column,
            row,
            f"{value:.2f}",
            ha="center",
            va="center",
            color="white" if light else "black",
        )
    axes.set_xticks(range(len(ATTACKS)), [attack.replace("_", " ") for attack in ATTACKS])
    axes.set_yticks(
        range(len(table)), (table["graph"] + "  " + table["rule"]).str.replace("_", " ")
    )
    axes.set(xlabel=f"attack; a peer alone: {alone:.2f}")
    for row in np.flatnonzero(table["graph"].to_numpy()[1:] != table["graph"].to_numpy()[:-1]):
        axes.axhline(row + 0.5, color="black", linewidth=1.2)


if __name__ == "__main__":
    sys.exit(common.start(experiment, "servers_and_robustness.robust_gossip"))
