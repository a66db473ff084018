"""Losses of examples, and their mean over a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, labels) -> (n,), the loss of every example."""


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(outputs)[label] of every example, (n,): the loss of classification."""
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


def mean_loss(out: Tensor, labels: Tensor, weight: Tensor, loss: Loss) -> Tensor:
    """The sum of the peers' mean losses, whose gradient holds that of each: a loss depends on its
    own model only.
    """
    losses = loss(out.flatten(0, 1), labels.flatten(0, 1))
    return (losses.view(out.shape[:2]) * weight).sum()
