"""Faults of a run: on a server, on local work, in its tables, and what is refused before it."""

from __future__ import annotations

import io
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

import dfl
from dfl.comm.exchange import Net
from dfl.reporting.text import header
from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates
from dfl.simulation.initialization import start
from dfl.simulation.prepared import Prepared
from dfl.training.batches import batches, groups
from dfl.training.sgd import sgd
from dfl.training.task import Task
from tests.algorithms.test_oracle import sgd as heavy_ball
from tests.conftest import Command
from tests.support.quadratic import centres, digits, final, info, quadratic, states

pytestmark = pytest.mark.usefixtures("no_figures")


def taking_part(setting: Prepared, t: int) -> tuple[list[int], list[int]]:
    """Return the peers that receive the server's model in round t, and those whose update arrives.

    All peers are clients.
    """
    effects = setting.network.fault_effects(t)
    everyone = np.arange(setting.layout.peers)
    assert effects is not None
    reached = everyone[effects.up & effects.arrive(setting.layout.peers, everyone)]
    return reached.tolist(), reached[effects.arrive(reached, setting.layout.peers)].tolist()


def test_the_effects_of_a_round_are_computed_once() -> None:
    network = quadratic(faults="outage:p=0.3").network
    first = network.fault_effects(4)
    assert network.fault_effects(4) is first
    assert network.fault_effects(5) is not first
    assert network.fault_effects(4) is not None


@pytest.mark.parametrize(
    "faults", ["link_loss:p=0.4", "outage:p=0.4,length=1+burst:p=0.3", "link_loss:p=0.95"]
)
def test_a_server_averages_the_updates_that_arrive(faults: str) -> None:
    """w <- w + mean (z_k - w) over the peers whose update arrives; w where there are none."""
    setting = quadratic(algorithm="fedavg", faults=faults)
    w = start(setting.run, setting.task, True, has_server=True)
    sent_down = sent_up = 0
    for t, state in enumerate(list(states(setting, 12))[1:]):
        reached, arrived = taking_part(setting, t)
        effects = setting.network.fault_effects(t)
        assert effects is not None
        sent_down += int(effects.up.sum())
        sent_up += len(reached)
        if arrived:
            z = heavy_ball(w.expand(8, -1), centres(setting), 0.1, 0.0, 3)
            w = z[arrived].mean(0, keepdim=True)
        assert torch.allclose(state.x, w, rtol=0, atol=1e-12)
    traffic = setting.network.traffic
    row = 5 * 8
    assert traffic.downloaded.sum() == sent_down * row
    assert traffic.payload.sum() == sent_up * row
    all_arrived = sum(len(taking_part(setting, t)[1]) for t in range(12))
    assert traffic.lost == (sent_down - sent_up) + (sent_up - all_arrived)


@pytest.mark.parametrize(
    "algorithm",
    [
        "fedavg",
        "fedavg:fraction=0.5,stragglers=0.5",
        "fedprox:stragglers=0.5",
        "fedavg:fraction=0.5,broadcast_to=everyone,server_momentum=0.5",
    ],
)
def test_faults_that_never_occur_change_nothing_at_a_server(algorithm: str) -> None:
    settings: dict[str, Any] = {"algorithm": algorithm, "bits": 6, "local_epochs": 4}
    calm = quadratic(**settings)
    w = final(calm, 4)
    for never in ("link_loss:p=0+burst:p=0", "outage:p=0", "leave:at=9", "stragglers:work=1"):
        setting = quadratic(**settings, faults=never)
        assert torch.equal(final(setting, 4), w)
        assert setting.network.traffic.lost == 0
        assert np.array_equal(setting.network.traffic.downloaded, calm.network.traffic.downloaded)
        assert np.array_equal(setting.network.traffic.payload, calm.network.traffic.payload)


def test_clients_are_drawn_among_peers_that_are_up() -> None:
    """Half of 8, drawn from the 5 that are left; with fewer than half left, all of them."""
    for gone, clients in (("0+1+2", 4), ("0+1+2+3+4+5", 2)):
        down = [int(i) for i in gone.split("+")]
        for broadcast_to, receivers in (("chosen", clients), ("everyone", 8 - len(down))):
            setting = quadratic(
                algorithm=f"fedavg:fraction=0.5,broadcast_to={broadcast_to}",
                faults=f"leave:peers={gone},at=0",
            )
            final(setting, 3)
            assert not setting.network.traffic.downloaded[down].any()
            assert setting.network.traffic.downloaded.sum() == 3 * receivers * 5 * 8
            assert setting.network.traffic.payload.sum() == 3 * clients * 5 * 8


