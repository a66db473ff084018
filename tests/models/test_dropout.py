"""Dropout masks are drawn by address, in training only, and gradients are those of torch."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import World
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.datasets.data import Data
from dfl.models.layers import Dropout
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import MODELS
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.training.batches import batches, groups
from dfl.training.gradients import layer_inputs
from dfl.training.sgd import sgd
from dfl.training.task import Task
from tests.algorithms.test_identities import part
from tests.conftest import Command
from tests.support.quadratic import digits, final
from tests.support.sequences import CLASSES, STEPS, Places, sequences

pytestmark = pytest.mark.usefixtures("no_figures")

DROPOUT = {"model": "mlp:hidden=12+9,dropout=0.3"}


def mask(task: Task, i: int, address: tuple[int, int], layer: tuple[str, int]) -> Tensor:
    """Return peer i's mask of one layer in step k of round t, from its address."""
    (t, k), (name, units) = address, layer
    b = task.solver.batch_size
    drawn = randomness.uniform(
        task.seed, f"dropout {name}", [int(task.peers[i])], t, k, n=b * units
    )[0]
    return (drawn.view(b, units) >= 0.3).float() / 0.7


def trained(task: Task, row: Tensor, i: int, t: int) -> Tensor:
    """Return the parameters after a round of peer i by torch's layers, gradients and optimiser."""
    layers = [nn.Linear(64, 12), nn.Linear(12, 9), nn.Linear(9, 10)]
    weights = [p for layer in layers for p in layer.parameters()]
    nn.utils.vector_to_parameters(row.clone(), weights)
    optimiser = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    group = next(group for group in groups(task) if i in group)
    for k, batch in enumerate(batches(task, t, group)):
        place = list(group).index(i)
        if place >= len(batch.index):
            break
        weight = batch.weight.expand(batch.index.shape)[place]
        index = batch.index[place][weight > 0]
        inputs, labels = (
            task.inputs(task.examples.inputs[index]).flatten(1),
            task.examples.labels[index],
        )
        h = layers[0](inputs).relu() * mask(task, i, (t, k), ("3", 12))[: len(index)]
        h = layers[1](h).relu() * mask(task, i, (t, k), ("6", 9))[: len(index)]
        optimiser.zero_grad()
        nn.functional.cross_entropy(layers[2](h), labels).backward()
        optimiser.step()
    return nn.utils.parameters_to_vector(weights).detach()


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.3"])
def test_a_round_is_sgd_with_dropout_masks(engine: str, partition: str) -> None:
    task = digits(
        **DROPOUT, engine=engine, partition=partition, init="independent", local_epochs=2
    ).task
    x = draw(task.module, task.parameter_layout, 0, range(6))
    ours = sgd(x, task, 1)
    for i in range(6):
        assert torch.allclose(ours[i], trained(task, x[i], i, 1), rtol=0, atol=2e-6)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_the_other_peers_of_a_rank_make_no_difference(engine: str) -> None:
    setting = digits(**DROPOUT, engine=engine, partition="dirichlet:alpha=0.3", init="independent")
    x = start(setting.run, setting.task, False)
    together = sgd(x, setting.task, 3)
    for first, stop in ((0, 1), (1, 3), (2, 6), (5, 6)):
        assert torch.equal(sgd(x[first:stop], part(setting, first, stop), 3), together[first:stop])


def test_masks_have_mean_one_and_are_independent() -> None:
    task = digits(model="mlp:hidden=400+400,dropout=0.2", batch_size=25, local_steps=2).task
    first, second = (layer_inputs(task, batch) for batch in batches(task, 0, np.arange(6)))
    assert list(first) == ["3.mask", "6.mask"]
    for drawn in first.values():
        assert drawn.shape == (6, 25, 400)
        assert set(drawn.unique().tolist()) == {0.0, 1.25}
        assert float(drawn.mean()) == pytest.approx(1, abs=0.01)
    whole = [each.flatten() for drawn in (first, second) for of in drawn.values() for each in of]
    correlations = torch.corrcoef(torch.stack(whole)).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 0.05


def test_evaluation_uses_all_units() -> None:
    """A model in three lines has the same outputs on the test set, with all units."""
    setting = digits(**DROPOUT)
    x, test_sets = final(setting, 2), setting.test_sets
    out = setting.task.outputs(
        setting.task.parameter_layout.views(x), setting.task.inputs(test_sets.inputs), each=False
    )
    w = setting.task.parameter_layout.views(x[2])
    h = setting.task.inputs(test_sets.inputs).flatten(1)
    for name in ("1", "4"):
        h = (h @ w[f"{name}.weight"].T + w[f"{name}.bias"]).relu()
    assert torch.allclose(out[2], h @ w["7.weight"].T + w["7.bias"], rtol=0, atol=1e-5)


def test_a_layer_multiplies_by_its_mask() -> None:
    layer, x = Dropout(0.5, 12), torch.randn(2, 3, 4)
    assert layer(x) is x
    given = torch.arange(24.0).view(2, 12)
    out = torch.func.functional_call(layer, {"mask": given}, (x,))
    assert torch.equal(out, x * given.view(2, 3, 4))
    assert layer.mask is None
    assert not layer.state_dict()
    assert "rate=0.5, units=12" in repr(layer)
    with pytest.raises(InputError, match="below 1, not 1"):
        Dropout(1, 3)
    with pytest.raises(InputError, match="units must be at least 1, not 0"):
        Dropout(0.5, 0)


