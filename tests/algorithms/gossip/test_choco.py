"""CHOCO-SGD agrees with its paper, and its gossip contracts as fast as the paper's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from dfl.comm.exchange import Net
from dfl.simulation.initialization import start
from dfl.simulation.prepared import Prepared
from tests.algorithms.test_oracle import dense, sgd
from tests.support.quadratic import STILL, centres, final, quadratic, states


def top_k(x: Tensor, k: int) -> Tensor:
    """The k largest coordinates of each row; random numbers have no ties."""
    return torch.zeros_like(x).scatter(1, at := x.abs().topk(k).indices, x.gather(1, at))


@pytest.mark.parametrize("topology", ["ring", "star", "exponential"])
def test_choco_is_the_recursion_of_the_paper(topology: str) -> None:
    setting = quadratic(
        d=20, topology=topology, algorithm="choco:gamma=0.3", compressor="top_k:share=0.2"
    )
    X, W, C = start(setting.run, setting.task, True), dense(setting, 0), centres(setting)
    H = X.clone()
    for state in list(states(setting, 15))[1:]:
        half = sgd(X, C, lr=0.1, momentum=0.0, steps=3)
        H = H + top_k(half - H, 4)
        X = half + 0.3 * (W @ H - H)
        assert torch.allclose(state.x, X, rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", ["small_world:k=4", "one_peer_exponential"])
def test_with_exact_messages_and_gamma_one_it_is_dpsgd(topology: str) -> None:
    settings: dict[str, Any] = {"topology": topology, "local_epochs": 1}
    x, y = (final(quadratic(algorithm=a, **settings), 20) for a in ("choco:gamma=1", "dfedavgm"))
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("compressor", ["quantize:bits=3", "random_k:share=0.2"])
@pytest.mark.parametrize("faults", ["none", "link_loss:p=0.3"])
def test_it_is_quantized_dfedavgm_bit_for_bit(compressor: str, faults: str) -> None:
    settings: dict[str, Any] = {"d": 40, "compressor": compressor, "faults": faults}
    x, y = (
        final(quadratic(algorithm=f"{a}:gamma=0.2", **settings), 9) for a in ("choco", "qdfedavgm")
    )
    assert torch.equal(x, y)


def gossip(
    gamma: float, compressor: str, rounds: int, dtype: torch.dtype = torch.float64
) -> tuple[float, float]:
    """Return the mean square of the distances to the mean on a ring of 16, and how far the mean
    has moved, in units of gamma eps max|x| a round.
    """
    setting = quadratic(
        d=100, peers=16, algorithm=f"choco:gamma={gamma}", compressor=compressor, rounds=0
    )
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = x.to(dtype)
    state = setting.algorithm.init(x, torch.zeros_like(x), Net(setting.network, 0))
    for t in range(rounds):
        net = Net(setting.network, t, measured=False)
        state = setting.algorithm.round(state, STILL, net)
    moved = (state.x.double().mean(0) - x.double().mean(0)).abs().max()
    unit = gamma * torch.finfo(dtype).eps * x.abs().max()
    return residual(state.x), float(moved / (rounds * unit))


def residual(x: Tensor) -> float:
    return float((x - x.mean(0)).square().mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gamma", "compressor", "published"),
    [
        (0.1, "top_k:share=0.1", 2e-10),
        (0.4, "top_k:share=0.1", 1e-28),
        (0.05, "top_k:share=0.01", 5e-5),
    ],
)
def test_gossip_contracts_at_the_known_rate(
    gamma: float, compressor: str, published: float
) -> None:
    """The mean moves by the rounding of sums that peers add up over all rounds, 1e-14 to 2e-13 in
    float64, where sums that are computed anew move it by 5e-15.
    """
    distance, moved = gossip(gamma, compressor, 2000)
    assert distance < 3 * published
    assert moved < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_mean_moves_by_rounding_alone(dtype: torch.dtype) -> None:
    """Its way is in proportion to the precision of the floats."""
    _, moved = gossip(0.4, "top_k:share=0.1", 300, dtype)
    assert 0.02 < moved < 1


def test_without_memory_gossip_of_top_k_does_not_converge() -> None:
    setting = quadratic(d=100, peers=16, algorithm="choco", compressor="top_k:share=0.1", rounds=0)
    x = torch.randn(16, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t in range(400):
        received = Net(setting.network, t, measured=False).exchange(x)
        x = x + 0.1 * (received.average() - received.own)
    assert residual(x) > 0.03
    assert gossip(0.1, "top_k:share=0.1", 400)[0] < 0.005


@pytest.mark.parametrize("compressor", ["top_k:share=0.1", "random_k:share=0.2", "quantize:bits=1"])
@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
def test_the_mean_is_kept_whatever_is_lost(compressor: str, topology: str) -> None:
    setting = quadratic(
        d=60,
        topology=topology,
        algorithm="choco:gamma=0.05",
        compressor=compressor,
        faults="link_loss:p=0.5",
    )
    x = start(setting.run, setting.task, True)
    for state in list(states(setting, 25))[1:]:
        z = sgd(x, centres(setting), 0.1, 0.0, 3)
        assert torch.allclose(state.x.mean(0), z.mean(0), rtol=0, atol=1e-12)
        x = state.x


def warned(prepared: Prepared) -> str:
    assert prepared.info
    return "\n".join(prepared.info.notes)


@pytest.mark.parametrize(
    ("gamma", "compressor", "grows"),
    [
        (1.0, "none", False),
        (1.0, "quantize:bits=1", False),
        (1.0, "top_k:share=0.1", True),
        (0.4, "top_k:share=0.1", False),
        (0.5, "random_k:share=0.1", True),
        (0.1, "random_k:share=0.1", False),
    ],
)
def test_a_step_too_large_for_its_messages_is_warned_of(
    gamma: float, compressor: str, grows: bool
) -> None:
    notes = warned(
        quadratic(peers=16, algorithm=f"choco:gamma={gamma}", compressor=compressor, rounds=200)
    )
    assert ("choose a gamma below" in notes) == grows
    assert (f"--compressor {compressor}" in notes) == grows


@pytest.mark.parametrize(
    ("algorithm", "compressor", "biased"),
    [
        ("qdfedavgm:exchange=paper", "top_k:share=0.1", True),
        ("qdfedavgm:exchange=paper", "random_k:share=0.3", True),
        ("qdfedavgm:exchange=paper", "random_k:share=0.3,scaled=true", False),
        ("qdfedavgm:exchange=paper", "quantize:bits=1", True),
        ("qdfedavgm:exchange=paper", "quantize:bits=2", False),
        ("fedavg", "top_k:share=0.1", True),
        ("fedavg", "top_k:share=0.9", False),
        ("fedavg", "quantize:bits=4", False),
        ("qdfedavgm", "top_k:share=0.1", False),
        ("choco", "top_k:share=0.1", False),
    ],
)
def test_biased_messages_without_memory_are_warned_of(
    algorithm: str, compressor: str, biased: bool
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        notes = warned(quadratic(algorithm=algorithm, compressor=compressor))
    assert ("are biased" in notes) == biased
    assert not biased or f"--compressor {compressor}" in notes
