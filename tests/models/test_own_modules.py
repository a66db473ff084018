"""A caller's modules: frozen parameters, tied weights, dtypes, and the caller's global settings."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import World
from dfl.core import generators
from dfl.core.isolation import isolated
from dfl.evaluation import metrics
from dfl.models.modules import in_evaluation
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.simulation.prepare import prepare
from dfl.training.batches import groups
from dfl.training.sgd import sgd
from dfl.training.task import Task

pytestmark = pytest.mark.usefixtures("no_figures")

ENGINES = ["loop", "batched"]
FEW: dict[str, Any] = {
    "peers": 4,
    "rounds": 3,
    "eval_every": 3,
    "lr": 0.1,
    "batch_size": 5,
    "weight_decay": 0.01,
}
X = np.random.default_rng(0).normal(size=(80, 6)).astype(np.float32)
Y = np.arange(80) % 3


def data(inputs: NDArray[Any] = X) -> dfl.Data:
    return dfl.Data(inputs, Y, inputs[:20], Y[:20], 3)


def final(
    model: nn.Module | list[nn.Module] | str, given: dfl.Data | None = None, **settings: Any
) -> dict[str, float]:
    return list(dfl.simulate(dfl.Run(**{**FEW, **settings}, model=model, dataset=given or data())))[
        -1
    ]


class Body(nn.Module):
    """A frozen body, a head with one frozen parameter, and a scale between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(5, 3)
        for value in (*self.body.parameters(), self.head.bias):
            value.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)) * self.scale)
        return out


class Head(nn.Module):
    """The trained parameters of a `Body`, on the outputs of its frozen body."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.scale, self.weight = (
            nn.Parameter(each.detach().clone()) for each in (body.scale, body.head.weight)
        )
        self.bias = body.head.bias.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x * self.scale, self.weight, self.bias)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings", [{}, {"bits": 8}, {"algorithm": "fedavg"}], ids=["gossip", "bits", "server"]
)
def test_frozen_parameters_are_neither_trained_nor_sent(
    engine: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    module = Body()
    body = {name: value.clone() for name, value in module.state_dict().items()}
    row = final(module, engine=engine, out=tmp_path / "run", **settings)
    features = torch.relu(module.body(torch.from_numpy(X))).detach().numpy()
    alone = final(Head(module), data(features), engine=engine, **settings)
    same = (
        "train_loss",
        "accuracy_mean",
        "accuracy_mean_model",
        "consensus_distance",
        "payload_bytes",
    )
    assert [row[name] for name in same] == pytest.approx([alone[name] for name in same], rel=1e-5)
    result = dfl.load(tmp_path / "run", module)
    rows = 1 if "algorithm" in settings else 4
    lengths = {name: len(value) for name, value in result.state.items()}
    assert lengths == {
        "scale": rows,
        "head.weight": rows,
        "body.weight": 1,
        "body.bias": 1,
        "head.bias": 1,
    }
    for made in (result.model(3), result.mean_model()):
        for name in ("body.weight", "body.bias", "head.bias"):
            assert torch.equal(made.state_dict()[name], body[name])
        assert not torch.equal(made.state_dict()["head.weight"], body["head.weight"])
    assert all(torch.equal(value, body[name]) for name, value in module.state_dict().items())


def test_frozen_parameters_are_loaded_from_the_run_not_from_the_given_module(
    tmp_path: Path,
) -> None:
    final(Body(), out=tmp_path / "run")
    other = Body()
    with torch.no_grad():
        other.body.weight.zero_()
    other.requires_grad_(True)
    made = dfl.load(tmp_path / "run", other).model(0)
    assert torch.equal(made.state_dict()["body.weight"], Body().body.weight)
    assert all(value.requires_grad for value in made.parameters())


def test_a_frozen_layer_of_a_stack_has_no_place_in_a_row(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    rows = [final(module, engine=engine) for engine in ENGINES]
    assert rows[0]["train_loss"] == pytest.approx(rows[1]["train_loss"], rel=1e-6)
    setting = prepare(dfl.Run(**FEW, model=module, dataset=data()), World())
    assert (setting.task.parameter_layout.names, setting.task.parameter_layout.d) == (
        ("2.weight", "2.bias"),
        18,
    )
    row = final(module, share="head:1")
    assert row["payload_bytes"] == final(module)["payload_bytes"]
    with pytest.raises(dfl.InputError, match=r"'0\.weight'"):
        final(module, share="0.weight")


def assert_same_bits(task: Task, x: Tensor, some: list[int]) -> None:
    """Assert that some of several models, with inputs (a, n, *shape), have the same outputs as
    among all.
    """
    layout = task.parameter_layout
    parameters = {
        name: torch.randn(len(x), *shape)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    with isolated(1):
        whole = task.outputs(parameters, x)
        part = task.outputs({name: value[some] for name, value in parameters.items()}, x[some])
    assert torch.equal(part, whole[some])


@pytest.mark.parametrize("others", [1, 2, 6])
def test_peers_on_a_frozen_body_have_the_same_bits_among_any_others(others: int) -> None:
    """A frozen layer is a product for each peer, not one of the rows of all: torch rounds a product
    by the number of its rows.
    """
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    module[0].requires_grad_(False)
    run = dfl.Run(**FEW, model=module, dataset=data(np.zeros((80, 64), np.float32)))
    task = prepare(run, World()).task
    assert task.solver.batched
    assert_same_bits(task, torch.randn(12, 1, 64), [11, *range(others)])


def test_convolutions_have_the_same_bits_among_any_others() -> None:
    """Convolutions of several models in one call would be rounded by their number."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 3))
    images = data(np.zeros((80, 1, 8, 8), np.float32))
    run = dfl.Run(**FEW, model=module, dataset=images, engine="batched")
    task = prepare(run, World()).task
    assert task.solver.batched
    for some in ([11], [11, 0], [11, 0, 1, 2, 3, 4]):
        assert_same_bits(task, torch.randn(12, 2, 1, 8, 8), some)


