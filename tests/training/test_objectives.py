"""Each part of a model follows the gradient of the paper's objective, in the paper's order."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import World
from dfl.core.errors import InputError
from dfl.models.layers import SplitModel
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import MODELS
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.training.auxiliaries import AUXILIARIES, Jigsaw, Rotation
from dfl.training.examples import Examples
from dfl.training.objectives import ADVERSARIES, Adversary, RepresentationObjective
from dfl.training.sgd import sgd
from dfl.training.task import Task
from tests.conftest import Command
from tests.support.protected import BOTH, one_attribute, setting, shaded, trained

pytestmark = pytest.mark.usefixtures("no_figures")

KINDS = [name for name in AUXILIARIES if name != "none"]


def at_start(given: Prepared) -> Tensor:
    return start(given.run, given.task, given.own_module)


def parts(task: Task) -> dict[str, tuple[str, ...]]:
    assert isinstance(task.module, SplitModel)
    return task.module.parts


def of(task: Task, rows: Tensor, *names: str) -> Tensor:
    """Return the parameters of some parts of the models, (p, numbers)."""
    views = task.parameter_layout.views(rows)
    return torch.cat(
        [views[each].flatten(1) for name in names for each in parts(task)[name]], dim=1
    )


@pytest.mark.parametrize(
    ("engine", "partition", "nets"),
    [
        pytest.param(engine, partition, nets, marks=() if (a + b + k) % 2 else pytest.mark.slow)
        for k, nets in enumerate([*KINDS, "adversary", "both", "proximal"])
        for a, engine in enumerate(("batched", "loop"))
        for b, partition in enumerate(("iid", "dirichlet:alpha=0.3"))
    ],
)
def test_a_round_is_that_of_the_paper(engine: str, partition: str, nets: str) -> None:
    """A round agrees with autograd and heavy-ball steps written plainly, one peer at a time, with
    the same masks and puzzles.
    """
    auxiliary = f"{nets if nets in KINDS else 'rotation'}:weight=0.4,hidden=6"
    adversary = BOTH if nets not in KINDS else "none"
    if nets == "adversary":
        auxiliary, adversary = "none", "adversary:lambda_global=1.3,hidden=6+4"
    given = setting(
        engine=engine,
        partition=partition,
        auxiliary=auxiliary,
        fairness_adversary=adversary,
        local_epochs=2,
        weight_decay=0.01,
    )
    task = given.task
    if nets == "proximal":
        task = replace(task, solver=replace(task.solver, prox_mu=0.3))
    x = at_start(given)
    ours = sgd(x, task, 2)
    for i in range(5):
        assert torch.allclose(ours[i], trained(task, x[i], i, 2), rtol=0, atol=3e-6)


def test_the_adversarys_gradient_reaches_f_with_opposite_sign() -> None:
    """By hand in float64: with r(h) = w2 relu(w1 h + b1) + b2 and h = A x + c, f ascends λ L_r."""
    rows = {}
    for strength in (0.0, 2.5):
        given = setting(
            nn.Sequential(nn.Flatten(), nn.Linear(36, 3), nn.Linear(3, 3)),
            one_attribute(),
            momentum=0.0,
            batch_size=0,
            fairness_adversary=f"adversary:lambda_global={strength},hidden=2",
            local_steps=1,
        )
        x = at_start(given)
        rows[strength] = sgd(x, given.task, 0)
    task = given.task
    views = {name: view.double().numpy() for name, view in task.parameter_layout.views(x).items()}
    for i in range(5):
        A, c, w1, b1, w2, b2 = (
            views[n][i] for n in ("1.weight", "1.bias", *parts(task)["adversary"])
        )
        mine = slice(task.examples.starts[i], task.examples.starts[i] + task.examples.sizes[i])
        inputs = task.inputs(task.examples.inputs[mine]).flatten(1).double().numpy()
        assert task.examples.protected is not None
        h = inputs @ A.T + c
        s = np.maximum(h @ w1.T + b1, 0) @ w2.T + b2
        up = (1 / (1 + np.exp(-s)) - task.examples.protected[mine].numpy()) / len(h)  # dL_r / ds
        back = (up @ w2 * (h @ w1.T + b1 > 0)) @ w1
        climbed = 0.1 * 2.5 * np.concatenate([(back.T @ inputs).ravel(), back.sum(0)])
        moved = (of(task, rows[2.5], "f") - of(task, rows[0.0], "f"))[i].double().numpy()
        np.testing.assert_allclose(moved, climbed, atol=1e-6)
        assert np.abs(climbed).max() > 1e-3


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("auxiliary", ["none", "autoencoder:weight=0.5"])
def test_an_adversary_without_weight_does_not_change_the_model(engine: str, auxiliary: str) -> None:
    """The model is equal bit for bit, with momentum, weight decay and padding, and the adversary
    still learns.
    """
    common: Any = {
        "engine": engine,
        "auxiliary": auxiliary,
        "partition": "dirichlet:alpha=0.3",
        "weight_decay": 0.01,
    }
    watched = setting(**common, fairness_adversary="adversary", local_epochs=2)
    alone = setting(**common, local_epochs=2)
    x, y = at_start(watched), at_start(alone)
    for t in range(2):
        x, y = sgd(x, watched.task, t), sgd(y, alone.task, t)
    views = watched.task.parameter_layout.views(x)
    for name, view in alone.task.parameter_layout.views(y).items():
        assert torch.equal(views[name], view), name
    moved = of(watched.task, x, "adversary") - of(watched.task, at_start(watched), "adversary")
    assert (moved.abs().amax(1) > 1e-3).all()


def deception(task: Task, x: Tensor) -> float:
    """Return the mean loss of the peers' adversaries on all examples, without dropout."""
    assert isinstance(task.objective, RepresentationObjective)
    assert task.objective.adversary is not None
    assert task.examples.protected is not None
    views = task.parameter_layout.views(x)
    h = task.outputs(views, task.inputs(task.examples.inputs), each=False, part="f")
    predicted = task.outputs(views, h, part="adversary")
    return float(
        torch.stack(
            [task.objective.adversary.loss(each, task.examples.protected) for each in predicted]
        ).mean()
    )


