"""Is what peers share, and only that, said and mixed, and does the rest stay with them?"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl import Data, Run, cost, metrics, simulate
from dfl.algorithms import ALGORITHMS
from dfl.errors import InputError
from dfl.local import sgd
from dfl.models import MODELS, Spec, draw
from dfl.mpi import World
from dfl.net import Net
from dfl.setup import make_module
from dfl.simulation import Setting, prepare
from dfl.specs import choose
from dfl.split import joined, parted, shared_names
from tests.quadratic import digits, final, states

NAMES = ["0.weight", "0.bias", "2.weight", "conv.weight", "5.bias"]
MLP: dict[str, Any] = {"model": "mlp:hidden=12+8"}


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        ("all", NAMES),
        ("nothing", []),
        ("head:1", ["5.bias"]),
        ("head:2", ["conv.weight", "5.bias"]),
        ("first:1", ["0.weight", "0.bias"]),
        ("first:4", NAMES),
        ("conv*", ["conv.weight"]),
        ("2", ["2.weight"]),
        ("5.*+0.bias", ["0.bias", "5.bias"]),
        ("*bias", ["0.bias", "5.bias"]),
        ("*", NAMES),
    ],
)
def test_shares_are_read(share: str, expected: list[str]) -> None:
    assert list(shared_names(share, NAMES)) == expected


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("cnov*", "'cnov*'.*choose from all, nothing, head:1, 0, 2, conv, 5, 0.weight"),
        ("0+6.*", "called '6.*'"),
        ("head:5", "1 to 4 layers.*'5'"),
        ("head:0", "1 to 4 layers"),
        ("first:-1", "1 to 4 layers"),
        ("head:two", "not 'two'"),
        ("", "called ''"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_names(share: str, said: str) -> None:
    with pytest.raises(InputError, match="--share") as refused:
        shared_names(share, NAMES)
    assert all(part in str(refused.value) for part in said.split(".*"))
    assert "\n" not in str(refused.value)


def test_a_row_begins_with_what_is_shared_and_holds_the_same_model() -> None:
    module = MODELS["mlp"]((1, 4, 4), 3, hidden=(5, 4))
    whole, head = Spec.of(module), Spec.of(module, "head:2")
    assert (whole.shared, head.shared, head.d) == (whole.d, 5 * 4 + 4 + 4 * 3 + 3, whole.d)
    assert head.common == ("3.weight", "3.bias", "5.weight", "5.bias")
    assert head.whole.shared == head.d
    for spec in (whole, head):
        rows = draw(module, spec, 0, [0, 3])
        ours = spec.views(rows)
        for name, value in whole.views(draw(module, whole, 0, [0, 3])).items():
            assert torch.equal(ours[name], value)
        nn.utils.vector_to_parameters(draw(module, whole, 0, [3])[0], module.parameters())
        assert torch.equal(spec.row(module), rows[1])


def test_rows_are_parted_and_joined_again() -> None:
    x = torch.arange(12.0).view(3, 4)
    for s in range(5):
        assert torch.equal(joined(*parted(x, s)), x)
    assert torch.equal(joined(x[:1, :2], x[:, 2:]), torch.cat([x[:1, :2].expand(3, -1), x[:, 2:]], 1))


EVERYBODY = [
    {"algorithm": "fedavg"},
    {"algorithm": "fedavg", "bits": 4},
    {"algorithm": "fedprox:mu=0"},
    {},
    {"bits": 4},
    {"bits": 2, "topology": "one_peer_exponential"},
    {"algorithm": "qdfedavgm:exchange=paper", "compressor": "quantize:bits=8"},
    {"aggregator": "median"},
]


@pytest.mark.parametrize("way", EVERYBODY)
def test_sharing_nothing_is_training_alone_bit_for_bit(way: dict[str, Any]) -> None:
    alone, setting = digits(algorithm="local_only", **MLP), digits(share="nothing", **MLP, **way)
    assert torch.equal(final(setting, 3), final(alone, 3))
    assert not setting.network.payload.any()
    assert not setting.network.told.any()


@pytest.mark.parametrize("way", [*EVERYBODY, {"algorithm": "fedavg:fraction=0.4,server_momentum=0.5"}])
def test_a_pattern_of_everything_is_all_bit_for_bit(way: dict[str, Any]) -> None:
    whole, pattern = (digits(share=share, **MLP, **way) for share in ("all", "*"))
    assert torch.equal(final(whole, 3), final(pattern, 3))
    assert whole.network.payload.tolist() == pattern.network.payload.tolist()


def by_hand(setting: Setting, rounds: int, mix: Tensor) -> Tensor:
    """X = W @ sgd(X) in the shared coordinates, X = sgd(X) in the others."""
    x, s = next(states(setting, 0)).x, setting.task.spec.shared
    for t in range(rounds):
        z = sgd(x, setting.task, t)
        x = torch.cat([(mix @ z[:, :s].double()).float(), z[:, s:]], 1)
    return torch.as_tensor(x)


@pytest.mark.parametrize("share", ["head:2", "first:1", "1.bias+5.*"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_over_a_graph_only_the_shared_part_is_mixed(share: str, topology: str) -> None:
    setting = digits(share=share, topology=topology, **MLP)
    mix = torch.from_numpy(setting.network.weights[0].toarray())
    expected = by_hand(setting, 3, mix)
    assert torch.allclose(final(setting, 3), expected, atol=1e-6)
    s, p = setting.task.spec.shared, setting.layout.peers
    assert setting.network.payload.tolist() == [3 * 4 * s * (2 if topology == "ring" else p - 1)] * p
    exact = digits(share=share, topology=topology, algorithm="qdfedavgm", **MLP)
    assert torch.allclose(final(exact, 3), expected, atol=1e-5)


def test_with_a_server_it_is_lg_fedavg() -> None:
    """Algorithm 1 of Liang et al., peer by peer: who is not chosen keeps its own part, and w is everybody's."""
    setting = digits(algorithm="fedavg:fraction=0.5", share="head:1", **MLP)
    s, run = setting.task.spec.shared, list(states(setting, 3))
    x, sizes = next(states(setting, 0)).x, torch.from_numpy(setting.task.train.sizes).double()
    x = x.expand(6, -1).clone()
    for t in range(3):
        chosen, *_ = setting.algorithm._draw(setting.task, Net(setting.network, t), t)  # type: ignore[attr-defined]
        z = sgd(x, setting.task, t)
        weight = sizes[chosen.here] / sizes[chosen.here].sum()
        x[chosen.here, s:] = z[chosen.here, s:]
        x[:, :s] = (weight @ z[chosen.here, :s].double()).float()
    assert torch.allclose(run[-1].x, x, atol=1e-6)
    assert run[-1].x.shape == x.shape
    assert not run[-1].one
    assert len(torch.unique(run[-1].x[:, s:], dim=0)) > 3