def test_an_auxiliary_net_needs_a_trained_layer_before_it(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    module[0].requires_grad_(False)
    assert final(module, auxiliary="supervised", out=tmp_path / "run")["train_loss"] < 1.2
    assert torch.equal(
        dfl.load(tmp_path / "run", module).model(0).state_dict()["0.weight"],
        module.state_dict()["0.weight"],
    )
    module[2].requires_grad_(False)
    with pytest.raises(dfl.InputError, match="head_layers=1 leaves only frozen"):
        final(module, auxiliary="supervised")


def test_peers_of_each_kind_keep_its_frozen_parameters(tmp_path: Path) -> None:
    kinds: list[nn.Module] = [Body(), Body()]
    with torch.no_grad():
        kinds[1].body.weight.mul_(-1)  # type: ignore[union-attr, operator]
    final(kinds, share="head", out=tmp_path / "run")
    result = dfl.load(tmp_path / "run", kinds)
    for peer in range(4):
        made = result.model(peer).state_dict()
        assert torch.equal(made["body.weight"], kinds[peer % 2].state_dict()["body.weight"])
        assert not torch.equal(made["scale"], torch.ones(5))


def test_init_from_a_run_with_frozen_parameters_needs_the_same_values(tmp_path: Path) -> None:
    final(Body(), out=tmp_path / "run")
    row = next(
        dfl.simulate(
            dfl.Run(**{**FEW, "init_from": tmp_path / "run"}, model=Body(), dataset=data())
        )
    )
    assert row["train_loss"] == dfl.load(tmp_path / "run").rows["train_loss"].iloc[-1]
    thawed = Body().requires_grad_(True)
    assert final(thawed, init_from=tmp_path / "run", rounds=0)["train_loss"] == pytest.approx(
        row["train_loss"], rel=1e-6
    )
    other = Body()
    with torch.no_grad():
        other.body.weight.zero_()
    with pytest.raises(dfl.InputError, match="frozen"):
        final(other, init_from=tmp_path / "run")


def test_a_module_without_trained_parameters_is_refused() -> None:
    with pytest.raises(dfl.InputError, match=r"all 5 of them are frozen"):
        final(Body().requires_grad_(False))


class Tied(nn.Module):
    """Two layers with one weight, which is in the row under the name of the first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.second(torch.relu(self.first(x)))))
        return out


class Repeated(Tied):
    """A layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.second = self.first


@pytest.mark.parametrize("kind", [Tied, Repeated])
@pytest.mark.parametrize("engine", ENGINES)
def test_tied_weights_train_as_in_torch(engine: str, kind: type[Tied], tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "algorithm": "fedavg",
        "peers": 2,
        "batch_size": 0,
        "local_steps": 4,
        "rounds": 1,
    }
    module = kind()
    row = final(
        module, engine=engine, out=tmp_path / "run", partition="iid", momentum=0.9, **settings
    )
    whole = 4 * sum(value.numel() for value in module.parameters())
    assert row["upload_bytes"] == 2 * whole
    models = []
    setting = prepare(dfl.Run(**{**FEW, **settings}, model=module, dataset=data()), World())
    for i in range(2):
        inputs, labels = setting.task.examples.at(torch.arange(40)[None] + 40 * i)
        own = copy.deepcopy(module)
        solver = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(4):
            solver.zero_grad()
            nn.functional.cross_entropy(own(inputs[0]), labels[0]).backward()
            solver.step()
        models.append(own.state_dict())
    result = dfl.load(tmp_path / "run", module)
    made = result.model(1)
    assert isinstance(made, Tied)
    assert made.first.weight is made.second.weight
    assert set(result.state) == set(dict(module.named_parameters()))
    for name, value in made.state_dict().items():
        torch.testing.assert_close(
            value, (models[0][name] + models[1][name]) / 2, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_every_peer_has_its_own_values_of_a_layer_with_two_names(
    engine: str, tmp_path: Path
) -> None:
    module = Repeated()
    final(module, engine=engine, out=tmp_path / "run")
    result = dfl.load(tmp_path / "run", module)
    assert all(len(values) == 4 for values in result.state.values())
    for peer, accuracy in enumerate(result.peers["accuracy"]):
        right = result.model(peer)(torch.from_numpy(X[:20])).argmax(1).numpy() == Y[:20]
        assert right.mean() == pytest.approx(accuracy)


def test_tied_weights_are_shared_under_any_of_their_names() -> None:
    rows = [final(Tied(), share=share) for share in ("first.weight", "second.weight", "second")]
    assert len({(row["train_loss"], row["payload_bytes"]) for row in rows}) == 1
    assert rows[0]["payload_bytes"] == 3 * 8 * 36 * 4


class Half(nn.Module):
    """One parameter of one dtype beside a layer of float32."""

    def __init__(self, dtype: torch.dtype, trained: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.odd = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.odd.float()
        return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64", "float64"])
@pytest.mark.parametrize("trained", [True, False])
def test_other_dtypes_are_refused(dtype: str, trained: bool) -> None:
    kind = getattr(torch, dtype)
    modules = [Half(kind, trained)] + (
        [] if dtype in ("float64", "complex64") else [nn.Linear(6, 3).to(kind)]
    )
    for module in modules:
        with pytest.raises(dfl.InputError, match=dtype) as caught:
            final(module)
        assert "float32" in str(caught.value)


def run_digits() -> list[dict[str, float]]:
    return list(
        dfl.simulate(
            dfl.Run(**{**FEW, "dataset": "digits", "examples_per_peer": 20, "model": "softmax"})
        )
    )


def global_settings() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), np.geterr(), torch.get_rng_state().tolist(),
    )  # fmt: skip


def set_while(put: Callable[[Any], None], value: Any, before: Any) -> Callable[[ExitStack], None]:
    def change(stack: ExitStack) -> None:
        put(value)
        stack.callback(put, before)

    return change


CHANGES: dict[str, Callable[[ExitStack], Any]] = {
    "default dtype": set_while(torch.set_default_dtype, torch.float64, torch.float32),
    "default device": set_while(torch.set_default_device, "meta", None),
    "device context": lambda stack: stack.enter_context(torch.device("meta")),
    "threads": set_while(torch.set_num_threads, 3, torch.get_num_threads()),
    "no_grad": lambda stack: stack.enter_context(torch.no_grad()),
    "inference_mode": lambda stack: stack.enter_context(torch.inference_mode()),
    "autocast": lambda stack: stack.enter_context(torch.autocast("cpu", torch.bfloat16)),
    "precision": set_while(torch.set_float32_matmul_precision, "medium", "highest"),
    "deterministic": set_while(torch.use_deterministic_algorithms, True, False),
    "numpy errors": lambda stack: stack.enter_context(np.errstate(all="raise")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_rows_do_not_depend_on_global_settings_of_the_caller(name: str) -> None:
    plain = run_digits()
    with ExitStack() as stack:
        CHANGES[name](stack)
        before = global_settings()
        rows: list[dict[str, float]] = []
        for row in dfl.simulate(
            dfl.Run(**FEW, dataset="digits", examples_per_peer=20, model="softmax")
        ):
            assert global_settings() == before
            rows.append(row)
        assert global_settings() == before
        module = copy.deepcopy(MODULE)
        own = final(module)
    assert [row | {"seconds": 0} for row in rows] == [row | {"seconds": 0} for row in plain]
    assert own | {"seconds": 0} == final(MODULE) | {"seconds": 0}


MODULE = Body()


def test_settings_are_restored_when_a_run_is_refused_diverges_or_is_closed() -> None:
    modules = nn.Linear(7, 3), nn.Linear(6, 3)
    before = global_settings()
    with pytest.raises(dfl.InputError):
        final(modules[0])
    with pytest.raises(dfl.DivergedError):
        final(modules[1], lr=1e30)
    rows = dfl.simulate(dfl.Run(**FEW, model=MODULE, dataset=data()))
    next(rows)
    assert isinstance(rows, Iterator)
    rows.close()  # type: ignore[attr-defined]
    assert global_settings() == before


def test_a_callers_module_is_not_changed_and_later_changes_of_it_have_no_effect() -> None:
    module = Body().eval()
    for value in module.parameters():
        value.grad = torch.ones_like(value) if value.requires_grad else None
    before = {
        name: (value.clone(), value.requires_grad, value.grad)
        for name, value in module.named_parameters()
    }
    rows = list(dfl.simulate(dfl.Run(**{**FEW, "eval_every": 1}, model=module, dataset=data())))
    assert not module.training
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name][0])
        assert (value.requires_grad, value.grad) == before[name][1:]
    again = []
    for row in dfl.simulate(dfl.Run(**{**FEW, "eval_every": 1}, model=module, dataset=data())):
        again.append(row)
        with torch.no_grad():
            module.body.weight.zero_()
    assert [row["train_loss"] for row in again] == [row["train_loss"] for row in rows]


class Temperature(nn.Module):
    """A parameter that is one number, of shape ()."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) * self.temperature
        return out


class Reshaped(Temperature):
    """The same number, of shape (1,)."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor([1.5]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.9},
        {"algorithm": "dfedsam", "partition": "quantity:alpha=1"},
        {"algorithm": "fedprox:mu=0.1"},
        {"bits": 4},
        {"share": "temperature"},
    ],
    ids=str,
)
def test_a_parameter_without_axes_trains_as_one_with_one_axis(
    engine: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folders = [tmp_path / "scalar", tmp_path / "axis"]
    rows = [
        final(module, engine=engine, out=folder, **settings) | {"seconds": 0}
        for module, folder in zip((Temperature(), Reshaped()), folders, strict=True)
    ]
    assert rows[0] == rows[1]
    states = [load_file(folder / "state.safetensors") for folder in folders]
    for name, value in states[0].items():
        assert torch.equal(value.flatten(), states[1][name].flatten())
    made = dfl.load(folders[0], Temperature()).model(0)
    assert torch.equal(dict(made.named_parameters())["temperature"], states[0]["temperature"][0])
    final(Temperature(), init_from=folders[0])


@pytest.mark.parametrize("first", [0, 2])
def test_peers_with_a_parameter_without_axes_have_the_same_bits_among_any_others(
    first: int,
) -> None:
    run = dfl.Run(**FEW, model=Temperature(), dataset=data(), engine="batched")
    task = prepare(run, World()).task
    rows = task.parameter_layout.row(task.module).repeat(len(task.peers), 1)
    with isolated(1):
        whole = sgd(rows, task, 1)
        part = sgd(rows[first : first + 2], task.only(np.arange(first, first + 2)), 1)
    assert torch.equal(part, whole[first : first + 2])


class Constant(nn.Module):
    """A layer of inputs that a constant selects or scales, held in some way."""

    constant: Tensor

    def __init__(self, constant: Tensor, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3)
        if how == "buffer":
            self.register_buffer("constant", constant)
        elif how == "parameter":
            self.constant = nn.Parameter(constant, requires_grad=False)
        else:
            self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, self.constant] if self.constant.dtype == torch.int64 else x * self.constant
        out: Tensor = self.layer(chosen)
        return out


