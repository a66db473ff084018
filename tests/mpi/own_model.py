"""A model in a file, as --model own_model.py:build takes it."""

import math

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """An embedding of a pixel's number, added up over the pixels, then a linear layer."""

    def __init__(self, pixels: int, classes: int, width: int) -> None:
        super().__init__()
        self.first = nn.Embedding(pixels, width)
        self.last = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last((x.flatten(1) @ self.first.weight).relu())
        return out


def build(shape: tuple[int, ...], classes: int, *, width: int = 5) -> nn.Module:
    """Return the model for images of one channel."""
    return Net(shape[1] * shape[2], classes, width)


def normed(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a dense layer, BatchNorm, and another dense layer."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(math.prod(shape), 6), nn.BatchNorm1d(6), nn.ReLU(),
        nn.Linear(6, classes),
    )  # fmt: skip


class Curved(nn.Module):
    """Two dense layers with operations that round by place, which no layer shows."""

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(pixels, 7), nn.Linear(7, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.elu(self.first(x.flatten(1)))
        out: Tensor = self.last(nn.functional.silu(h))
        return out


def curved(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the model with such operations."""
    return Curved(math.prod(shape), classes)


class Mixer(nn.Module):
    """A dense layer on the rows of an image, whose GELU sees a transposed array."""

    def __init__(self, rows: int, columns: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(rows, 7), nn.Linear(7 * columns, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.gelu(self.first(x.flatten(1, -2).transpose(1, 2)).transpose(1, 2))
        out: Tensor = self.last(h.flatten(1))
        return out


def mixer(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the mixer of images."""
    return Mixer(math.prod(shape[:-1]), shape[-1], classes)


def curved_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of log(1 + exp(-margin)) + 1 / (1 + exp(margin)) of every example, (n,).

    The gradient of the second, a sigmoid, is computed from its value.
    """
    signs = 2 * torch.nn.functional.one_hot(labels, outputs.shape[1]) - 1
    gaps = -outputs * signs
    return (torch.nn.functional.softplus(gaps) + torch.sigmoid(gaps)).sum(1)
