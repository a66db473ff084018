"""Push-sum keeps the mean on directed graphs, whatever is lost."""

from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from torch import Tensor

from dfl.comm.exchange import Net
from dfl.simulation.initialization import start
from tests.support.quadratic import STILL, H, centres, final, quadratic, states

P = 16
ANY_GRAPH = nx.DiGraph([(i, (i + 1) % P) for i in range(P)] + [(0, 5), (0, 9), (3, 12), (7, 2)])
"""A directed circle with a few more edges, so that peers send to one, two or three others."""


def averaging(rounds: int, **settings: Any) -> tuple[Tensor, Any]:
    """Return the models and the state after rounds without training from x_i = i."""
    setting = quadratic(peers=P, **{"algorithm": "push_sum", **settings})
    x = torch.arange(P, dtype=torch.float64)[:, None]
    state = setting.algorithm.init(x, x, Net(setting.network, 0))
    for t in range(rounds):
        state = setting.algorithm.round(state, STILL, Net(setting.network, t, measured=False))
    return state.x[:, 0], state


@pytest.mark.parametrize("graph", [ANY_GRAPH, "exponential", "one_peer_exponential"])
def test_every_model_is_the_mean_of_the_start(graph: Any) -> None:
    models, _ = averaging(300, topology=graph)
    assert torch.allclose(models, torch.tensor(7.5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_rows_that_sum_to_one_miss_the_mean_and_so_do_the_sums_without_weights() -> None:
    rows, _ = averaging(300, topology=ANY_GRAPH, algorithm="dfedavgm", mixing="uniform")
    assert float(rows.max() - rows.min()) < 1e-6
    assert abs(float(rows.mean()) - 7.5) > 0.1
    _, state = averaging(300, topology=ANY_GRAPH)
    assert float(state.sums.max() - state.sums.min()) > 5


METHODS = ("push_sum", "dfedavgm")


@pytest.mark.parametrize("graph", ["ring", "exponential", "one_peer_exponential", "star"])
def test_on_a_doubly_stochastic_matrix_it_is_dpsgd(graph: str) -> None:
    settings: dict[str, Any] = {"topology": graph, "mixing": "metropolis", "momentum": 0.9}
    pushed, averaged = (final(quadratic(algorithm=a, **settings), 20) for a in METHODS)
    assert torch.allclose(pushed, averaged, rtol=0, atol=1e-12)


def test_it_is_the_recursion_of_the_paper() -> None:
    setting = quadratic(topology=ANY_GRAPH, algorithm="push_sum", peers=P, local_steps=1,
                        local_epochs=None)  # fmt: skip
    x = z = start(setting.run, setting.task, True)
    w = torch.ones(P, 1, dtype=torch.float64)
    W = torch.from_numpy(setting.network.schedule.weights[0].toarray())
    assert torch.allclose(W.sum(0), torch.ones(P, dtype=torch.float64))
    for state in list(states(setting, 30))[1:]:
        x = W @ (x - 0.1 * H * (z - centres(setting)))
        w = W @ w
        z = x / w
        assert torch.allclose(state.x, z, rtol=0, atol=1e-12)


@pytest.mark.parametrize("faults", ["link_loss:p=0.3", "burst:p=0.4", "outage:p=0.1,length=3"])
@pytest.mark.parametrize("graph", [ANY_GRAPH, "one_peer_exponential"])
def test_faults_leave_both_sums_and_the_mean(faults: str, graph: Any) -> None:
    """Peers reach the mean of the start; averages whose receivers fill in for the lost do not."""
    models, state = averaging(200, topology=graph, faults=faults)
    assert float(state.sums.sum()) == pytest.approx(P * 7.5, rel=1e-12)
    assert float(state.weights.sum()) == pytest.approx(P, rel=1e-12)
    assert torch.allclose(models, torch.tensor(7.5, dtype=torch.float64), rtol=0, atol=1e-4)
    rows, _ = averaging(200, topology="one_peer_exponential", algorithm="dfedavgm", faults=faults)
    assert abs(float(rows.mean()) - 7.5) > 1e-2


def test_a_sender_keeps_the_weight_of_what_is_lost() -> None:
    """The round is that of the matrix whose lost weights are moved to the diagonal."""
    setting = quadratic(topology=ANY_GRAPH, algorithm="push_sum", peers=P, faults="link_loss:p=0.4")
    W = setting.network.schedule.weights[0].toarray()
    messages = torch.randn(P, 3, dtype=torch.float64)
    for t in range(5):
        lost = np.zeros_like(W, dtype=bool)
        effects = setting.network.fault_effects(t)
        assert effects is not None
        for i, j in zip(*np.nonzero(W - np.diag(np.diag(W))), strict=True):
            lost[i, j] = not effects.arrive(np.array([j]), np.array([i]))[0]
        kept = np.where(lost, 0, W) + np.diag(np.where(lost, W, 0).sum(0))
        found = Net(setting.network, t).exchange(messages).total()
        assert lost.any()
        assert torch.allclose(found, torch.from_numpy(kept) @ messages, rtol=0, atol=1e-14)
