"""Components that `Run` takes as objects: each gives the bytes of its spec, is checked, and is
named in run.json.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dfl
from dfl.algorithms.gossip.dfedavgm import DFedAvgM, State
from dfl.algorithms.server.fedavg import FedAvg
from dfl.comm.mpi import World
from dfl.compression import Exact, Quantize
from dfl.datasets.data import DATASETS
from dfl.datasets.given import as_data
from dfl.datasets.partitions.base import Assignment, Labels
from dfl.environment.faults import Fault, LinkLoss, RoundKey
from dfl.environment.link_models import LINK_MODELS
from dfl.robust.aggregators import AGGREGATORS, Aggregate
from dfl.robust.attacks import ATTACKS, Attack, AttackView
from dfl.simulation.prepare import prepare
from dfl.training.augmentation import AUGMENTS
from dfl.training.auxiliaries import AUXILIARIES
from dfl.training.losses import cross_entropy, squared_error
from tests.support.quadratic import info
from tests.support.stopping import crash, same

RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 6)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64) + 2 * (X[:, 1] > 0)
DATA = dfl.Data(X[:96], Y[:96], X[96:], Y[96:], 4)
PEERS = 6
NONE: Any = None

pytestmark = pytest.mark.filterwarnings("ignore:24 of 120 examples")


def small(**settings: Any) -> dfl.Run:
    few = {"peers": PEERS, "rounds": 3, "eval_every": 3, "model": "softmax", "dataset": DATA}
    return dfl.Run(**{**few, **settings})


def last(run: dfl.Run) -> dict[str, float]:
    """Return the last row of a run without its clock."""
    *_, row = dfl.simulate(run)
    return {name: value for name, value in row.items() if name != "seconds"}


def refused(run: Callable[[], dfl.Run]) -> str:
    with pytest.raises(dfl.InputError) as caught:
        list(dfl.simulate(run()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def ring_matrix(graph: csr_array) -> csr_array:
    """Return metropolis weights of a ring: 1/3 for each neighbour and oneself."""
    return (graph.astype(np.float64) + csr_array(np.eye(graph.shape[0]))) / 3


def lazy_matrix(graph: csr_array) -> csr_array:
    """Return (I + W) / 2 for those weights."""
    return (ring_matrix(graph) + csr_array(np.eye(graph.shape[0]))) / 2


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
class Lagged(DFedAvgM):
    """DFedAvgM that moves by beta toward the average: with beta = 1 it is DFedAvgM."""

    beta: float = 1.0

    def round(self, state: State, task: Any, net: Any) -> State:
        mean = super().round(state, task, net).x
        return State(state.x + self.beta * (mean - state.x) if self.beta != 1 else mean)


def test_a_method_of_ones_own() -> None:
    assert last(small(algorithm=Lagged())) == last(small())
    still = last(small(algorithm=Lagged(beta=0.0)))
    assert (still["consensus_distance"], still["payload_bytes"]) == (
        0,
        last(small())["payload_bytes"],
    )


class Plain(DFedAvgM):
    applies = ()


@pytest.mark.parametrize("settings", [{"bits": 4}, {"aggregator": "median"}])
def test_a_method_of_ones_own_states_what_it_applies(settings: dict[str, Any]) -> None:
    line = refused(lambda: small(algorithm=Plain(), **settings))
    assert " has no part in --algorithm Plain(): leave it out" in line
    assert "`applies`" in line
    assert "`applies`" not in refused(lambda: small(algorithm="local_only", **settings))


def test_the_number_of_peers_is_that_of_the_graph() -> None:
    graph = nx.cycle_graph(PEERS)
    assert last(small(peers=None, topology=graph)) == last(small(topology="ring"))
    assert "--topology" in (line := refused(lambda: small(peers=5, topology=graph)))
    assert "6 nodes" in line


def test_the_direction_of_an_edge() -> None:
    """With the edge 0 -> 1 peer 1 receives from peer 0, not the other way round."""
    graph = nx.DiGraph([(0, 1), (1, 2), (2, 0)])
    matrix = csr_array(np.array([[0.5, 0, 0.5], [0.5, 0.5, 0], [0, 0.5, 0.5]]))
    by_rule = last(small(peers=3, topology=graph, mixing="uniform"))
    assert by_rule == last(small(peers=3, mixing=matrix))
    assert by_rule != last(small(peers=3, mixing=csr_array(matrix.T)))


def test_a_mixing_matrix_is_the_graph_where_none_is_given() -> None:
    matrix = ring_matrix(csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS))))
    expected = last(small(topology="ring"))
    assert last(small(peers=None, mixing=matrix)) == expected
    assert last(small(mixing=matrix.toarray())) == expected
    assert last(small(topology=nx.cycle_graph(PEERS), mixing=matrix)) == expected
    line = refused(lambda: small(topology=nx.path_graph(PEERS), mixing=matrix))
    assert "--mixing has a weight of peer 0 for peer 5" in line
    assert "--mixing" in refused(lambda: small(topology="ring", mixing=matrix[:4, :4]))


def test_a_graph_for_each_round() -> None:
    pairs = [nx.Graph([(0, 1), (2, 3)]), nx.Graph([(0, 3), (1, 2)])]
    for graph in pairs:
        graph.add_nodes_from(range(4))
    ordered = [nx.Graph() for _ in pairs]
    for graph, other in zip(ordered, pairs, strict=True):
        graph.add_nodes_from(range(4))
        graph.add_edges_from(other.edges)
    run = small(peers=4, topology=ordered, mixing="uniform", rounds=2, lr=1e-9, init="independent")
    row = last(run)
    assert row["consensus_distance"] < 1e-6  # two rounds of pairwise means are the mean of four
    assert last(replace(run, rounds=1))["consensus_distance"] > 1e-3


def test_named_nodes_are_the_same_peers_in_every_round() -> None:
    one = nx.Graph([("a", "b"), ("b", "c")])
    other = nx.Graph([("c", "b"), ("b", "a")])
    line = refused(lambda: small(peers=None, topology=[one, other]))
    assert line.startswith("--topology")
    assert "round 1" in line
    assert "\n" not in line
    ordered = nx.Graph()
    ordered.add_nodes_from(one)
    ordered.add_edges_from(other.edges)
    chain = small(peers=3, topology="chain")
    assert last(small(peers=None, topology=[one, ordered])) == last(chain)


def test_pairs_of_arrays_and_torch_datasets_are_the_same_data() -> None:
    arrays = as_data((X, Y), 3)
    tensors = as_data(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), 3)
    assert (len(arrays.train_inputs), len(arrays.test_inputs), arrays.classes) == (96, 24, 4)
    for name in ("train_inputs", "train_labels", "test_inputs", "test_labels"):
        np.testing.assert_array_equal(getattr(arrays, name), getattr(tensors, name))
    every = np.concatenate([arrays.train_inputs, arrays.test_inputs])
    np.testing.assert_array_equal(np.sort(every, axis=0), np.sort(X, axis=0))
    other = as_data((X, Y), 4)
    assert (other.test_labels != arrays.test_labels).any() or (
        other.test_inputs != arrays.test_inputs
    ).any()
    assert "24 of 120 examples" in arrays.notes[0]


def test_a_train_and_a_test_set() -> None:
    train, test = (
        (X[:96], Y[:96]),
        TensorDataset(torch.from_numpy(X[96:]), torch.from_numpy(Y[96:])),
    )
    assert last(small(dataset=(train, test))) == last(small())


def test_one_example_is_a_test_set() -> None:
    row = last(small(dataset=((X, Y), (X[:1], Y[:1]))))
    assert row["accuracy_mean"] in [k / PEERS for k in range(PEERS + 1)]


class Inputs(TensorDataset):
    """Items without a label."""

    def __getitem__(self, index: int) -> Any:
        return self.tensors[0][index]


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Inputs(torch.from_numpy(X)), "items of a torch Dataset must be pairs (input, label), not"),
        (TensorDataset(torch.from_numpy(X)), "must be pairs (input, label), not (tensor("),
        ((X[:1], Y[:1]), "--dataset must have two examples or more"),
        (((X[:0], Y[:0]), (X, Y)), "--dataset must have an example or more"),
    ],
)
def test_examples_that_are_no_pairs_are_refused(dataset: Any, reason: str) -> None:
    assert reason in refused(lambda: small(dataset=dataset))


def test_targets_that_are_not_finite_are_refused() -> None:
    for half in range(2):
        target = [X[:, 0].copy(), X[:, 1].copy()]
        target[half][3] = np.nan
        dataset = (X, target[0]), (X, target[1])
        run = small(dataset=dataset, model=nn.Linear(6, 1), loss="squared_error")
        line = refused(partial(replace, run))
        assert line == f"{['train', 'test'][half]}_labels has nan at (3,): it must be finite"


@pytest.mark.parametrize(("half", "value"), [(0, -1), (0, 4), (1, -1)])
def test_numbers_that_are_no_tokens_are_refused(half: int, value: int) -> None:
    tokens = [np.random.default_rng(half).integers(4, size=(24, 5)) for half in range(2)]
    labels = [each.copy() for each in tokens]
    tokens[half][3, 2] = value
    data = dfl.Data(tokens[0], labels[0], tokens[1], labels[1], 4)
    line = refused(lambda: small(dataset=data, model="char_lstm:hidden=4,layers=1"))
    assert "takes whole numbers in range(4) as inputs, and those" in line
    assert f"int64 from {min(value, 0)} to {max(value, 3)}" in line


def test_regression_on_arrays() -> None:
    target = X @ np.arange(6, dtype=np.float32)
    run = small(
        dataset=(X, target), model=nn.Linear(6, 1), loss="squared_error", rounds=30, lr=0.01
    )
    first, *_, row = dfl.simulate(run)
    assert row.train_loss < 0.05 * first.train_loss
    assert np.isnan(row.accuracy_mean)


def test_whole_numbers_are_targets_of_a_regression() -> None:
    """Integers give the figures of the same floats; they may be negative."""
    target = np.round(3 * X @ np.arange(6, dtype=np.float32))
    assert target.min() < 0
    run = small(model=nn.Linear(6, 1), loss="squared_error", lr=0.01)
    row = last(replace(run, dataset=(X, target.astype(np.int64))))
    assert row == pytest.approx(last(replace(run, dataset=(X, target))), nan_ok=True, abs=0)
    assert np.isnan(row["accuracy_mean"])


@pytest.mark.parametrize("dataset", ["digits", DATA, (X, Y)])
def test_squared_error_of_several_outputs_for_a_number_is_refused(dataset: Any) -> None:
    own = isinstance(dataset, tuple)
    settings = {"dataset": dataset, "model": nn.Linear(6, 4) if own else "softmax"}
    line = refused(lambda: small(loss="squared_error", **settings))
    assert line.startswith("--loss squared_error")


def test_squared_error() -> None:
    outputs = torch.tensor([[1.0, 2.0], [0.0, 3.0]])
    assert squared_error(outputs, torch.zeros(2, 2)).tolist() == [5.0, 9.0]
    assert squared_error(outputs[:, :1], torch.ones(2)).tolist() == [0.0, 1.0]


def missing(directory: Path | None) -> dfl.Data:
    raise FileNotFoundError(2, "No such file", "x.npy")


def without_a_folder() -> dfl.Data:
    return DATA


@pytest.mark.parametrize(
    ("loader", "reason"),
    [(missing, "FileNotFoundError: .*x.npy"), (without_a_folder, "TypeError: without_a_folder")],
)
def test_a_loader_that_fails_is_refused(loader: Callable[..., dfl.Data], reason: str) -> None:
    with DATASETS.replaced():
        DATASETS.register("mine")(loader)
        line = refused(lambda: small(dataset="mine"))
    assert re.match(f"--dataset mine cannot be read: {reason}", line)


@pytest.mark.usefixtures("without_figures")
def test_a_partition_by_indices(tmp_path: Path) -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    list(dfl.simulate(small(partition=parts, out=tmp_path / "run", rounds=0)))
    peers = dfl.load(tmp_path / "run").peers
    assert peers["n_train"].tolist() == [16] * PEERS
    counts = [np.bincount(Y[part], minlength=4) for part in parts]
    expected = [" ".join(f"{k}:{n}" for k, n in enumerate(each) if n) for each in counts]
    assert peers["labels"].tolist() == expected


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([np.arange(5)] * 2, "2 arrays of indices for 6 peers"),
        ([np.arange(5)] * PEERS, "example 0 has several owners"),
        ([np.array([96 + i]) for i in range(PEERS)], "peer 0 must be whole numbers from 0 to 95"),
        ([np.array([0.5])] * PEERS, "peer 0 must be whole numbers"),
        (
            [*np.split(np.arange(95), 5), np.arange(0)],
            "peer 5 first: 95 of 96 examples are with others",
        ),
        ([[i] for i in range(PEERS)], "must be text, or in Python an object with arrays in place"),
        (lambda *_: Assignment([np.arange(3)] * PEERS, NONE), "example 0 has several owners"),
        (
            lambda *_: Assignment([np.array([i]) for i in range(PEERS)], NONE),
            "returns None as test parts: it must be an array of indices for each peer",
        ),
    ],
)
def test_indices_that_are_no_partition(parts: Any, reason: str) -> None:
    line = refused(lambda: small(partition=parts))
    assert line.startswith("--partition")
    assert reason in line


def test_indices_with_settings_that_draw_examples_are_refused() -> None:
    parts = [np.arange(16 * i, 16 * (i + 1)) for i in range(PEERS)]
    line = refused(lambda: small(partition=parts, examples_per_peer=3))
    assert line.startswith("--examples-per-peer 3")
    line = refused(lambda: small(partition=parts, algorithm="fltrust:root=10"))
    assert line.startswith("--partition")


def test_indices_need_a_test_set_of_their_own() -> None:
    line = refused(lambda: small(dataset=(X, Y), partition=[np.arange(3)] * PEERS))
    assert line.startswith("--partition")


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
        ({"attack": Failing(peers=(0,))}, "--attack own:Failing(fraction=0.2, peers=(0,)) fails"),
        ({"aggregator": lambda updates: updates.rows[0]}, "--aggregator must return"),
        ({"aggregator": lambda updates: Aggregate(updates.rows)}, "--aggregator: the row"),
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
            "--attack own:Everyone(fraction=0.2, peers=(3, 4)): 2 falsified messages of one number "
            "must be ndarray (2, 1), not ndarray of float64 (6, 1)",
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


def test_nodes_that_are_numbers_are_the_peers_of_these_numbers() -> None:
    graph = nx.Graph([(0, 3), (3, 1), (1, 4), (4, 2), (2, 5)])
    ordered = nx.Graph()
    ordered.add_nodes_from(range(PEERS))
    ordered.add_edges_from(graph.edges)
    attacked = {"attack": "scale:peers=0", "topology": graph}
    assert last(small(**attacked)) == last(small(**attacked | {"topology": ordered}))


def test_an_edge_that_is_stored_as_zero_is_none() -> None:
    matrix = csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS)))
    matrix[0, PEERS - 1] = 0
    matrix[PEERS - 1, 0] = 0
    assert last(small(topology=matrix.astype(bool))) == last(small(topology="chain"))


@pytest.mark.usefixtures("without_figures")
def test_a_run_with_a_mixing_matrix_is_resumed_with_it(tmp_path: Path) -> None:
    matrix = ring_matrix(csr_array(nx.to_numpy_array(nx.cycle_graph(PEERS))))
    run = small(rounds=4, checkpoint_every=2, mixing=matrix, peers=None, dataset="digits")
    list(dfl.simulate(replace(run, out=tmp_path / "whole")))
    crash(replace(run, out=tmp_path / "cut"), 2)
    list(dfl.simulate(dfl.resumed(tmp_path / "cut", mixing=matrix)))
    same(tmp_path / "whole", tmp_path / "cut")


def test_as_many_matrices_as_graphs() -> None:
    graph = nx.cycle_graph(PEERS)
    matrix = ring_matrix(csr_array(nx.to_numpy_array(graph)))
    assert last(small(topology=graph, mixing=[matrix])) == last(small(topology="ring"))
    for graphs, matrices in ((1, 2), (3, 2), (2, 3)):
        run = small(topology=[graph] * graphs, mixing=[matrix] * matrices)
        with pytest.raises(dfl.InputError) as caught:
            list(dfl.simulate(run))
        line = str(caught.value)
        assert "--mixing" in line


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


class Bare(NamedTuple):
    x: Tensor


class Undressed(DFedAvgM):
    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return Bare(x)


def test_a_state_is_a_dataclass() -> None:
    message = refused(lambda: small(algorithm=Undressed()))
    assert "--algorithm" in message
    assert "Bare" in message


@dataclass(frozen=True)
class Kept:
    x: Tensor
    kept: Any


@dataclass(frozen=True, kw_only=True)
class Returning(DFedAvgM):
    """DFedAvgM whose states are made by functions of the models."""

    begun: Any = State
    after: Any = State

    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return self.begun(x)

    def round(self, state: Any, task: Any, net: Any) -> Any:
        return self.after(super().round(state, task, net).x)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Returning(begun=lambda x: x), "what init returns must be a frozen dataclass"),
        (Returning(begun=lambda x: State(x[0])), "what init returns: x must be Tensor of float32"),
        (Returning(begun=lambda x: State(x.double())), "what init returns: x must be Tensor of"),
        *(
            (Returning(begun=partial(Kept, kept=kept)), "what init returns: kept must be a tensor")
            for kept in (3, None, (), np.zeros(3), torch.tensor(3))
        ),
        (Returning(after=lambda z: None), "what round returns must be a frozen dataclass"),
        (Returning(after=lambda z: z), "what round returns must be a frozen dataclass"),
        (Returning(after=lambda z: State(z[0])), "what round returns: x must be Tensor of float32"),
        (Returning(after=lambda z: State(z[:1])), "what round returns: x must be Tensor of"),
        (Returning(after=lambda z: State(z.double())), "what round returns: x must be Tensor of"),
        (Returning(after=lambda z: Kept(z, 3)), "what round returns: kept must be a tensor"),
    ],
)
def test_a_state_has_tensors_of_one_form(method: Returning, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith("--algorithm own:Returning")
    assert wanted in line


@dataclass(frozen=True, kw_only=True)
class Changing(DFedAvgM):
    """Has a second field, of another form from round 3 on."""

    kept: Any

    def init(self, x: Tensor, copies: Tensor, net: Any) -> Any:
        return Kept(x, torch.zeros_like(x))

    def round(self, state: Any, task: Any, net: Any) -> Any:
        x = super().round(state, task, net).x
        return Kept(x, state.kept if net.t < 3 else self.kept(state.kept))


@pytest.mark.parametrize(
    "kept",
    [
        lambda kept: None,
        lambda kept: kept[:1],
        lambda kept: kept.double(),
        lambda kept: kept[:, 1:],
    ],
)
def test_a_state_has_the_same_form_in_every_round(kept: Any) -> None:
    rows: list[dfl.Row] = []
    with pytest.raises(dfl.InputError, match="what round returns: kept must be Tensor of float32"):
        rows.extend(dfl.simulate(small(algorithm=Changing(kept=kept), rounds=6, eval_every=1)))
    assert len(rows) == 4


class Sending(DFedAvgM):
    """The peers average before round 0."""

    def init(self, x: Tensor, copies: Tensor, net: Any) -> State:
        return State(net.exchange(x).average())


class Raising(DFedAvgM):
    def init(self, x: Tensor, copies: Tensor, net: Any) -> State:
        raise KeyError("x")


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Sending(), "--algorithm: init sends messages, which round alone may"),
        (Raising(), "--algorithm: init fails: KeyError: 'x'"),
    ],
)
def test_init_only_makes_a_state(method: DFedAvgM, wanted: str) -> None:
    assert refused(lambda: small(algorithm=method)) == wanted


@dataclass(frozen=True, kw_only=True)
class Exchanging(DFedAvgM):
    """Models as they are received, of messages that a function makes of the models."""

    sent: Any
    per_edge: bool = False

    def round(self, state: Any, task: Any, net: Any) -> Any:
        return State(net.exchange(self.sent(state.x), per_edge=self.per_edge).average())


@dataclass(frozen=True, kw_only=True)
class Uploading(FedAvg):
    """FedAvg whose clients send one row too few."""

    def round(self, state: Any, task: Any, net: Any) -> Any:
        net.collect(state.x[:0], net.everyone)
        return super().round(state, task, net)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Exchanging(sent=lambda x: x[0]), "must be Tensor (6, m), not Tensor of float32 (28,)"),
        (Exchanging(sent=lambda x: x.numpy()), "must be Tensor (6, m), not ndarray of float32"),
        (Exchanging(sent=lambda x: x, per_edge=True), "must be Tensor (12, m), not Tensor of"),
        (Uploading(), "must be Tensor (6, m), not Tensor of float32 (0, 28)"),
    ],
)
def test_messages_have_a_row_each(method: Any, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith(f"--algorithm: the messages that round sends {wanted}")


class Observing(DFedAvgM):
    columns = ("gap",)

    def observe(self, state: State) -> Any:
        return {"gap": 1.0}


class Other(Observing):
    def observe(self, state: State) -> Any:
        return {"other": state.x[:, 0]}


class Forgetting(DFedAvgM):
    columns = ("gap",)


class Requiring(DFedAvgM):
    requires: ClassVar[Any] = ("static",)


class Expecting(DFedAvgM):
    expects: ClassVar[Any] = {"static": "it is slow"}


@pytest.mark.parametrize(
    ("method", "wanted"),
    [
        (Observing(), "what observe returns: gap must be Tensor (6,), not 1.0"),
        (Other(), "what observe returns lacks gap, which columns names"),
        (Forgetting(), "what observe returns lacks gap, which columns names"),
        (Requiring(), "requires must be a dict of dfl.algorithms.assumptions, not ('static',)"),
        (Expecting(), "expects must be a dict of dfl.algorithms.assumptions, not {'static'"),
    ],
)
def test_what_a_method_states_has_its_form(method: DFedAvgM, wanted: str) -> None:
    line = refused(lambda: small(algorithm=method))
    assert line.startswith(f"--algorithm own:{type(method).__name__}")
    assert wanted in line


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x / x.norm().clip(min=1).item(),
        lambda x: torch.from_numpy(x.numpy().copy()),
        lambda x: x + torch.zeros(len(x), 1),
    ],
)
def test_init_may_read_the_models(read: Any) -> None:
    """The memory of a state is estimated on models without values."""

    def both(x: Tensor) -> Kept:
        return Kept(x, read(x))

    run = small(algorithm=Returning(begun=both, after=both))
    assert info(prepare(run, World())).method.rows == 1
    assert last(run)["train_loss"] == last(small())["train_loss"]


def test_a_class_is_no_method() -> None:
    line = refused(lambda: small(algorithm=DFedAvgM))
    assert line.startswith("--algorithm must be a spec or an object of class Algorithm")


def given() -> dict[str, Any]:
    """Return an object for each of some fields, of other identity at every call."""
    torch.manual_seed(0)
    return {
        "algorithm": Lagged(beta=0.5),
        "topology": nx.cycle_graph(PEERS),
        "model": nn.Linear(6, 4),
        "dataset": (X, Y),
        "loss": weighted,
    }


def weighted(outputs: Tensor, labels: Tensor) -> Tensor:
    return 2 * cross_entropy(outputs, labels)


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


class Late(DFedAvgM):
    """Returns nothing in round 4."""

    def round(self, state: State, task: Any, net: Any) -> Any:
        return super().round(state, task, net) if net.t < 4 else None


@pytest.mark.usefixtures("without_figures")
def test_the_first_round_after_a_resume_is_checked(tmp_path: Path) -> None:
    given = {"algorithm": Late(), "dataset": DATA}
    crash(small(rounds=6, checkpoint_every=2, out=tmp_path, **given), 4)
    line = refused(lambda: dfl.resumed(tmp_path, **given))
    assert "what round returns must be a frozen dataclass" in line


class InPlace(nn.Module):
    """Doubles its inputs without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2))
        return y


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_model_that_changes_its_inputs_is_refused(engine: str) -> None:
    """Every evaluation would change the test set again."""
    line = refused(lambda: small(model=InPlace(), engine=engine))
    assert "the model InPlace changes its inputs in place" in line


