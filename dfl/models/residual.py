"""Residual networks for small images.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from dfl.models.layers import Conv2d

Norm = Literal["group", "batch", "none"]
"""What follows a convolution: GroupNorm with two groups, BatchNorm, or nothing."""


class ResNet(nn.Module):
    """A ResNet of three stages of 16, 32 and 64 channels for images of 32 x 32 pixels.

    Where a stage begins, the shortcut takes every other pixel and fills new channels with zeros
    (option A), so that it has no parameters.

    Source:
        He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016, section 4.2.
    """

    def __init__(self, channels: int, classes: int, blocks: int, norm: Norm) -> None:
        super().__init__()
        self.first = _convolution(channels, 16, 1, norm)
        widths = [each for each in (16, 32, 64) for _ in range(blocks)]
        pairs = pairwise([16, *widths])
        self.blocks = nn.Sequential(*(Block(a, b, norm) for a, b in pairs))
        self.last = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, classes) for images (n, channels, height, width)."""
        features: Tensor = self.blocks(torch.relu(self.first(x)))
        out: Tensor = self.last(features.mean((2, 3)))
        return out


class Block(nn.Module):
    """relu(x + f(x)), where f is two convolutions; the first takes every other pixel where the
    number of channels grows.
    """

    def __init__(self, a: int, b: int, norm: Norm) -> None:
        super().__init__()
        self.stride = 1 if a == b else 2
        self.more = b - a
        self.one = _convolution(a, b, self.stride, norm)
        self.two = _convolution(b, b, 1, norm)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output (n, b, ...) for x (n, a, ...)."""
        change = self.two(torch.relu(self.one(x)))
        kept = x[:, :, :: self.stride, :: self.stride]
        kept = nn.functional.pad(kept, (0, 0, 0, 0, self.more // 2, self.more - self.more // 2))
        return torch.relu(kept + change)


def _convolution(a: int, b: int, stride: int, norm: Norm) -> nn.Sequential:
    """Return a convolution of 3 x 3 pixels and its normalisation, which has the bias."""
    layer = Conv2d(a, b, 3, stride=stride, padding=1, bias=norm == "none")
    if norm == "none":
        return nn.Sequential(layer)
    return nn.Sequential(layer, nn.GroupNorm(2, b) if norm == "group" else nn.BatchNorm2d(b))
