"""Messages as they are: the bytes of their floats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dfl.compression.base import COMPRESSORS, Draw, as_bytes, floats

if TYPE_CHECKING:
    import torch


@COMPRESSORS.register("none")
@dataclass(frozen=True, kw_only=True)
class Exact:
    """The bytes of the floats: B = 4m for float32, 8m for float64.

    Neither direction copies contiguous memory.
    """

    unbiased: ClassVar[bool] = True

    def bound(self, m: int) -> float:
        """Return 0: nothing is lost."""
        return 0.0

    def encode(self, messages: torch.Tensor, draw: Draw) -> torch.Tensor:
        """View messages (q, m) as bytes (q, B)."""
        return as_bytes(messages)

    def decode(self, encoded: torch.Tensor, m: int, dtype: torch.dtype) -> torch.Tensor:
        """View bytes (q, B) as messages (q, m); `dtype` must be the one that was encoded."""
        return floats(encoded, dtype)