class Tokens(nn.Module):
    """Looks up a row for each of six tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.table(x.long()).flatten(1))
        return y


def test_parts_of_a_partition_may_be_rows_of_an_array() -> None:
    own: Any = np.arange(96).reshape(PEERS, -1)
    test: Any = np.arange(24).reshape(PEERS, -1)
    arrays = last(small(partition=lambda *_: Assignment(own, test)))
    lists = last(small(partition=lambda *_: Assignment([*own], [*test])))
    assert arrays["train_loss"] == lists["train_loss"]


@pytest.mark.parametrize("engine", ["auto", "batched", "loop"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_token_without_a_row_is_refused(engine: str, half: int) -> None:
    """With several models torch.func.vmap reads a row of another model in its place."""
    tokens = np.random.default_rng(0).integers(0, 9, (120, 6))
    tokens[[50, 110][half], 3] = 9
    labels = tokens.sum(1) % 4
    data = dfl.Data(tokens[:96], labels[:96], tokens[96:], labels[96:], classes=4)
    assert last(small(model=Tokens(10), dataset=data, engine=engine))["train_loss"] < 2
    line = refused(lambda: small(model=Tokens(9), dataset=data, engine=engine))
    assert "the model Tokens fails" in line
    assert "index out of range" in line


def test_outputs_of_a_regression_may_have_no_axis() -> None:
    numbers = ((X[:96], X[:96, 0]), (X[96:], X[96:, 0]))
    scalar, column = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), nn.Linear(6, 1)
    column.load_state_dict(scalar[0].state_dict())
    rows = [
        last(small(model=model, dataset=numbers, loss="squared_error"))
        for model in (scalar, column)
    ]
    assert rows[0]["train_loss"] == rows[1]["train_loss"] < 1