def test_one_client_is_never_a_straggler_even_where_few_are_up() -> None:
    setting = quadratic(algorithm="fedavg:stragglers=0.75", faults="leave:peers=0+1+2+3+4+5,at=0")
    final(setting, 3)
    assert setting.network.traffic.payload.sum() == 3 * 5 * 8


@pytest.mark.parametrize(
    "algorithm", ["fedavg:server_momentum=0.5", "fedprox:stragglers=0.5", "fltrust:root=20"]
)
def test_a_server_without_updates_takes_a_step_of_zeros(algorithm: str) -> None:
    """Its momentum goes on, and decays."""
    for faults in ("leave:fraction=1,at=2", "link_loss:p=1"):
        seen = [
            state.x
            for state in states(digits(algorithm=algorithm, faults=faults, attack="alie"), 4)
        ]
        assert torch.equal(seen[0], seen[2]) == (faults == "link_loss:p=1")
    setting = digits(algorithm="fedavg:server_momentum=0.5", faults="leave:fraction=1,at=2")
    v = [state.velocity.abs().sum() for state in states(setting, 4)]
    assert v[3] == pytest.approx(v[2] / 2)
    assert v[4] == pytest.approx(v[2] / 4)


def test_a_servers_rule_is_given_only_updates_that_arrive() -> None:
    shown: list[int] = []

    def count(updates: Updates) -> Aggregate:
        shown.append(len(updates.rows))
        return Aggregate(updates.mix(updates.weights))

    with AGGREGATORS.replaced(count=count):
        setting = quadratic(
            algorithm="fedavg", aggregator="count", faults="link_loss:p=0.3", attack="ipm:peers=2"
        )
        del shown[:]  # of the preflight
        final(setting, 6)
    arrived = [len(taking_part(setting, t)[1]) for t in range(6)]
    assert shown == [n for n in arrived if n]


@pytest.mark.parametrize(
    "settings", [{"local_epochs": 2}, {"local_steps": 7}, {"partition": "dirichlet:alpha=0.4"}]
)
def test_a_straggler_takes_the_first_of_its_batches(settings: dict[str, Any]) -> None:
    setting = digits(**settings, batch_size=4)
    task = setting.task
    share = np.array([1, 0.5, 0, 0.01, 0.3, 1])
    fewer = task.paced(share)
    expected = [
        0 if s == 0 else max(1, round(s * k))
        for s, k in zip(share, task.steps.tolist(), strict=True)
    ]
    assert fewer.steps.tolist() == expected

    def seen(of: Task) -> dict[int, list[list[int]]]:
        found: dict[int, list[list[int]]] = {i: [] for i in range(6)}
        for group, batch in ((few, batch) for few in groups(of) for batch in batches(of, 3, few)):
            real = batch.weight.expand(batch.index.shape) > 0
            taken = {
                int(i): row[own].tolist()
                for i, row, own in zip(group, batch.index, real, strict=False)
            }
            for i, examples in taken.items():  # a lone peer trains as one of two
                found[i].append(examples)
        return found

    whole = seen(task)
    part = seen(fewer)
    assert all(part[i] == whole[i][: expected[i]] for i in range(6))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_peer_without_steps_keeps_its_model(engine: str) -> None:
    setting = digits(engine=engine, init="independent")
    x = next(states(setting, 0)).x
    z = sgd(x, setting.task.paced(np.array([1.0, 0, 1, 0, 0, 0.5])), 0)
    kept = [i for i in range(6) if torch.equal(x[i], z[i])]
    assert kept == [1, 3, 4]
    assert torch.equal(sgd(x, setting.task.paced(np.zeros(6)), 0), x)
    whole = sgd(x, setting.task, 0)
    assert torch.equal(z[[0, 2]], whole[[0, 2]])


def test_a_straggler_takes_the_smaller_of_two_limits() -> None:
    """The steps that FedProx draws for its stragglers, and those that the fault leaves."""
    task = digits(local_epochs=4).task
    here = np.array([1, 3])
    work = np.array([1, 4])
    each = int(task.per_epoch[0])
    assert task.only(here, work).steps.tolist() == [each, 4 * each]
    assert task.paced(np.full(6, 0.5)).only(here, work).steps.tolist() == [each, 2 * each]


