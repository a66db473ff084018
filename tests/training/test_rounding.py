"""Operations that several models together would compute otherwise."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dfl
from dfl.comm.mpi import World
from dfl.models.parameter_layout import draw
from dfl.models.recurrent import GRU
from dfl.simulation.prepare import prepare
from dfl.training.losses import Loss, cross_entropy, losses
from dfl.training.rounding import BY_PLACE, recorded
from dfl.training.task import Task

MODELS = 7
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    str(each): each
    for each in (
        nn.ReLU(), nn.ReLU6(), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.GELU("tanh"),
        nn.Sigmoid(), nn.LogSigmoid(), nn.SiLU(), nn.Mish(), nn.Softplus(), nn.Tanh(),
        nn.Hardswish(), nn.Hardsigmoid(), nn.Softsign(), nn.Tanhshrink(), nn.LeakyReLU(),
        nn.Softmax(-1), nn.LogSoftmax(-1), nn.GLU(-1),
    )
}  # fmt: skip
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: getattr(torch, name) for name in (
        "exp", "exp2", "expm1", "sin", "cos", "atan", "sinh", "cosh", "tanh", "asinh", "erf",
        "square", "sinc", "abs", "round",
    )},
    "log": lambda x: (x.abs() + 1).log(),
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: (x.abs() + 1).sqrt(),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "atanh": lambda x: (0.9 * x.tanh()).atanh(),
    "x^3": lambda x: x**3,
    "x^-1": lambda x: x**-1.0,
    "x^2.5": lambda x: x.abs() ** 2.5,
    "2^x": lambda x: 2.0**x,
    "x^x": lambda x: x.abs() ** x,
    "atan2": lambda x: torch.atan2(x, 1 + x),
    "hypot": lambda x: torch.hypot(x, 1 + x),
    "logaddexp": lambda x: torch.logaddexp(x, 1 + x),
    "logaddexp2": lambda x: torch.logaddexp2(x, 1 + x),
    "xlogy": lambda x: torch.xlogy(x, 1 + x.abs()),
    "bce": lambda x: functional.binary_cross_entropy_with_logits(
        x, torch.full_like(x, 0.3), reduction="none"
    ),
    "huber": lambda x: functional.huber_loss(x, torch.zeros_like(x), reduction="none"),
    "soft margin": lambda x: functional.soft_margin_loss(x, torch.ones_like(x), reduction="none"),
    "fft": lambda x: torch.fft.rfft(x).abs(),
    "in place": lambda x: (2 * x).sigmoid_(),
    "transposed gelu": lambda x: functional.gelu(x.transpose(-1, -2)).transpose(-1, -2),
    "complex": lambda x: torch.complex(x, 1 + x).abs(),
    "std": lambda x: x.std(-1),
    "layer_norm": lambda x: functional.layer_norm(x, x.shape[-1:]),
}  # fmt: skip


def computed(function: Callable[[Tensor], Tensor], x: Tensor, slope: Tensor) -> tuple[Tensor, ...]:
    """Return the values of a function, and the gradient that belongs to a slope of each number."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(slope[..., : y.shape[-1]] if y.dim() == x.dim() else slope[..., 0])
    assert x.grad is not None
    return y.detach(), x.grad


def rounds_by_place(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> bool:
    """Return whether some numbers of some models are other ones without those of the others."""
    generator = torch.Generator().manual_seed(0)
    for width in (2, 6, 10, 22, 34):
        for examples in (1, 3, 7):
            x, slope = 2 * torch.randn(2, MODELS, examples, width, dtype=dtype, generator=generator)
            whole = computed(function, x, slope)
            for first, end in combinations(range(MODELS + 1), 2):
                if end - first == 1:  # a lone peer trains as one of two
                    continue
                some = computed(function, x[first:end], slope[first:end])
                if not all(map(torch.equal, some, (each[first:end] for each in whole))):
                    return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *OPERATIONS])