def test_a_layer_of_other_units_is_refused_before_round_0() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), Dropout(0.5, 4), nn.Linear(8, 10))
    with pytest.raises(InputError, match=r"model Sequential fails.*invalid for input of size"):
        digits(model=module)


class Position(nn.Module):
    """A learned number for every place."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(STEPS, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.places


@pytest.mark.parametrize("end", [partial(Dropout, 0.5, STEPS * CLASSES), Position])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_module_of_ones_own_gets_whole_rows(
    engine: Literal["loop", "batched"], end: Callable[[], nn.Module]
) -> None:
    """Labels that end early do not shorten a row that masks or positions have units for."""

    class Causal(nn.Sequential):
        causal = True

    data = sequences()
    labels = np.where(np.arange(STEPS) < 2, np.asarray(data.train_labels), -100)
    module = Causal(Places(), end())
    run = dfl.Run(
        model=module, dataset=replace(data, train_labels=labels), peers=4, rounds=2, engine=engine
    )
    *_, last = dfl.simulate(run)
    assert np.isfinite(last["train_loss"])


def test_a_model_with_dropout_is_no_stack_of_dense_layers() -> None:
    assert digits(**DROPOUT).task.dense == ()
    assert digits(model="mlp:hidden=12,dropout=0").task.dense
    assert (
        ParameterLayout.of(MODELS["mlp"]((4,), 3, hidden=(5, 6), dropout=0.5)).d
        == 4 * 5 + 5 + 5 * 6 + 6 + 6 * 3 + 3
    )


def test_dropout_layers_of_a_callers_module_draw_by_address() -> None:
    """The units after a convolution are channels times places."""
    rng = np.random.default_rng(0)
    inputs: Any = rng.integers(0, 256, (40, 1, 6, 6)).astype(np.uint8)
    data = Data(
        inputs, rng.integers(0, 2, 40), inputs[:2], np.zeros(2, np.int64), classes=2, scale=1 / 255
    )

    def moved(rate: float) -> Tensor:
        module = nn.Sequential(
            nn.Conv2d(1, 3, 3), Dropout(rate, 48), nn.Flatten(), nn.Linear(48, 2)
        )
        setting = prepare(dfl.Run(peers=4, init="independent", model=module, dataset=data), World())
        return sgd(start(setting.run, setting.task, True), setting.task, 0)

    assert torch.equal(moved(0.5), moved(0.5))
    assert not torch.allclose(moved(0.5), moved(0.0), atol=1e-3)
    with pytest.raises(
        InputError, match=r"layer 1 drops units at random.*dfl\.models\.layers\.Dropout"
    ):
        ParameterLayout.of(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))


@pytest.mark.parametrize(
    "layer",
    [
        *(kind(0.1) for kind in (nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
        nn.MultiheadAttention(2, 1, dropout=0.1),
        nn.TransformerEncoderLayer(2, 1, 2, dropout=0.1),
        nn.RReLU(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_torchs_layers_that_draw_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(InputError, match=r"^the model('s layer \w+)? drops units at random"):
        ParameterLayout.of(layer)
    with pytest.raises(InputError, match=r"^the model's layer 1(\.\w+)? drops units at random"):
        ParameterLayout.of(nn.Sequential(nn.Linear(2, 2), layer))


class Power(nn.Module):
    """A layer whose attributes have the names of rates of dropout."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = self.dropout = p
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.abs() ** self.p)
        return out


@pytest.mark.parametrize("p", [0.5, 1])
def test_a_callers_layer_may_have_an_attribute_p(p: float) -> None:
    inputs = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)
    half = inputs, np.arange(20) % 3
    *_, last = dfl.simulate(dfl.Run(model=Power(p), dataset=(half, half), peers=2, rounds=1))
    assert np.isfinite(last.train_loss)


def test_a_model_with_dropout_is_loaded_from_a_run(tmp_path: Path) -> None:
    run = dfl.Run(peers=3, rounds=2, out=tmp_path / "run", model="mlp:hidden=8,dropout=0.4")
    *_, last = dfl.simulate(run)
    model: Any = dfl.load(run.out or "").model(1)
    assert isinstance(model[3], Dropout)
    assert model.train()(torch.ones(2, 1, 8, 8)).shape == (2, 10)
    assert (
        model.to(torch.float64)(torch.ones(2, 1, 8, 8, dtype=torch.float64)).dtype == torch.float64
    )
    assert last["accuracy_mean"] > 0.2


@pytest.mark.parametrize("rate", ["1", "-0.1", "1.5"])
def test_rates_out_of_range_are_refused(dfl_run: Command, rate: str) -> None:
    line = dfl_run.refused("--model", f"mlp:dropout={rate}", "--peers", "4", "--dry-run")
    assert line == f"--model mlp: dropout must be at least 0 and below 1, not {float(rate)}"
