"""Clique averaging agrees with its recursion, and with SGD where all peers are one clique."""

from typing import Any

import pytest
import torch

from dfl.core.errors import InputError
from dfl.simulation.initialization import start
from tests.support.quadratic import H, centres, final, info, quadratic

SETTINGS: dict[str, Any] = {
    "algorithm": "clique_averaging",
    "topology": "caveman:size=3",
    "peers": 9,
    "local_epochs": None,
    "local_steps": 1,
}


@pytest.mark.parametrize(("steps", "momentum"), [(1, 0.0), (1, 0.9), (3, 0.9)])
def test_it_is_its_recursion_on_dense_matrices(steps: int, momentum: float) -> None:
    given = {**SETTINGS, "local_steps": steps, "momentum": momentum}
    setting = quadratic(**given, lr_schedule="exponential:decay=0.7")
    W = torch.from_numpy(setting.network.schedule.weights[0].toarray())
    C = torch.kron(torch.eye(3), torch.ones(3, 3)).double() / 3
    X = start(setting.run, setting.task, True)
    M = 0 * X
    for t in range(10):
        lr, Z = 0.1 * 0.7**t, X
        for _ in range(steps):
            Z = Z - lr * H * (Z - centres(setting))
        M = momentum * M + C @ (X - Z) / lr
        X = W @ (X - lr * M)
    assert torch.allclose(final(setting, 10), X, rtol=0, atol=1e-10)


def test_one_clique_of_all_is_dpsgd_on_the_complete_graph() -> None:
    one = quadratic(**{**SETTINGS, "topology": "caveman:size=9"})
    plain = {**SETTINGS, "algorithm": "dpsgd", "topology": "complete", "mixing": "uniform"}
    assert torch.allclose(final(one, 10), final(quadratic(**plain), 10), rtol=0, atol=1e-12)


def test_one_clique_of_all_is_sgd_with_momentum_on_the_mean_gradient() -> None:
    setting = quadratic(**{**SETTINGS, "topology": "caveman:size=9", "momentum": 0.9})
    x = start(setting.run, setting.task, True).mean(0)
    m = 0 * x
    for _ in range(10):
        m = 0.9 * m + H * (x - centres(setting).mean(0))
        x = x - 0.1 * m
    assert torch.allclose(final(setting, 10), x.expand(9, -1), rtol=0, atol=1e-12)


def test_gradients_are_sent_within_cliques_only() -> None:
    """Three cliques of 3 have 18 directed edges, and 6 more lead from one to the next."""
    setting = quadratic(**SETTINGS)
    assert info(setting).payload_shared == (18 + 6 + 18) * 5 * 8
    final(setting, 1)
    assert setting.network.traffic.payload.sum() == (18 + 6 + 18) * 5 * 8


def test_a_graph_without_clusters_is_refused() -> None:
    with pytest.raises(InputError, match="--topology ring"):
        quadratic(**{**SETTINGS, "topology": "ring"})
