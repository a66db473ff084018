"""Shared parameters are sent and mixed, and personal ones stay with their peers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl import Data, Run
from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.core.errors import InputError
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.sharing import merge_shared, shared_names, split_shared
from dfl.models.zoo import MODELS
from dfl.simulation.measure import consensus, measure
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import gathered
from dfl.training.sgd import sgd
from tests.support.quadratic import digits, final, run_states, states

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
def test_share_selects_parameters(share: str, expected: list[str]) -> None:
    assert list(shared_names(share, NAMES)) == expected


@pytest.mark.parametrize(
    ("share", "layer"), [("head:1", 2), ("first:1", 0), ("2", 2), ("head:2", None)]
)
def test_a_layer_with_parametrizations_is_one(share: str, layer: int | None) -> None:
    normed = nn.utils.parametrizations.weight_norm
    module = nn.Sequential(normed(nn.Linear(6, 5)), nn.ReLU(), normed(nn.Linear(5, 3)))
    names = [name for name, _ in module.named_parameters()]
    assert "2.parametrizations.weight.original0" in names
    chosen = [name for name in names if layer is None or name.startswith(f"{layer}.")]
    assert list(shared_names(share, names)) == chosen
    alone = [name for name, _ in module[0].named_parameters()]
    assert list(shared_names("head:1", alone)) == alone


@pytest.mark.parametrize(
    ("share", "message"),
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
def test_unknown_shares_are_refused_with_the_names(share: str, message: str) -> None:
    with pytest.raises(InputError, match="--share") as caught:
        shared_names(share, NAMES)
    assert all(part in str(caught.value) for part in message.split(".*"))
    assert "\n" not in str(caught.value)


def test_a_model_that_is_one_layer_has_no_name_of_a_layer_to_choose() -> None:
    with pytest.raises(InputError, match=r"choose from all, nothing, head:1, weight, bias$"):
        shared_names("last", ["weight", "bias"])


def test_a_row_begins_with_the_shared_parameters_and_holds_the_same_model() -> None:
    module = MODELS["mlp"]((1, 4, 4), 3, hidden=(5, 4))
    whole = ParameterLayout.of(module)
    head = ParameterLayout.of(module, "head:2")
    assert (whole.shared, head.shared, head.d) == (whole.d, 5 * 4 + 4 + 4 * 3 + 3, whole.d)
    assert head.shared_parameters == ("3.weight", "3.bias", "5.weight", "5.bias")
    assert head.all_shared.shared == head.d
    for layout in (whole, head):
        rows = draw(module, layout, 0, [0, 3])
        ours = layout.views(rows)
        for name, value in whole.views(draw(module, whole, 0, [0, 3])).items():
            assert torch.equal(ours[name], value)
        nn.utils.vector_to_parameters(draw(module, whole, 0, [3])[0], module.parameters())
        assert torch.equal(layout.row(module), rows[1])


def test_nets_of_training_are_no_layers_and_are_shared_by_all_or_by_name() -> None:
    names = ["1.weight", "3.weight", "auxiliary.0.weight"]
    for share, expected in (
        ("head:1", names[1:2]),
        ("*", names[:2]),
        ("aux*", names[2:]),
        ("all", names),
    ):
        assert list(shared_names(share, names, ("auxiliary",))) == expected
    # A layer of a caller may have that name.
    assert list(shared_names("head:1", names)) == names[2:]


def test_split_rows_are_merged_again() -> None:
    x = torch.arange(12.0).view(3, 4)
    for s in range(5):
        assert torch.equal(merge_shared(*split_shared(x, s)), x)
    assert torch.equal(
        merge_shared(x[:1, :2], x[:, 2:]), torch.cat([x[:1, :2].expand(3, -1), x[:, 2:]], 1)
    )


METHODS: list[dict[str, Any]] = [
    {"algorithm": "fedavg"},
    {"algorithm": "fedprox:mu=0"},
    {},
    {"algorithm": "qdfedavgm"},
    {"algorithm": "qdfedavgm:exchange=paper"},
    {"algorithm": "choco", "topology": "one_peer_exponential"},
    {"algorithm": "fltrust:root=20"},
]
COMPRESSED_OR_ROBUST: list[dict[str, Any]] = [
    {"algorithm": "fedavg", "bits": 4},
    {"bits": 4},
    {"bits": 2, "topology": "one_peer_exponential"},
    {"algorithm": "qdfedavgm:exchange=paper", "compressor": "quantize:bits=8"},
    {"aggregator": "median"},
]


@pytest.mark.parametrize("way", METHODS)
def test_sharing_nothing_equals_local_only_bit_for_bit(way: dict[str, Any]) -> None:
    alone = digits(algorithm="local_only", **MLP)
    setting = digits(share="nothing", **MLP, **way)
    assert torch.equal(final(setting, 3), final(alone, 3))
    assert not setting.network.traffic.payload.any()
    assert not setting.network.traffic.downloaded.any()


ON_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"bits": 3}, "--bits 3"),
    ({"algorithm": "choco", "bits": 3}, "--bits 3"),
    ({"algorithm": "fedavg", "compressor": "top_k:share=0.1"}, "--compressor top_k:share=0.1"),
    ({"aggregator": "median"}, "--aggregator median"),
    ({"attack": "sign_flip:peers=1"}, "--attack sign_flip:peers=1"),
    ({"attack": "backdoor:peers=1", "algorithm": "fedavg"}, "--attack backdoor:peers=1"),
    ({"attack": "dissensus:peers=1"}, "--attack dissensus:peers=1"),
    ({"faults": "link_loss:p=0.5"}, "--faults link_loss:p=0.5"),
    ({"faults": "outage+burst", "algorithm": "power_gossip"}, "--faults outage+burst"),
    ({"links": "phone"}, "--links phone"),
    ({"links": "phone", "algorithm": "fedavg"}, "--links phone"),
]


@pytest.mark.parametrize(("way", "what"), ON_MESSAGES)
@pytest.mark.parametrize("until", [None, "0"])
def test_what_acts_on_messages_has_no_part_where_nothing_is_shared(
    way: dict[str, Any], what: str, until: str | None
) -> None:
    with pytest.raises(InputError) as raised:
        digits(share="nothing", share_all_until=until, **MLP, **way)
    assert str(raised.value).startswith(what)
    assert str(raised.value).endswith("has no part in --share nothing: leave it out")


@pytest.mark.parametrize(
    "way",
    [
        {"share_all_until": "2", "bits": 4, "links": "phone", "faults": "link_loss"},
        {"share_all_until": "2", "attack": "sign_flip:peers=1", "aggregator": "median"},
        {"algorithm": "push_sum", "topology": "exponential", "faults": "link_loss"},
        {"attack": "label_flip:peers=1", "faults": "outage+stragglers"},
        {"algorithm": "local_only", "links": "phone"},
    ],
)
def test_what_acts_on_peers_or_on_numbers_that_are_sent_has_a_part(way: dict[str, Any]) -> None:
    digits(share="nothing", rounds=4, **MLP, **way)


@pytest.mark.parametrize(
    "way",
    [
        *METHODS,
        *COMPRESSED_OR_ROBUST,
        {"algorithm": "fedavg:fraction=0.4,server_momentum=0.5"},
    ],
)
def test_the_pattern_of_all_names_equals_all_bit_for_bit(way: dict[str, Any]) -> None:
    whole, pattern = (digits(share=share, **MLP, **way) for share in ("all", "*"))
    assert torch.equal(final(whole, 3), final(pattern, 3))
    assert whole.network.traffic.payload.tolist() == pattern.network.traffic.payload.tolist()


def by_hand(setting: Prepared, rounds: int, mix: Tensor) -> Tensor:
    """Return X = W @ sgd(X) in the shared coordinates, X = sgd(X) in the others."""
    x = final(setting, 0)
    s = setting.task.parameter_layout.shared
    for t in range(rounds):
        z = sgd(x, setting.task, t)
        x = torch.cat([(mix @ z[:, :s].double()).float(), z[:, s:]], 1)
    return torch.as_tensor(x)


@pytest.mark.parametrize("share", ["head:2", "first:1", "1.bias+5.*"])
@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_over_a_graph_only_the_shared_part_is_mixed(share: str, topology: str) -> None:
    setting = digits(share=share, topology=topology, **MLP)
    mix = torch.from_numpy(setting.network.schedule.weights[0].toarray())
    expected = by_hand(setting, 3, mix)
    assert torch.allclose(final(setting, 3), expected, atol=1e-6)
    s = setting.task.parameter_layout.shared
    peers = setting.layout.peers
    neighbours = 2 if topology == "ring" else peers - 1
    assert setting.network.traffic.payload.tolist() == [3 * 4 * s * neighbours] * peers
    exact = digits(share=share, topology=topology, algorithm="qdfedavgm", **MLP)
    assert torch.allclose(final(exact, 3), expected, atol=1e-5)


def test_fedavg_with_a_shared_head_is_lg_fedavg() -> None:
    """Algorithm 1 of Liang et al., peer by peer: peers that are not chosen keep their personal
    part, and w is the shared part of all.
    """
    setting = digits(algorithm="fedavg:fraction=0.5", share="head:1", **MLP)
    s = setting.task.parameter_layout.shared
    run = final(setting, 3)
    x = final(setting, 0)
    sizes = torch.from_numpy(setting.task.examples.sizes).double()
    algorithm: Any = setting.algorithm
    for t in range(3):
        chosen, *_ = algorithm._draw(setting.task, Net(setting.network, t))
        z = sgd(x, setting.task, t)
        weight = sizes[chosen.here] / sizes[chosen.here].sum()
        x[chosen.here, s:] = z[chosen.here, s:]
        x[:, :s] = (weight @ z[chosen.here, :s].double()).float()
    assert torch.allclose(run, x, atol=1e-6)
    assert run.shape == x.shape
    assert len(torch.unique(run[:, s:], dim=0)) > 3


def test_the_proximal_term_acts_on_shared_parameters_only() -> None:
    """In the first of two steps the term is 0; after the second only the shared part differs."""
    ways = [
        digits(peers=1, local_steps=2, share="head:1", algorithm=f"fedprox:mu={mu}", **MLP)
        for mu in (0, 5)
    ]
    free, proximal = (final(setting, 1)[0] for setting in ways)
    s = ways[0].task.parameter_layout.shared
    assert not torch.equal(free[:s], proximal[:s])
    assert torch.equal(free[s:], proximal[s:])


def test_updates_can_be_weighted_by_their_length() -> None:
    setting = digits(algorithm="fedavg:weighting=gradient", **MLP)
    first, second = states(setting, 1)
    steps = (sgd(first.x.expand(6, -1), setting.task, 0) - first.x).double()
    weight = steps.square().sum(1) / steps.square().sum()
    assert torch.allclose(second.x[0].double(), first.x[0] + weight @ steps, atol=1e-6)
    assert not torch.allclose(weight, torch.full((6,), 1 / 6, dtype=torch.float64), rtol=1e-2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"algorithm": "local_only", "share": "head:1"},
            "--share head:1 has no part in --algorithm local_only",
        ),
        ({"algorithm": "pooled", "share": "head:1"}, "--share head:1 has no part in"),
        ({"algorithm": "pooled", "share": "nothing"}, "--share nothing has no part in"),
        ({"share": "head:٢"}, "the model has 1 to 2 layers to share, not '٢'"),
        ({"share": "head:1+0.bias"}, "--share head:1+0.bias: head:1 cannot be joined"),
        ({"share": "0.*+all"}, "--share 0.*+all: all cannot be joined"),
        ({"share_all_until": "3"}, "--share-all-until 3"),
        (
            {"share": "head:1", "share_all_until": "٢"},
            "--share-all-until must be written a number of rounds or",
        ),
        (
            {"share": "head:1", "share_all_until": "loss=3"},
            "--share-all-until: unknown figure 'loss'",
        ),
        (
            {"share": "head:1", "share_all_until": "accuracy=97"},
            "--share-all-until accuracy must be from 0 to 1, not 97.0",
        ),
        (
            {"share": "head:1", "share_all_until": "9"},
            "--share-all-until 9 is more than all --rounds 4",
        ),
        ({"share": "head:1", "share_all_until": "9" * 5000}, "is more than all --rounds 4"),
        (
            {"share": "head:1", "share_all_until": "consensus_distance=1"},
            "--share-all-until: unknown figure 'consensus_distance'",
        ),
        (
            {"share": "head:1", "share_all_until": "soon"},
            "--share-all-until must be written a number of rounds or",
        ),
        ({"share": "conv*"}, "no layer or parameter is called 'conv*'"),
        ({"algorithm": "fedavg:broadcast_to=nobody"}, "broadcast_to must be chosen or everyone"),
        ({"algorithm": "fedavg:weighting=norm"}, "weighting must be examples, uniform or gradient"),
    ],
)
def test_bad_combinations_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        digits(**settings)
    assert message in str(caught.value)


def test_figures_of_a_run_with_personal_parts_are_of_every_peer() -> None:
    setting = digits(algorithm="fedavg", share="head:1", **MLP)
    *_, last = run_states(setting, 2)
    peers = measure(last, setting)
    assert peers is not None
    assert len(np.unique(peers["accuracy"])) > 1
    models = gathered(last, setting)
    assert models is not None
    assert models.shape == (6, setting.task.parameter_layout.d)
    distance, mean = consensus(last, setting)
    assert distance > 0
    assert mean is not None
    assert torch.equal(mean[: setting.task.parameter_layout.shared], last.state.x[0])


def test_a_callers_module_is_shared_by_the_names_of_its_layers() -> None:
    module = nn.Sequential()
    module.add_module("body", nn.Linear(3, 4))
    module.add_module("head", nn.Linear(4, 2))
    x = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    data = Data(x, (x[:, 0] > 0).astype(np.int64), x, (x[:, 0] > 0).astype(np.int64), 2)
    setting = prepare(Run(peers=4, share="head", model=module, dataset=data), World())
    assert setting.task.parameter_layout.shared_parameters == ("head.weight", "head.bias")
    assert torch.equal(final(setting, 0), setting.task.parameter_layout.row(module).expand(4, -1))