def test_a_pull_holds_only_what_is_shared() -> None:
    """With one peer and one step nothing has moved yet, with two the pull differs in the shared part alone."""
    ways = [digits(peers=1, local_steps=2, share="head:1", algorithm=f"fedprox:mu={mu}", **MLP) for mu in (0, 5)]
    free, held = (final(setting, 1)[0] for setting in ways)
    s = ways[0].task.spec.shared
    assert not torch.equal(free[:s], held[:s])
    assert torch.equal(free[s:], held[s:])


def test_steps_can_count_by_their_length() -> None:
    setting = digits(algorithm="fedavg:weighting=gradient", **MLP)
    first, second = states(setting, 1)
    steps = (sgd(first.w.expand(6, -1), setting.task, 0) - first.w).double()
    weight = steps.square().sum(1) / steps.square().sum()
    assert torch.allclose(second.w[0].double(), first.w[0] + weight @ steps, atol=1e-6)
    assert not torch.allclose(weight, torch.full((6,), 1 / 6, dtype=torch.float64), rtol=1e-2)


def test_at_first_everything_can_be_shared() -> None:
    """Two rounds of FedAvg, then local-global rounds from there; the bytes of both kinds are counted."""
    few: dict[str, Any] = {"peers": 6, "examples_per_peer": 25, "rounds": 4, "eval_every": 1, **MLP}
    few |= {"algorithm": "fedavg"}
    rows = list(simulate(Run(share="head:1", pretrain="2", **few)))
    whole = list(simulate(Run(**few)))
    spec = digits(share="head:1", **MLP).task.spec
    assert [row["train_loss"] for row in rows[:3]] == [row["train_loss"] for row in whole[:3]]
    assert rows[3]["train_loss"] != whole[3]["train_loss"]
    assert [row["consensus_distance"] > 0 for row in rows] == [False, False, False, True, True]
    steps = np.diff([row["parameters_k_plus_m"] for row in rows])
    assert steps.tolist() == [12 * spec.d, 12 * spec.d, 12 * spec.shared, 12 * spec.shared]
    goal = whole[1]["accuracy_mean"]
    until = list(simulate(Run(share="head:1", pretrain=f"accuracy={goal}", **few)))
    turns = [row["accuracy_mean"] >= goal for row in whole].index(True)
    assert [row["consensus_distance"] > 0 for row in until].index(True) == turns + 1


def test_copies_of_neighbours_are_cut_when_less_is_shared() -> None:
    few: dict[str, Any] = {"peers": 6, "examples_per_peer": 25, "rounds": 4, "bits": 8, **MLP}
    for topology in ("ring", "one_peer_exponential"):
        setting = digits(share="head:1", **few, topology=topology)
        whole = replace(setting.task, spec=setting.task.spec.whole)
        state, s = next(states(replace(setting, task=whole), 0)), setting.task.spec.shared
        state = setting.algorithm.round(state, whole, Net(setting.network, 0), 0)
        cut = setting.algorithm.part(state, s)
        assert torch.equal(cut.said, state.said[:, :s])
        assert torch.equal(cut.heard, state.heard[:, :s])
        after = setting.algorithm.round(cut, setting.task, Net(setting.network, 1), 1)
        assert torch.equal(after.x[:, s:], sgd(state.x, setting.task, 1)[:, s:])


