"""Convolutions as matrix products, for the images of several models at once.

`torch.func.vmap` makes one grouped convolution of those of several models, which a GPU computes
group by group where numbers are float32. Here the pixels under the kernel are copied side by side,
and one batched product follows for all models; its gradients are such products, too.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Axes = tuple[int, ...]

PLACES = 256
"""From so many places of the kernel in an image on, its gradient is computed for each image and
summed; one long product would occupy few of a GPU's processors.
"""


def convolved(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Axes, padding: Axes
) -> Tensor:
    """Return what `torch.nn.functional.conv2d` does, up to rounding: (n, o, height', width').

    It is differentiated once; second derivatives are wrong.

    Args:
        x: (n, c, height, width).
        weight: (o, c, k, l).
        bias: (o,), or None.
        stride, padding: of both axes.
    """
    out: Tensor
    out, _ = _Convolution.apply(x, weight, stride, padding)  # type: ignore[no-untyped-call]
    return out if bias is None else out + bias[:, None, None]


class _Convolution(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, stride: Axes, padding: Axes) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the pixels under the kernel."""
        columns, shape = _columns(x, weight.shape[2:], stride, padding)
        return _image(columns @ weight.flatten(1).mT, shape), columns

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Keep what the gradients take."""
        x, weight, ctx.stride, ctx.padding = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(weight, output[1])
        ctx.sides = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients with respect to x and weight.

        That of x is a convolution with the reversed kernel, of gradients with zeros between them.
        """
        weight, columns = ctx.saved_tensors
        g = gradients[0]
        rows = g.permute(0, 2, 3, 1).flatten(1, 2)
        if rows.shape[1] >= PLACES:
            of_weight = (rows.mT @ columns.unflatten(0, rows.shape[:2])).sum(0)
        else:
            of_weight = rows.flatten(0, 1).mT @ columns
        of_weight = of_weight.view(weight.shape)
        if not ctx.needs_input_grad[0]:
            return None, of_weight, None, None
        ends: list[int] = []
        for axis in (3, 2):
            stride, padding, k = ctx.stride[axis - 2], ctx.padding[axis - 2], weight.shape[axis]
            g = _spread(g, axis, stride)
            before = k - 1 - padding
            ends += [before, ctx.sides[axis - 2] + k - 1 - before - g.shape[axis]]
        reversed_kernel = weight.flip(2, 3).transpose(0, 1).flatten(1)
        columns, shape = _columns(functional.pad(g, ends), weight.shape[2:], (1, 1), (0, 0))
        return _image(columns @ reversed_kernel.mT, shape), of_weight, None, None


def _columns(
    x: Tensor, kernel: tuple[int, ...], stride: Axes, padding: Axes
) -> tuple[Tensor, tuple[int, ...]]:
    """Return the pixels (n * height' * width', c * k * l) under the kernel at each of its places,
    and (n, height', width').
    """
    if any(padding):
        x = functional.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    windows = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    n, _, height, width = windows.shape[:4]
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1), (n, height, width)


def _image(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return rows (n * height * width, c) as images (n, c, height, width)."""
    image: Tensor = rows.unflatten(0, shape)
    return image.permute(0, 3, 1, 2)


def _spread(g: Tensor, axis: int, stride: int) -> Tensor:
    """Return g with stride - 1 zeros between any two neighbours along an axis."""
    if stride == 1:
        return g
    zeros = (0, stride - 1) if axis == 3 else (0, 0, 0, stride - 1)
    spread: Tensor = functional.pad(g.unsqueeze(axis + 1), zeros)
    size = (g.shape[axis] - 1) * stride + 1
    return spread.flatten(axis, axis + 1).narrow(axis, 0, size)
