"""`share_all_until`: all parameters are shared at first, a part later, counted as in LG-FedAvg."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dfl import Run, simulate
from dfl.algorithms import ALGORITHMS, Method
from dfl.comm.exchange import Net
from dfl.core.registry import choose
from dfl.models.parameter_layout import ParameterLayout
from dfl.models.zoo import MODELS
from dfl.simulation.make_models import make_module
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import RunState, narrowed
from dfl.training.sgd import sgd
from tests.support.quadratic import digits, final, info, run_states

MLP: dict[str, Any] = {"model": "mlp:hidden=12+8"}


def test_all_parameters_are_shared_until_a_round_or_a_goal() -> None:
    """Two rounds of FedAvg, then local-global rounds from there; the bytes of both kinds are
    counted.
    """
    few: dict[str, Any] = {"peers": 6, "examples_per_peer": 25, "rounds": 4, "eval_every": 1, **MLP}
    few |= {"algorithm": "fedavg"}
    rows = list(simulate(Run(share="head:1", share_all_until="2", **few)))
    whole = list(simulate(Run(**few)))
    spec = digits(share="head:1", **MLP).task.parameter_layout
    assert [row["train_loss"] for row in rows[:3]] == [row["train_loss"] for row in whole[:3]]
    assert rows[3]["train_loss"] != whole[3]["train_loss"]
    assert [row["consensus_distance"] > 0 for row in rows] == [False, False, False, True, True]
    steps = np.diff([row["parameters_k_plus_m"] for row in rows])
    assert steps.tolist() == [12 * spec.d, 12 * spec.d, 12 * spec.shared, 12 * spec.shared]
    goal = whole[1]["accuracy_mean"]
    until = list(simulate(Run(share="head:1", share_all_until=f"accuracy={goal}", **few)))
    turns = [row["accuracy_mean"] >= goal for row in whole].index(True)
    assert [row["consensus_distance"] > 0 for row in until].index(True) == turns + 1


def after_a_round(setting: Prepared) -> RunState:
    """The run after one round in which all parameters are shared."""
    *_, run_state = run_states(replace(setting, run=replace(setting.run, share_all_until="1")), 1)
    return run_state


def after_the_next(setting: Prepared, run_state: RunState) -> Any:
    net = Net(setting.network, run_state.t)
    return setting.algorithm.round(run_state.state, run_state.task, net)


def test_the_server_momentum_continues_for_shared_parameters() -> None:
    """The velocity keeps its shared columns; the next step adds beta times them."""
    setting = digits(algorithm="fedavg:server_momentum=0.5", share="head:1", **MLP)
    whole, s = after_a_round(setting), setting.task.parameter_layout.shared
    cut = narrowed(whole, setting)
    assert torch.equal(cut.state.velocity, whole.state.velocity[:, :s])
    assert cut.state.velocity.any()
    assert torch.equal(cut.models, whole.models.expand(6, -1))
    assert cut.task.personal.shape == (6, whole.state.x.shape[1] - s)
    after = after_the_next(setting, cut)
    assert torch.allclose(after.x, cut.state.x + after.velocity)
    free = digits(algorithm="fedavg", share="head:1", **MLP)
    step = after_the_next(free, narrowed(whole, setting)).velocity
    assert torch.allclose(after.velocity, 0.5 * cut.state.velocity + step, atol=1e-7)


def test_replicas_keep_their_shared_columns() -> None:
    few: dict[str, Any] = {"peers": 6, "examples_per_peer": 25, "rounds": 4, "bits": 8, **MLP}
    for topology in ("ring", "one_peer_exponential"):
        setting = digits(share="head:1", **few, topology=topology)
        whole, s = after_a_round(setting), setting.task.parameter_layout.shared
        cut = narrowed(whole, setting)
        assert torch.equal(cut.state.sent, whole.state.sent[:, :s])
        assert torch.equal(cut.state.received, whole.state.received[:, :s])
        z = sgd(whole.state.x, setting.task, 1)
        assert after_the_next(setting, cut).x.shape == (6, s)
        assert torch.equal(cut.task.personal, z[:, s:])


def parameters_k_plus_m(
    algorithm: Method, peers: int, layout: ParameterLayout, rounds: tuple[int, int]
) -> int:
    """Return the parameters that a server and K peers send in all, as Table 1 of LG-FedAvg counts:
    the server sends to all K peers, and m of them send to it.

    Args:
        algorithm: a method with a server.
        peers: K.
        layout: the numbers of all and of shared parameters.
        rounds: the rounds that share all parameters, and those that share a part.
    """
    first, then = rounds
    answers, _ = algorithm.traffic(peers, 0)
    return int(peers + answers) * (first * layout.all_shared.shared + then * layout.shared)


@pytest.mark.parametrize(
    ("model", "shape", "share", "rounds", "total"),
    [
        ("mlp:hidden=512+256+256+128", (1, 28, 28), "all", (725, 0), 5.05e10),
        ("mlp:hidden=512+256+256+128", (1, 28, 28), "head:2", (400, 50), 2.805e10),
        ("lenet", (3, 32, 32), "all", (1850, 0), 13.0448e9),
        ("lenet", (3, 32, 32), "first:2", (1200, 60), 8.4804e9),
    ],
)
def test_the_counts_equal_table_1(
    model: str, shape: tuple[int, ...], share: str, rounds: tuple[int, int], total: float
) -> None:
    """Liang et al. 2020, Table 1: K = 100, m = 10, from the published rounds."""
    spec = ParameterLayout.of(make_module(choose("--model", model, MODELS), shape, 10), share)
    counted = parameters_k_plus_m(
        choose("--algorithm", "fedavg:fraction=0.1", ALGORITHMS)(), 100, spec, rounds
    )
    assert counted == pytest.approx(total, rel=1e-4)
    published = {"all": spec.d, "head:2": 34_186, "first:2": 2_872}
    assert (spec.d, spec.shared) == (633_226 if "mlp" in model else 64_102, published[share])
    assert ParameterLayout.of(
        make_module(choose("--model", model, MODELS), shape, 10), "head:3"
    ).shared in (
        99_978,
        48_120 + 12_100 + 1_010,
    )


def test_counted_parameters_equal_the_estimate() -> None:
    settings: dict[str, Any] = {
        "algorithm": "fedavg:fraction=0.5",
        "share": "head:1",
        "peers": 6,
        "rounds": 5,
        **MLP,
    }
    *_, last = simulate(Run(**settings, share_all_until="2", examples_per_peer=25))
    setting = digits(**settings)
    counted = parameters_k_plus_m(setting.algorithm, 6, setting.task.parameter_layout, (2, 3))
    assert (
        last["parameters_k_plus_m"]
        == counted
        == 9 * (2 * setting.task.parameter_layout.d + 3 * setting.task.parameter_layout.shared)
    )


def test_broadcast_to_everyone_changes_downloads_only() -> None:
    chosen, everyone = (
        digits(algorithm=f"fedavg:fraction=0.5,broadcast_to={clients}", share="head:1", **MLP)
        for clients in ("chosen", "everyone")
    )
    assert torch.equal(final(chosen, 3), final(everyone, 3))
    s = chosen.task.parameter_layout.shared
    assert chosen.network.traffic.downloaded.sum() == 3 * 3 * 4 * s
    assert everyone.network.traffic.downloaded.tolist() == [3 * 4 * s] * 6
    assert chosen.network.traffic.parameters == everyone.network.traffic.parameters == 3 * 9 * s
    assert info(everyone).payload_shared == (3 + 6) * 4 * s
