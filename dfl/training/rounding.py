"""Operations of torch that several models together would compute otherwise.

On a processor torch computes an array in vectors, and the numbers after the last whole vector by
another function in some operations, which may round differently. In an array of the numbers of
several models, the place of its end depends on the peers of a rank. Convolutions of several models
are one grouped convolution, whose rounding depends on the number of groups. And the gradient of an
embedding under torch.func.vmap, of which it makes one table of the rows of all models, leaves out
the padding row of the first model alone. So models and losses with such an operation are computed
one after the other.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

BY_PLACE = frozenset(
    {
        "_fft_c2c", "_fft_c2r", "_fft_r2c", "atan2", "atanh",
        "binary_cross_entropy_with_logits",  # whose slope is a sigmoid
        "celu", "convolution", "cosh", "elu", "exp2", "hypot", "logaddexp", "logaddexp2", "mish",
        "polar", "sigmoid", "silu", "sinh", "softplus",
    }
)  # fmt: skip
"""Operations that round by place, for all numbers. `_is_by_model` adds those that do for some."""
BY_FREQUENCY = "embedding by frequency"
"""The name of embeddings whose gradient is divided by how often a token is in the batch."""
EXACT_POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)
"""Exponents for which a power is products, quotients and square roots, which round once."""


class _Recorder(TorchDispatchMode):
    """Notes the operations of `_is_by_model`, while it is active and not paused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()
        self.paused = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True makes the first operation import torch.compile, for half a second."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute an operation."""
        name = func.overloadpacket.__name__.removeprefix("_foreach_").removesuffix("_")
        if "embedding" in name and len(args) > 3 and args[3] is True:
            name = BY_FREQUENCY
        if not self.paused and _is_by_model(name, args, kwargs or {}):
            self.found.add(name)
        return func(*args, **kwargs or {})


def _is_by_model(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether models with an operation, with these arguments, are computed one after the
    other.
    """
    if name == "embedding":
        return len(args) > 2 and args[2] != -1  # with a padding row
    if name == "gelu":  # exact where oneDNN computes it
        onednn = args[0].dtype != torch.float64 and args[0].is_contiguous()
        return kwargs.get("approximate") == "tanh" or not onednn
    if name == "pow":
        return isinstance(args[1], Tensor) or args[1] not in EXACT_POWERS
    is_complex = any(isinstance(each, Tensor) and each.is_complex() for each in args)
    return is_complex or name in BY_PLACE or name == BY_FREQUENCY


@contextmanager
def recorded(exact: Iterable[Module] = ()) -> Iterator[set[str]]:
    """Yield the set of the operations of `_is_by_model`, to which those that are computed while the
    context is open are added.

    Args:
        exact: layers that round independently of the place whatever their operations.
    """
    recorder = _Recorder()

    def paused(value: bool) -> Any:
        return lambda *_: setattr(recorder, "paused", value)

    with ExitStack() as hooks, recorder:
        for layer in exact:
            hooks.callback(layer.register_forward_pre_hook(paused(True)).remove)
            hooks.callback(layer.register_forward_hook(paused(False)).remove)
        yield recorder.found


def are_by_model(found: set[str], device: torch.device) -> bool:
    """Return whether models with recorded operations are computed one after the other on a device.

    Places matter to rounding on a processor only.
    """
    return bool(found if device.type == "cpu" else found & {"embedding", BY_FREQUENCY})
