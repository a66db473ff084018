"""Methods with a server agree with their papers, and with each other where they are equal."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl import Data, InputError, Run
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.core.layout import Layout
from dfl.robust import aggregators
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import begin
from dfl.training.sgd import sgd
from tests.support.quadratic import FEW, centres, digits, final, quadratic

WHOLE: dict[str, Any] = {"momentum": 0.0, "batch_size": 0}


def server(algorithm: str, rounds: int = 4, **settings: Any) -> Tensor:
    """Return the server's row (d,) after some rounds on digits."""
    setting = digits(algorithm=algorithm, **settings)
    state = begin(setting).state
    for t in range(rounds):
        state = setting.algorithm.round(state, setting.task, Net(setting.network, t))
    assert state.x.shape == (1, setting.task.parameter_layout.d)
    return torch.as_tensor(state.x[0])


def near(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=1e-6) and not torch.equal(
        one, torch.zeros_like(one)
    )


def test_fedprox_with_mu_zero_is_fedavg_bit_for_bit() -> None:
    assert torch.equal(server("fedprox:mu=0"), server("fedavg"))
    assert torch.equal(server("fedprox:mu=0,fraction=0.5"), server("fedavg:fraction=0.5"))
    assert not torch.equal(server("fedprox:mu=0.1"), server("fedavg"))


def test_one_step_on_everything_is_fedsgd_and_gradient_descent() -> None:
    expected = descent(digits(**WHOLE), 4)
    assert near(server("fedavg", **WHOLE), expected)
    assert near(server("fedsgd", momentum=0.0), expected)
    assert torch.equal(server("fedavg", **WHOLE), server("fedsgd", momentum=0.0))
    assert near(server("pooled", **WHOLE), expected)


def descent(setting: Prepared, rounds: int) -> Tensor:
    """Return the row (d,) after gradient descent on all examples, by torch's own modules."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    x = start(setting.run, setting.task, False)[0].clone()
    nn.utils.vector_to_parameters(x, module.parameters())
    sgd = torch.optim.SGD(module.parameters(), lr=setting.run.lr)
    for _ in range(rounds):
        sgd.zero_grad()
        inputs = setting.task.inputs(setting.task.examples.inputs)
        nn.functional.cross_entropy(module(inputs), setting.task.examples.labels).backward()
        sgd.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def test_dfedavgm_on_a_complete_graph_is_fedavg_with_all_clients() -> None:
    """With uniform weights, equal n_k and no momentum."""
    complete = final(digits(topology="complete", mixing="uniform", momentum=0.0), 4)
    assert near(server("fedavg", momentum=0.0), complete[0])
    peers = final(quadratic(topology="complete", mixing="uniform"), 12)
    row = final(quadratic(algorithm="fedavg"), 12)
    assert row.dtype == torch.float64
    assert torch.allclose(peers, row.expand_as(peers), rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 0.9])
@pytest.mark.parametrize("attack", ["none", "sign_flip:peers=3"])
@pytest.mark.parametrize("options", ["tau=0.3", "tau=0.1", "f=2"])
def test_clipping_follows_a_server_with_momentum(beta: float, attack: str, options: str) -> None:
    """Clipping reaches the optimum and stays near it, also where it clips every update."""
    settings: dict[str, Any] = {"algorithm": f"fedavg:server_momentum={beta}", "attack": attack}
    distance = distances(quadratic(**settings, aggregator=f"clipping:{options}"), 180)
    assert max(distance[150:]) < 1.5 + 2 * (options == "tau=0.1" and beta == 0.9)
    assert max(distance) < 3 * distance[0]


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_clipping_with_a_large_radius_is_the_mean(beta: float) -> None:
    algorithm = f"fedavg:server_momentum={beta}"
    clipped, mean = (
        final(quadratic(algorithm=algorithm, aggregator=rule), 80)
        for rule in ("clipping:tau=1e9", "mean")
    )
    assert torch.allclose(clipped, mean, rtol=0, atol=1e-12)


def distances(setting: Prepared, rounds: int) -> list[float]:
    """Return the server's distance to the optimum before each round; about 8 at the start."""
    state = begin(setting).state
    state = replace(state, x=state.x + 4.0)
    optimum = centres(setting).mean(0)
    found: list[float] = []
    for t in range(rounds):
        found.append(float((state.x[0] - optimum).norm()))
        state = setting.algorithm.round(state, setting.task, Net(setting.network, t))
    return found


