"""A run agrees with the paper's equations on dense matrices."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import dfl
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.training.sgd import sgd as train
from tests.mpi.layouts import MODEL
from tests.support.quadratic import H, centres, final, quadratic, spread, states
from tests.support.sequences import pictures_and_words, sequences

GRAPHS = (
    "ring",
    "star",
    "torus",
    "erdos_renyi:p=0.5",
    "complete",
    "exponential",
    "one_peer_exponential",
)


def sgd(x: Tensor, c: Tensor, lr: float, momentum: float, steps: int) -> Tensor:
    """Heavy ball as the paper writes it: y+ = y - lr g + momentum (y - y_before)."""
    before = y = x
    for _ in range(steps):
        before, y = y, y - lr * H * (y - c) + momentum * (y - before)
    return y


def dense(setting: object, t: int) -> Tensor:
    weights = setting.network.schedule.weights  # type: ignore[attr-defined]
    return torch.from_numpy(weights[t % len(weights)].toarray())


@pytest.mark.parametrize("topology", GRAPHS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_dfedavgm_is_w_times_sgd(topology: str, momentum: float) -> None:
    setting = quadratic(topology=topology, momentum=momentum, peers=9 if topology == "torus" else 8)
    X = start(setting.run, setting.task, True)
    for t in range(15):
        X = dense(setting, t) @ sgd(X, centres(setting), lr=0.1, momentum=momentum, steps=3)
    assert torch.allclose(final(setting, 15), X, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"model": "char_lstm:hidden=6,embedding=3", "dataset": sequences()}, "last"),
        ({"model": "vqa:width=5", "dataset": pictures_and_words()}, "head.*"),
        ({"model": f"{MODEL}:normed", "norm_stats": "local", "examples_per_peer": 20}, "head:1"),
        ({"model": f"{MODEL}:normed", "norm_stats": "share", "examples_per_peer": 20}, "all"),
    ],
)
@pytest.mark.parametrize("algorithm", ["dfedavgm", "qdfedavgm"])
def test_models_of_sequences_of_parts_and_with_statistics_are_mixed_alike(
    settings: dict[str, Any], share: str, algorithm: str
) -> None:
    """X = W @ sgd(X) in what is shared; the rest, and statistics of one's own, stay."""
    run = dfl.Run(**settings, algorithm=algorithm, share=share, peers=6, topology="star", rounds=3)
    setting = prepare(run, World())
    s = setting.task.parameter_layout.shared
    x = first = final(setting, 0)
    for t in range(3):
        z = train(x, setting.task, t)
        x = torch.cat([(dense(setting, t) @ z[:, :s].double()).float(), z[:, s:]], 1)
    assert torch.allclose(final(setting, 3), x, atol=1e-5)
    assert (x - first).abs().max() > 1e-2
    assert bool((x[0] != x[1]).any())


@pytest.mark.parametrize("topology", ["ring", "star", "exponential"])
@pytest.mark.parametrize("gamma", [1.0, 0.6])
def test_replicas_are_the_recursion_of_the_paper(topology: str, gamma: float) -> None:
    setting = quadratic(
        topology=topology, algorithm=f"qdfedavgm:gamma={gamma}", compressor="quantize:bits=16"
    )
    X = start(setting.run, setting.task, True)
    Y, W = X.clone(), dense(setting, 0)
    for state in list(states(setting, 15))[1:]:
        Z = sgd(X, centres(setting), lr=0.1, momentum=0.0, steps=3)
        Y = Y + (Z - Y)  # 16 bits: the message is nearly exact
        X = Z + gamma * (W @ Y - Y)
        assert torch.allclose(state.x, X, rtol=0, atol=2e-4)


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_the_published_exchange_averages_updates(alpha: float) -> None:
    setting = quadratic(algorithm=f"qdfedavgm:exchange=paper,alpha={alpha}")
    X, W = start(setting.run, setting.task, True), dense(setting, 0)
    for _ in range(15):
        X = X + alpha * W @ (sgd(X, centres(setting), 0.1, 0.0, 3) - X)
    assert torch.allclose(final(setting, 15), X, rtol=0, atol=1e-12)