CONSTANTS = [
    (torch.ones(6, dtype=torch.bool), "attribute"),
    (torch.arange(6), "attribute"),
    (torch.ones(6), "parameter"),
]


@pytest.mark.parametrize(("constant", "advised"), CONSTANTS, ids=["mask", "table", "numbers"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_constant_that_is_a_buffer_is_refused_with_what_works(
    engine: str, constant: Tensor, advised: str
) -> None:
    with pytest.raises(dfl.InputError, match=rf"the buffer constant, .*: make .* {advised}"):
        final(Constant(constant, "buffer"), engine=engine)
    if advised == "attribute":
        with pytest.raises(dfl.InputError, match=rf"parameter constant is of .* {advised}"):
            final(Constant(constant, "parameter"), engine=engine)
    row = final(Constant(constant, advised), engine=engine)
    plain = nn.Sequential(Constant(constant, "attribute").layer)
    assert row["train_loss"] == pytest.approx(final(plain, engine=engine)["train_loss"])


class Moded(nn.Module):
    """A layer, with logits that are adjusted in training alone, or are what a function makes of
    them in evaluation.
    """

    def __init__(self, evaluated: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.evaluated = nn.Linear(6, 3), evaluated

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.training:
            return out if self.evaluated else out + torch.tensor([5.0, 0, 0])
        return self.evaluated(out) if self.evaluated else out


@pytest.mark.parametrize("settings", [{}, {"algorithm": "fedavg"}, {"share": "*bias"}], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_figures_are_those_of_the_models_that_are_saved(
    engine: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    module = nn.Sequential(Moded())
    folder = tmp_path / "run"
    row = final(module, engine=engine, out=folder, ensemble=True, **settings)
    result = dfl.load(folder, module)
    x, y = torch.from_numpy(X), torch.from_numpy(Y)

    def accuracy(out: Tensor) -> float:
        return float((out.argmax(1) == y[:20]).double().mean())

    with torch.no_grad():
        outputs = [result.model(i)(x[:20]) for i in range(4)]
        of_mean = result.mean_model()(x[:20])
        loss = float(nn.functional.cross_entropy(result.mean_model()(x), y))
    assert result.peers["accuracy"].tolist() == pytest.approx([accuracy(out) for out in outputs])
    assert row["accuracy_mean_model"] == pytest.approx(accuracy(of_mean))
    assert row["accuracy_ensemble"] == pytest.approx(accuracy(torch.stack(outputs).mean(0)))
    if "algorithm" in settings:  # one model, and parts of equal size
        assert row["train_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_trains_in_the_mode_in_which_it_is_given(engine: Any) -> None:
    def trained(module: nn.Module) -> Tensor:
        run = dfl.Run(**FEW, model=module, dataset=data(), engine=engine)
        task = prepare(run, World()).task
        with isolated(1):
            return sgd(task.parameter_layout.row(task.module).repeat(4, 1), task, 1)

    given, plain = Moded(), trained(nn.Sequential(Moded().layer))
    torch.testing.assert_close(trained(given.eval()), plain)
    assert not torch.allclose(trained(given.train()), plain, atol=0.01)


def test_what_a_model_returns_in_evaluation_is_tried() -> None:
    final(Moded(lambda out: out.softmax(1)))
    final(Moded(Tensor.detach))  # it need not be differentiated there
    for function, part in (
        (lambda out: out.argmax(1), r"the model Moded returns \(2,\) for"),
        (lambda out: out - out.mean(0), "the model Moded computes .* from other examples"),
        (lambda out: out + torch.rand(3), "the model or the loss draws from torch's own"),
        (lambda out: out.view(7), "the model Moded fails on inputs"),
    ):
        with pytest.raises(dfl.InputError, match=rf"^in evaluation mode \(eval\(\)\), {part}"):
            final(Moded(function))


def test_an_operation_of_evaluation_that_rounds_by_place_is_computed_by_model() -> None:
    run = dfl.Run(**FEW, model=Moded(torch.sigmoid), dataset=data())
    assert prepare(run, World()).task.by_model


def test_a_traced_model_is_the_model() -> None:
    """Its forward belongs to no module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    traced, given = final(torch.fx.symbolic_trace(module)), final(module)
    assert traced["train_loss"] == pytest.approx(given["train_loss"], rel=1e-5)


def test_layers_of_torch_keep_their_mode_in_evaluation() -> None:
    """Which decides about kernels that round otherwise."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    module = nn.Sequential(
        layer, nn.GRU(6, 3), Moded(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    )
    with in_evaluation([module]):
        assert [each for each in module.modules() if not each.training] == [module[2]]
    assert all(each.training for each in module.modules())


class Unused(nn.Module):
    """A module with a layer that the outputs do not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_without_a_gradient_keeps_its_values(engine: str, tmp_path: Path) -> None:
    module = Unused()
    final(module, engine=engine, weight_decay=0.0, out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "state.safetensors")
    torch.testing.assert_close(state["idle.weight"], module.idle.weight.detach().expand(4, 2, 2))


class Looked(nn.Module):
    """An embedding of the signs of the inputs, with gradients that may be sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(3, 5, sparse=sparse), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.table((x.sign() + 1).long()).mean(1))
        return out


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sparse_gradients_train_as_dense_ones(momentum: float) -> None:
    settings: dict[str, Any] = {"engine": "loop", "momentum": momentum}
    sparse, dense = (final(Looked(each), **settings) for each in (True, False))
    assert sparse["train_loss"] == pytest.approx(dense["train_loss"], rel=1e-6)


class Coupled(nn.Module):
    """A module whose outputs for an example depend on the batch."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function = nn.Linear(6, 3), function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.function(x))
        return out


def attention(x: Tensor) -> Tensor:
    """Attention over what it takes for the places of one sequence."""
    return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0), lambda x: x / x.norm(), lambda x: x / x.abs().max(),
        lambda x: x - x[:1], attention,
    ],
)  # fmt: skip
def test_a_model_that_couples_the_examples_of_a_batch_is_refused(
    function: Callable[[Tensor], Tensor], engine: str
) -> None:
    with pytest.raises(dfl.InputError, match="Coupled computes the outputs of an example from"):
        final(Coupled(function), engine=engine)


def test_statistics_of_the_batch_alone_are_refused() -> None:
    layer = nn.BatchNorm1d(6, track_running_stats=False)
    with pytest.raises(dfl.InputError, match="BatchNorm must keep running statistics"):
        final(nn.Sequential(layer, nn.Linear(6, 3)))


DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002
    "Python": random.random,
}


@pytest.mark.parametrize("whose", DRAWS)
def test_random_numbers_are_named_as_the_reason(whose: str) -> None:
    def shaken(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs + DRAWS[whose](), labels, reduction="none")

    rare = Coupled(lambda x: 2 * x if DRAWS[whose]() < 0 else x)
    plain = nn.Linear(6, 3)
    before = generators.states()
    for settings in ({"model": rare}, {"model": plain, "loss": shaken}):
        with pytest.raises(dfl.InputError, match=f"draws from {whose}'s own generator"):
            final(**settings)
    assert generators.drawn_since(before) is None


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_a_model_that_does_not_take_an_example_alone_is_refused(engine: str) -> None:
    """The last batch may have one example, whose axis torch.squeeze would remove."""
    message = r"Coupled returns \(3,\) for inputs of shape \(1, 6\).*squeeze\(\) must name an axis"
    with pytest.raises(dfl.InputError, match=message):
        final(Coupled(torch.squeeze), engine=engine)
    assert "train_loss" in final(Coupled(lambda x: x[:, None].squeeze(1)), engine=engine)


class Pairs(nn.Module):
    """A model of few parameters that multiplies all pairs of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(1, 2), nn.Linear(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.first(x[..., None]).unbind(-1)
        products = a[..., None] * b[..., None, :]
        out: Tensor = self.last(products.mean((-1, -2))[..., None])
        return out


@pytest.mark.parametrize(
    ("model", "inputs", "numbers", "together", "evaluated"),
    [
        (Pairs(), 20, 20 * 20, 40, 163),  # 2^27 numbers: of 512 examples, in four tensors
        (Pairs(), 300, 300 * 300, 2, 2),
        (nn.Linear(300, 3), 300, 300, 40, 218),
    ],
)
def test_models_together_are_bounded_by_what_an_operation_computes(
    model: nn.Module, inputs: int, numbers: int, together: int, evaluated: int
) -> None:
    given = data(np.ones((80, inputs), np.float32))
    task = prepare(dfl.Run(dataset=given, model=model, peers=40), World(0, 1)).task
    assert task.solver.batched
    assert task.activations == numbers
    assert max(map(len, groups(task))) == together
    assert metrics._models(task) == evaluated


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_that_computes_much_has_the_same_results_among_fewer(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Pairs()
    found = final(model, engine=engine)
    monkeypatch.setattr(metrics, "MOST_OUTPUTS", 2**17)  # two models of 36 numbers an example
    again = final(model, engine=engine)
    assert again | {"seconds": 0} == found | {"seconds": 0}


def test_a_model_without_finite_outputs_is_refused_as_such() -> None:
    with pytest.raises(dfl.DivergedError):
        final(Coupled(lambda x: x / 0))


def test_a_loss_that_couples_the_examples_of_a_batch_is_refused() -> None:
    def balanced(outputs: Tensor, labels: Tensor) -> Tensor:
        counts = torch.bincount(labels, minlength=3)
        losses: Tensor = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return losses / counts[labels] * len(labels)

    def centred(outputs: Tensor, labels: Tensor) -> Tensor:
        outputs = outputs - outputs.mean(0)
        losses: Tensor = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return losses

    def focal(outputs: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = nn.functional.cross_entropy(outputs, labels, reduction="none")
        weight = (1 - torch.exp(-losses.detach())) ** 2
        return losses * weight / weight.max()

    def relative(outputs: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = nn.functional.cross_entropy(outputs, labels, reduction="none")
        return losses - losses[:1].detach() / 2

    for loss in (balanced, centred, focal, relative):
        for model in (nn.Linear(6, 3), "softmax"):
            with pytest.raises(dfl.InputError, match="the loss of an example depends on other"):
                final(model, loss=loss)


class Branches(nn.Module):
    """A module whose forward depends on values, which vmap does not support."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x if float(x.sum()) > 1e9 else x * 2)
        return out


def test_a_model_that_vmap_does_not_support_is_trained_by_the_loop() -> None:
    module = Branches()
    assert final(module)["train_loss"] == final(module, engine="loop")["train_loss"]
    with pytest.raises(dfl.InputError, match="Branches"):
        final(module, engine="batched")


@pytest.mark.parametrize(
    "layer",
    [
        nn.GroupNorm(2, 4),
        nn.LayerNorm(4),
        nn.RMSNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_independent_starts_of_normalisation_layers_are_one_and_zero(layer: nn.Module) -> None:
    layout = ParameterLayout.of(layer)
    rows = layout.views(draw(layer, layout, seed=0, peers=[0, 1]))
    assert list(rows) == [name for name, _ in layer.named_parameters()]
    for name, values in rows.items():
        assert torch.equal(values, torch.full((2, 4), float(name == "weight")))
