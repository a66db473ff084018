"""Batch normalization: the layer is torch's, and each policy does what it states to statistics."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl import InputError, Run
from dfl.algorithms import ALGORITHMS
from dfl.core.errors import Suspended
from dfl.models.modules import is_recurrent
from dfl.models.normalization import BatchNorm, converted
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.sharing import NormStats
from dfl.models.zoo import MODELS
from dfl.simulation import loop, read_on_root
from dfl.simulation.initialization import start
from dfl.simulation.measure import consensus, measure
from dfl.simulation.prepared import Prepared
from dfl.training.sgd import sgd
from dfl.training.statistics import recompute
from dfl.training.task import Task
from tests.support.quadratic import digits, final, info, run_states, spread

STATISTICS = 2 * 8
"""Running statistics of `normed`."""

POLICIES: tuple[NormStats, ...] = ("local", "share", "recompute")


@pytest.fixture
def normed() -> nn.Sequential:
    """Return a model of digits with one BatchNorm; 626 parameters besides its statistics."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    )


def of(module: nn.Module, norm_stats: str = "local", **settings: Any) -> Prepared:
    return digits(model=module, norm_stats=norm_stats, **settings)


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 5), (7, 3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_the_layer_is_torchs_and_padding_does_not_count(
    shape: tuple[int, ...], affine: bool
) -> None:
    kinds = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
    theirs = kinds[len(shape)](3, momentum=0.3, affine=affine)
    if affine:
        nn.init.normal_(theirs.weight)
    ours = converted(copy.deepcopy(theirs))
    assert isinstance(ours, BatchNorm)
    x = torch.randn(shape, requires_grad=True)
    padded = torch.cat([x.detach(), torch.full((2, *shape[1:]), 9.0)]).requires_grad_()
    ours.example_weight = torch.tensor([1 / 7] * 7 + [0.0] * 2)
    ours.rate = torch.tensor(0.3)
    out, expected = ours(padded)[:7], theirs(x)
    torch.testing.assert_close(out, expected)
    (g,) = torch.autograd.grad(out.pow(3).sum(), padded)
    (h,) = torch.autograd.grad(expected.pow(3).sum(), x)
    torch.testing.assert_close(g[:7], h, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.example_weight = None
    torch.testing.assert_close(ours(x), theirs.eval()(x))


def test_a_batch_of_one_value_and_a_negative_variance_are_finite() -> None:
    layer = converted(nn.BatchNorm1d(3))
    assert isinstance(layer, BatchNorm)
    layer.running_var.fill_(-1)
    assert layer(torch.ones(2, 3)).isfinite().all()
    layer.example_weight, layer.rate = torch.ones(1), torch.tensor(0.1)
    assert not layer(torch.ones(1, 3)).any()
    assert layer.running_var.isfinite().all()


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_one_peer_is_a_plain_loop_of_torch(normed: nn.Sequential, engine: str) -> None:
    """Weights, and running statistics, on which neither momentum nor weight decay acts."""
    setting = of(normed, peers=1, local_steps=5, batch_size=0, weight_decay=0.1, engine=engine)
    reached = final(setting, 2)[0]
    train = setting.task.examples
    inputs = setting.task.inputs(train.inputs)
    for _ in range(2):
        optimizer = torch.optim.SGD(normed.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(normed(inputs), train.labels).backward()
            optimizer.step()
    torch.testing.assert_close(
        reached, setting.task.parameter_layout.row(normed), atol=5e-6, rtol=1e-4
    )
    assert not torch.allclose(reached[-STATISTICS:], torch.zeros(STATISTICS))


@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.3"])
def test_both_engines_agree(normed: nn.Sequential, partition: str) -> None:
    loop, batched = (
        final(of(normed, engine=engine, partition=partition, local_epochs=2), 3)
        for engine in ("loop", "batched")
    )
    torch.testing.assert_close(loop, batched, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.3"])
def test_training_does_not_depend_on_the_other_peers(
    normed: nn.Sequential, engine: str, partition: str
) -> None:
    setting = of(normed, engine=engine, partition=partition, init="independent")
    x = start(setting.run, setting.task, True)
    together = sgd(x, setting.task, 3)
    for first, stop in ((0, 1), (1, 3), (2, 6), (5, 6)):
        alone = setting.task.only(np.arange(first, stop))
        assert torch.equal(sgd(x[first:stop], alone, 3), together[first:stop])


def test_local_statistics_stay_with_their_peer(normed: nn.Sequential) -> None:
    """On a complete graph peers agree in all but their statistics, which no message holds."""
    setting = of(normed, topology="complete", mixing="uniform")
    _, before, after = (each.models for each in run_states(setting, 2))
    assert torch.equal(before[:, :-STATISTICS], before[:1, :-STATISTICS].expand(6, -1))
    z = sgd(before, setting.task, 1)
    assert torch.equal(after[:, -STATISTICS:], z[:, -STATISTICS:])
    assert len(after[:, -STATISTICS:].unique(dim=0)) == 6
    assert setting.network.traffic.payload.tolist() == [2 * 5 * 4 * 626] * 6


@pytest.mark.parametrize("policy", ["local", "recompute"])
def test_statistics_do_not_count_in_consensus_distance(normed: nn.Sequential, policy: str) -> None:
    """On a complete graph peers agree in all parameters."""
    setting = of(normed, policy, topology="complete", mixing="uniform")
    last = list(run_states(setting, 2))[-1]
    distance, mean = consensus(last, setting)
    assert distance < 1e-6
    assert spread(last.models) > 0.1
    assert mean is not None
    torch.testing.assert_close(mean, last.models.mean(0))


def test_shared_statistics_are_averaged(normed: nn.Sequential) -> None:
    setting = of(normed, "share", topology="complete", mixing="uniform")
    _, before, after = (each.models for each in run_states(setting, 2))
    z = sgd(before, setting.task, 1)
    torch.testing.assert_close(after[0], z.mean(0))
    assert torch.equal(after, after[:1].expand(6, -1))
    assert setting.network.traffic.payload.tolist() == [2 * 5 * 4 * (626 + STATISTICS)] * 6
    assert prepared_notes(setting, "--norm-stats share")
    assert not prepared_notes(of(normed), "--norm-stats")


EXTRAPOLATING: dict[str, dict[str, Any]] = {
    "clique_averaging": {},
    "d2": {},
    "decentlam": {},
    "dpsgd:order=cta": {},
    "exact_diffusion": {},
    "fedavg:server_lr=2": {},
    "fedavg:server_momentum=0.9": {},
    "fltrust:root=10,fraction=0.4": {},
    "gradient_tracking:order=cta": {},
    "momentum_tracking": {},
    "push_sum": {"topology": "random_out:s=2"},
    "qdfedavgm:exchange=paper": {},
}
"""Specs of methods that do more than average -> settings in which it is seen."""
NAMES = {spec.partition(":")[0] for spec in EXTRAPOLATING}
AVERAGING = [*(name for name in ALGORITHMS if name not in NAMES), *(
    "dpsgd:order=atc", "fedavg:fraction=0.5,server_lr=0.7", "gradient_tracking:order=atc",
    "qdfedavgm:exchange=replica",
)]  # fmt: skip
"""Specs of all other methods, and of other options of those."""


def beyond(setting: Prepared, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how far a shared statistic leaves the range that it has had after local training, or
    at the start, relative to the widest of these ranges; over 12 rounds.
    """
    seen: list[Tensor] = []

    def watched(name: str) -> Any:
        plain = getattr(Task, name)

        def call(self: Task, *args: Any, **more: Any) -> Any:
            out = plain(self, *args, **more)
            z = out[0] if isinstance(out, tuple) else out
            seen.append(z[:, -STATISTICS:].clone())  # the method may overwrite it
            return out

        return call

    worst = 0.0
    with monkeypatch.context() as patch:
        for name in ("train", "train_with_momentum"):
            patch.setattr(Task, name, watched(name))
        for run_state in run_states(setting, 12):
            x = run_state.state.x[:, -STATISTICS:]
            if not run_state.t:
                seen.append(x)
            every = torch.cat(seen)
            low, high = every.amin(0), every.amax(0)
            if run_state.t:
                outside = torch.maximum(low - x, x - high).max() / (high - low).max()
                worst = max(worst, float(outside))
    return worst


def sharing(module: nn.Module, spec: str, **more: Any) -> Prepared:
    """Return a run of peers that share statistics and whose data differ."""
    steps = {} if spec == "fedsgd" else {"local_steps": 8}
    return of(
        module, "share", algorithm=spec, partition="dirichlet:alpha=0.1", batch_size=5, lr=0.01,
        rounds=12, **steps, **more,
    )  # fmt: skip


@pytest.mark.parametrize("spec", AVERAGING)
def test_shared_statistics_stay_in_the_range_of_the_peers(
    normed: nn.Sequential, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert beyond(sharing(normed, spec), monkeypatch) < 1e-5


@pytest.mark.parametrize("spec", EXTRAPOLATING)
def test_a_method_that_would_move_statistics_further_does_not_share_them(
    normed: nn.Sequential, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = EXTRAPOLATING[spec]
    with pytest.raises(InputError, match=f"--norm-stats share.*{spec}.*local or recompute"):
        sharing(normed, spec, **more)
    for policy in ("local", "recompute"):
        assert final(of(normed, policy, algorithm=spec, rounds=2, **more), 2).isfinite().all()
    kind = ALGORITHMS[spec.partition(":")[0]]
    monkeypatch.setattr(kind, "averages", True)
    assert beyond(sharing(normed, spec, **more), monkeypatch) > 1e-3


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ("--compressor quantize:bits=2", {"bits": 2}),
        ("--compressor random_k:share=0.5", {"compressor": "random_k:share=0.5"}),
    ],
)
def test_statistics_are_not_shared_in_messages_that_change_them(
    normed: nn.Sequential, given: str, messages: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    more: dict[str, Any] = {"spec": "qdfedavgm", **messages}
    with pytest.raises(InputError, match=f"--norm-stats share.*{given} .*local or recompute"):
        sharing(normed, **more)
    monkeypatch.setattr(read_on_root, "_check_statistics", lambda *_: None)
    assert beyond(sharing(normed, **more), monkeypatch) > 1e-3


def prepared_notes(setting: Prepared, about: str) -> list[str]:
    assert setting.info
    return [note for note in setting.info.notes if about in note]


def test_recomputed_statistics_are_those_of_own_examples(normed: nn.Sequential) -> None:
    """As torch has them with all examples in one batch and momentum=None."""
    setting = of(normed, "recompute", partition="dirichlet:alpha=0.3")
    last = list(run_states(setting, 2))[-1]
    last.task.recompute_statistics(last.state.x)
    layout, examples = setting.task.parameter_layout, setting.task.examples
    for i, row in enumerate(last.models):
        first = int(examples.starts[i])
        inputs = setting.task.inputs(examples.inputs[first : first + int(examples.sizes[i])])
        theirs = copy.deepcopy(normed)
        for name, value in theirs.named_parameters():
            value.data = layout.views(row)[name].clone()
        assert isinstance(theirs[2], nn.BatchNorm1d)
        theirs[2].reset_running_stats()
        theirs[2].momentum = None
        theirs(inputs)
        torch.testing.assert_close(row, layout.row(theirs), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.usefixtures("no_figures")
def test_models_are_evaluated_with_recomputed_statistics(
    normed: nn.Sequential, rounds: int, tmp_path: Path
) -> None:
    """Those of the models after mixing, also before round 0."""
    setting = of(normed, "recompute", partition="dirichlet:alpha=0.3", rounds=rounds)
    (*_, row) = dfl.simulate(replace(setting.run, model=normed, out=tmp_path, report=False))
    last = list(run_states(setting, rounds))[-1]
    last.task.recompute_statistics(last.state.x)
    expected = setting.task.parameter_layout.views(last.models)
    state = dfl.load(tmp_path).state
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert len(state["2.running_mean"].unique(dim=0)) == 6
    figures = measure(last, setting)
    assert figures is not None
    assert row.train_loss == figures["train_loss"].mean()


def test_chunks_are_weighted_by_their_examples(
    normed: nn.Sequential, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = of(normed, "recompute", peers=2)
    x = start(setting.run, setting.task, True)
    whole, chunked = x.clone(), x.clone()
    recompute(whole, setting.task)
    monkeypatch.setattr("dfl.training.statistics.CHUNK", 10)
    recompute(chunked, setting.task)
    mean = slice(-STATISTICS, -STATISTICS // 2)
    torch.testing.assert_close(chunked[:, mean], whole[:, mean])
    assert not torch.equal(chunked[:, -1], whole[:, -1])


@pytest.mark.filterwarnings("ignore:--norm-stats share")
def test_policies_train_alike_and_differ_in_evaluation(normed: nn.Sequential) -> None:
    """Training reads no running statistics."""
    ends = [
        list(dfl.simulate(replace(RUN, model=normed, norm_stats=policy)))[-1] for policy in POLICIES
    ]
    assert len({row.train_loss for row in ends}) == 3
    layouts = [final(of(normed, policy), 3)[:, :626] for policy in POLICIES]
    assert all(torch.equal(each, layouts[0]) for each in layouts)


RUN = Run(peers=4, rounds=4, examples_per_peer=25, eval_every=2, eval_examples=50)

WAYS: list[dict[str, Any]] = [
    {"algorithm": "fedavg:fraction=0.5"},
    {"algorithm": "fedprox", "partition": "dirichlet:alpha=0.3"},
    {"algorithm": "dfedsam:rho=0.05"},
    {"bits": 4, "share": "head:1"},
    {"share": "1", "share_all_until": "2"},
]


@pytest.mark.parametrize(
    ("policy", "way"),
    [pair for pair in product(POLICIES, WAYS) if pair[0] != "share" or "bits" not in pair[1]],
)
def test_every_policy_with_every_family(
    normed: nn.Sequential, way: dict[str, Any], policy: str
) -> None:
    setting = of(normed, policy, **{"rounds": 3, **way})
    last = final(setting, 3)
    assert last.isfinite().all()
    assert (last != start(setting.run, setting.task, True)[:1]).any(1).all()


def test_a_step_up_moves_no_statistics(normed: nn.Sequential) -> None:
    """DFedSAM's statistics after a step are those of the batch at y, as without the ascent."""
    plain, sam = (
        final(of(normed, algorithm=name, local_steps=1, batch_size=0), 1)
        for name in ("dfedavgm", "dfedsam:rho=0.5")
    )
    assert torch.equal(plain[:, -STATISTICS:], sam[:, -STATISTICS:])
    assert not torch.equal(plain[:, :-STATISTICS], sam[:, :-STATISTICS])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.usefixtures("no_figures")
def test_a_resumed_run_and_its_models(
    normed: nn.Sequential, policy: NormStats, tmp_path: Path
) -> None:
    run = replace(RUN, model=normed, norm_stats=policy, report=False)
    whole = list(dfl.simulate(replace(run, out=tmp_path / "whole")))
    list(dfl.simulate(replace(run, out=tmp_path / "half", rounds=2, checkpoint_every=2)))
    again = dfl.resumed(tmp_path / "half", model=normed, rounds=4)
    assert list(dfl.simulate(again))[-1].train_loss == whole[-1].train_loss
    ended = dfl.load(tmp_path / "whole", module=normed)
    other = dfl.load(tmp_path / "half", module=normed)
    for name, value in ended.state.items():
        assert torch.equal(value, other.state[name])
    model = ended.model(2)
    assert not model.training
    assert torch.equal(model.state_dict()["2.running_var"], ended.state["2.running_var"][2])


@pytest.mark.usefixtures("no_figures")
def test_a_resumed_run_evaluates_recomputed_statistics(
    normed: nn.Sequential, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a signal in a round that was not to be evaluated then."""
    run = replace(RUN, model=normed, norm_stats="recompute", report=False, eval_every=10)
    whole = list(dfl.simulate(replace(run, rounds=3)))
    monkeypatch.setattr(loop, "_agree_after_round", lambda state, *_: 15 * (state.t == 3))
    with pytest.raises(Suspended):
        list(dfl.simulate(replace(run, out=tmp_path, rounds=8)))
    monkeypatch.undo()
    again = dfl.resumed(tmp_path, model=normed, rounds=3)
    assert list(dfl.simulate(again))[-1].train_loss == whole[-1].train_loss


@pytest.mark.usefixtures("no_figures")
def test_a_resnet_with_batch_norm_trains_and_is_loaded(tmp_path: Path) -> None:
    run = Run(
        model="resnet20:norm=batch", norm_stats="local", peers=2, rounds=1, examples_per_peer=4,
        batch_size=4, eval_examples=4, out=tmp_path / "run", report=False,
    )  # fmt: skip
    (*_, row) = dfl.simulate(run)
    model = dfl.load(run.out or "").model(1)
    assert np.isfinite(row.train_loss)
    assert not any(value.is_meta for value in model.state_dict().values())
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_statistics_follow_the_parameters_of_their_part() -> None:
    module = converted(MODELS["resnet20"]((3, 32, 32), 10, norm="batch"))
    local = ParameterLayout.of(module, norm_stats="local")
    assert (local.shared, local.d - local.shared) == (269_722, 2 * 688)
    first = ParameterLayout.of(module, "first*", norm_stats="share")
    assert first.shared_parameters[-2:] == ("first.1.running_mean", "first.1.running_var")
    head = ParameterLayout.of(module, "head:1", norm_stats="share")
    assert head.shared_parameters == ("last.weight", "last.bias")
    (row,) = draw(module, local, 0, [3])
    views = local.views(row)
    assert (views["first.1.running_var"] == 1).all()
    assert (views["first.1.running_mean"] == 0).all()


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_a_layer_with_weight_norm_is_drawn_by_its_fan_in() -> None:
    """Its weight is computed from two parameters and is none itself."""
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(400, 3)))
    (row,) = draw(module, ParameterLayout.of(module), 0, [0])
    assert 0.8 / 20 < float(row.abs().max()) <= 1 / 20


def test_a_layer_that_is_used_twice_stays_one() -> None:
    layer = nn.BatchNorm1d(3)
    made = converted(nn.Sequential(layer, layer))
    first, second = made.get_submodule("0"), made.get_submodule("1")
    assert isinstance(first, BatchNorm)
    assert first is second


class Powers(nn.Module):
    """A layer whose attributes p and together are not those of a dropout or of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.p, self.together = 2.0, "x"
        self.layer = nn.Linear(4, 3)


def test_attributes_of_other_meanings_are_left_alone() -> None:
    module = Powers()
    assert ParameterLayout.of(module).d == 15
    assert not is_recurrent(module)


class Counting(nn.Module):
    """A model with a buffer that is no running statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(64, 10), nn.BatchNorm1d(10)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layer(x.flatten(1)))
        return out


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    """Yield settings, and what the message names."""
    stack = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    yield {"model": stack}, "2.running_mean.*--norm-stats"
    yield {"model": "mlp", "norm_stats": "local"}, "--norm-stats local.*--model mlp"
    yield {"model": Counting(), "norm_stats": "share"}, "--norm-stats share.*calls"
    frozen = copy.deepcopy(stack)
    frozen[2].eval()
    yield {"model": frozen, "norm_stats": "local"}, "layer 2.*eval"
    yield {"model": Counting()}, "calls.*--norm-stats"
    cumulative = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10, momentum=None))
    yield {"model": cumulative, "norm_stats": "local"}, "layer 2.*momentum=None"
    rows = nn.Sequential(
        nn.Flatten(0, 2), nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Unflatten(0, (-1, 8)),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    shape = r"layer 2 normalizes an array of shape \(16, 4\) for 2 examples.*\(n, channels"
    for engine in ("loop", "batched"):
        yield {"model": rows, "norm_stats": "local", "engine": engine}, shape
    yield (
        {"model": stack, "norm_stats": "local", "auxiliary": "supervised"},
        "--auxiliary supervised.*--norm-stats local",
    )
    yield (
        {"model": stack, "norm_stats": "local", "algorithm": "pooled"},
        "--norm-stats local.*--algorithm pooled",
    )


@pytest.mark.parametrize(("settings", "message"), list(refused()))
def test_what_no_policy_covers_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        next(dfl.simulate(replace(RUN, **settings)))


@pytest.mark.parametrize(
    ("settings", "whose"),
    [
        ({"batch_size": 1}, "6 peers have"),
        ({"batch_size": 10}, "6 peers have"),
        ({"batch_size": 10, "local_steps": 4}, "6 peers have"),
        ({"batch_size": 10, "local_steps": 3}, ""),
        ({"batch_size": 8}, ""),
        ({"batch_size": 0}, ""),
        ({"batch_size": 0, "examples_per_peer": 1}, "6 peers have"),
    ],
    ids=str,
)
def test_a_batch_of_one_example_is_warned_of(
    normed: nn.Sequential, settings: dict[str, Any], whose: str
) -> None:
    prepared = of(normed, peers=6, **{"examples_per_peer": 31, **settings})
    (note,) = [each for each in info(prepared).notes if "--batch-size" in each] or [""]
    assert bool(note) == bool(whose)
    wanted = f"{whose} a batch of one example, which the BatchNorm layer 2 maps to its bias"
    assert not whose or wanted in note


def test_one_example_with_several_places_is_not_warned_of() -> None:
    torch.manual_seed(0)
    placed = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 10))
    prepared = of(placed, peers=5, batch_size=1, examples_per_peer=5)
    assert [each for each in info(prepared).notes if "--batch-size" in each] == []