def test_the_published_exchange_diverges_at_the_rate_of_its_eigenvalue() -> None:
    """A mode of W with eigenvalue l < 0 grows by 1 - a l per round, a = 1 - (1 - lr h)^K."""
    setting = quadratic(algorithm="qdfedavgm:exchange=paper", peers=16, mixing="metropolis")
    found = [state.x for state in states(setting, 400)]
    distances = [spread(x) for x in found[-2:]]
    a = 1 - (1 - 0.1 * H) ** 3
    assert distances[-1] / distances[-2] == pytest.approx(1 + a / 3, rel=1e-3)
    mean = found[-1].mean(0)
    assert torch.allclose(
        mean, centres(setting).mean(0), atol=1e-3
    )  # which is all that a mean would show


@pytest.mark.slow
@pytest.mark.parametrize("bits", range(1, 17))
@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential", "exponential"])
def test_every_width_preserves_the_mean_and_reaches_consensus(bits: int, topology: str) -> None:
    """The mean follows gradient descent on the mean, whatever the messages lose; the peers stay
    close.
    """
    setting = quadratic(topology=topology, bits=bits, d=300)
    x = start(setting.run, setting.task, True)
    mean, distances = x.mean(0), []
    for state in list(states(setting, 60))[1:]:
        mean = sgd(mean, centres(setting).mean(0), 0.1, 0.0, 3)
        assert torch.allclose(state.x.mean(0), mean, rtol=0, atol=1e-12)
        distances.append(spread(state.x))
    exact = spread(final(quadratic(topology=topology, d=300), 60))
    assert max(distances[40:]) < 1.25 * exact + 0.05
    assert max(distances[50:]) < 1.2 * max(distances[30:40])


def test_without_a_quantizer_the_edges_are_dfedavgm() -> None:
    plain = final(quadratic(topology="one_peer_exponential"), 12)
    edges = final(quadratic(topology="one_peer_exponential", algorithm="qdfedavgm"), 12)
    assert torch.allclose(plain, edges, rtol=0, atol=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.6])
@pytest.mark.parametrize("bits", [2, 16])
def test_copies_per_edge_are_the_recursion_on_whole_matrices(gamma: float, bits: int) -> None:
    """x_i <- z_i + gamma (sum_j w_ij y_(j->i) - sum_k w_ki y_(i->k)), on a directed graph that
    changes.
    """
    setting = quadratic(
        topology="one_peer_exponential",
        algorithm=f"qdfedavgm:gamma={gamma}",
        compressor=f"quantize:bits={bits}",
        d=40,
    )
    net, P = setting.network, 8
    X = start(setting.run, setting.task, True) + 3.0
    state = setting.algorithm.init(X, X, Net(net, 0))
    copies = X[None].expand(P, -1, -1).clone()  # [k, i]: what k knows of i
    for t in range(9):
        W, Z = dense(setting, t), sgd(X, centres(setting), 0.1, 0.0, 3)
        edges = Net(net, t).edges
        messages = (
            Net(net, t)
            .exchange(Z[edges.owner] - copies[edges.ids % P, edges.owner], per_edge=True)
            .own
        )
        copies[edges.ids % P, edges.owner] += messages
        distances = W * (1 - torch.eye(P))
        X = Z + gamma * (
            torch.einsum("ij,ijd->id", distances, copies)
            - torch.einsum("ki,kid->id", distances, copies)
        )
        state = setting.algorithm.round(state, setting.task, Net(net, t))
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)
        assert (state.error > 0).all()


def test_independent_starts_leave_copies_at_zero() -> None:
    from dfl.comm.mpi import World
    from dfl.config import Run
    from dfl.simulation.prepare import prepare

    setting = prepare(Run(peers=4, init="independent", bits=4), World())
    state = next(states(setting, 0))
    assert float(spread(state.x)) > 1
    assert not state.sent.any()
    assert not state.received.any()


def test_weights_of_the_network_are_those_of_the_graph() -> None:
    setting = quadratic(topology="star", mixing="metropolis", peers=5)
    expected = np.eye(5) * 0.8
    expected[0, :] = expected[:, 0] = 0.2
    np.testing.assert_allclose(dense(setting, 0).numpy(), expected, atol=1e-12)