@pytest.mark.slow
@pytest.mark.parametrize(("strength", "least", "most"), [(0.0, 0.0, 0.3), (3.0, 0.6, 0.75)])
def test_an_adversary_hides_the_attributes(strength: float, least: float, most: float) -> None:
    """Without weight the adversary's loss is far below log 2 = 0.69, that of a coin; with weight it
    is near log 2. Labels are learned in both cases.
    """
    adversary = f"adversary:lambda_global={strength}"
    more: dict[str, Any] = {
        "init": "common",
        "lr": 0.06,
        "momentum": 0.0,
        "batch_size": 20,
        "model": "mlp:hidden=16+8",
    }
    given = setting(fairness_adversary=adversary, algorithm="pooled", local_epochs=200, **more)
    x = start(given.run, given.task, False, has_server=True)
    assert given.task.server is not None
    x = sgd(x, given.task.server, 0)
    assert least < deception(given.task, x) < most
    predicted = given.task.outputs(
        given.task.parameter_layout.views(x),
        given.task.inputs(given.task.examples.inputs),
        each=False,
    )
    assert float((predicted[0].argmax(1) == given.task.examples.labels).float().mean()) > 0.7


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("batch_size", [3, 4, 10])
@pytest.mark.parametrize("auxiliary", ["jigsaw", "autoencoder:hidden=5"])
def test_a_peers_bits_do_not_depend_on_its_group(
    engine: str, batch_size: int, auxiliary: str
) -> None:
    """This includes functions that torch rounds differently at the end of an array, as sigmoid."""
    uneven: dict[str, Any] = {
        "partition": "dirichlet:alpha=0.3",
        "peers": 7,
        "batch_size": batch_size,
    }
    given = setting(engine=engine, auxiliary=auxiliary, fairness_adversary=BOTH, **uneven)
    x, train = at_start(given), given.task.examples
    together = sgd(x, given.task, 3)
    for first, stop in ((0, 1), (1, 3), (2, 5), (3, 7)):
        mine = slice(int(train.starts[first]), int((train.starts + train.sizes)[stop - 1]))
        assert train.protected is not None
        own = Examples.of(
            train.inputs[mine], train.labels[mine], train.sizes[first:stop], train.protected[mine]
        )
        task = replace(
            given.task,
            peers=np.arange(first, stop),
            examples=own,
            padded=given.task.padded[first:stop],
        )
        assert torch.equal(sgd(x[first:stop], task, 3), together[first:stop])


