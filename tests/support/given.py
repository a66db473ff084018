"""Runs of a few rounds on random examples, and what tests give them as objects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

import dfl
from dfl.algorithms.gossip.dfedavgm import DFedAvgM, State
from dfl.training.losses import cross_entropy

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + 2 * (X[:, 1] > 0)
DATA = dfl.Data(X[:96], Y[:96], X[96:], Y[96:], 4)
PEERS = 6


def small(**settings: Any) -> dfl.Run:
    """Return a run of three rounds on these examples, with changed settings."""
    few = {"peers": PEERS, "rounds": 3, "eval_every": 3, "model": "softmax", "dataset": DATA}
    return dfl.Run(**{**few, **settings})


def last(run: dfl.Run) -> dict[str, float]:
    """Return the last row of a run without its clock."""
    *_, row = dfl.simulate(run)
    return {name: value for name, value in row.items() if name != "seconds"}


def refused(run: Callable[[], dfl.Run]) -> str:
    """Return the line by which a run, or the making of its settings, is refused."""
    with pytest.raises(dfl.InputError) as caught:
        list(dfl.simulate(run()))
    assert "\n" not in str(caught.value), f"more than one line: {caught.value}"
    return str(caught.value)


def ring_matrix(graph: csr_array) -> csr_array:
    """Return metropolis weights of a ring: 1/3 for each neighbour and oneself."""
    return (graph.astype(np.float64) + csr_array(np.eye(graph.shape[0]))) / 3


def lazy_matrix(graph: csr_array) -> csr_array:
    """Return (I + W) / 2 for those weights."""
    return (ring_matrix(graph) + csr_array(np.eye(graph.shape[0]))) / 2


@dataclass(frozen=True, kw_only=True)
class Lagged(DFedAvgM):
    """DFedAvgM that moves by beta toward the average: with beta = 1 it is DFedAvgM."""

    beta: float = 1.0

    def round(self, state: State, task: Any, net: Any) -> State:
        mean = super().round(state, task, net).x
        return State(state.x + self.beta * (mean - state.x) if self.beta != 1 else mean)


def given() -> dict[str, Any]:
    """Return an object for each of some fields, of other identity at every call."""
    torch.manual_seed(0)
    return {
        "algorithm": Lagged(beta=0.5),
        "topology": nx.cycle_graph(PEERS),
        "model": nn.Linear(6, 4),
        "dataset": (X, Y),
        "loss": weighted,
    }


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return twice the cross-entropy."""
    return 2 * cross_entropy(outputs, labels)
