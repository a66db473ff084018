"""Convolutions as products: torch's, of several models at once."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dfl.models import layers
from dfl.models.convolution import PLACES, convolved
from dfl.models.layers import Conv1d, Conv2d
from dfl.models.modules import stacked_models
from dfl.training.precision import products
from tests.support.standin import DEVICE, Standin

SHAPES = {
    "square": ((3, 3), (1, 1), (1, 1), (9, 8)),
    "no padding": ((5, 5), (1, 1), (0, 0), (12, 12)),
    "many places": ((3, 3), (1, 1), (1, 1), (17, 16)),
    "strides": ((3, 3), (2, 2), (1, 1), (8, 9)),
    "two strides": ((5, 3), (2, 1), (2, 0), (11, 10)),
    "pixels left over": ((3, 3), (3, 2), (0, 0), (11, 8)),
    "a row": ((1, 5), (1, 1), (0, 2), (1, 9)),
    "a pixel": ((1, 1), (2, 2), (0, 0), (7, 8)),
    "wide padding": ((2, 2), (1, 1), (2, 2), (5, 5)),
}
"""Kernel, stride, padding and sides of images."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_gradients_are_those_of_torch(name: str, bias: bool) -> None:
    kernel, stride, padding, sides = SHAPES[name]
    torch.manual_seed(0)
    shapes = ((4, 3, 2, *sides), (4, 5, 2, *kernel), (4, 5))[: 2 + bias]
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolved(x, weight, bias, stride, padding)

    def torchs(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.conv2d(x, weight, bias, stride, padding)

    out, wanted = (torch.func.vmap(f)(*given) for f in (ours, torchs))
    torch.testing.assert_close(out, wanted)
    upstream = torch.randn_like(wanted)
    for leaves in (given, given[1:]):  # images are leaves of no first layer
        gradients, known = (
            torch.autograd.grad(each, leaves, upstream, True) for each in (out, wanted)
        )
        torch.testing.assert_close(gradients, known)
    images = [given[0].detach(), *given[1:]]
    (gradient,) = torch.autograd.grad(torch.func.vmap(ours)(*images), given[1], upstream)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted, given[1], upstream)[0])


def test_some_images_have_many_places_and_some_few() -> None:
    """A gradient is a sum over images in the former."""
    places = {name: sides[0] * sides[1] for name, (*_, sides) in SHAPES.items()}
    assert places["many places"] >= PLACES > places["square"]


@pytest.mark.parametrize(
    ("layer", "is_product"),
    [
        (Conv2d(2, 3, 3), True),
        (Conv2d(2, 3, 3, stride=2, padding=1, bias=False), True),
        (Conv2d(2, 4, 3, groups=2), False),
        (Conv2d(2, 3, 3, dilation=2), False),
        (Conv2d(2, 3, 3, padding="same"), False),
        (Conv2d(2, 3, 3, padding=1, padding_mode="circular"), False),
        (Conv1d(2, 3, 3), True),
        (Conv1d(2, 3, 5, stride=2, padding=2), True),
        (Conv1d(2, 4, 3, groups=2), False),
    ],
)
def test_a_layer_is_a_product_for_several_models_off_the_processor(
    layer: Conv1d | Conv2d, is_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def counted(*given: object) -> Tensor:
        products.append(given)
        return convolved(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(layers, "convolved", counted)
    sides = (9, 8)[: layer.weight.dim() - 2]
    images = torch.randn(4, 3, 2, *sides)
    values = {name: torch.randn(4, *each.shape) for name, each in layer.named_parameters()}

    def output(own: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, own, (x,))
        return found

    together = torch.func.vmap(output)
    with stacked_models():
        here = together(values, images)
        assert not products
        with Standin():
            moved = {name: value.to(DEVICE) for name, value in values.items()}
            there = together(moved, images.to(DEVICE)).cpu()
    assert bool(products) == is_product
    torch.testing.assert_close(there, here)


class Doubled(Conv2d):
    """A convolution with other weights than its own."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


def together(layer: Conv2d, images: Tensor, values: dict[str, Tensor]) -> Tensor:
    def output(own: dict[str, Tensor], x: Tensor) -> Tensor:
        found: Tensor = torch.func.functional_call(layer, own, (x,))
        return found

    with stacked_models():
        return torch.func.vmap(output)(values, images)


def test_a_layer_may_change_its_weights() -> None:
    layer, images = Doubled(2, 3, 3), torch.randn(4, 3, 2, 9, 8)
    values = {name: torch.randn(4, *each.shape) for name, each in layer.named_parameters()}
    here = together(layer, images, values)
    with Standin():
        moved = {name: value.to(DEVICE) for name, value in values.items()}
        there = together(layer, images.to(DEVICE), moved).cpu()
    torch.testing.assert_close(there, here)


@pytest.mark.parametrize(
    ("precision", "channels", "is_product"),
    [("tf32", 8, False), ("tf32", 6, True), ("float32", 8, True)],
)
def test_tensor_cores_take_even_channels_in_tf32(
    precision: str, channels: int, is_product: bool
) -> None:
    layer = Conv2d(8, channels, 3)
    with stacked_models(), products(precision, DEVICE), Standin():
        assert (layers._product_padding(layer, torch.ones(1).to(DEVICE)) == (0, 0)) == is_product


def test_bfloat16_is_left_to_the_grouped_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with stacked_models(), Standin():
        assert layers._product_padding(Conv2d(2, 3, 3), torch.ones(1).to(DEVICE)) is None