def test_trimming_no_peer_is_the_uniform_mean() -> None:
    uneven: dict[str, Any] = {"partition": "dirichlet:alpha=0.5"}
    trimmed = server("fedavg", aggregator="trimmed_mean:f=0", **uneven)
    assert near(server("fedavg:weighting=uniform", **uneven), trimmed)
    assert not near(server("fedavg", **uneven), trimmed)
    one, other = (
        final(quadratic(algorithm="fedavg", aggregator=rule), 9)
        for rule in ("trimmed_mean:f=0", "mean")
    )
    assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("peers", [2, 5, 10])
def test_full_batches_do_not_depend_on_the_number_of_clients(peers: int) -> None:
    """With E = 1 and B = n_k FedAvg is gradient descent on all data."""
    x = np.random.default_rng(0).normal(size=(100, 4))
    data = Data(x, (x.sum(1) > 0).astype(np.int64), x[:5], np.zeros(5, np.int64), classes=2)
    run: dict[str, Any] = {"algorithm": "fedavg", "local_epochs": 1, "lr": 0.5, **WHOLE}
    one, many = (
        prepare(Run(peers=n, **run, model=nn.Linear(4, 2).double(), dataset=data), World())
        for n in (1, peers)
    )
    row = torch.zeros(1, 10, dtype=torch.float64)
    for t in range(20):
        row = one.algorithm.round(
            one.algorithm.init(row, row, Net(one.network, t)), one.task, Net(one.network, t)
        ).x
    other = torch.zeros_like(row)
    for t in range(20):
        net = Net(many.network, t)
        other = many.algorithm.round(many.algorithm.init(other, other, net), many.task, net).x
    assert torch.allclose(row, other, rtol=0, atol=1e-12)
    assert row.abs().max() > 0.1


def test_a_2nn_on_equal_clients_does_not_depend_on_their_number() -> None:
    """The same 150 digits on 1, 5 and 30 clients, in full batches."""
    one, *others = (
        server(
            "fedavg", rounds=8, model="2nn", peers=n, examples_per_peer=150 // n, lr=0.2, **WHOLE
        )
        for n in (1, 5, 30)
    )
    w = start((few := digits(model="2nn")).run, few.task, False)[0]
    assert (one - w).abs().max() > 0.01
    assert all(near(one, other) for other in others)


def test_clients_are_weighted_by_their_examples() -> None:
    """The next model is w + sum n_k (z_k - w) / m_t over the sampled clients k, m_t = sum n_k."""
    setting = digits(algorithm="fedavg:fraction=0.5", partition="dirichlet:alpha=0.5")
    w = start(setting.run, setting.task, False, True)
    sizes = setting.task.examples.sizes
    z = sgd(w.expand(6, -1), setting.task, 1)
    state = setting.algorithm.init(w, w, Net(setting.network, 1))
    moved = setting.algorithm.round(state, setting.task, Net(setting.network, 1))
    chosen = np.flatnonzero(setting.network.traffic.payload)
    assert len(chosen) == 3
    share = torch.from_numpy(sizes[chosen] / sizes[chosen].sum()).float()
    assert near(moved.x[0], w[0] + (share[:, None] * (z[chosen] - w)).sum(0))


