"""How many numbers each operation of torch computes.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _Counter(TorchDispatchMode):
    """Notes the numbers that every operation returns, the most of one tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, for the reason given in `dfl.training.rounding`."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operation."""
        results = func(*args, **kwargs or {})
        every = results if isinstance(results, list | tuple) else (results,)
        tensors = (each.numel() for each in every if isinstance(each, Tensor))
        self.found.append(max(tensors, default=0))
        return results


@contextmanager
def counted() -> Iterator[list[int]]:
    """Yield the list to which the numbers of each operation are added that is computed while the
    context is open.
    """
    with _Counter() as mode:
        yield mode.found
