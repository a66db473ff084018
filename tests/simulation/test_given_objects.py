"""Components that `Run` takes as objects: each gives the bytes of its spec, is checked, and is
named in run.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn

import dfl
from dfl.algorithms.server.fedavg import FedAvg
from dfl.compression import Exact, Quantize
from dfl.datasets.partitions.base import Assignment, Labels
from dfl.environment.faults import Fault, LinkLoss, RoundKey
from dfl.environment.link_models import LINK_MODELS
from dfl.robust.aggregators import AGGREGATORS, Aggregate
from dfl.robust.attacks import ATTACKS, Attack, AttackView
from dfl.training.augmentation import AUGMENTS
from dfl.training.auxiliaries import AUXILIARIES
from dfl.training.losses import cross_entropy
from tests.support.given import PEERS, Lagged, X, Y, given, last, lazy_matrix, refused, small
from tests.support.stopping import crash, same

pytestmark = pytest.mark.filterwarnings("ignore:24 of 120 examples")


@pytest.mark.parametrize(
    ("field", "value", "spec"),
    [
        ("algorithm", FedAvg(fraction=0.5), "fedavg:fraction=0.5"),
        ("topology", nx.path_graph(PEERS), "chain"),
        ("topology", nx.to_numpy_array(nx.path_graph(PEERS), dtype=bool), "chain"),
        ("topology", nx.to_scipy_sparse_array(nx.path_graph(PEERS), dtype=int), "chain"),
        ("mixing", lazy_matrix, "lazy"),
        ("compressor", Exact(), "none"),
        ("aggregator", AGGREGATORS["median"], "median"),
        ("attack", ATTACKS["scale"](peers=(1,)), "scale:peers=1"),
        ("augment", AUGMENTS["none"](), "none"),
        ("auxiliary", AUXILIARIES["supervised"](), "supervised"),
        ("lr_schedule", lambda t, rounds: 0.9**t, "exponential:decay=0.9"),
        ("faults", LinkLoss(p=0.3), "link_loss:p=0.3"),
        ("faults", [LinkLoss(p=0.3)], "link_loss:p=0.3"),
        ("links", LINK_MODELS["phone"](), "phone"),
        ("loss", cross_entropy, "cross_entropy"),
    ],
)
def test_an_object_gives_the_figures_of_its_spec(field: str, value: Any, spec: str) -> None:
    more: dict[str, Any] = {"model": "mlp"} if field == "auxiliary" else {}
    row = last(small(**{field: value}, **more))
    assert row == last(small(**{field: spec}, **more))
    if spec not in ("none", "cross_entropy"):  # these are the defaults
        assert row != last(small(**more))


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "array": lambda: {"dataset": (X.copy(), Y.copy())},
    "tensor": lambda: {"dataset": (torch.from_numpy(X.copy()), torch.from_numpy(Y.copy()))},
    "data": lambda: {"dataset": dfl.Data(X.copy(), Y, X, Y, 4)},
    "matrix": lambda: {"mixing": np.eye(PEERS)},
    "sparse": lambda: {"mixing": csr_array(np.eye(PEERS))},
    "sequence": lambda: {"partition": [np.arange(2 * i, 2 * i + 2) for i in range(PEERS)]},
    "method": lambda: {"algorithm": FedAvg(fraction=0.5)},
    "function": lambda: {"loss": cross_entropy},
    "spec": lambda: {"loss": "squared_error"},
}


@pytest.mark.parametrize("name", PARTS)
def test_runs_are_equal_where_their_objects_are(name: str) -> None:
    one, same = dfl.Run(**PARTS[name]()), dfl.Run(**PARTS[name]())
    assert one == same
    assert hash(one) == hash(same)
    assert one != replace(one, rounds=7)
    assert one != dfl.Run(**PARTS["matrix" if name != "matrix" else "sparse"]())
    assert one != dfl.Run()
    assert one != name


def test_runs_differ_where_a_value_of_an_object_does() -> None:
    run = dfl.Run(dataset=(X, Y), mixing=csr_array(np.eye(4)), partition=[np.arange(4)])
    assert run == replace(run, dataset=(X.copy(), Y))
    for changes in (
        {"dataset": (X + 1, Y)},
        {"dataset": (X, Y.astype(np.int32))},
        {"dataset": (X[1:], Y[1:])},
        {"mixing": csr_array(np.ones((4, 4)))},
        {"partition": [np.arange(4), np.arange(4)]},
        {"model": nn.Linear(6, 4)},
    ):
        assert run != replace(run, **changes)
    assert small(model=nn.Linear(6, 4)) != small(model=nn.Linear(6, 4))  # by identity


def test_a_compressor_as_an_object() -> None:
    given = small(algorithm="qdfedavgm", compressor=Quantize(bits=5))
    assert last(given) == last(small(bits=5))


@dataclass(frozen=True, kw_only=True)
class Shout(Attack):
    """Attackers send their messages times ten."""

    def falsify(self, view: AttackView) -> Any:
        return 10 * view.updates.rows[view.attackers]


@dataclass(frozen=True, kw_only=True)
class Gone(Fault):
    """Peer 0 is down in every round."""

    touches = "peers"
    who: list[int] = field(default_factory=lambda: [0])

    def down(self, round_key: RoundKey) -> Any:
        return np.isin(np.arange(round_key.peers), self.who)


class Halved:
    """A compressor that sends float16."""

    name = "halved"

    def encode(self, messages: Tensor, draw: Any) -> Tensor:
        return messages.half().view(torch.uint8)

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(torch.float16).to(dtype)


class Rowwise(Halved):
    """The same, of one message or more."""

    def encode(self, messages: Tensor, draw: Any) -> Tensor:
        assert len(messages)
        return super().encode(messages, draw)

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        return super().decode(encoded, m, dtype).reshape(len(encoded), -1)


class Unpacked(Halved):
    """The same, without the bytes."""

    def encode(self, messages: Tensor, draw: Any) -> Tensor:
        return messages.half()

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        return encoded.to(dtype)


class Wide(Halved):
    """The same, without the type of the messages."""

    def decode(self, encoded: Tensor, m: int, dtype: torch.dtype) -> Tensor:
        return encoded.view(torch.float16)


@dataclass(frozen=True, kw_only=True)
class Everyone(Attack):
    """Attackers send what all send."""

    def falsify(self, view: AttackView) -> Any:
        return view.updates.rows


@dataclass(frozen=True, kw_only=True)
class Failing(Attack):
    """Attackers have no message."""

    def falsify(self, view: AttackView) -> Any:
        return view.updates.rows[:0][view.attackers]


@dataclass(frozen=True, kw_only=True)
class Onefold(Attack):
    """Attackers send one message over all edges."""

    def falsify_edges(self, view: AttackView, matrix: Any, edges: Any) -> Any:
        return view.updates.rows[:1]


def test_components_of_ones_own_classes() -> None:
    base = last(small())
    assert last(small(attack=Shout(peers=(1,)))) == last(small(attack="scale:peers=1,factor=10"))
    assert last(small(faults=Gone()))["peers_up"] == PEERS - 1
    row = last(small(algorithm="qdfedavgm", compressor=Halved()))
    assert row["payload_bytes"] == base["payload_bytes"] / 2
    assert "--faults" in refused(lambda: small(faults=[Gone(), Gone()]))


@pytest.mark.parametrize(
    ("method", "value", "line"),
    [
        ("down", [True], "what down returns must be ndarray of bool (6,), not [True]"),
        ("down", np.zeros(6), "what down returns must be ndarray of bool (6,), not ndarray of"),
        ("pace", np.ones(5), "what pace returns must be ndarray (6,), not ndarray of float64 (5,)"),
        ("pace", np.full(6, 7.5), "what pace returns must be from 0 to 1, not 7.5"),
        ("pace", np.full(6, np.nan), "what pace returns must be from 0 to 1, not nan"),
        ("loses", np.ones(2, bool), "what loses returns must be ndarray of bool (1,), not ndarray"),
        ("loses", KeyError("oops"), "fails: KeyError: 'oops'"),
    ],
)
def test_faults_of_ones_own_are_called_before_round_0(method: str, value: Any, line: str) -> None:
    def returned(fault: Fault, *arguments: object) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    wrong = type("Wrong", (Fault,), {"touches": "links", method: returned})
    message = refused(lambda: small(faults=wrong()))
    assert message.startswith("--faults Wrong")
    assert line in message


def odd(labels: Labels, peers: int, rng: Any) -> Any:
    return Assignment([np.arange(5)] * (peers - 1), [np.arange(0)] * peers)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"partition": odd}, "--partition returns 5 train parts for 6 peers"),
        ({"partition": lambda labels, peers, rng: [[0]] * peers}, "--partition must return"),
        ({"lr_schedule": lambda t: 1.0}, "--lr-schedule fails"),
        ({"lr_schedule": lambda t, rounds: float("nan")}, "--lr-schedule must return a finite"),
        ({"mixing": lambda graph: 1 / 0}, "--mixing fails: ZeroDivisionError"),
        ({"attack": Failing(peers=(0,))}, "--attack own:Failing(fraction=None, peers=(0,)) fails"),
        ({"aggregator": lambda updates: updates.rows[0]}, "--aggregator must return"),
        ({"aggregator": lambda updates: Aggregate(updates.rows)}, "--aggregator: the row"),
        (
            {"aggregator": lambda updates: Aggregate(updates.rows[0, :3])},
            "--aggregator: the row of 3 messages of 64 numbers must be ndarray (64,), not ndarray",
        ),
        ({"aggregator": lambda updates: Aggregate(updates.mix(np.ones(9)))}, "--aggregator fails"),
        (
            {"aggregator": lambda updates: Aggregate(updates.rows[0], np.ones(9))},
            "--aggregator: the scores",
        ),
        (
            {"algorithm": "qdfedavgm", "compressor": Unpacked()},
            "--compressor own:Unpacked: 8 encoded messages must be Tensor of uint8 (8, B), not "
            "Tensor of float16 (8, 4096)",
        ),
        ({"algorithm": "qdfedavgm", "compressor": Wide()}, "--compressor own:Wide: 8 decoded"),
        (
            {"attack": Everyone(peers=(3, 4))},
            "--attack own:Everyone(fraction=None, peers=(3, 4)): 2 falsified messages of one "
            "number must be ndarray (2, 1), not ndarray of float64 (6, 1)",
        ),
        (
            {"algorithm": "fedavg:fraction=0.34", "attack": Everyone(peers=(3, 4))},
            "--attack own:Everyone",
        ),
        ({"attack": Onefold(peers=(0,))}, "--attack own:Onefold"),
        ({"topology": nx.Graph()}, "--topology"),
        ({"topology": nx.Graph([(i, i) for i in range(PEERS)])}, "--topology"),
        ({"mixing": lambda graph: np.full(graph.shape, 1 / 6)}, "--topology"),
        ({"mixing": lambda graph: None}, "--mixing"),
        ({"mixing": np.zeros((PEERS, PEERS))}, "--"),
        ({"topology": np.full((6, 6), 1 / 6), "mixing": np.eye(6)}, "--topology and --mixing"),
        ({"dataset": (np.ma.masked_equal(X, X[0, 0]), Y)}, "--dataset"),
        *(({"dataset": (X[:n], Y[:n])}, "--dataset must have two examples") for n in (0, 1)),
        ({"dataset": (X, Y[1:])}, "--dataset must have two examples"),
        ({"links": np.array([1, 2])}, "--links"),
    ],
)
def test_what_user_functions_and_arrays_must_be(settings: dict[str, Any], flag: str) -> None:
    assert refused(lambda: small(**settings)).startswith(flag)


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "choco"},
        {"algorithm": "choco", "faults": "link_loss:p=0.5"},
        {"algorithm": "qdfedavgm", "topology": "random_matching", "faults": "outage:p=0.5"},
    ],
)
def test_a_compressor_is_not_called_without_messages(settings: dict[str, Any]) -> None:
    assert last(small(**settings, compressor=Rowwise())) == last(
        small(**settings, compressor=Halved())
    )


def test_a_rule_of_ones_own_is_named_where_models_diverge() -> None:
    """The trial before the run has messages of zeros, of which this rule returns zeros."""

    def rule(updates: Any) -> Any:
        return Aggregate(updates.rows[0] * np.where(updates.rows[0], np.inf, 1))

    for aggregator, end in (
        (rule, ", or check --aggregator own:rule"),
        ("mean", " or other messages"),
    ):
        lr = 0.05 if aggregator is rule else 1e30
        with pytest.raises(dfl.DivergedError) as caught:
            list(dfl.simulate(small(aggregator=aggregator, lr=lr, model="mlp")))
        assert str(caught.value).endswith(end)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5, None])
def test_a_schedule_without_a_rate_ends_the_run_before_the_round(bad: Any, tmp_path: Path) -> None:
    def schedule(t: int, rounds: int) -> Any:
        return bad if t == 2 else 1.0

    rows = dfl.simulate(small(lr_schedule=schedule, rounds=4, eval_every=1, out=tmp_path / "run"))
    seen: list[int] = []
    with pytest.raises(dfl.InputError) as caught:
        seen.extend(int(row["round"]) for row in rows)
    assert seen == [0, 1, 2]
    line = str(caught.value)
    assert line.startswith("--lr-schedule")
    assert "round 2" in line
    assert "\n" not in line
    assert dfl.load(tmp_path / "run").rows["round"].tolist() == seen


def mean(updates: Any) -> Any:
    """Return what the median returns, under the name of the default rule."""
    return AGGREGATORS["median"](updates)


def test_a_rule_named_like_the_default_is_not_taken_for_it() -> None:
    line = refused(lambda: small(bits=4, aggregator=mean))
    assert line.startswith("--aggregator")
    assert last(small(aggregator=mean)) == last(small(aggregator="median"))


@pytest.mark.parametrize(
    "field",
    ["topology", "mixing", "algorithm", "compressor", "aggregator", "attack", "dataset",
     "partition", "augment", "auxiliary", "fairness_adversary", "lr_schedule", "faults", "links",
     "loss"],
)  # fmt: skip
def test_an_object_of_another_kind_is_refused_by_its_flag(field: str) -> None:
    settings: dict[str, Any] = {field: object()}
    if field == "compressor":
        settings["algorithm"] = "qdfedavgm"
    line = refused(lambda: small(**settings))
    assert line.startswith(f"--{field.replace('_', '-')} ")


def test_run_json_names_the_objects_and_a_replay_is_refused(tmp_path: Path, dfl_run: Any) -> None:
    list(dfl.simulate(small(out=tmp_path / "run", **given())))
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    assert {name: settings[name] for name in given()} == {
        "algorithm": "own:Lagged(beta=0.5)",
        "topology": "own:Graph(6 nodes)",
        "model": "own:Linear",
        "dataset": "own:ndarray(120, 6)+ndarray(120,)",
        "loss": "own:weighted",
    }
    for flag in ("--config", "--resume"):
        place = tmp_path / "run" / ("run.json" if flag == "--config" else "")
        line = dfl_run.refused(f"{flag}={place}")
        assert "--algorithm own:Lagged(beta=0.5)" in line
    line = refused(lambda: dfl.Run.from_dict({**settings, "out": None}))
    assert line.startswith("--algorithm")


@pytest.mark.usefixtures("without_figures")
def test_a_run_with_objects_is_resumed_with_them(tmp_path: Path) -> None:
    run = small(rounds=6, checkpoint_every=2)
    list(dfl.simulate(replace(run, out=tmp_path / "whole", **given())))
    crash(replace(run, out=tmp_path / "cut", **given()), 4)
    with pytest.raises(dfl.InputError, match="--algorithm"):
        dfl.resumed(tmp_path / "cut")
    other = given() | {"algorithm": Lagged(beta=0.25)}
    line = refused(lambda: dfl.resumed(tmp_path / "cut", **other))
    assert "--algorithm" in line
    list(dfl.simulate(dfl.resumed(tmp_path / "cut", **given())))
    same(tmp_path / "whole", tmp_path / "cut")
