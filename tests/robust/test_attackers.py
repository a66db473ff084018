"""Do lies reach those who are lied to, through rules and words, and are the honest what is
measured?
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dfl
from dfl.comm.net import Net
from dfl.evaluation import metrics
from dfl.robust.aggregators import AGGREGATORS, Updates
from dfl.robust.attacks import ATTACKS
from dfl.robust.attacks.blind import SignFlip
from dfl.simulation import monitor
from dfl.simulation.initialization import start
from dfl.simulation.prepare import Prepared
from dfl.training.sgd import sgd
from tests.conftest import Command
from tests.reporting.test_report import small
from tests.support.quadratic import digits, moments, quadratic, states

RULES = {
    "median": {},
    "trimmed_mean": {"f": 1},
    "krum": {"f": 1},
    "geometric_median": {},
    "fltrust": {},
    "clipping": {},
}


def spoken(setting: Prepared, **threat_model: Any) -> Prepared:
    """The setting with another manner of speaking."""
    setting.network.threat_model = setting.network.threat_model._replace(**threat_model)
    return setting


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("topology", ["regular:k=4", "complete"])
def test_a_peer_combines_what_its_closed_neighbourhood_says(name: str, topology: str) -> None:
    """Row by row from the dense matrix: steps from where the peer stood, its own step trusted."""
    setting, rule = digits(topology=topology, peers=7), partial(AGGREGATORS[name], **RULES[name])
    rng = np.random.default_rng(0)
    words, origin = (torch.from_numpy(rng.normal(size=(7, 30))) for _ in range(2))
    got = Net(setting.network, 0).exchange(words, origin).combine(rule)
    dense = setting.network.schedule.weights[0].toarray()
    for i, weights in enumerate(dense):
        near = np.flatnonzero(weights)
        assert i in near
        steps = words.numpy()[near] - origin.numpy()[i]
        expected = (
            origin.numpy()[i]
            + rule(Updates(steps, weights[near], words.numpy()[i] - origin.numpy()[i])).row
        )
        np.testing.assert_allclose(got[i], expected, rtol=0, atol=1e-12)


def test_the_mean_of_a_neighbourhood_is_the_average() -> None:
    setting = digits()
    words = torch.randn(6, 40)
    heard = Net(setting.network, 0).exchange(words)
    assert torch.equal(heard.combine(partial(AGGREGATORS["mean"])), heard.average())


@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
@pytest.mark.parametrize("name", ["mean", "median"])
def test_words_over_edges_are_combined_like_words_of_peers(topology: str, name: str) -> None:
    """An attack that says the same over every edge changes nothing but the way that words take."""

    class EachEdge(SignFlip):
        per_edge = True

    words, rule = torch.randn(8, 50), partial(AGGREGATORS[name])
    for t in range(3):
        once, each = (
            spoken(digits(topology=topology, peers=8), attack=attack(), attackers=np.array([2, 5]))
            for attack in (ATTACKS["sign_flip"], EachEdge)
        )
        one, other = (Net(s.network, t).exchange(words).combine(rule) for s in (once, each))
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
        assert once.network.traffic.payload.tolist() == each.network.traffic.payload.tolist()


def test_neighbours_hear_the_lie_and_the_truth_of_others() -> None:
    setting = spoken(digits(peers=6), attack=ATTACKS["scale"](factor=10.0), attackers=np.array([1]))
    words = torch.randn(6, 20)
    heard = Net(setting.network, 0).exchange(words)
    assert torch.equal(heard.sent[1], words[1] * 10)
    assert torch.equal(heard.sent[[0, 2, 3, 4, 5]], words[[0, 2, 3, 4, 5]])
    assert torch.equal(heard.own, words)  # to itself a liar says the truth
    weights = torch.from_numpy(setting.network.schedule.weights[0].toarray()).float()
    expected = weights @ heard.sent + weights.diagonal()[:, None] * (words - heard.sent)
    assert torch.allclose(heard.average(), expected, atol=1e-5)


def test_the_lie_goes_over_edges_where_edges_speak() -> None:
    """On a graph that changes qdfedavgm says a word per edge: those of liars are falsified, each
    once.
    """
    setting = digits(
        algorithm="qdfedavgm",
        topology="one_peer_exponential",
        peers=8,
        attack="scale:peers=2+5,factor=3",
    )
    net = Net(setting.network, 1)
    words = torch.randn(len(net.edges.owner), 20)
    heard = net.exchange(words, edges=net.edges)
    for k, owner in enumerate(net.edges.owner):
        assert torch.equal(heard.sent[k], words[k] * 3 if owner in (2, 5) else words[k])
    assert torch.equal(heard.own, words)


def test_a_server_hears_the_lie() -> None:
    setting = spoken(
        digits(peers=6, algorithm="fedavg"),
        attack=ATTACKS["sign_flip"](),
        attackers=np.array([0, 4]),
    )
    words, net = torch.randn(3, 20), Net(setting.network, 0)
    heard = net.aggregate(
        words, net.group(np.array([5, 2, 4])), np.array([1, 2, 3])
    )  # rows are 2, 4, 5
    assert torch.allclose(heard.row[0], (words[0] - 2 * words[1] + 3 * words[2]) / 6, atol=1e-6)


def test_poisoned_examples_are_the_liars_only() -> None:
    honest, poisoned = (
        digits(attack=attack).task.examples for attack in ("none", "label_flip:peers=1+3")
    )
    for i in range(6):
        part = slice(int(honest.starts[i]), int(honest.starts[i] + honest.sizes[i]))
        assert torch.equal(poisoned.inputs[part], honest.inputs[part])
        expected = 9 - honest.labels[part] if i in (1, 3) else honest.labels[part]
        assert torch.equal(poisoned.labels[part], expected)


def test_figures_are_over_the_honest() -> None:
    setting = digits(attack="sign_flip:peers=0+4")
    *_, last = moments(setting, 3)
    peers = monitor.measure(last, setting)
    assert peers is not None
    assert peers["is_attacker"].tolist() == [1, 0, 0, 0, 1, 0]
    row, honest = metrics.summary(peers, ()), [1, 2, 3, 5]
    assert row["accuracy_mean"] == pytest.approx(peers["accuracy"][honest].mean())
    assert row["accuracy_min"] == peers["accuracy"][honest].min()
    distance, mean = monitor.consensus(last, setting)
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
    *_, last = moments(setting, 2)
    peers = monitor.measure(last, setting)
    assert peers is not None
    said = setting.task.outputs(
        setting.task.parameter_layout.views(last.models), setting.task.inputs(inputs), each=False
    ).argmax(2)
    assert set(peers["backdoor_success"]) == {float((said == 3).double().mean())}
    assert metrics.summary(peers, ())["backdoor_success_mean"] == peers["backdoor_success"][0]


@pytest.mark.parametrize("t", [0, 3])
def test_trust_is_in_what_the_server_learned_itself(t: int) -> None:
    """g_0 is as many local steps on the root examples as a peer takes, from the same model; by the
    explicit formula.
    """
    setting = digits(algorithm="fltrust:root=20", attack="sign_flip:peers=1+2", momentum=0.0)
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


def test_the_server_takes_as_many_steps_as_the_busiest_peer() -> None:
    setting = digits(algorithm="fltrust:root=20", partition="dirichlet:alpha=0.3")
    assert setting.task.server is not None
    assert (
        setting.task.server.steps.tolist()
        == [setting.task.steps.max()]
        > [setting.task.steps.min()]
    )


def test_the_last_step_is_the_centre_of_clipping() -> None:
    """Karimireddy et al. 2021: a server goes on from its last aggregate, and words are clipped
    around it.
    """
    setting = digits(algorithm="fedavg", aggregator="clipping:tau=0.01", momentum=0.0)
    *_, before, after = states(setting, 3)
    step = (after.x - before.x)[0]
    assert (step - before.velocity[0]).norm() <= 0.01 + 1e-6
    assert step.norm() > 0.015  # and not around 0


def test_liars_say_other_things_in_other_rounds() -> None:
    setting = digits(attack="gaussian:peers=2+4")
    words = torch.randn(6, 30)
    once, again, later = (Net(setting.network, t).exchange(words).sent for t in (0, 0, 1))
    assert torch.equal(once, again)
    assert not torch.isclose(once[[2, 4]], later[[2, 4]]).any()
    assert not torch.isclose(once[2], once[4]).any()


def test_over_a_graph_lies_are_about_the_step() -> None:
    setting = digits(attack="sign_flip:peers=2")
    words, origin = torch.randn(2, 6, 30)
    heard = Net(setting.network, 0).exchange(words, origin)
    assert torch.allclose(heard.sent[2], 2 * origin[2] - words[2])  # origin - (word - origin)


def test_a_liar_does_not_harm_itself_or_end_the_run() -> None:
    """What a liar says to others it does not believe, and what others make of it is not its
    concern.
    """
    loud = digits(attack="scale:peers=3,factor=1e30", aggregator="median", topology="complete")
    *_, last = states(loud, 4)
    assert torch.isfinite(last.x).all()
    assert last.x.abs().max() < 10
    for row in dfl.simulate(small(attack="scale:peers=3,factor=1e38", aggregator="median")):
        assert np.isfinite(row["train_loss"])


def test_nobody_to_trust_changes_nothing() -> None:
    setting = digits(algorithm="fltrust:root=20", attack="sign_flip:peers=0+1+2+3+4", momentum=0.0)
    w = start(setting.run, setting.task, False, True)
    spoken(setting, attackers=np.arange(6))
    state = setting.algorithm.init(w, w, Net(setting.network, 0))
    assert torch.equal(setting.algorithm.round(state, setting.task, Net(setting.network, 0)).x, w)


def test_root_examples_are_no_peers() -> None:
    few, plain = (
        digits(algorithm=a, examples_per_peer=None) for a in ("fltrust:root=30", "fedavg")
    )
    assert few.task.examples.sizes.sum() == plain.task.examples.sizes.sum() - 30


def test_a_run_with_liars_says_so(tmp_path: Path) -> None:
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
        "--aggregator krum: f=1 needs more than 4 words, there are 4",
    ),
    (
        "--algorithm fedavg:fraction=0.5 --peers 8 --aggregator krum",
        "--aggregator krum: f=1 needs more than 4 words",
    ),
    (
        "--algorithm fedavg:stragglers=0.5 --peers 8 --aggregator krum",
        "--aggregator krum: f=1 needs more than 4 words",
    ),
    ("--aggregator krum", "--aggregator krum: f=1 needs more than 4 words, there are 3"),
    (
        "--aggregator trimmed_mean:f=2",
        "--aggregator trimmed_mean: f=2 needs more than 4 words, there are 3",
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
        "--attack adaptive is made for a server that trusts an update: it needs",
    ),
    (
        "--algorithm fedavg --attack dissensus",
        "--attack dissensus sends each neighbour another message: choose --algorit",
    ),
    (
        "--algorithm qdfedavgm --attack dissensus",
        "--attack dissensus sends each neighbour another message: choose --algo",
    ),
    (
        "--algorithm local_only --attack alie",
        "--attack alie falsifies messages, and --algorithm local_only sends none",
    ),
    ("--attack sign_flip:peers=16", "--attack sign_flip: peers must be from 0 to 15, not 16"),
    (
        "--attack sign_flip:fraction=1",
        "--attack sign_flip: all 16 peers lie; leave somebody honest",
    ),
    ("--attack backdoor:target=10", "--attack backdoor: target"),
    (
        "--algorithm fedsgd --local-epochs 3",
        "--algorithm fedsgd takes one step on all of a peer's examples: leave",
    ),
    ("--algorithm fltrust:root=5000", "--algorithm fltrust: root=5000 with bias=0.1 needs "),
]


@pytest.mark.parametrize(("tokens", "line"), IMPOSSIBLE)
def test_what_cannot_be_withstood_or_told_is_refused_before(
    dfl_run: Command, tokens: str, line: str
) -> None:
    peers = [] if "--peers" in tokens else ["--peers", "16"]
    assert dfl_run.refused(*tokens.split(), *peers).startswith(line)


def test_labels_that_are_no_classes_cannot_be_flipped() -> None:
    for attack in ("label_flip", "backdoor"):
        with pytest.raises(dfl.InputError, match=f"{attack} needs labels that are classes"):
            quadratic(attack=attack)
    with pytest.raises(dfl.InputError, match="no classes have no accuracy"):
        quadratic(until="accuracy=0.9")


def test_the_mean_model_is_that_of_the_honest(tmp_path: Path) -> None:
    *_, last = dfl.simulate(small(attack="sign_flip:peers=1", out=tmp_path / "run"))
    done = dfl.load(tmp_path / "run")
    for name, parameter in done.mean_model().named_parameters():
        assert torch.allclose(
            parameter.double(), done.state[name][[0, 2, 3]].double().mean(0), atol=1e-6
        )
    assert last["consensus_distance"] > 0