@pytest.mark.slow
def test_engines_agree_in_a_whole_run(tmp_path: Path) -> None:
    states = []
    for engine in ("loop", "batched"):
        run = dfl.Run(
            peers=5,
            rounds=3,
            model="mlp:hidden=9,dropout=0.1",
            engine=engine,
            auxiliary="supervised",
            fairness_adversary="adversary:lambda_global=0.5",
            augment="crop_flip:padding=1",
            partition="dirichlet:alpha=0.5",
            out=tmp_path / engine,
            batch_size=5,
            momentum=0.5,
        )
        assert list(dfl.simulate(replace(run, dataset=shaded())))[-1]["accuracy_mean"] > 0.3
        states.append(dfl.load(tmp_path / engine).state)
    loop, batched = states
    assert {name.partition(".")[0] for name in loop} == {"1", "4", "auxiliary", "adversary"}
    for name, value in loop.items():
        assert torch.allclose(value, batched[name], rtol=0, atol=1e-6), name
    model: Any = dfl.load(tmp_path / "loop").model(2)  # without the auxiliary net and the adversary
    assert [name for name, _ in model.named_parameters()] == [
        "1.weight",
        "1.bias",
        "4.weight",
        "4.bias",
    ]
    assert torch.equal(model[1].weight, loop["1.weight"][2])


@pytest.mark.parametrize("algorithm", ["fltrust:root=6", "pooled"])
def test_a_server_that_trains_knows_the_attributes(algorithm: str) -> None:
    given = setting(
        algorithm=algorithm, fairness_adversary=BOTH, auxiliary="supervised", init="common"
    )
    server = given.task.server
    assert server is not None
    assert server.examples.protected is not None
    whole, mine = shaded(), server.examples.inputs.flatten(1)
    places = [
        int((torch.from_numpy(whole.train_inputs).flatten(1) == each).all(1).int().argmax())
        for each in mine
    ]
    assert whole.train_protected is not None
    np.testing.assert_array_equal(server.examples.protected.numpy(), whole.train_protected[places])
    x = start(given.run, given.task, False, has_server=True)
    assert (of(server, sgd(x, server, 0) - x, "adversary").abs().sum()) > 0


def test_parts_keep_their_names_and_starts() -> None:
    given, plain = setting(fairness_adversary=BOTH, auxiliary="autoencoder:hidden=6"), setting()
    assert parts(given.task)["f"] == ("1.weight", "1.bias", "4.weight", "4.bias")
    assert parts(given.task)["g"] == ("7.weight", "7.bias")
    assert parts(given.task)["auxiliary"][0] == "auxiliary.1.weight"
    views = given.task.parameter_layout.views(at_start(given))
    for name, view in plain.task.parameter_layout.views(at_start(plain)).items():
        assert torch.equal(views[name], view), name
    x, seen = at_start(given), given.task.inputs(given.test_sets.inputs)
    one, other = (task.outputs(task.parameter_layout.views(at_start(s)), seen, each=False)
                  for s in (given, plain) for task in (s.task,))  # fmt: skip
    assert torch.equal(one, other)
    assert views["auxiliary.3.weight"].shape == (5, 36, 6)
    assert views["adversary.5.weight"].shape == (5, 2, 4)
    assert len(torch.unique(x[:, -1])) == 5


@pytest.mark.parametrize(("head_layers", "g"), [(1, "7"), (2, "47"), (3, "")])
def test_the_representation_ends_at_head_layers(head_layers: int, g: str) -> None:
    spec = f"supervised:head_layers={head_layers}"
    if g:
        names = parts(setting(auxiliary=spec).task)["g"]
        assert names == tuple(f"{k}.{kind}" for k in g for kind in ("weight", "bias"))
    else:
        with pytest.raises(
            InputError,
            match=r"supervised: head_layers=3 leaves nothing .* the model has 3 layers with par",
        ):
            setting(auxiliary=spec)
    lenet = prepare(dfl.Run(peers=2, model="cnn", auxiliary="rotation:head_layers=2"), World())
    assert lenet.task.parameter_layout.shapes[
        lenet.task.parameter_layout.names.index("auxiliary.1.weight")
    ] == (
        4,
        64 * 2 * 2,
    )


def test_a_module_of_the_caller_keeps_its_values() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 4), nn.PReLU(), nn.Linear(4, 3)).double()
    given = setting(module, fairness_adversary=BOTH, auxiliary="supervised", init="common", seed=3)
    views = given.task.parameter_layout.views(at_start(given))
    for name, value in module.named_parameters():
        assert torch.equal(views[name][1], value.detach()), name
    nets = nn.ModuleDict({"adversary": MODELS["mlp"]((4,), 2, hidden=(6, 4))})
    drawn = draw(nets, ParameterLayout.of(nets), 3, [0])[0].double()
    assert torch.equal(of(given.task, at_start(given), "adversary")[2], drawn)
    assert given.task.dtype == torch.float64
    assert torch.isfinite(sgd(at_start(given), given.task, 0)).all()