def test_an_operation_that_rounds_by_place_is_recorded(name: str, dtype: torch.dtype) -> None:
    function = (ACTIVATIONS | OPERATIONS)[name]
    x = torch.randn(3, 4, dtype=dtype)
    with recorded() as found:
        computed(function, x, torch.ones_like(x))
    assert found or not rounds_by_place(function, dtype)


BY_NAME: dict[str, Callable[[Tensor], Tensor]] = {
    "_fft_c2c": lambda x: torch.fft.fft(torch.complex(x, x)),
    "_fft_c2r": lambda x: torch.fft.irfft(torch.fft.rfft(x)),
    "_fft_r2c": torch.fft.rfft,
    "atan2": OPERATIONS["atan2"],
    "atanh": torch.atanh,
    "binary_cross_entropy_with_logits": OPERATIONS["bce"],
    "celu": lambda x: torch.ops.aten.celu(x),
    "convolution": lambda x: functional.conv1d(x[:, None], torch.ones(1, 1, 3)),
    "cosh": torch.cosh,
    "elu": functional.selu,
    "exp2": torch.exp2,
    "gelu": lambda x: functional.gelu(x.T),
    "hypot": OPERATIONS["hypot"],
    "logaddexp": OPERATIONS["logaddexp"],
    "logaddexp2": OPERATIONS["logaddexp2"],
    "mish": functional.mish,
    "mul": lambda x: torch.complex(x, x) * torch.complex(x, x),
    "polar": lambda x: torch.polar(x, x),
    "pow": OPERATIONS["x^2.5"],
    "sigmoid": lambda x: torch._foreach_sigmoid([x])[0],
    "silu": functional.silu,
    "sinh": torch.sinh,
    "softplus": functional.softplus,
}


def test_every_operation_that_rounds_by_place_is_recorded_by_its_name() -> None:
    """On a processor without vectors, none rounds by place."""
    assert set(BY_NAME) >= BY_PLACE
    for name, function in BY_NAME.items():
        with recorded() as found:
            function(torch.rand(4, 5))
        assert name in found, (name, found)


@pytest.mark.parametrize(
    "exact", ["ReLU()", "Tanh()", "LeakyReLU(negative_slope=0.01)", "exp", "x^3", "huber"]
)
def test_operations_of_most_models_and_losses_are_not_recorded(exact: str) -> None:
    with recorded() as found:
        computed((ACTIVATIONS | OPERATIONS)[exact], torch.randn(3, 4), torch.ones(3, 4))
    assert not found


def test_layers_that_round_alike_everywhere_are_passed_over() -> None:
    layer, x = GRU(3, 4), torch.randn(2, 5, 3)
    with recorded() as whole:
        layer(x)
    with recorded([layer]) as found:
        layer(x)
        assert not found
        torch.sigmoid(x)
    assert whole == found == {"sigmoid"}
    with recorded() as after:
        layer(x)
    assert after == whole  # the hooks are gone


class Functional(nn.Module):
    """A model whose operations no layer shows."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.function(self.first(x)))
        return out


def smooth(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return log cosh of the error, (n,)."""
    error = outputs[:, 0] - labels
    return error + functional.softplus(-2 * error)


def shifted(x: Tensor) -> Tensor:
    """Return the mean of neighbours, by a convolution."""
    return functional.conv1d(x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]


def task_of(model: nn.Module | list[Functional], **settings: Any) -> Task:
    """Return the task of peers whose labels are classes, or numbers where a loss is given."""
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(40, 5)).astype("f4")
    labels = inputs[:, 0] if "loss" in settings else generator.integers(0, 3, 40)
    run = dfl.Run(dataset=(inputs, labels), model=model, peers=4, **settings)
    return prepare(run, World()).task


