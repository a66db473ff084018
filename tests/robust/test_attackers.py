"""Attacks in a run: what receivers get, what rules make of it, and what is measured."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dfl
from dfl.comm.exchange import Net
from dfl.evaluation import metrics
from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates
from dfl.robust.attacks import ATTACKS
from dfl.robust.attacks.blind import SignFlip
from dfl.simulation.initialization import start
from dfl.simulation.measure import consensus, measure
from dfl.simulation.prepared import Prepared
from dfl.training.sgd import sgd
from tests.conftest import Command
from tests.reporting.callbacks.test_report import small
from tests.support.quadratic import digits, final, quadratic, run_states, states

RULES = {
    "median": {},
    "trimmed_mean": {"f": 1},
    "krum": {"f": 1},
    "geometric_median": {},
    "fltrust": {},
    "clipping": {},
}


FOR_GRAPHS = [
    name
    for name, kind in ATTACKS.items()
    if kind().falsifies and not kind().per_edge and name != "adaptive"  # that is for a server
]
"""Attacks that send all neighbours of an attacker the same."""


def threatened(setting: Prepared, **threat_model: Any) -> Prepared:
    """Return the run with another threat model."""
    setting.network.threat_model = setting.network.threat_model._replace(**threat_model)
    return setting


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("topology", ["regular:k=4", "complete"])
def test_a_peer_aggregates_the_steps_of_its_closed_neighbourhood(name: str, topology: str) -> None:
    """Row by row from the dense matrix: steps from the peer's start, its own step the reference."""
    setting = digits(topology=topology, peers=7)
    rule = partial(AGGREGATORS[name], **RULES[name])
    rng = np.random.default_rng(0)
    messages, start = (torch.from_numpy(rng.normal(size=(7, 30))) for _ in range(2))
    got = Net(setting.network, 0).exchange(messages, start).aggregate(rule)
    dense = setting.network.schedule.weights[0].toarray()
    for i, weights in enumerate(dense):
        near = np.flatnonzero(weights)
        assert i in near
        steps = messages.numpy()[near] - start.numpy()[i]
        expected = (
            start.numpy()[i]
            + rule(Updates(steps, weights[near], messages.numpy()[i] - start.numpy()[i])).row
        )
        np.testing.assert_allclose(got[i], expected, rtol=0, atol=1e-12)


def test_the_mean_of_a_neighbourhood_is_the_average() -> None:
    setting = digits()
    messages = torch.randn(6, 40)
    received = Net(setting.network, 0).exchange(messages)
    assert torch.equal(received.aggregate(partial(AGGREGATORS["mean"])), received.average())


@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
@pytest.mark.parametrize("name", ["mean", "median"])
def test_messages_over_edges_are_aggregated_like_messages_of_peers(
    topology: str, name: str
) -> None:
    """An attack that sends the same over every edge gives the result of one that sends once."""

    class EachEdge(SignFlip):
        per_edge = True

    messages = torch.randn(8, 50)
    rule = partial(AGGREGATORS[name])
    for t in range(3):
        once, each = (
            threatened(
                digits(topology=topology, peers=8), attack=attack(), attackers=np.array([2, 5])
            )
            for attack in (ATTACKS["sign_flip"], EachEdge)
        )
        one, other = (Net(s.network, t).exchange(messages).aggregate(rule) for s in (once, each))
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
        assert once.network.traffic.payload.tolist() == each.network.traffic.payload.tolist()


@pytest.mark.parametrize("topology", ["ring", "regular:k=3"])
def test_a_message_of_weight_0_is_not_in_a_neighbourhood(topology: str) -> None:
    """With mixing=neighbors that is a peer's own, sent once or over edges."""
    counts: dict[str, list[int]] = {}
    for attack in ("sign_flip", "dissensus"):
        setting = digits(
            algorithm="dfedavgm", topology=topology, mixing="neighbors", attack=f"{attack}:peers=1"
        )
        found = counts[attack] = []

        def count(updates: Updates, found: list[int] = found) -> Aggregate:
            found.append(len(updates.rows))
            return AGGREGATORS["median"](updates)

        Net(setting.network, 0).exchange(torch.randn(6, 20)).aggregate(partial(count))
    assert counts["sign_flip"] == counts["dissensus"] == [2 if topology == "ring" else 3] * 6


