"""Checksums of what a run is given besides its settings and data: a caller's own model and loss, and files.

A checkpoint keeps them, and a run that goes on is compared with them. Of code they cover what Python shows of a
function or class: its bytecode, constants, names, default values and enclosed values. They do not cover functions and
values that code refers to by a global name, or code of torch, whose version is noted apart.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.core.errors import InputError

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

MODEL, CODE, VALUES, LOSS = "model", "model's code", "model's initial values", "loss"
BYTECODE = (CODE, LOSS)
"""Those of which another version of Python makes another checksum."""


def of_models(modules: Sequence[Module]) -> dict[str, str]:
    """Return checksums of a caller's modules: their structure, their code, and the values of their parameters.

    Values that are not trained, buffers and frozen parameters, count to the structure, since no checkpoint has them.
    """
    structure, code, values = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for k, module in enumerate(modules):
        for name, part in module.named_modules():
            structure.update(
                f"{k} {name} {_called(type(part))} {part.extra_repr()} {_options(part)}\n".encode()
            )
            for text in _class(type(part)):
                code.update(text)
        trained = {name for name, each in module.named_parameters() if each.requires_grad}
        for name, value in module.state_dict().items():
            structure.update(
                f"{k} {name} {value.dtype} {tuple(value.shape)} {name in trained}\n".encode()
            )
            (values if name in trained else structure).update(_bytes(value))
    return {MODEL: structure.hexdigest(), CODE: code.hexdigest(), VALUES: values.hexdigest()}


def of_loss(loss: Callable[..., Any]) -> dict[str, str]:
    """Return the checksum of a caller's loss."""
    return {LOSS: _digest(_thing(loss, frozenset()))}


def of_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the checksums of files by what asked for them; what is no file is left to those who read it.

    Raises:
        InputError: one cannot be read.
    """
    found = {}
    for asked, path in files.items():
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                found[asked] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{asked}: {path} cannot be read ({error.strerror})") from None
    return found


def _digest(parts: Iterator[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(part + b"\n")
    return whole.hexdigest()


def _options(module: Module) -> str:
    """The numbers and names that a module keeps as attributes, but for the mode that it is in."""
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }
    return repr(
        sorted(
            (name, value)
            for name, value in own.items()
            if isinstance(value, bool | int | float | str)
        )
    )


def _called(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _class(kind: type) -> Iterator[bytes]:
    """What the classes of a module that are not torch's do."""
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        yield _called(each).encode()
        for name, value in sorted(vars(each).items()):
            function = inspect.unwrap(
                getattr(value, "__func__", getattr(value, "fget", None) or value)
            )
            if inspect.isfunction(function):
                yield name.encode()
                yield from _function(function, frozenset())


PLAIN = (type(None), bool, int, float, complex, str, bytes)


def _thing(value: Any, seen: frozenset[int]) -> Iterator[bytes]:
    """What there is to see of a value, or of something that can be called; `seen` are those around it."""
    if id(value) in seen:
        return
    seen |= {id(value)}
    if isinstance(value, PLAIN):
        yield repr(value).encode()
    elif isinstance(value, torch.Tensor | np.ndarray):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield _bytes(torch.as_tensor(value))
    elif inspect.isfunction(value):
        yield from _function(value, seen)
    elif (inspect.isroutine(value) and not inspect.ismethod(value)) or isinstance(value, type):
        yield str(getattr(value, "__qualname__", value)).encode()
    else:
        yield _called(type(value)).encode()
        for part in _parts(value):
            yield from _thing(part, seen)


def _parts(value: Any) -> Sequence[Any]:
    """What a value that is not plain is made of."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return [each for item in value.items() for each in item]
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if inspect.ismethod(value):
        return value.__func__, value.__self__
    if isinstance(value, torch.nn.Module):
        return list(of_models([value]).values())
    own = getattr(value, "__dict__", {})
    return [*_class(type(value)), dict(sorted(own.items()))]


def _function(function: Any, seen: frozenset[int]) -> Iterator[bytes]:
    yield _called(function).encode()
    if function.__module__.partition(".")[0] == "torch":
        return
    yield from _code(function.__code__, function.__doc__)
    for each in (function.__defaults__, function.__kwdefaults__):
        yield from _thing(each, seen)
    for cell in function.__closure__ or ():
        try:
            yield from _thing(cell.cell_contents, seen)
        except ValueError:  # an empty cell
            yield b"empty"


def _code(code: CodeType, text: str | None = None) -> Iterator[bytes]:
    """What a function does: bytecode, names and constants, but neither where it stands nor its docstring."""
    yield code.co_code
    yield repr((code.co_names, code.co_varnames, code.co_freevars)).encode()
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _code(constant)
        elif isinstance(constant, frozenset):
            yield repr(sorted(map(repr, constant))).encode()
        elif text is None or constant != text:
            yield repr(constant).encode()


def _bytes(value: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    if value.is_meta or not value.numel():
        return b""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
