"""Peers with models of different kinds share a head; the rest of each model is its own."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl import InputError, Run, load, simulate
from dfl.comm.mpi import World
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.training.sgd import sgd
from tests.support.quadratic import final, run_states

FEW: dict[str, Any] = {
    "peers": 7,
    "examples_per_peer": 30,
    "rounds": 3,
    "eval_every": 3,
    "share": "head",
}


class Half(nn.Module):
    """A model of the upper or the lower half of a digit, with a head of 10 x 8 weights."""

    def __init__(self, upper: bool, *widths: int) -> None:
        super().__init__()
        layers = [nn.Linear(a, b) for a, b in zip((32, *widths), (*widths, 8), strict=True)]
        self.body = nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())])
        self.head = nn.Linear(8, 10)
        self.upper = upper

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(
            self.body(x.flatten(1)[:, slice(0, 32) if self.upper else slice(32, 64)])
        )
        return out


@pytest.fixture
def kinds() -> list[nn.Module]:
    """Return a model of the upper half with one hidden layer, and of the lower half with two."""
    torch.manual_seed(0)
    return [Half(True), Half(False, 12)]


def setting_of(modules: Sequence[nn.Module] | str, **settings: Any) -> Prepared:
    return prepare(Run(**{**FEW, **settings}, model=modules), World())


def test_peers_have_the_kinds_in_turn_and_a_common_head(kinds: list[nn.Module]) -> None:
    setting = setting_of(kinds)
    x = final(setting, 0)
    short, long = (layout for _, layout in setting.task.kinds)
    assert (short.shared, long.shared, setting.task.parameter_layout.d) == (90, 90, long.d)
    assert torch.equal(x[:, :90], x[:1, :90].expand(7, -1))
    for i, row in enumerate(x):
        module, layout = setting.task.kinds[i % 2]
        own = torch.cat([short.row(kinds[0])[:90], layout.row(module)[90:]])
        assert torch.equal(row[: layout.d], own)
        assert not row[layout.d :].any()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_each_kind_trains_as_without_the_other_kind(kinds: list[nn.Module], engine: str) -> None:
    setting = setting_of(kinds, engine=engine, init="independent")
    x = final(setting, 0)
    z = sgd(x, setting.task, 0)
    for here, part in setting.task.by_kind():
        assert here.tolist() == (
            [0, 2, 4, 6] if part.module is setting.task.kinds[0][0] else [1, 3, 5]
        )
        d = part.parameter_layout.d
        assert torch.equal(z[here, :d], sgd(x[here, :d], part, 0))
        assert not z[here, d:].any()
        assert not torch.equal(z[here, :d], x[here, :d])


WAYS: list[dict[str, Any]] = [
    {"algorithm": "fedavg"},
    {"algorithm": "fedavg:fraction=0.5", "bits": 4},
    {"topology": "ring"},
    {"topology": "one_peer_exponential", "bits": 3},
    {"bits": 5, "init": "independent"},
    {"algorithm": "fedprox:stragglers=0.5", "local_epochs": 3},
    {"algorithm": "fltrust:root=20"},
]


@pytest.mark.parametrize("way", WAYS)
def test_only_the_common_head_is_sent(kinds: list[nn.Module], way: dict[str, Any]) -> None:
    whole = setting_of(kinds, **way)
    twin = setting_of([kinds[0], kinds[0]], **way)
    last = final(whole, 3)
    final(twin, 3)
    assert whole.network.traffic.payload.tolist() == twin.network.traffic.payload.tolist()
    assert bool(torch.isfinite(last).all())
    assert not last[0, whole.task.kinds[0][1].d :].any()


def test_the_same_kind_twice_equals_one_kind(kinds: list[nn.Module]) -> None:
    for way in WAYS:
        one = prepare(Run(**{**FEW, **way}, model=kinds[0]), World())
        assert torch.equal(final(one, 2), final(setting_of([kinds[0], kinds[0]], **way), 2))


NAMED = "mlp:hidden=8+mlp:hidden=8+5"
"""Models of one and of two hidden layers, of which the first may be shared."""


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("named", [False, True])
def test_figures_are_of_each_peers_own_kind(
    kinds: list[nn.Module], tmp_path: Path, named: bool
) -> None:
    """The figures of a run are those of the modules that it returns."""
    model: Any = NAMED if named else kinds
    share = "first:1" if named else "head"
    run = Run(**{**FEW, "ensemble": True, "out": tmp_path / "run", "share": share})
    *_, row = simulate(replace(run, model=model))
    result = load(tmp_path / "run", None if named else kinds)
    setting = setting_of(model, share=share)
    test_sets = setting.test_sets
    inputs = setting.task.inputs(test_sets.inputs)
    with torch.no_grad():
        outputs = torch.stack([result.model(i)(inputs) for i in range(7)])
    accuracy = (outputs.argmax(2) == test_sets.labels).double().mean(1).numpy()
    assert result.peers["accuracy"].to_numpy() == pytest.approx(accuracy)
    inputs, labels = setting.task.examples.at(torch.arange(7 * 30).view(7, 30))
    with torch.no_grad():
        losses = [
            nn.functional.cross_entropy(result.model(i)(setting.task.inputs(inputs[i])), labels[i])
            for i in range(7)
        ]
    assert result.peers["train_loss"].to_numpy() == pytest.approx(np.array(losses), rel=1e-5)
    assert row["accuracy_ensemble"] == pytest.approx(
        float((outputs.mean(0).argmax(1) == test_sets.labels).double().mean())
    )
    assert np.isnan(row["accuracy_mean_model"])
    assert row["consensus_distance"] > 0
    shapes = {name: tuple(value.shape) for name, value in result.state.items() if "weight" in name}
    assert shapes == (
        {
            "1.weight": (7, 8, 64), "0/3.weight": (4, 10, 8),
            "1/3.weight": (3, 5, 8), "1/5.weight": (3, 10, 5),
        } if named else {
            "head.weight": (7, 10, 8), "0/body.0.weight": (4, 8, 32),
            "1/body.0.weight": (3, 12, 32), "1/body.2.weight": (3, 8, 12),
        }
    )  # fmt: skip
    with pytest.raises(InputError, match="no mean"):
        result.mean_model()


def test_local_training_of_several_kinds(kinds: list[nn.Module]) -> None:
    """Local training of kinds that share nothing is that on a graph which sends nothing."""
    alone = setting_of(kinds, algorithm="local_only", share="nothing")
    on_graph = setting_of(kinds, share="nothing")
    assert torch.equal(final(alone, 3), final(on_graph, 3))
    assert not alone.network.traffic.payload.any()
    with pytest.raises(InputError, match="in common, or nothing"):
        setting_of(kinds, algorithm="local_only", share="all")


def test_both_kinds_learn(kinds: list[nn.Module]) -> None:
    few = {**FEW, "rounds": 40, "eval_every": 40, "examples_per_peer": 60, "algorithm": "fedavg"}
    first, last = simulate(Run(**few, model=kinds))
    assert last["accuracy_min"] > 0.4 > first["accuracy_max"]


def test_kinds_that_share_nothing_have_no_consensus_distance(kinds: list[nn.Module]) -> None:
    with pytest.raises(InputError, match=r"--until consensus_distance=1 with 2 kinds of model, wh"):
        setting_of(kinds, share="nothing", until="consensus_distance=1")


@pytest.mark.usefixtures("without_figures")
def test_init_from_is_refused_for_several_kinds(kinds: list[nn.Module], tmp_path: Path) -> None:
    list(simulate(Run(**{**FEW, "rounds": 1, "out": tmp_path / "run"}, model=kinds[0])))
    with pytest.raises(InputError, match=r"--init-from .* with 2 kinds"):
        setting_of(kinds, init_from=tmp_path / "run")


@pytest.mark.usefixtures("without_figures")
def test_init_from_a_run_of_several_kinds_is_refused(
    kinds: list[nn.Module], tmp_path: Path
) -> None:
    list(simulate(Run(**{**FEW, "rounds": 1, "out": tmp_path / "run"}, model=kinds)))
    for peers in (7, 9):
        with pytest.raises(InputError, match="has models of several kinds"):
            prepare(
                Run(**{**FEW, "peers": peers, "init_from": tmp_path / "run"}, model=kinds[0]),
                World(),
            )


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_named_kinds_start_and_train_as_each_alone(engine: str) -> None:
    """All draw their own parameters as if alone, and the shared ones, of one name, are equal."""
    setting = setting_of(NAMED, share="first:1", engine=engine)
    x, z = final(setting, 0), sgd(final(setting, 0), setting.task, 0)
    for k, ((here, part), spec) in enumerate(
        zip(setting.task.by_kind(), ("mlp:hidden=8", "mlp:hidden=8+5"), strict=True)
    ):
        d = part.parameter_layout.d
        alone = setting_of(spec, share="first:1", engine=engine)
        assert here.tolist() == list(range(k, 7, 2))
        assert torch.equal(x[here, :d], final(alone, 0)[here])
        trained = sgd(final(alone, 0), alone.task, 0)[here]
        assert torch.allclose(z[here, :d], trained, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"share": "all"}, "--share all with 2 kinds"),
        ({"share_all_until": "3"}, "--share-all-until 3 with 2 kinds"),
        ({"share": "body.0"}, "--share body.0: the shared parameters of models 0 and 1"),
        ({"share": "tail"}, "no layer or parameter is called 'tail'"),
    ],
)
def test_kinds_must_agree_in_the_shared_part(
    kinds: list[nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as caught:
        setting_of(kinds, **settings)
    assert message in str(caught.value)


def test_kinds_that_share_all_they_have_are_refused() -> None:
    run = Run(peers=4, model="mlp+mlp", share="head:2", algorithm="fedavg", rounds=1)
    with pytest.raises(InputError, match="--share head:2 with 2 kinds of model shares all"):
        list(simulate(run))


def test_kinds_have_no_mean_to_stop_at() -> None:
    run = Run(
        peers=4, model="mlp+softmax", share="nothing", until="accuracy_mean_model=0.5", rounds=1
    )
    with pytest.raises(InputError, match=r"^--until accuracy_mean_model=0\.5 with 2 kinds"):
        list(simulate(run))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("mlp+mpl", "--model: unknown 'mpl' (did you mean mlp?)"),
        ("mlp+mlp:hiden=3", "--model mlp: unknown option 'hiden'"),
        ("mlp+", "--model: unknown 'mlp+'"),
        ("mlp+vqa", "--model vqa takes inputs of several parts"),
        ("mlp:hidden=8+cnn", "--share first:1: the shared parameters of models 0 and 1 differ"),
        ("softmax+char_lstm", "--model char_lstm takes whole numbers"),
    ],
)
def test_a_bad_model_among_several_is_named(model: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        setting_of(model, share="first:1")
    assert message in str(caught.value)


def test_kinds_of_different_dtypes_are_refused(kinds: list[nn.Module]) -> None:
    with pytest.raises(InputError, match="one dtype"):
        setting_of([kinds[0], kinds[1].double()])


@pytest.mark.parametrize("method", ["momentum_tracking", "d2", "dfedsam:rho=0.1"])
def test_memory_of_methods_is_of_the_shared_part(kinds: list[nn.Module], method: str) -> None:
    setting = setting_of(kinds, algorithm=method)
    run_state = list(run_states(setting, 3))[-1]
    assert all(value.shape == (7, 90) for value in vars(run_state.state).values())
    loop, batched = (
        final(setting_of(kinds, algorithm=method, engine=each), 3) for each in ("loop", "batched")
    )
    assert torch.allclose(loop, batched, rtol=0, atol=1e-5)