@pytest.mark.parametrize("topology", ["complete", "star"])
@pytest.mark.parametrize("name", FOR_GRAPHS)
def test_faults_without_an_effect_do_not_change_what_attackers_send(
    name: str, topology: str
) -> None:
    """With faults a copy is sent over each edge: attackers count and imitate peers, not edges."""
    models = [
        final(
            digits(
                algorithm="choco:gamma=1",
                topology=topology,
                attack=f"{name}:peers=1+4",
                compressor="none",
                faults=faults,
                lr=0.01,
            ),
            2,
        )
        for faults in ("none", "link_loss:p=0")
    ]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-5)


def test_neighbours_receive_falsified_messages_of_attackers_only() -> None:
    setting = threatened(
        digits(peers=6), attack=ATTACKS["scale"](factor=10.0), attackers=np.array([1])
    )
    messages = torch.randn(6, 20)
    received = Net(setting.network, 0).exchange(messages)
    assert torch.equal(received.sent[1], messages[1] * 10)
    assert torch.equal(received.sent[[0, 2, 3, 4, 5]], messages[[0, 2, 3, 4, 5]])
    assert torch.equal(received.own, messages)  # an attacker keeps its own
    weights = torch.from_numpy(setting.network.schedule.weights[0].toarray()).float()
    expected = weights @ received.sent + weights.diagonal()[:, None] * (messages - received.sent)
    assert torch.allclose(received.average(), expected, atol=1e-5)


def test_messages_over_edges_are_falsified_where_a_method_sends_over_edges() -> None:
    """On a changing graph qdfedavgm sends per edge: those of attackers are falsified, each once."""
    setting = digits(
        algorithm="qdfedavgm",
        topology="one_peer_exponential",
        peers=8,
        attack="scale:peers=2+5,factor=3",
    )
    net = Net(setting.network, 1)
    messages = torch.randn(len(net.edges.owner), 20)
    received = net.exchange(messages, per_edge=True)
    for k, owner in enumerate(net.edges.owner):
        assert torch.equal(received.sent[k], messages[k] * 3 if owner in (2, 5) else messages[k])
    assert torch.equal(received.own, messages)


def test_a_server_receives_falsified_messages() -> None:
    setting = threatened(
        digits(peers=6, algorithm="fedavg"),
        attack=ATTACKS["sign_flip"](),
        attackers=np.array([0, 4]),
    )
    messages = torch.randn(3, 20)
    net = Net(setting.network, 0)
    # The rows are those of peers 2, 4 and 5.
    received = net.aggregate(messages, net.group(np.array([5, 2, 4])), np.array([1, 2, 3]))
    assert torch.allclose(
        received.row[0], (messages[0] - 2 * messages[1] + 3 * messages[2]) / 6, atol=1e-6
    )


def test_only_the_attackers_examples_are_poisoned() -> None:
    honest, poisoned = (
        digits(attack=attack).task.examples for attack in ("none", "label_flip:peers=1+3")
    )
    for i in range(6):
        part = slice(int(honest.starts[i]), int(honest.starts[i] + honest.sizes[i]))
        assert torch.equal(poisoned.inputs[part], honest.inputs[part])
        expected = 9 - honest.labels[part] if i in (1, 3) else honest.labels[part]
        assert torch.equal(poisoned.labels[part], expected)


def test_figures_are_over_honest_peers() -> None:
    setting = digits(attack="sign_flip:peers=0+4")
    *_, last = run_states(setting, 3)
    peers = measure(last, setting)
    assert peers is not None
    assert peers["is_attacker"].tolist() == [1, 0, 0, 0, 1, 0]
    row = metrics.summary(peers, ())
    honest = [1, 2, 3, 5]
    assert row["accuracy_mean"] == pytest.approx(peers["accuracy"][honest].mean())
    assert row["accuracy_min"] == peers["accuracy"][honest].min()
    distance, mean = consensus(last, setting)
    x = last.models[honest].double()
    assert distance == pytest.approx(float((x - x.mean(0)).square().sum(1).mean().sqrt()))
    assert mean is not None
    assert torch.allclose(mean.double(), x.mean(0), atol=1e-6)