@pytest.mark.parametrize(
    ("fraction", "peers", "m"),
    [(0.0, 10, 1), (0.29, 100, 29), (0.1, 100, 10), (1.0, 7, 7), (0.04, 10, 1)],
)
def test_the_number_of_clients_is_the_rounded_fraction(fraction: float, peers: int, m: int) -> None:
    few: dict[str, Any] = {**FEW, "peers": peers, "examples_per_peer": 5}
    run = Run(algorithm=f"fedavg:fraction={fraction}", **few)
    setting = prepare(run, World())
    w = start(setting.run, setting.task, False, True)
    state = setting.algorithm.init(w, w, Net(setting.network, 0))
    seen = set()
    for t in range(3):
        setting.network.traffic.payload[:] = setting.network.traffic.downloaded[:] = 0
        state = setting.algorithm.round(state, setting.task, Net(setting.network, t))
        d = setting.task.parameter_layout.d
        assert (
            sorted(setting.network.traffic.payload)
            == sorted(setting.network.traffic.downloaded)
            == [0] * (peers - m) + [4 * d] * m
        )
        seen.add(setting.network.traffic.payload.tobytes())
    assert len(seen) == (1 if m == peers else 3)  # different clients in every round
    assert (
        setting.network.traffic.parameters
        == 3 * (setting.layout.peers + m) * setting.task.parameter_layout.d
    )


def test_the_server_has_a_learning_rate_and_a_momentum() -> None:
    once = server("fedavg", rounds=1)
    w = start((few := digits()).run, few.task, False)[0]
    assert near(server("fedavg:server_lr=0.5", rounds=1), w + 0.5 * (once - w))
    heavy = digits(algorithm="fedavg:server_momentum=0.5,server_lr=2")
    state = heavy.algorithm.init(w[None], w[None], Net(heavy.network, 0))
    first = heavy.algorithm.round(state, heavy.task, Net(heavy.network, 0))
    second = heavy.algorithm.round(first, heavy.task, Net(heavy.network, 1))
    plain = digits(algorithm="fedavg")
    step = (
        plain.algorithm.round(
            replace(first, velocity=first.velocity * 0), plain.task, Net(plain.network, 1)
        ).x
        - first.x
    )
    assert near(second.velocity[0], (0.5 * first.velocity + step)[0])
    assert near(first.velocity[0], once - w)
    assert near(second.x[0], (first.x + 2 * (0.5 * first.velocity + step))[0])


def test_stragglers_are_dropped_or_do_less() -> None:
    dropped = digits(algorithm="fedavg:stragglers=0.5", local_epochs=3)
    final(dropped, 1)
    assert sorted(dropped.network.traffic.payload > 0) == [False] * 3 + [True] * 3
    assert (
        dropped.network.traffic.downloaded > 0
    ).all()  # stragglers receive the model and send nothing
    fewer = digits(algorithm="fedavg:stragglers=0.5,straggler_policy=fewer", local_epochs=30)
    final(fewer, 1)
    assert (fewer.network.traffic.payload > 0).all()
    assert not torch.equal(
        *(
            server(f"fedavg{o}", local_epochs=30)
            for o in ("", ":stragglers=0.5,straggler_policy=fewer")
        )
    )
    assert not torch.equal(
        *(server(f"fedprox{o}", local_steps=30) for o in ("", ":stragglers=0.5"))
    )
    assert torch.equal(
        server("fedavg:stragglers=0.9,fraction=0.01"), server("fedavg:fraction=0.01")
    )  # at least one client takes part


def test_a_share_of_stragglers_that_is_none_of_the_clients_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"^--algorithm fedavg: stragglers .* enough for one of 6 clients"
    ):
        digits(algorithm="fedavg:stragglers=0.05")
    with pytest.raises(InputError, match=r"enough for one of 3 clients, not 0.1"):
        digits(algorithm="fedprox:stragglers=0.1,fraction=0.5")


def test_stragglers_and_their_work_change_between_rounds() -> None:
    """Half of the four sampled clients are stragglers, different ones in every round, and each
    does at most E epochs, a number drawn anew in every round.
    """
    setting = digits(
        algorithm="fedavg:fraction=0.7,stragglers=0.5,straggler_policy=fewer", local_epochs=50
    )
    method = setting.algorithm
    seen = set()
    for t in range(6):
        net = Net(setting.network, t)
        chosen, group, work = method._draw(setting.task, net)  # type: ignore[attr-defined]
        assert chosen is group
        assert len(work) == 4
        assert (work < 50).sum() <= 2
        assert work.min() >= 1
        seen.add((tuple(group.ids[work < 50]), tuple(work[work < 50])))
    assert len(seen) == 6
    assert len({ids for ids, _ in seen}) > 2
    assert len({amounts for _, amounts in seen}) == 6


