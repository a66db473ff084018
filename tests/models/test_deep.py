"""Deep models for images: residual blocks, normalisation, and initial values."""

from __future__ import annotations

import math

import pytest
import torch

import dfl
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.residual import Block
from dfl.models.zoo import MODELS


@pytest.mark.parametrize(("a", "b"), [(16, 16), (16, 32)])
def test_a_block_without_weights_is_its_shortcut(a: int, b: int) -> None:
    """New channels are zeros, half of them before and half after the others."""
    block = Block(a, b, "none")
    for value in block.parameters():
        torch.nn.init.zeros_(value)
    x = torch.randn(2, a, 6, 6)
    expected = torch.zeros(2, b, 6, 6) if a == b else torch.zeros(2, b, 3, 3)
    first = (b - a) // 2
    expected[:, first : first + a] = (x if a == b else x[:, :, ::2, ::2]).relu()
    assert torch.equal(block(x), expected)


def test_resnet20_has_19_convolutions_and_one_dense_layer() -> None:
    layers = list(MODELS["resnet20"]((3, 32, 32), 10).modules())
    convolutions = [each for each in layers if isinstance(each, torch.nn.Conv2d)]
    norms = [each for each in layers if isinstance(each, torch.nn.GroupNorm)]
    assert [each.out_channels for each in convolutions] == [16] * 7 + [32] * 6 + [64] * 6
    assert [each.num_channels for each in norms] == [each.out_channels for each in convolutions]
    assert {each.num_groups for each in norms} == {2}
    plain = MODELS["resnet20"]((3, 32, 32), 10, norm="none")
    assert not any(isinstance(each, torch.nn.GroupNorm) for each in plain.modules())


@pytest.mark.parametrize("name", ["resnet20", "vgg11"])
def test_outputs_of_an_image_do_not_depend_on_the_batch(name: str) -> None:
    module = MODELS[name]((3, 32, 32), 10)
    images = torch.randn(3, 3, 32, 32)
    torch.testing.assert_close(module(images)[:1], module(images[:1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["resnet20", "vgg11"])
def test_signals_neither_vanish_nor_grow_through_the_layers(name: str) -> None:
    module = MODELS[name]((3, 32, 32), 10)
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    outputs = torch.func.functional_call(module, layout.views(row), (torch.randn(16, 3, 32, 32),))
    assert 0.03 < float((outputs - outputs.mean(0)).std()) < 3


def test_weights_before_a_relu_start_on_the_scale_of_he() -> None:
    module = MODELS["vgg11"]((3, 32, 32), 10)
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    views = layout.views(row)
    for name, fan_in in (("0", 27), ("3", 576), ("8", 2304)):
        bound = math.sqrt(6 / fan_in)
        assert 0.99 * bound < float(views[f"{name}.weight"].abs().max()) <= bound
        assert float(views[f"{name}.bias"].abs().max()) <= 1 / math.sqrt(fan_in)
    assert float(views["22.weight"].abs().max()) <= 1 / math.sqrt(512)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "none"])
def test_both_engines_train_a_resnet_alike(norm: str) -> None:
    rows = [
        list(
            dfl.simulate(
                dfl.Run(
                    model=f"resnet20:norm={norm}", peers=2, rounds=2, examples_per_peer=8,
                    batch_size=4, eval_examples=20, lr=0.05, engine=engine,
                )
            )
        )[-1]
        for engine in ("loop", "batched")
    ]  # fmt: skip
    assert rows[0].train_loss == pytest.approx(rows[1].train_loss, rel=1e-4)
    assert rows[0].consensus_distance == pytest.approx(rows[1].consensus_distance, rel=1e-3)
