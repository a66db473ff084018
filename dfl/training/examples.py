"""The examples of a rank's peers as tensors, and their normalization."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.arrays import Array
from dfl.core.parts import Parts, map_parts
from dfl.core.ragged import Ragged

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
        inputs: (n, *shape), integers in the dtype of the files, or normalized floats; or a tuple
            of such parts.
        labels: (n, ...).
        sizes: (p,), examples per peer; in host memory.
        starts: (p,), where each peer's examples begin; in host memory.
        protected: (n, k), k protected attributes of each example, 0 or 1; None if there are none.
    """

    inputs: Parts
    labels: Tensor
    sizes: Ints
    starts: Ints
    protected: Tensor | None = None

    @classmethod
    def of(
        cls, inputs: Parts, labels: Tensor, sizes: Ints, protected: Tensor | None = None
    ) -> Examples:
        """Return the examples of peers that lie one after the other, of sizes (p,)."""
        return cls(inputs, labels, sizes, np.cumsum(sizes) - sizes, protected)

    def only(self, here: Ints) -> Examples:
        """Return the examples of the peers at some positions."""
        return replace(self, sizes=self.sizes[here], starts=self.starts[here])

    def subset(self, chosen: Ragged) -> Examples:
        """Return the examples at some positions among those of each peer."""
        places = np.repeat(self.starts, chosen.sizes) + chosen.values
        flat = torch.from_numpy(places).to(self.labels.device)
        inputs = map_parts(lambda part: part.index_select(0, flat), self.inputs)
        labels = self.labels.index_select(0, flat)
        return Examples.of(inputs, labels, chosen.sizes)

    def at(self, index: Tensor) -> tuple[Parts, Tensor]:
        """Return inputs (a, b, *shape) and labels (a, b, ...) of the examples at index (a, b)."""
        flat = index.flatten()

        def rows(part: Tensor) -> Tensor:
            return part.index_select(0, flat).view(*index.shape, *part.shape[1:])

        return map_parts(rows, self.inputs), rows(self.labels)


def normalize_floats(inputs: Parts, scale: Parts, shift: Parts) -> Parts:
    """Return floats normalized, and integers unchanged: these are normalized batch by batch."""

    def normalized(part: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return normalize(part, scale, shift) if part.is_floating_point() else part

    return map_parts(normalized, inputs, scale, shift)


def loaded(
    inputs: Parts, labels: Array, scale: Parts, shift: Parts, device: torch.device
) -> tuple[Parts, Tensor]:
    """Return inputs and labels as tensors on a device, floats normalized.

    Args:
        inputs, labels: as files have them.
        scale, shift: of each part, on that device.
        device: where the examples are used.
    """
    moved = map_parts(lambda part: as_tensor(part).to(device), inputs)
    return normalize_floats(moved, scale, shift), as_tensor(labels).to(device)


def as_tensor(values: Array) -> Tensor:
    """Return an array as a contiguous tensor that shares its memory where it can."""
    return torch.from_numpy(np.asarray(values, order="C"))