def test_rows_have_peers_up_and_messages_lost() -> None:
    """Peers 0 and 1 of a ring of 6 join in round 3."""
    few: dict[str, Any] = {"model": "softmax", "peers": 6, "rounds": 4, "eval_every": 1}
    rows = pd.DataFrame(dfl.simulate(dfl.Run(**few, faults="join:peers=0+1,at=3+link_loss:p=1")))
    assert rows["peers_up"].tolist() == [4, 4, 4, 4, 6]
    assert rows["messages_lost"].tolist() == [0, 6, 12, 18, 30]
    assert list(rows.columns[-2:]) == ["peers_up", "messages_lost"]
    assert not {"peers_up", "messages_lost"} & set(next(dfl.simulate(dfl.Run(**few))))


def test_the_header_names_the_faults() -> None:
    shown = dict(header(info(digits(faults="outage:p=0.2+stragglers"))))
    assert shown["faults"] == "outage:p=0.2+stragglers"
    assert "faults" not in dict(header(info(digits())))


def test_no_faults_cost_nothing() -> None:
    net = Net(digits().network, 0)
    assert net.work is None
    assert net.network.peer_plan(0) is net.network.peer_plan(6)
    assert net.reached(net.everyone) is net.everyone
    assert digits(faults="none").network.threat_model.faults == ()
    assert Net(digits(faults="link_loss").network, 0).work is None


REFUSED = [
    (
        "--faults link_loss --algorithm pooled",
        "--faults link_loss has no part in --algorithm pooled: leave it out",
    ),
    (
        "--faults outage --algorithm pooled",
        "--faults outage has no part in --algorithm pooled: leave it out",
    ),
    (
        "--faults outage+burst --algorithm local_only",
        "--faults outage+burst has no part in --algorithm local_only",
    ),
    ("--faults leave:peers=2+4", "--faults leave: peers must be from 0 to 3, not 2+4"),
    (
        "--faults stragglers:peers=1+2,fraction=0.9",
        "--faults stragglers: fraction 0.9 and peers 1+2 both choose peers: give one of them",
    ),
    (
        "--faults leave:peers=2+",
        "--faults leave: peers must be whole numbers joined by +, as 200+200, not '2+'",
    ),
    ("--faults link_loss+", "--faults: unknown 'link_loss+' (did you mean link_loss?)"),
    ("--faults outage+outage:p=0.3", "--faults outage+outage:p=0.3 names something twice"),
    (
        "--faults link_loss --aggregator trimmed_mean",
        "--aggregator trimmed_mean: f=1 needs more than 2 messages, there is 1 "
        "where --faults link_loss leaves no more",
    ),
    (
        "--faults leave --aggregator krum:f=0 --algorithm fedavg",
        "--aggregator krum: f=0 needs more than 2 messages, there is 1 "
        "where --faults leave leaves no more",
    ),
    (
        "--aggregator krum:f=1 --faults stragglers --topology star",
        "--aggregator krum: f=1 needs more than 4 messages",
    ),
]


@pytest.mark.parametrize(("tokens", "line"), REFUSED)
def test_faults_that_cannot_be_are_refused(dfl_run: Command, tokens: str, line: str) -> None:
    assert dfl_run.refused("--peers", "4", *tokens.split()).startswith(line)


def test_faults_that_have_a_part_run(dfl_run: Command) -> None:
    few = ["--peers", "4", "--rounds", "2", "--model", "softmax"]
    for tokens in (
        "--faults outage+stragglers --algorithm local_only",
        "--faults link_loss --aggregator median",
        "--faults stragglers --aggregator trimmed_mean --topology complete",
    ):
        ended = dfl_run(*few, *tokens.split(), "--out", re.sub(r"\W", "", tokens))
        assert ended.code == 0, ended.err


def test_a_dry_run_counts_the_memory_of_copies_per_edge() -> None:
    from dfl.reporting.callbacks.terminal import Terminal

    sizes = []
    for faults in ("none", "link_loss"):
        console = Console(file=io.StringIO(), width=200)
        Terminal(console).dry_run(info(digits(bits=8, faults=faults, topology="complete")))
        assert isinstance(console.file, io.StringIO)
        sizes.append(re.findall(r"about ([0-9.]+) ", console.file.getvalue())[0])
    assert float(sizes[1]) > float(sizes[0])