@pytest.mark.parametrize("engine", ["auto", "batched"])
@pytest.mark.parametrize(
    "function", [nn.SiLU(), functional.elu, shifted], ids=["layer", "function", "conv"]
)
def test_models_with_such_an_operation_are_computed_one_after_the_other(
    function: Callable[[Tensor], Tensor], engine: str
) -> None:
    task = task_of(Functional(function), engine=engine)
    assert (task.by_model, task.loss_by_model) == (True, False)
    assert task.solver.batched == (engine == "batched")
    assert not task_of(Functional(torch.tanh), engine=engine).by_model


@pytest.mark.parametrize("engine", ["auto", "batched"])
@pytest.mark.parametrize("turn", [1, -1])
def test_one_kind_of_model_with_such_an_operation_is_enough(turn: int, engine: str) -> None:
    models = [Functional(shifted), Functional(torch.tanh), Functional(torch.tanh)][::turn]
    task = task_of(models, engine=engine, share="last")
    assert task.by_model
    assert task.solver.batched == (engine == "batched")
    assert not task_of(models[1:2] * 2, engine=engine, share="last").by_model


def test_losses_with_such_an_operation_are_computed_one_after_the_other() -> None:
    assert task_of(nn.Linear(5, 1), loss=smooth).loss_by_model
    assert not task_of(nn.Linear(5, 1), loss="squared_error").loss_by_model


@pytest.mark.parametrize("loss", [smooth, cross_entropy])
def test_the_losses_of_a_model_are_those_without_the_other_models(loss: Loss) -> None:
    out = torch.randn(5, 7, 3)
    labels = torch.randn(5, 7) if loss is smooth else torch.randint(3, (5, 7))
    found = losses(out, labels, loss, by_model=True)
    for one, each in zip(zip(out, labels, strict=True), found, strict=True):
        torch.testing.assert_close(loss(*one), each, rtol=0, atol=0)
    torch.testing.assert_close(losses(out, labels, loss, by_model=False), found)


class Words(nn.Module):
    """The mean of embedded tokens, which are the signs of an input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.last = nn.Embedding(3, 7, **options), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.table((x.sign() + 1).long()).mean(1))
        return out


def test_every_model_keeps_the_padding_row_of_its_embedding() -> None:
    """Under vmap, torch leaves out the gradient of that of the first model alone."""
    batched = task_of(Words(padding_idx=2), engine="batched", batch_size=4)
    assert batched.by_model
    assert not task_of(Words(padding_idx=2)).solver.batched
    assert not task_of(Words(), engine="batched").by_model
    row = batched.parameter_layout.row(batched.module)
    x = row.expand(4, -1).contiguous()
    found = batched.train(x, 1)
    rows = batched.parameter_layout.views(found)["table.weight"]
    assert not rows[:, 2].any()
    assert rows[:, 0].any()
    alone = task_of(Words(padding_idx=2), engine="loop", batch_size=4)
    torch.testing.assert_close(found, alone.train(x, 1), rtol=0, atol=1e-6)
    start = draw(batched.module, batched.parameter_layout, 0, [0, 1])
    tables = batched.parameter_layout.views(start)["table.weight"]
    assert not tables[:, 2].any()
    assert tables[:, :2].all()


def test_an_embedding_that_counts_tokens_is_for_the_loop() -> None:
    """Batches that are filled up repeat an example."""
    assert not task_of(Words(scale_grad_by_freq=True)).solver.batched
    with pytest.raises(dfl.InputError, match="scale_grad_by_freq=True"):
        task_of(Words(scale_grad_by_freq=True), engine="batched")


class Wrong(torch.autograd.Function):
    """A function x -> 2 x, whose values for several models are 3 x."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 2 * slope

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor) -> tuple[Tensor, Any]:
        return 3 * x, in_dims[0]


def test_models_that_are_others_together_are_trained_one_after_the_other() -> None:
    def tripled(x: Tensor) -> Tensor:
        out: Tensor = Wrong.apply(x)  # type: ignore[no-untyped-call]
        return out

    assert not task_of(Functional(tripled)).solver.batched
    with pytest.raises(dfl.InputError, match="Functional at once have other outputs or gradients"):
        task_of(Functional(tripled), engine="batched")
