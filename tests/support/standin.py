"""A stand-in for a device other than the processor, for machines without one.

Torch sees tensors of the device "lazy", which no build computes on. They hold ordinary tensors and
refuse to mix with them. Every operation on them is dispatched here, computed on the tensors that
they hold, and noted if it moves numbers to the processor.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

import dfl

PRODUCT = f"{Path(dfl.__file__).parent}/"
"""The folder of the package."""
DEVICE = torch.device("lazy", 0)


class Held(torch.Tensor):
    """A tensor on the stand-in device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Held:
        held: Held = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        held.held = inner
        return held

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of a Standin block")


class Standin(TorchDispatchMode):
    """A block in which the device exists.

    Attributes:
        moved: (file of dfl, operation) of every move to the processor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [
            each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)
        ]
        held = [each for each in tensors if isinstance(each, Held)]
        device = kwargs.pop("device", None)
        there = bool(held) if device is None else torch.device(device).type == DEVICE.type
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        if held and (not there or name == "_local_scalar_dense"):
            self.moved.append((_caller(), name))
        mixed = held and any(each.dim() and not isinstance(each, Held) for each in tensors)
        if mixed and not (name == "copy_" and isinstance(args[0], Held)):
            raise RuntimeError(f"{func} takes tensors of two devices in {_caller()}")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        first = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if first is not None and first.is_write:
            return args[0] if func._schema.returns else None  # of a list of tensors
        return tree_map(
            lambda each: Held(each) if there and isinstance(each, torch.Tensor) else each, out
        )


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, Held) else value


def _caller() -> str:
    """Return the file of dfl that is being executed."""
    frame: Any = sys._getframe(1)
    while frame and not frame.f_code.co_filename.startswith(PRODUCT):
        frame = frame.f_back
    return frame.f_code.co_filename.removeprefix(PRODUCT) if frame else "elsewhere"
