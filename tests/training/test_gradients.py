"""Gradients by batched products, by vmap and one peer at a time agree with torch's autograd."""

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dfl.comm.mpi import World
from dfl.config import Run
from dfl.datasets.data import Data
from dfl.models.modules import dense_layers
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.training.gradients import update_velocity
from dfl.training.problem import Step
from dfl.training.sgd import sgd
from dfl.training.task import Task


def stack(*widths: int, bias: bool = True, last: bool = False) -> nn.Sequential:
    """Return dense layers with ReLU between them, and after the last one if `last`."""
    layers: list[nn.Module] = []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b, bias=bias), nn.ReLU()]
    return nn.Sequential(*(layers if last else layers[:-1]))


def problem(module: nn.Module, n: int = 12, loss: Any = "cross_entropy", **more: Any) -> Prepared:
    """Return five peers with examples of as many features as the module takes."""
    rng = np.random.default_rng(0)
    features = next(module.parameters()).shape[1]
    inputs = rng.normal(size=(5 * n, features)).astype(np.float32)
    labels = rng.integers(0, 2, 5 * n)
    data = Data(inputs, labels, inputs[:2], labels[:2], classes=2)
    run = Run(
        **{"peers": 5, "init": "independent", "batch_size": 4, "lr": 0.1, "local_epochs": 2, **more}
    )
    return prepare(replace(run, model=module, dataset=data, loss=loss), World())


def stepped(setting: Prepared, **more: Any) -> Tensor:
    """Return the models after a round of training, with some fields of the task changed."""
    return sgd(start(setting.run, setting.task, False), replace(setting.task, **more), 1)


class ByAutograd(Task):
    """A task whose model is not recognized as a stack of dense layers."""

    dense = ()


def by_autograd(setting: Prepared, batched: bool) -> Tensor:
    same = {each.name: getattr(setting.task, each.name) for each in fields(setting.task)}
    task = ByAutograd(**{**same, "solver": replace(setting.task.solver, batched=batched)})
    return sgd(start(setting.run, setting.task, False), task, 1)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4), st.booleans(), st.booleans(),
    st.sampled_from([0.0, 0.1]), st.sampled_from([0, 1, 4, 5]),
)  # fmt: skip
def test_products_agree_with_autograd(
    widths: list[int], bias: bool, last: bool, decay: float, batch_size: int
) -> None:
    module = stack(*widths, 2, bias=bias, last=last)
    setting = problem(module, weight_decay=decay, batch_size=batch_size)
    assert len(setting.task.dense) == len(widths)
    ours = stepped(setting)
    for batched in (True, False):
        assert torch.allclose(
            ours, by_autograd(setting, batched), rtol=0, atol=4e-6
        )  # the error of a few float32 steps
    one_by_one = replace(setting.task.solver, batched=False)
    assert torch.allclose(ours, stepped(setting, solver=one_by_one), rtol=0, atol=4e-6)


def test_any_loss_has_a_gradient() -> None:
    """A function of the caller that is cross entropy, differentiated by autograd, agrees with the
    closed form of the built-in loss.
    """

    def same(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, reduction="none")

    module = stack(6, 5, 2)
    known, other = problem(module), problem(module, loss=same)
    assert known.task.loss is not other.task.loss
    assert torch.allclose(stepped(known), stepped(other), rtol=0, atol=1e-6)


def test_one_step_of_softmax_regression_agrees_with_its_formula() -> None:
    """v = -lr (softmax - onehot) x^T / n without momentum, by numpy in float64."""
    setting = problem(stack(3, 2), n=4, batch_size=0, momentum=0.0, local_epochs=1)
    x = start(setting.run, setting.task, False)
    moved = (sgd(x, setting.task, 0) - x).double().numpy()
    for i, row in enumerate(x.double().numpy()):
        mine = slice(4 * i, 4 * i + 4)
        inputs = setting.task.examples.inputs[mine].double().numpy()
        onehot = np.eye(2)[setting.task.examples.labels[mine].numpy()]
        scores = np.exp(inputs @ row[:6].reshape(2, 3).T + row[6:])
        slope = (scores / scores.sum(1, keepdims=True) - onehot) / 4
        expected = -0.1 * np.concatenate([(slope.T @ inputs).ravel(), slope.sum(0)])
        np.testing.assert_allclose(moved[i], expected, atol=1e-6)


def test_momentum_is_carried_by_the_velocity() -> None:
    setting = problem(stack(3, 2))
    y = setting.task.parameter_layout.take(start(setting.run, setting.task, False), np.arange(5))
    first = {name: torch.full_like(value, 2.0) for name, value in y.items()}
    none = {name: torch.zeros_like(value) for name, value in y.items()}
    from dfl.training.batches import batches, groups

    (group,) = groups(setting.task)
    batch = next(batches(setting.task, 0, group))
    for v in (first, none):
        update_velocity(v, y, Step.of(setting.task, batch), 0.1)
    for name in y:
        assert torch.allclose(first[name], none[name] + 2.0 * 0.9, atol=1e-6)


