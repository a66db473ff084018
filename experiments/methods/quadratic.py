"""Distance from the minimum of all peers together, by method and graph.

Peer i minimises a_i / 2 ||x - c_i||^2 over 10 coordinates, a_i uniform on [1, 2], c_i standard
normal; all together the minimum is x* = sum_i a_i c_i / sum_i a_i. Exact gradients, one local step,
learning rate 0.05, 16 peers, 1,000 rounds in float64; the distance is sqrt(mean_i ||x_i - x*||^2).
Methods with momentum have 0.9 and a tenth of the learning rate, so that a constant gradient moves
all methods equally far in the long run.

Command, three minutes on one core:

    python -m experiments.methods.quadratic

Finding: on the ring gradient tracking, momentum tracking, D2 and exact diffusion reach the minimum
of all peers, on the chain RelaySGD does too; D-PSGD, DSGDm, QG-DSGDm and DecentLaM do not. On the
ring the tracking methods end at 3e-8 to 2e-7, and at 6e-15 to 1e-14 on a graph that changes, where
averaging is faster; D2 and exact diffusion end at 3e-14 and 2e-14. D-PSGD and DSGDm end at 0.66,
QG-DSGDm and DecentLaM at 0.13: the fixed point of the last two is that of D-PSGD with their own,
ten times smaller, learning rate, so neither removes the bias. On the chain D2 and exact diffusion
are faster than tracking (1e-13 against 0.08), and RelaySGD ends at 6e-7. With lambda_min = -0.44 D2
diverges (1e73) and exact diffusion does not (9e-15). Where W is not doubly stochastic, gradient
tracking ends at 0.054, the minimum of peers that count unequally, and what assumes a symmetric W
diverges: D2, exact diffusion, DecentLaM. Every run that diverged was warned of.

Grid: every method on five graphs.

- ring: weights 1/3, lambda_min = -1/3, which is where D2 stops being stable.
- ring_0.44: a ring with own weights of 0.28 and lambda_min = -0.44.
- directed: a directed ring on which every second peer also sends to the fifth after it; a peer
  averages what it receives with equal weights, so W is not doubly stochastic; in push-sum a peer
  sends equal parts.
- chain: on which RelaySGD relays; other graphs are no trees, and it is refused there.
- changing: one_peer_exponential, each peer sends to one other, at a distance of 1, 2, 4, 8 in turn.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import networkx as nx
import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor, nn

import dfl
from dfl.config import Run
from dfl.store.callbacks import Callback, Outcome, RunInfo
from experiments import common

COORDINATES = 10
LR = 0.05
MOMENTUM = 0.9
LADDER = (1, 3, 10, 30, 100, 300, 1000)
"""Numbers of rounds after which the distance is measured."""

NEAR = 1e-6
"""The distance within which a method counts as having reached the minimum."""


@dataclass(frozen=True)
class Method:
    """A method of the comparison.

    Attributes:
        algorithm: as --algorithm.
        momentum: as --momentum; the learning rate is (1 - momentum) times that of the others.
        pushes: whether the columns of W must sum to 1.
    """

    algorithm: str
    momentum: float = 0.0
    pushes: bool = False

    @property
    def lr(self) -> float:
        """The learning rate."""
        return round(LR * (1 - self.momentum), 6)


METHODS = {
    "D-PSGD, atc": Method("dpsgd"),
    "D-PSGD, cta": Method("dpsgd:order=cta"),
    "DFedSAM": Method("dfedsam"),
    "DSGDm": Method("dsgdm", MOMENTUM),
    "QG-DSGDm": Method("qg_dsgdm", MOMENTUM),
    "DecentLaM": Method("decentlam", MOMENTUM),
    "gradient tracking, atc": Method("gradient_tracking"),
    "gradient tracking, cta": Method("gradient_tracking:order=cta"),
    "momentum tracking": Method("momentum_tracking", MOMENTUM),
    "D2": Method("d2"),
    "exact diffusion": Method("exact_diffusion"),
    "push-sum": Method("push_sum", pushes=True),
    "RelaySGD": Method("relay_sgd"),
}


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/methods_quadratic")
    rounds: int = LADDER[-1]
    """Most rounds."""


class Centre(nn.Module):
    """c - x for an example c."""

    def __init__(self) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        """Return c - x."""
        return c - self.x


class Last(Callback):
    """Keeps the warnings of a run and its last models.

    Attributes:
        notes: the warnings.
        models: (P, COORDINATES).
    """

    notes: tuple[str, ...] = ()
    models: NDArray[np.floating]

    def start(self, info: RunInfo) -> None:
        """Keep the warnings."""
        self.notes = info.notes

    def finish(self, outcome: Outcome) -> None:
        """Keep the models."""
        self.models = outcome.state["x"]


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure the distance of every method from the minimum, on four graphs."""
    rows = measure(options.rounds)
    table = tabulate(rows)
    common.publish(options, table, draw(rows), finding(table))