def test_rotations_agree_with_numpy_and_puzzles_are_permutations() -> None:
    image = np.random.default_rng(0).integers(0, 256, (4, 4))
    for k, places in enumerate(Rotation.table(4, 4)):
        np.testing.assert_array_equal(image.flat[places.numpy()].reshape(4, 4), np.rot90(image, k))
    table = Jigsaw.table(4, 6)
    assert table.shape == (24, 24)
    assert len({tuple(row) for row in table.tolist()}) == 24
    assert all(sorted(row) == list(range(24)) for row in table.tolist())
    assert table[0].tolist() == list(range(24))
    assert ADVERSARIES["none"]() is None


def test_the_adversarys_loss_is_torchs_binary_cross_entropy() -> None:
    outputs = torch.randn(50, 3) * 10
    targets = torch.randint(0, 2, (50, 3))
    each = nn.functional.binary_cross_entropy_with_logits(
        outputs, targets.float(), reduction="none"
    )
    assert torch.allclose(Adversary().loss(outputs, targets), each.mean(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "parts_of_message"),
    [
        ("--fairness-adversary adversary", ["--fairness-adversary adversary", "protected"]),
        (
            "--fairness-adversary adversary:lambda_local=2",
            ["--fairness-adversary adversary", "lambda_local=2.0", "--auxiliary"],
        ),
        (
            "--fairness-adversary adversary:head_layers=2 --auxiliary jigsaw",
            ["--auxiliary jigsaw: head_layers=1", "--fairness-adversary adversary: head_layers=2"],
        ),
        ("--model softmax --auxiliary rotation", ["--auxiliary rotation", "head_layers=1"]),
        (
            "--dataset gaussian:features=12 --auxiliary rotation",
            ["--auxiliary rotation", "as high as they are wide", "12"],
        ),
        (
            "--dataset gaussian:features=12 --auxiliary jigsaw",
            ["--auxiliary jigsaw", "even", "12"],
        ),
    ],
)
def test_impossible_objectives_are_refused(
    dfl_run: Command, tokens: str, parts_of_message: list[str]
) -> None:
    line = dfl_run.refused(*tokens.split(), "--peers", "4", "--dry-run")
    assert all(each in line for each in parts_of_message), line


def test_models_that_cannot_be_split_are_refused() -> None:
    tied = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, 3))
    tied[2].weight = tied[1].weight
    named = nn.Sequential()
    named.add_module("auxiliary", nn.Linear(36, 3))
    for module in (tied, named, nn.Linear(36, 3)):
        with pytest.raises(InputError, match=r"--auxiliary supervised .* plain nn\.Sequential"):
            setting(module, auxiliary="supervised", init="common")


class Called(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Linear(7, 5), r"fail on examples of \(1, 6, 6\): RuntimeError: mat1 and mat2"),
        (nn.GRU(36, 5), r"fail on examples of \(1, 6, 6\): AttributeError: 'tuple' object"),
        (nn.Sequential(nn.Linear(36, 5), nn.BatchNorm1d(5)), "keeps running statistics"),
    ],
)
def test_layers_that_a_run_cannot_train_are_refused_in_one_line(
    layer: nn.Module, message: str
) -> None:
    module = nn.Sequential(nn.Flatten(), layer, nn.Linear(5, 3))
    with pytest.raises(InputError, match=message):
        setting(module, auxiliary="supervised", init="common")


def test_a_layer_of_the_caller_may_depend_on_values() -> None:
    """Its width is that of real numbers, not of ones without values."""
    branch = Called(lambda x: x if float(x.detach().sum()) < 1e9 else -x)
    models = []
    for layer in (branch, nn.Identity()):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), layer, nn.Linear(5, 3))
        given = setting(module, auxiliary="supervised", init="common", engine="loop")
        models.append(sgd(at_start(given), given.task, 0))
    assert torch.equal(*models)


@pytest.mark.parametrize("head", [1, 2])
def test_parameters_that_the_model_does_not_use_keep_their_values(head: int) -> None:
    """Of f, and of g where it has two layers."""

    class Wide(nn.Linear):
        def __init__(self, inputs: int, outputs: int) -> None:
            super().__init__(inputs, outputs)
            self.idle = nn.Linear(2, 2)

    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 5), Wide(5, 4), nn.Linear(4, 3))
    given = setting(module, auxiliary=f"supervised:hidden=6,head_layers={head}", weight_decay=0.0)
    x = at_start(given)
    moved = sgd(x, given.task, 0) - x
    views = given.task.parameter_layout.views(moved)
    assert not views["2.idle.weight"].any()
    assert views["2.weight"].any()
