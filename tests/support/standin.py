"""A device that is not the processor, without one: its tensors hold ordinary ones and refuse to mix
with them.

Torch sees tensors of the device "lazy", which no build computes on; every operation on them comes
here, is done on what they hold, and is noted if it hands numbers to the processor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("lazy", 0)


class Held(torch.Tensor):
    """A tensor on the stand-in device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Held:
        held: Held = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE,
        )  # fmt: skip
        held.held = inner
        return held

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} outside of a Standin block")


class Standin(TorchDispatchMode):
    """While it lasts there is the device; `moved` says which file of dfl moved what to the
    processor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: list[tuple[str, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        tensors = [
            each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)
        ]
        held = [each for each in tensors if isinstance(each, Held)]
        asked = kwargs.pop("device", None)
        there = bool(held) if asked is None else torch.device(asked).type == DEVICE.type
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        if held and (not there or name == "_local_scalar_dense"):
            self.moved.append((_caller(), name))
        mixed = held and any(each.dim() and not isinstance(each, Held) for each in tensors)
        if mixed and not (name == "copy_" and isinstance(args[0], Held)):
            raise RuntimeError(f"{func} takes tensors of two devices in {_caller()}")
        out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
        first = func._schema.arguments[0].alias_info if func._schema.arguments else None
        if first is not None and first.is_write:
            return args[0]
        return tree_map(
            lambda each: Held(each) if there and isinstance(each, torch.Tensor) else each, out
        )


def _inner(value: Any) -> Any:
    return value.held if isinstance(value, Held) else value


def _caller() -> str:
    """The file of dfl that is being executed."""
    frame: Any = sys._getframe(1)
    while frame and "/dfl/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.rpartition("/dfl/")[2] if frame else "elsewhere"