@pytest.mark.parametrize(
    ("model", "shape", "share", "rounds", "total"),
    [
        ("mlp:hidden=512+256+256+128", (1, 28, 28), "all", (725, 0), 5.05e10),
        ("mlp:hidden=512+256+256+128", (1, 28, 28), "head:2", (400, 50), 2.805e10),
        ("lenet", (3, 32, 32), "all", (1850, 0), 13.0448e9),
        ("lenet", (3, 32, 32), "first:2", (1200, 60), 8.4804e9),
    ],
)
def test_the_counts_of_table_1_come_out(
    model: str, shape: tuple[int, ...], share: str, rounds: tuple[int, int], total: float
) -> None:
    """Liang et al. 2020, Table 1: K = 100, m = 10, from the published rounds."""
    spec = Spec.of(make_module({"model": choose("--model", model, MODELS)}, shape, 10), share)
    told = cost.parameters_k_plus_m(choose("--algorithm", "fedavg:fraction=0.1", ALGORITHMS)(), 100, spec, rounds)
    assert told == pytest.approx(total, rel=1e-4)
    published = {"all": spec.d, "head:2": 34_186, "first:2": 2_872}
    assert (spec.d, spec.shared) == (633_226 if "mlp" in model else 64_102, published[share])
    assert Spec.of(make_module({"model": choose("--model", model, MODELS)}, shape, 10), "head:3").shared in (
        99_978,
        48_120 + 12_100 + 1_010,
    )


def test_what_is_counted_is_what_was_foretold() -> None:
    settings: dict[str, Any] = {"algorithm": "fedavg:fraction=0.5", "share": "head:1", "peers": 6, "rounds": 5, **MLP}
    *_, last = simulate(Run(**settings, pretrain="2", examples_per_peer=25))
    setting = digits(**settings)
    told = cost.parameters_k_plus_m(setting.algorithm, 6, setting.task.spec, (2, 3))
    assert last["parameters_k_plus_m"] == told == 9 * (2 * setting.task.spec.d + 3 * setting.task.spec.shared)


def test_everyone_can_be_told() -> None:
    chosen, everyone = (
        digits(algorithm=f"fedavg:fraction=0.5,push={whom}", share="head:1", **MLP) for whom in ("chosen", "everyone")
    )
    assert torch.equal(final(chosen, 3), final(everyone, 3))
    s = chosen.task.spec.shared
    assert chosen.network.told.sum() == 3 * 3 * 4 * s
    assert everyone.network.told.tolist() == [3 * 4 * s] * 6
    assert chosen.network.parameters == everyone.network.parameters == 3 * 9 * s
    assert everyone.payload_per_round == (3 + 6) * 4 * s


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "local_only", "share": "head:1"}, "--share head:1 has no part in --algorithm local_only"),
        ({"algorithm": "fltrust", "share": "head:1"}, "no part in --algorithm fltrust"),
        ({"pretrain": "3"}, "--pretrain 3"),
        ({"share": "head:1", "pretrain": "loss=3"}, "--pretrain: unknown figure 'loss'"),
        ({"share": "head:1", "pretrain": "soon"}, "--pretrain must be written a number of rounds or"),
        ({"share": "conv*"}, "no layer or parameter is called 'conv*'"),
        ({"algorithm": "fedavg:push=nobody"}, "push must be chosen or everyone"),
        ({"algorithm": "fedavg:weighting=norm"}, "weighting must be examples, uniform or gradient"),
    ],
)
def test_refusals(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        digits(**settings)
    assert said in str(refused.value)


def test_figures_of_a_split_run_are_of_every_peer() -> None:
    setting = digits(algorithm="fedavg", share="head:1", **MLP)
    last = list(states(setting, 2))[-1]
    peers = metrics.measure(last, setting)
    assert peers is not None
    assert len(np.unique(peers["accuracy"])) > 1
    models = metrics.models(last, setting)
    assert models is not None
    assert models.shape == (6, setting.task.spec.d)
    distance, mean = metrics.apart(last, setting)
    assert distance > 0
    assert mean is not None
    assert torch.equal(mean[: setting.task.spec.shared], last.w[0])


def test_own_modules_are_shared_by_the_names_of_their_layers() -> None:
    module = nn.Sequential()
    module.add_module("body", nn.Linear(3, 4))
    module.add_module("head", nn.Linear(4, 2))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = Data(x, (x[:, 0] > 0).astype(np.int64), x, (x[:, 0] > 0).astype(np.int64), 2)
    setting = prepare(Run(peers=4, share="head"), World(), module, data)
    assert setting.task.spec.common == ("head.weight", "head.bias")
    assert torch.equal(next(states(setting, 0)).x, setting.task.spec.row(module).expand(4, -1))
