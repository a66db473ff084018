"""Every model maps a batch of examples to one output per class, and published ones are those of
their papers, written out in plain torch.
"""

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dfl.core.errors import InputError
from dfl.core.parts import Shape
from dfl.core.registry import choose
from dfl.models.zoo import MODELS

IMAGES: list[Shape] = [(1, 28, 28), (3, 32, 32), (1, 17, 23)]
SHAPES: dict[str, list[Shape]] = {
    "char_lstm": [(80,), (1,)],
    "word_lstm": [(10,), (1,)],
    "transformer": [(10,), (1,)],
    "har_cnn": [(9, 128), (1, 5)],
    "har_lstm": [(9, 128), (1, 5)],
    "vgg11": [(3, 32, 32), (1, 40, 64)],
    "vqa": [((3, 64, 64), (26,)), ((2048,), (1000,))],
}
"""The shapes of the inputs of models that do not take all these images."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in sorted(MODELS) for shape in SHAPES.get(name, IMAGES)],
)
def test_a_model_has_one_output_per_class(name: str, shape: Shape) -> None:
    several = isinstance(shape[0], tuple)
    inputs = [torch.ones(2, *each) for each in (shape if several else (shape,))]
    outputs = MODELS[name](shape, 7)(*inputs)
    assert outputs.shape == (2, 7)
    assert outputs.isfinite().all()
    assert (outputs[0] == outputs[1]).all()


def test_a_cnn_has_the_given_layers() -> None:
    """Cao et al. 2021: 30 and 50 kernels of 3 x 3 without padding, under 100 units."""
    spec = "cnn:channels=30+50,kernel=3,padding=0,hidden=100"
    module = choose("--model", spec, MODELS)((1, 28, 28), 10)
    assert [tuple(value.shape) for value in module.parameters()] == [
        (30, 1, 3, 3), (30,), (50, 30, 3, 3), (50,), (100, 50 * 5 * 5), (100,), (10, 100), (10,),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "smallest"),
    [
        ("kernel=5", 4),
        ("kernel=3,padding=0", 10),
        ("channels=4+4+4,kernel=3,padding=0", 22),
        ("channels=4,kernel=5,padding=1", 4),
        ("kernel=1,padding=3", 1),
    ],
)
def test_a_cnn_takes_every_image_that_its_layers_leave_a_pixel_of(
    options: str, smallest: int
) -> None:
    build = choose("--model", f"cnn:{options}", MODELS)
    for height, width in ((smallest, smallest + 1), (smallest + 3, smallest)):
        assert build((2, height, width), 7)(torch.ones(3, 2, height, width)).shape == (3, 7)
    if smallest > 1:
        with pytest.raises(InputError, match=rf"at least {smallest}x{smallest}, channels"):
            build((2, smallest + 5, smallest - 1), 7)


Weights = Iterator[Tensor]
"""The parameters of a model, in the order of its layers."""


def dense(x: Tensor, w: Weights) -> Tensor:
    return functional.linear(x, next(w), next(w))


def pooled(x: Tensor, w: Weights, padding: int) -> Tensor:
    """A convolution, ReLU and max pooling, in the order of the papers."""
    return functional.max_pool2d(functional.conv2d(x, next(w), next(w), padding=padding).relu(), 2)


def perceptron(x: Tensor, w: Weights, hidden: int) -> Tensor:
    x = x.flatten(1)
    for _ in range(hidden):
        x = dense(x, w).relu()
    return dense(x, w)


def two_convolutions(x: Tensor, w: Weights, padding: int, hidden: int) -> Tensor:
    """The CNNs of McMahan et al. 2017 and Cao et al. 2021, and LeNet-5 as LG-FedAvg has it."""
    for _ in range(2):
        x = pooled(x, w, padding)
    return perceptron(x, w, hidden)


def vqa(image: Tensor, words: Tensor, w: Weights) -> Tensor:
    """The image encoder of easy-VQA, and the product of Antol et al. 2015, section 4.3."""
    for _ in range(2):
        image = pooled(image, w, padding=1)
    image = dense(image.flatten(1), w).tanh()
    question = dense(dense(words, w).tanh(), w).tanh()
    return dense(dense(image * question, w).tanh(), w)


def vgg11(x: Tensor, w: Weights) -> Tensor:
    """Configuration A of Simonyan and Zisserman 2015, with one dense layer."""
    for last in (True, True, False, True, False, True, False, True):
        x = functional.conv2d(x, next(w), next(w), padding=1).relu()
        x = functional.max_pool2d(x, 2) if last else x
    return dense(x.flatten(1), w)


def signals(x: Tensor, w: Weights) -> Tensor:
    for _ in range(2):
        x = functional.conv1d(x, next(w), next(w), padding=2).relu()
        x = functional.max_pool1d(x, 2)
    return perceptron(x, w, hidden=1)


def resnet20(x: Tensor, w: Weights, norm: str) -> Tensor:
    """He et al. 2016, section 4.2, with shortcuts A."""

    def convolution(x: Tensor, stride: int = 1) -> Tensor:
        kernel = next(w)
        bias = next(w) if norm == "none" else None
        x = functional.conv2d(x, kernel, bias, stride=stride, padding=1)
        return x if norm == "none" else functional.group_norm(x, 2, next(w), next(w))

    x = convolution(x).relu()
    for stage in range(3):
        for block in range(3):
            halves = stage > 0 and block == 0
            change = convolution(convolution(x, 2 if halves else 1).relu())
            if halves:
                none = torch.zeros_like(x[:, ::2, ::2, ::2])
                x = torch.cat([none, x[:, :, ::2, ::2], none], dim=1)
            x = (x + change).relu()
    return dense(x.mean((2, 3)), w)


PUBLISHED: dict[str, tuple[Shape, Callable[..., Tensor]]] = {
    "softmax": ((1, 28, 28), partial(perceptron, hidden=0)),
    "2nn": ((1, 28, 28), partial(perceptron, hidden=2)),
    "cnn": ((1, 28, 28), partial(two_convolutions, padding=2, hidden=1)),
    "cnn:channels=30+50,kernel=3,padding=0,hidden=100": (
        (1, 28, 28), partial(two_convolutions, padding=0, hidden=1),
    ),
    "lenet": ((3, 32, 32), partial(two_convolutions, padding=0, hidden=2)),
    "vgg11": ((3, 32, 32), vgg11),
    "har_cnn": ((9, 128), signals),
    "vqa": (((3, 64, 64), (26,)), vqa),
    "resnet20": ((3, 32, 32), partial(resnet20, norm="group")),
    "resnet20:norm=none": ((3, 32, 32), partial(resnet20, norm="none")),
}  # fmt: skip


@pytest.mark.parametrize("spec", PUBLISHED)
def test_a_published_model_has_the_layers_of_its_paper(spec: str) -> None:
    """Outputs and gradients are those of the layers in plain torch."""
    shape, by_hand = PUBLISHED[spec]
    torch.manual_seed(0)
    module = choose("--model", spec, MODELS)(shape, 10).double()
    shapes = shape if isinstance(shape[0], tuple) else (shape,)
    inputs = [torch.randn(4, *each, dtype=torch.float64) for each in shapes]
    labels = torch.tensor([3, 0, 9, 3])
    weights = list(module.parameters())
    remaining = iter(weights)
    outputs = [module(*inputs), by_hand(*inputs, remaining)]
    assert not list(remaining)
    found, expected = (
        torch.autograd.grad(functional.cross_entropy(out, labels), weights) for out in outputs
    )
    torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
    assert all(each.any() for each in expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)
