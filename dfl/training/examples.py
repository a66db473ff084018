"""The examples of a rank's peers as tensors, and their normalization."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.arrays import Array

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]


def normalize(raw: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return float(x) * scale + shift, the inputs of a model."""
    return raw.to(scale.dtype).mul(scale).add_(shift)


@dataclass(frozen=True)
class Examples:
    """Examples of this rank's peers, one peer after the other, on the device where they are used.

    Attributes:
        inputs: (n, *shape), integers in the dtype of the files, or normalized floats.
        labels: (n, ...).
        sizes: (p,), examples per peer; in host memory.
        starts: (p,), where each peer's examples begin; in host memory.
        protected: (n, k), k protected attributes of each example, 0 or 1; None if there are none.
    """

    inputs: Tensor
    labels: Tensor
    sizes: Ints
    starts: Ints
    protected: Tensor | None = None

    @classmethod
    def of(
        cls, inputs: Tensor, labels: Tensor, sizes: Ints, protected: Tensor | None = None
    ) -> Examples:
        """Return the examples of peers that lie one after the other, of sizes (p,)."""
        return cls(inputs, labels, sizes, np.cumsum(sizes) - sizes, protected)

    def only(self, here: Ints) -> Examples:
        """Return the examples of the peers at some positions."""
        return replace(self, sizes=self.sizes[here], starts=self.starts[here])

    def subset(self, chosen: Sequence[Ints]) -> Examples:
        """Return the examples at some positions (sizes[i],) among those of each peer."""
        index = [start + each for start, each in zip(self.starts, chosen, strict=True)]
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *index])).to(
            self.inputs.device
        )
        inputs = self.inputs.index_select(0, flat)
        labels = self.labels.index_select(0, flat)
        return Examples.of(inputs, labels, np.array([len(each) for each in index], np.int64))

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs (a, b, *shape) and labels (a, b, ...) of the examples at index (a, b)."""
        flat = index.flatten()
        inputs = self.inputs.index_select(0, flat)
        labels = self.labels.index_select(0, flat)
        inputs = inputs.view(*index.shape, *inputs.shape[1:])
        return inputs, labels.view(*index.shape, *labels.shape[1:])


def normalize_floats(inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return floats normalized, and integers unchanged: these are normalized batch by batch."""
    return normalize(inputs, scale, shift) if inputs.is_floating_point() else inputs


def as_tensor(values: Array) -> Tensor:
    """Return an array as a contiguous tensor that shares its memory where it can."""
    return torch.from_numpy(np.asarray(values, order="C"))
