"""Losses of examples, `LOSSES`, and their mean over a batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.registry import Registry, example_with

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, labels) -> (n,), the loss of every example."""

LOSSES: Registry[Callable[..., Tensor]] = Registry("loss", "dfl.losses")
"""Name -> f(outputs, labels, *, options) -> (n,). A loss states as an attribute `regression = True`
that labels are numbers to predict: whole numbers that a caller gives are no classes then.
"""


def is_regression(loss: Callable[..., Tensor]) -> bool:
    """Return whether a loss states that labels are numbers to predict, and no classes."""
    return bool(getattr(loss.func if isinstance(loss, partial) else loss, "regression", False))


def _regression(loss: Loss) -> Loss:
    """State that labels are numbers to predict."""
    setattr(loss, "regression", True)  # noqa: B010  a function's type has no such attribute
    return loss


@LOSSES.register("cross_entropy")
def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """-log softmax(outputs)[label] of every example, (n,): the loss of classification."""
    return torch.nn.functional.cross_entropy(outputs, labels, reduction="none")


@LOSSES.register("squared_error")
@example_with("--model FILE.py:FUNCTION")
@_regression
def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """||output - label||^2 of every example, (n,): the loss of regression.

    Raises:
        InputError: outputs and labels of different numbers of coordinates.
    """
    predicted, wanted = (each.reshape(len(each), -1) for each in (outputs, labels))
    if predicted.shape != wanted.shape:
        raise InputError(
            f"--loss squared_error: {predicted.shape[1]} outputs of the model for labels of "
            f"{wanted.shape[1]} coordinates: give a model with as many, or choose --loss "
            "cross_entropy for classes"
        )
    return (predicted - wanted).square().sum(1)


def losses(out: Tensor, labels: Tensor, loss: Loss, by_model: bool) -> Tensor:
    """Return the losses of the examples of several models, (a, n).

    Args:
        out: (a, n, ...), outputs.
        labels: (a, n, ...).
        loss: the loss of examples.
        by_model: whether those of each model are computed by themselves.
    """
    if by_model:
        return torch.stack([loss(*each) for each in zip(out, labels, strict=True)])
    return loss(out.flatten(0, 1), labels.flatten(0, 1)).view(out.shape[:2])


def mean_loss(
    out: Tensor, labels: Tensor, weight: Tensor, loss: Loss, by_model: bool = False
) -> Tensor:
    """Return the sum of the peers' mean losses.

    Its gradient with respect to a peer's model is that of the peer's own mean loss, since each loss
    depends on one model only.

    Args:
        out: (a, b, ...), outputs; (a, b, *places, ...) of sequences.
        labels: (a, b, ...); (a, b, *places) of sequences.
        weight: (a, b) or (1, b), the weight of each example in its peer's mean; (a, b, *places),
            that of every place of a sequence.
        loss: the loss of examples, or of places.
        by_model: as `losses`.
    """
    last = weight.dim() - 1
    found = losses(out.flatten(1, last), labels.flatten(1, last), loss, by_model)
    return (found.view(out.shape[: last + 1]) * weight).sum()


def place_weights(labels: Tensor, weight: Tensor) -> Tensor:
    """Return the weight of every place of sequences in its peer's mean loss, (a, b, *places).

    Places that count have one over their number in the batch of the peer; places whose label is
    negative, and those of examples that are padding, have 0.

    Args:
        labels: (a, b, *places).
        weight: (a, b) or (1, b), 0 for examples that are padding.
    """
    counts = (labels >= 0) & (weight > 0).view(*weight.shape, *[1] * (labels.dim() - 2))
    number = counts.flatten(1).sum(1).clamp_min(1)
    return counts.to(weight.dtype) / number.view(-1, *[1] * (labels.dim() - 1))
