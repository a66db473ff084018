"""PowerGossip agrees with its recursion on dense matrices, and with averaging at full rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl import Run
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.core.errors import InputError
from dfl.simulation.cost import payload_per_round
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import begin
from tests.algorithms.test_oracle import dense
from tests.support.quadratic import (
    STILL,
    H,
    centres,
    final,
    half_square,
    info,
    points,
    run_states,
    spread,
)

SHAPE = (4, 6)
D = 4 * 6 + 3
"""Coordinates of `Sheet`: a matrix, then a vector."""


class Sheet(nn.Module):
    """A model of a matrix and a vector, whose output is c less both for an example c."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64))
        self.vector = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, c: Tensor) -> Tensor:
        return c - torch.cat([self.matrix.flatten(), self.vector])


def sheets(**settings: Any) -> Prepared:
    """Return a run on points of D coordinates, ready to start."""
    run = Run(**{"peers": 8, "momentum": 0.0, "lr": 0.1, "local_steps": 1, **settings})
    assert run.peers is not None
    data = points(run.peers, D)
    return prepare(replace(run, model=Sheet(), dataset=data, loss=half_square), World())


@pytest.mark.parametrize("topology", ["ring", "star", "erdos_renyi:p=0.5"])
@pytest.mark.parametrize("mixing", ["metropolis", "uniform"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_it_is_the_recursion_on_dense_matrices(topology: str, mixing: str, rank: int) -> None:
    setting = sheets(topology=topology, mixing=mixing, algorithm=f"power_gossip:rank={rank}")
    W, C, X = dense(setting, 0), centres(setting), begin(setting).state.x
    owner, other = np.divmod(setting.network.schedule.union.out, 8)
    factors = {
        (int(i), int(j)): right[:, 4:].T  # columns of the right factor
        for i, j, right in zip(owner, other, begin(setting).state.factors, strict=True)
    }
    for run_state in list(run_states(setting, 12))[1:]:
        odd = run_state.t % 2 == 0
        Z = X - 0.1 * H * (X - C)
        M = Z[:, :24].view(8, *SHAPE)
        M = M.mT if odd else M
        step = torch.zeros_like(Z)
        for (i, j), known in factors.items():
            V = torch.linalg.qr(known).Q
            S = (M[j] - M[i]) @ V
            change = S @ V.mT
            step[i, :24] += W[i, j] * (change.mT if odd else change).flatten()
            step[i, 24:] += W[i, j] * (Z[j] - Z[i])[24:]
            factors[i, j] = S
        X = Z + step
        assert torch.allclose(run_state.models, X, rtol=0, atol=1e-10)


def test_where_nothing_is_shared_nothing_is_sent() -> None:
    setting = sheets(share="nothing", algorithm="power_gossip")
    alone = sheets(algorithm="local_only")
    assert info(setting).payload_shared == 0
    *_, run_state = run_states(setting, 3)
    assert torch.equal(run_state.task.personal, final(alone, 3))


@pytest.mark.parametrize("topology", ["ring", "star"])
def test_at_full_rank_it_is_averaging(topology: str) -> None:
    settings: dict[str, Any] = {"topology": topology, "local_steps": 3}
    x, y = (
        final(sheets(algorithm=method, **settings), 20)
        for method in ("power_gossip:rank=4", "dfedavgm")
    )
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_two_rounds_find_a_difference_of_its_rank(rank: int) -> None:
    setting = sheets(
        peers=2, topology="chain", mixing="uniform", algorithm=f"power_gossip:rank={rank}"
    )
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, rank, generator=generator, dtype=torch.float64) for n in SHAPE)
    x = torch.zeros(2, D, dtype=torch.float64)
    x[1, :24] = (left @ right.mT).flatten()
    state = replace(begin(setting).state, x=x)
    for t in range(2):
        assert spread(state.x) > 0.01
        state = setting.algorithm.round(state, STILL, Net(setting.network, t))
    assert spread(state.x) < 1e-12


@pytest.mark.parametrize("topology", ["ring", "erdos_renyi:p=0.5"])
def test_the_mean_is_kept_and_consensus_reached(topology: str) -> None:
    setting = sheets(topology=topology, algorithm="power_gossip:rank=1")
    x = torch.randn(8, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    state = replace(begin(setting).state, x=x)
    distances = [spread(x)]
    for t in range(400):
        state = setting.algorithm.round(state, STILL, Net(setting.network, t))
        distances.append(spread(state.x))
    assert torch.allclose(state.x.mean(0), x.mean(0), rtol=0, atol=1e-12)
    assert (np.diff(distances) < 1e-15).all()
    assert distances[-1] < 1e-6 * distances[0]


def test_both_ends_of_an_edge_remember_the_same() -> None:
    setting = sheets(topology="erdos_renyi:p=0.5", algorithm="power_gossip:rank=2")
    out = setting.network.schedule.union.out
    back = np.searchsorted(out, out % 8 * 8 + out // 8)
    for run_state in run_states(setting, 5):
        assert torch.equal(run_state.state.factors, run_state.state.factors[back])


@pytest.mark.parametrize(("rank", "even", "odd"), [(1, 4, 6), (3, 12, 18), (4, 24, 24)])
def test_its_messages_are_products_and_vectors(rank: int, even: int, odd: int) -> None:
    setting = sheets(algorithm=f"power_gossip:rank={rank}")
    payload = setting.network.traffic.payload
    sent = [int(payload.sum()) for _ in run_states(setting, 3)]
    assert np.diff(sent).tolist() == [16 * 8 * (n + 3) for n in (even, odd, even)]
    estimate = payload_per_round(setting.algorithm, setting.network, D, torch.float64)
    assert estimate == 16 * 8 * ((even + odd) / 2 + 3)


def test_a_part_of_a_model_is_shared_from_some_round_on() -> None:
    from dfl import simulate

    data = points(4, D)
    run = Run(peers=4, model=Sheet(), dataset=data, loss=half_square, rounds=6, local_steps=1)
    run = replace(run, algorithm="power_gossip:rank=2", share="matrix", share_all_until="3")
    rows = [row["payload_bytes"] for row in simulate(replace(run, eval_every=1))]
    sent = [8 + 3, 12 + 3, 8 + 3, 12, 8, 12]
    assert np.diff(rows).tolist() == [8 * 8 * n for n in sent]


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"topology": "one_peer_exponential"}, "--topology one_peer_exponential"),
        ({"topology": "exponential"}, "--topology exponential"),
        ({"faults": "link_loss:p=0.1"}, "--faults link_loss:p=0.1"),
        ({"faults": "outage:p=0.1"}, "--faults outage:p=0.1"),
        ({"attack": "sign_flip:peers=3"}, "--attack sign_flip:peers=3"),
        ({"compressor": "top_k:share=0.1"}, "--compressor top_k:share=0.1"),
    ],
)
def test_what_it_cannot_do_is_refused(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(InputError, match=setting):
        sheets(algorithm="power_gossip", **settings)


def test_weights_that_do_not_keep_the_mean_are_warned_of() -> None:
    assert "mean" in str(
        info(sheets(topology="star", mixing="uniform", algorithm="power_gossip")).notes
    )