def problem() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a (P,) and c (P, COORDINATES)."""
    rng = np.random.default_rng(0)
    return rng.uniform(1, 2, common.PEERS), rng.normal(size=(common.PEERS, COORDINATES))


def graphs() -> dict[str, dict[str, Any]]:
    """Return the settings of every graph."""
    peers = np.arange(common.PEERS)
    tight = np.zeros((common.PEERS, common.PEERS))
    tight[peers, peers] = 0.28
    for hop in (1, -1):
        tight[peers, (peers + hop) % common.PEERS] = 0.36
    hops: list[tuple[int, int]] = [(i, (i + 1) % common.PEERS) for i in range(common.PEERS)]
    hops += [(i, (i + 5) % common.PEERS) for i in range(0, common.PEERS, 2)]
    directed = nx.DiGraph()
    directed.add_nodes_from(range(common.PEERS))
    directed.add_edges_from(hops)
    return {
        "ring": {"topology": "ring", "mixing": "metropolis"},
        "ring_0.44": {"topology": None, "mixing": csr_array(tight)},
        "directed": {"topology": directed, "mixing": "uniform"},
        "chain": {"topology": "chain", "mixing": "metropolis"},
        "changing": {"topology": "one_peer_exponential"},
    }


def setting(method: Method, rounds: int, **graph: Any) -> Run:
    """Return a run of a method on a graph."""
    a, c = problem()
    if method.pushes and isinstance(graph["topology"], nx.DiGraph):
        graph["mixing"] = "out_degree"
    return Run(
        peers=common.PEERS,
        algorithm=method.algorithm,
        momentum=method.momentum,
        lr=method.lr,
        rounds=rounds,
        eval_every=rounds,
        local_steps=1,
        batch_size=0,
        model=Centre(),
        dataset=dfl.Data(c, a, c[:1], a[:1], classes=0),
        partition=list(np.arange(common.PEERS)[:, None]),
        loss=lambda out, labels: labels * out.square().sum(-1) / 2,
        **graph,
    )


def distance(models: NDArray[np.floating]) -> float:
    """Return sqrt(mean_i ||x_i - x*||^2)."""
    a, c = problem()
    best = a @ c / a.sum()
    return float(np.sqrt(np.square(models - best).sum(1).mean()))


def measure(rounds: int) -> pd.DataFrame:
    """Return the distances of every method and graph; NaN where a run is refused."""
    found = []
    for graph, given in graphs().items():
        for name, method in METHODS.items():
            for t in (each for each in LADDER if each <= rounds):
                row = {"graph": graph, "method": name, "round": t}
                found.append({**row, **ended(setting(method, t, **given))})
    return pd.DataFrame(found)


def ended(run: Run) -> dict[str, Any]:
    """Return the distance at the end of a run, and whether it was warned of."""
    last = Last()
    try:
        for _ in dfl.simulate(run, callbacks=[last]):
            pass
    except dfl.InputError:  # the method is not for this graph
        return {"distance": np.nan, "warned": False}
    warned = any("assumes" in note for note in last.notes)
    return {"distance": distance(last.models), "warned": warned}


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method: its momentum and rate, and the last distance on every graph, with a
    ! where the run was warned of.
    """
    last = rows[rows["round"] == rows["round"].max()]
    table = pd.DataFrame(
        {
            "method": name,
            "momentum": str(method.momentum),
            "lr": str(method.lr),
            **{
                row["graph"]: _cell(row["distance"], warned=row["warned"])
                for row in last[last["method"] == name].to_dict("records")
            },
        }
        for name, method in METHODS.items()
    )
    return table


def _cell(distance: float, *, warned: bool) -> str:
    if np.isnan(distance):
        return "refused"
    return f"{distance:.1e}{' !' if warned else ''}"


def finding(table: pd.DataFrame) -> str:
    """Return the finding: the methods that come close to the minimum, by graph."""
    parts = []
    for graph in graphs():
        last = pd.to_numeric(table[graph].str.removesuffix(" !"), errors="coerce")
        near = last < NEAR
        parts.append(f"on {graph}: {', '.join(table.loc[near, 'method']) or 'none'}")
    return f"methods within {NEAR:g} of the minimum at the end, {'; '.join(parts)}."


def draw(rows: pd.DataFrame) -> Figure:
    """Draw a panel per graph: the distance by round."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, rows["graph"].nunique(), sharey=True)
    for axes, (graph, own) in zip(panels, common.groups(rows, ["graph"]), strict=True):
        _panel(axes, own)
        axes.set_title(graph)
    panels[0].set_ylabel("distance from the minimum")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    for k, name in enumerate(METHODS):
        own = rows[rows["method"] == name]
        colour = common.COLOURS[k % len(common.COLOURS)]
        line = "-" if k < len(common.COLOURS) else "--"
        axes.plot(own["round"], own["distance"], label=name, color=colour, linestyle=line)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(1e-14, 1e3)
    axes.set_xlabel("round")


if __name__ == "__main__":
    sys.exit(common.start(experiment, "methods.quadratic"))