def test_a_message_does_not_depend_on_the_other_senders() -> None:
    """The random numbers of quantization are addressed by the peer, not by its position among the
    sampled clients.
    """
    setting = digits(algorithm="fedavg", bits=4)
    row = torch.linspace(-1, 1, 40)
    net = Net(setting.network, 0)
    alone = net.aggregate(row[None], net.group(np.array([4])), np.ones(1)).row[0]
    pair = net.aggregate(
        torch.stack([row, row]), net.group(np.array([1, 4])), np.array([0, 1])
    ).row[0]
    assert torch.equal(alone, pair)
    assert not torch.equal(alone, row)


@pytest.mark.parametrize("counting", [{"local_epochs": 4}, {"local_steps": 9}])
def test_fewer_steps_are_the_first_of_all_steps(counting: dict[str, int]) -> None:
    task = digits(**counting).task
    x = start((few := digits()).run, few.task, False)
    peers = np.array([1, 4])
    work = np.array([2, 3])
    rows = sgd(x[:2], task.only(peers, work), 0)
    for row, peer, amount in zip(rows, peers, work, strict=True):
        name = next(iter(counting))
        fewer = digits(**{name: int(amount)}).task
        assert torch.equal(row, sgd(x, fewer, 0)[peer])


def test_the_proximal_term_keeps_peers_near_the_start() -> None:
    """FedProx on a quadratic agrees with z <- z - eta (h (z - c) + mu (z - w)), by hand."""
    setting = quadratic(algorithm="fedprox:mu=3", local_epochs=5)
    w = torch.ones(1, 5, dtype=torch.float64)
    z = w.clone()
    c = setting.task.examples.inputs
    for _ in range(5):
        z = z - 0.1 * (0.7 * (z - c) + 3 * (z - w))
    got = setting.algorithm.round(
        setting.algorithm.init(w, w, Net(setting.network, 0)),
        setting.task,
        Net(setting.network, 0),
    )
    assert torch.allclose(got.x, z.mean(0, keepdim=True), rtol=0, atol=1e-12)


def test_local_only_sends_nothing_and_pooled_has_all_examples() -> None:
    alone, pooled = digits(algorithm="local_only"), digits(algorithm="pooled")
    x = final(alone, 2)
    assert torch.equal(
        x, sgd(sgd(start(alone.run, alone.task, False), alone.task, 0), alone.task, 1)
    )
    assert not alone.network.traffic.payload.any()
    assert pooled.task.server is not None
    assert pooled.task.server.examples.sizes.tolist() == [pooled.task.examples.sizes.sum()]
    assert sorted(pooled.task.server.examples.labels.tolist()) == sorted(
        pooled.task.examples.labels.tolist()
    )
    assert pooled.task.server.steps.tolist() == [-(-150 // 10)]


def test_a_server_aggregates_decoded_messages() -> None:
    """Messages have 4 bits per coordinate, and the rule aggregates what they decode to."""
    setting = digits(algorithm="fedavg", bits=4, momentum=0.0)
    final(setting, 1)
    d = setting.task.parameter_layout.d
    assert set(setting.network.traffic.payload) == {-(-4 * d // 8) + 4}
    assert set(setting.network.traffic.downloaded) == {4 * d}
    sent_updates = torch.zeros(6, 3)
    sent_updates[:, 0] = torch.tensor([1.0, 2, 3, 4, 5, 7])
    network = setting.network
    rule = partial(aggregators.AGGREGATORS["median"])
    network.threat_model = network.threat_model._replace(
        aggregator=rule, compressor=digits().network.threat_model.compressor
    )
    aggregated = Net(network, 0).aggregate(
        sent_updates, Layout(6, 1).group(np.arange(6), 0), np.ones(6)
    )
    assert aggregated.row.tolist() == [[3.5, 0, 0]]
    assert torch.isnan(aggregated.scores).all()