def hooked(kind: str) -> nn.Module:
    module = stack(4, 3, 2)
    getattr(module[0], f"register_{kind}_hook")(lambda *given: None)
    return module


def tied() -> nn.Module:
    module = stack(4, 4, 4, 2)
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), (4,)),
        (nn.Sequential(nn.Linear(4, 2)), (5, 4)),
        (nn.Sequential(nn.Flatten(2), nn.Linear(4, 2)), (3, 2, 2)),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), (4,)),
        (nn.Linear(4, 2), (4,)),
        *(
            (hooked(kind), (4,))
            for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre")
        ),
        (nn.Sequential(*[nn.Linear(4, 4)] * 2), (4,)),
        (tied(), (4,)),
        (nn.Sequential(), (4,)),
    ],
)
def test_other_modules_are_differentiated_by_autograd(
    module: nn.Module, shape: tuple[int, ...]
) -> None:
    assert dense_layers(module, shape) == ()


def test_a_plain_stack_is_read_in_order() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(8, 3, bias=False), nn.ReLU(), nn.Linear(3, 2))
    first, second = dense_layers(module, (2, 2, 2))
    assert (first.weight, first.bias, first.relu) == ("1.weight", None, True)
    assert (second.weight, second.bias, second.relu) == ("3.weight", "3.bias", False)


def test_a_relu_may_be_used_twice() -> None:
    relu = nn.ReLU()
    module = nn.Sequential(nn.Linear(4, 5), relu, nn.Linear(5, 3), relu, nn.Linear(3, 2))
    assert [layer.relu for layer in dense_layers(module, (4,))] == [True, True, False]


class Shared(nn.Module):
    """A model whose gradients share memory (a and b, which are summed) or are expanded from one
    number (c, whose elements are summed).
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.full((2, 3), 0.1 * k)) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a + self.b).T * (1 + self.c.sum())


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_gradients_may_share_memory(engine: str) -> None:
    setting = problem(
        Shared(), engine=engine, init="common", batch_size=0, local_epochs=1, momentum=0.0
    )
    x = start(setting.run, setting.task, True)
    moved = sgd(x, setting.task, 0) - x
    module = Shared()
    train = setting.task.examples
    for i in range(5):
        mine = slice(12 * i, 12 * i + 12)
        loss = nn.functional.cross_entropy(module(train.inputs[mine]), train.labels[mine])
        by_torch = torch.cat(
            [g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))]
        )
        assert torch.allclose(moved[i], -0.1 * by_torch, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_tied_weights_move_together(engine: str) -> None:
    """A weight with two names has one place in a row, and the gradient of both."""
    setting = problem(
        tied(), engine=engine, batch_size=0, local_epochs=1, momentum=0.0, init="independent"
    )
    x = start(setting.run, setting.task, False)
    moved = sgd(x, setting.task, 0) - x
    examples = setting.task.examples
    for i in range(5):
        mine = slice(12 * i, 12 * i + 12)
        row = setting.task.parameter_layout.views(x[i].clone().requires_grad_())
        out = examples.inputs[mine]
        for name in ("0", "2", "4"):
            weight = row["0.weight" if name == "2" else f"{name}.weight"]
            out = out @ weight.T + row[f"{name}.bias"]
            out = out.relu() if name != "4" else out
        loss = nn.functional.cross_entropy(out, examples.labels[mine])
        by_hand = torch.autograd.grad(loss, list(row.values()))
        expected = -0.1 * torch.cat([g.flatten() for g in by_hand])
        assert torch.allclose(moved[i], expected, rtol=0, atol=1e-6)


def test_probabilities_as_labels_have_a_gradient() -> None:
    """Cross entropy takes the probabilities of the classes as labels too."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(20, 4)).astype(np.float32)
    soft = rng.dirichlet(np.ones(3), 20).astype(np.float32)
    run = Run(peers=5, init="independent", lr=0.1)
    setting = prepare(
        replace(run, model=stack(4, 6, 3), dataset=Data(inputs, soft, inputs, soft, classes=0)),
        World(),
    )
    assert setting.task.dense
    assert torch.allclose(stepped(setting), by_autograd(setting, True), rtol=0, atol=1e-6)


@pytest.mark.parametrize("widths", [(5, 2), (13, 10, 2), (5, 1, 2), (64, 32, 10, 2)])
@pytest.mark.parametrize("batch_size", [1, 3, 10, 0])
def test_a_peers_bits_do_not_depend_on_its_group(widths: tuple[int, ...], batch_size: int) -> None:
    """This holds for groups that are not aligned in memory, for products with a vector, for pairs
    and for one peer.
    """
    from tests.algorithms.test_identities import part

    setting = problem(stack(*widths), n=10, batch_size=batch_size)
    x = start(setting.run, setting.task, False)
    together = sgd(x, setting.task, 3)
    for first, stop in ((0, 1), (1, 2), (1, 3), (2, 5), (4, 5)):
        assert torch.equal(sgd(x[first:stop], part(setting, first, stop), 3), together[first:stop])
