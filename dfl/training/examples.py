"""The examples of a rank's peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

Ints = NDArray[np.int64]


def normal(raw: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """What a model sees of examples: float(x) * scale + shift."""
    return raw.to(scale.dtype).mul(scale).add_(shift)


@dataclass(frozen=True)
class Examples:
    """Examples of this rank's peers, one peer after the other, on the device where they are used.

    Attributes:
        inputs: (n, *shape): whole numbers in the dtype of the files, or floats as the model sees
            them.
        labels: (n, ...).
        sizes: (p,), examples per peer; known to the processor, which plans with it.
        starts: (p,), where each peer's examples begin.
        protected: (n, k), k protected attributes of each, 0 or 1; None where there are none.
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
        """All examples that there are."""
        return cls(inputs, labels, sizes, np.cumsum(sizes) - sizes, protected)

    def only(self, here: Ints) -> Examples:
        """Those of the peers at some positions."""
        return replace(self, sizes=self.sizes[here], starts=self.starts[here])

    def subset(self, chosen: Sequence[Ints]) -> Examples:
        """Return the examples at some positions (sizes[i],) among those of each peer."""
        index = [start + each for start, each in zip(self.starts, chosen, strict=True)]
        flat = torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *index])).to(
            self.inputs.device
        )
        inputs, labels = (of.index_select(0, flat) for of in (self.inputs, self.labels))
        return Examples.of(inputs, labels, np.array([len(each) for each in index], np.int64))

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs (a, b, *shape) and labels (a, b, ...) of the examples at index (a, b)."""
        flat = index.flatten()
        inputs, labels = (of.index_select(0, flat) for of in (self.inputs, self.labels))
        return inputs.view(*index.shape, *inputs.shape[1:]), labels.view(
            *index.shape, *labels.shape[1:]
        )


def ready(inputs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Return floats normalised, as the model takes them; integers are normalised batch by batch."""
    return normal(inputs, scale, shift) if inputs.is_floating_point() else inputs


def as_tensor(values: NDArray[Any]) -> Tensor:
    """Return an array as a contiguous tensor that shares its memory where it can."""
    return torch.from_numpy(np.asarray(values, order="C"))
