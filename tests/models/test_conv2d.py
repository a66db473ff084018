"""The convolution of images whose channels lie side by side in memory."""

from __future__ import annotations

import pytest
import torch

from dfl.models.layers import Conv2d
from dfl.models.modules import stacked_models
from dfl.models.zoo import MODELS


@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_torchs_convolution_in_another_order(channels: int) -> None:
    """One channel, too, for which torch itself keeps the order of rows."""
    layer = Conv2d(channels, 4, 3)
    x = torch.randn(2, channels, 6, 6)
    out = layer(x)
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, torch.nn.Conv2d.forward(layer, x), rtol=1e-5, atol=1e-6)


def test_several_models_keep_torchs_order() -> None:
    layer = Conv2d(3, 4, 3)
    rows = {name: torch.stack([value, 2 * value]) for name, value in layer.named_parameters()}
    x = torch.randn(2, 5, 3, 6, 6)
    with stacked_models():
        out = torch.func.vmap(lambda row, own: torch.func.functional_call(layer, row, own))(rows, x)
    for scale, own, found in zip((1, 2), x, out, strict=True):
        torch.testing.assert_close(found, scale * layer(own), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "lenet", "resnet20", "vgg11"])
def test_every_model_of_images_is_made_of_it(name: str) -> None:
    layers = MODELS[name]((3, 32, 32), 10).modules()
    found = [layer for layer in layers if isinstance(layer, torch.nn.Conv2d)]
    assert found
    assert all(isinstance(layer, Conv2d) for layer in found)