def test_a_backdoor_is_measured_on_triggered_examples() -> None:
    setting = digits(attack="backdoor:peers=2,target=3", algorithm="fedavg")
    assert setting.test_sets.triggered is not None
    inputs, labels = setting.test_sets.triggered
    assert set(labels.tolist()) == {3}
    assert len(labels) == (setting.test_sets.labels != 3).sum()
    *_, last = run_states(setting, 2)
    peers = measure(last, setting)
    assert peers is not None
    predicted = setting.task.outputs(
        setting.task.parameter_layout.views(last.models), setting.task.inputs(inputs), each=False
    ).argmax(2)
    assert set(peers["backdoor_success"]) == {float((predicted == 3).double().mean())}
    assert metrics.summary(peers, ())["backdoor_success_mean"] == peers["backdoor_success"][0]


@pytest.mark.parametrize("t", [0, 3])
@pytest.mark.parametrize("algorithm", ["fltrust:root=20", "fltrust:root=20,batch=0"])
def test_fltrust_trusts_the_servers_own_step(algorithm: str, t: int) -> None:
    """g_0 is as many local steps on the server's examples as a peer takes, from the same model."""
    setting = digits(algorithm=algorithm, attack="sign_flip:peers=1+2", momentum=0.0)
    server = setting.task.server
    assert server is not None
    assert server.steps.tolist() == [3] == [int(setting.task.steps.max())]
    assert len(server.examples.labels) == 20
    assert (server.examples.labels == 1).sum() == 2
    w = start(setting.run, setting.task, False, True)
    g = (sgd(w.expand(6, -1), setting.task, t) - w).double()
    g[[1, 2]] *= -1
    g0 = (sgd(w, server, t) - w)[0].double()
    trust = torch.relu((g @ g0) / (g.norm(dim=1) * g0.norm()))
    row = (trust[:, None] * g * (g0.norm() / g.norm(dim=1))[:, None]).sum(0) / trust.sum()
    state = setting.algorithm.init(w, w, Net(setting.network, t))
    after = setting.algorithm.round(state, setting.task, Net(setting.network, t))
    assert torch.allclose(after.x[0].double(), w[0].double() + row, atol=1e-6)
    assert torch.allclose(setting.algorithm.observe(after)["trust"], trust, atol=1e-6)
    assert trust[[1, 2]].tolist() == [0, 0]
    assert (trust[[0, 3, 4, 5]] > 0).all()


def test_a_step_of_the_server_can_take_the_whole_root_dataset() -> None:
    """With batch=0, g_0 of one step is minus the learning rate times the gradient on all of it."""
    setting = digits(algorithm="fltrust:root=20,batch=0", local_steps=1, momentum=0.0, lr=0.1)
    server = setting.task.server
    assert server is not None
    assert (server.steps.tolist(), server.padded.tolist()) == ([1], [20])
    w = start(setting.run, setting.task, False, True)
    views = {name: rows[0] for name, rows in server.parameter_layout.views(w).items()}
    leaves = {name: value.clone().requires_grad_() for name, value in views.items()}
    inputs = server.inputs(server.examples.inputs)
    outputs = torch.func.functional_call(server.module, leaves, inputs)
    loss = torch.nn.functional.cross_entropy(outputs, server.examples.labels)
    gradients = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    for name, after in server.parameter_layout.views(sgd(w, server, 0)).items():
        assert torch.allclose(after[0], views[name] - 0.1 * gradients[name], atol=1e-6)
    assert setting.task.solver.batch_size == digits(algorithm="fltrust").task.solver.batch_size


def test_the_server_takes_as_many_steps_as_the_busiest_peer() -> None:
    setting = digits(algorithm="fltrust:root=20", partition="dirichlet:alpha=0.3")
    assert setting.task.server is not None
    assert (
        setting.task.server.steps.tolist()
        == [setting.task.steps.max()]
        > [setting.task.steps.min()]
    )


def test_the_last_step_of_the_server_is_the_centre_of_clipping() -> None:
    """Karimireddy et al. 2021: updates are clipped around the server's last aggregate."""
    setting = digits(algorithm="fedavg", aggregator="clipping:tau=0.01", momentum=0.0)
    *_, before, after = states(setting, 3)
    step = (after.x - before.x)[0]
    assert (step - before.velocity[0]).norm() <= 0.01 + 1e-6
    assert step.norm() > 0.015  # more than clipping around 0 allows


def test_random_attacks_send_other_messages_in_other_rounds() -> None:
    setting = digits(attack="gaussian:peers=2+4")
    messages = torch.randn(6, 30)
    once, again, later = (Net(setting.network, t).exchange(messages).sent for t in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.isclose(once[[2, 4]], later[[2, 4]]).any()
    assert not torch.isclose(once[2], once[4]).any()


def test_over_a_graph_steps_are_falsified() -> None:
    setting = digits(attack="sign_flip:peers=2")
    messages, start = torch.randn(2, 6, 30)
    received = Net(setting.network, 0).exchange(messages, start)
    assert torch.allclose(received.sent[2], 2 * start[2] - messages[2])  # start - (message - start)


def test_falsified_messages_do_not_end_the_run() -> None:
    """An attacker averages its own message, and models of attackers need not be finite."""
    loud = digits(attack="scale:peers=3,factor=1e30", aggregator="median", topology="complete")
    *_, last = states(loud, 4)
    assert torch.isfinite(last.x).all()
    assert last.x.abs().max() < 10
    for row in dfl.simulate(small(attack="scale:peers=3,factor=1e38", aggregator="median")):
        assert np.isfinite(row["train_loss"])


def test_fltrust_without_a_trusted_update_changes_nothing() -> None:
    setting = digits(algorithm="fltrust:root=20", attack="sign_flip:peers=0+1+2+3+4", momentum=0.0)
    w = start(setting.run, setting.task, False, True)
    threatened(setting, attackers=np.arange(6))
    state = setting.algorithm.init(w, w, Net(setting.network, 0))
    assert torch.equal(setting.algorithm.round(state, setting.task, Net(setting.network, 0)).x, w)


def test_the_servers_examples_are_taken_from_the_peers() -> None:
    few, plain = (
        digits(algorithm=a, examples_per_peer=None) for a in ("fltrust:root=30", "fedavg")
    )
    assert few.task.examples.sizes.sum() == plain.task.examples.sizes.sum() - 30


@pytest.mark.usefixtures("without_figures")
def test_the_tables_of_a_run_mark_attackers_and_their_trust(tmp_path: Path) -> None:
    run = small(algorithm="fltrust:root=10", attack="label_flip:peers=2", out=tmp_path / "run")
    for _ in dfl.simulate(run):
        pass
    peers = pd.read_csv(tmp_path / "run" / "peers.csv")
    assert peers["is_attacker"].tolist() == [0, 0, 1, 0]
    assert peers["trust"].between(0, 1).all()
    rows = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert rows["trust_mean"].iloc[-1] == pytest.approx(
        peers["trust"][peers["is_attacker"] == 0].mean()
    )
    assert rows["trust_mean_attackers"].iloc[-1] == peers["trust"][2]
    assert "degree" not in peers


IMPOSSIBLE = [
    (
        "--algorithm fedavg --peers 4 --aggregator krum",
        "--aggregator krum: f=1 needs more than 4 messages, there are 4",
    ),
    (
        "--algorithm fedavg:fraction=0.5 --peers 8 --aggregator krum",
        "--aggregator krum: f=1 needs more than 4 messages",
    ),
    (
        "--algorithm fedavg:stragglers=0.5 --peers 8 --aggregator krum",
        "--aggregator krum: f=1 needs more than 4 messages",
    ),
    ("--aggregator krum", "--aggregator krum: f=1 needs more than 4 messages, there are 3"),
    (
        "--aggregator trimmed_mean:f=2",
        "--aggregator trimmed_mean: f=2 needs more than 4 messages, there are 3",
    ),
    (
        "--algorithm fedavg --aggregator fltrust",
        "--aggregator fltrust has no part in --algorithm fedavg: leave it out",
    ),
    (
        "--algorithm fedavg --until consensus_distance=1",
        "--until consensus_distance=1 has no part in --algorithm fedav",
    ),
    (
        "--attack sign_flip:fraction=0.01",
        "--attack sign_flip: fraction must be 0 or enough for one of 16 peers, not 0.",
    ),
    (
        "--algorithm fltrust --aggregator median",
        "--aggregator median has no part in --algorithm fltrust: leave it out",
    ),
    (
        "--algorithm fedavg:weighting=gradient --aggregator median",
        "--algorithm fedavg: weighting=gradient has no part in --aggregator median, which ignores "
        "weights: leave it out",
    ),
    (
        "--algorithm fltrust:weighting=uniform,root=10",
        "--algorithm fltrust: weighting=uniform has no part in --aggregator fltrust, which ignores",
    ),
    (
        "--attack sign_flip:peers=1+2,fraction=0.5",
        "--attack sign_flip: fraction 0.5 and peers 1+2 both choose peers: give one of them",
    ),
    (
        "--algorithm qdfedavgm --aggregator median",
        "--aggregator median has no part in --algorithm qdfedavgm: leave it",
    ),
    (
        "--algorithm fedavg --topology ring",
        "--topology ring has no part in --algorithm fedavg: leave it out",
    ),
    (
        "--algorithm pooled --mixing lazy",
        "--mixing lazy has no part in --algorithm pooled: leave it out",
    ),
    (
        "--algorithm local_only --bits 4",
        "--bits 4 has no part in --algorithm local_only: leave it out",
    ),
    (
        "--algorithm fedavg --init independent",
        "--init independent has no part in --algorithm fedavg: leave it out",
    ),
    (
        "--algorithm fedavg --attack adaptive",
        "--attack adaptive ",
    ),
    (
        "--algorithm fedavg --attack dissensus",
        "--attack dissensus sends each neighbour a message of its own: choose --algorithm "
        "dfedavgm or dfedsam or epidemic",
    ),
    (
        "--algorithm qdfedavgm --attack dissensus",
        "--attack dissensus sends each neighbour a message of its own: choose",
    ),
    (
        "--algorithm local_only --attack alie",
        "--attack alie falsifies messages, and --algorithm local_only sends none",
    ),
    (
        "--algorithm pooled --attack label_flip",
        "--attack label_flip poisons what peers train on, and --algorithm pooled trains no peer",
    ),
    ("--attack sign_flip:peers=16", "--attack sign_flip: peers must be from 0 to 15, not 16"),
    (
        "--attack sign_flip:fraction=1",
        "--attack sign_flip: all 16 peers ",
    ),
    ("--attack backdoor:target=10", "--attack backdoor: target"),
    (
        "--algorithm fedsgd --local-epochs 3",
        "--algorithm fedsgd takes one step on all of a peer's examples: leave",
    ),
    (
        "--algorithm relay_sgd --mixing lazy",
        "--mixing lazy has no part in --algorithm relay_sgd: leave it out",
    ),
    ("--algorithm fltrust:root=5000", "the server's own examples: 5000 with bias=0.1 need "),
]


@pytest.mark.parametrize(("tokens", "line"), IMPOSSIBLE)
def test_a_rule_or_an_attack_that_cannot_work_is_refused_before_the_run(
    dfl_run: Command, tokens: str, line: str
) -> None:
    peers = [] if "--peers" in tokens else ["--peers", "16"]
    assert dfl_run.refused(*tokens.split(), *peers).startswith(line)


def test_labels_that_are_no_classes_cannot_be_flipped() -> None:
    for attack in ("label_flip", "backdoor"):
        with pytest.raises(dfl.InputError, match=f"--attack {attack} "):
            quadratic(attack=attack)
    with pytest.raises(dfl.InputError, match=r"--until accuracy=0\.9"):
        quadratic(until="accuracy=0.9")


@pytest.mark.usefixtures("without_figures")
def test_the_mean_model_is_that_of_honest_peers(tmp_path: Path) -> None:
    *_, last = dfl.simulate(small(attack="sign_flip:peers=1", out=tmp_path / "run"))
    done = dfl.load(tmp_path / "run")
    for name, parameter in done.mean_model().named_parameters():
        assert torch.allclose(
            parameter.double(), done.state[name][[0, 2, 3]].double().mean(0), atol=1e-6
        )
    assert last["consensus_distance"] > 0
