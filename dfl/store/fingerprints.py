"""Checksums of the objects that a caller gives, and of files that a run reads besides its data.

Checkpoints have them, and a resumed run is compared with them. Of code they cover what Python shows
of a function or class: its bytecode, constants, names, default values and enclosed values,
and what it refers to by a global name: functions and classes, modules of torch, tensors, arrays,
and plain values, also in tuples, lists and dicts. Modules of Python and definitions of installed
packages count by their names; the versions of the packages that matter are recorded separately.
Other objects that code refers to by a global name count by their class. Of a torch Dataset the
attributes count, and not what it reads from files.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.registry import choose
from dfl.environment.link_models import LINK_MODELS
from dfl.models.model_file import file_of

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

MODEL = "model"
CODE = "model's code"
VALUES = "model's initial values"
OBJECT = "object of "


def depends_on_python(name: str) -> bool:
    """Return whether a checksum depends on the version of Python, as bytecode does."""
    return name == CODE or name.startswith(OBJECT)


def of_models(modules: Sequence[Module]) -> dict[str, str]:
    """Return checksums of a caller's modules: of their structure, code and initial values.

    Values that are not trained, buffers and frozen parameters, count to the structure, since no
    checkpoint has them.
    """
    structure, code, values = _Walk(), _Walk(), _Walk()
    for k, module in enumerate(modules):
        code.leave_out(module.modules())  # their functions may enclose them
        for name, part in module.named_modules():
            structure.add(k, name, _called(type(part)), _extra(part), _options(part))
            code.add(
                type(part),
                [
                    each
                    for each in vars(part).values()
                    if isinstance(each, FunctionType | MethodType)
                ],
            )
        first = dict(module.named_parameters())
        for name, value in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(),
        ):
            trained = isinstance(value, torch.nn.Parameter) and value.requires_grad
            structure.add(k, name, str(value.dtype), tuple(value.shape), trained, name in first)
            (values if trained else structure).add(_bytes(value))
    return {MODEL: structure.hexdigest(), CODE: code.hexdigest(), VALUES: values.hexdigest()}


def of_object(flag: str, value: object) -> dict[str, str]:
    """Return the checksum of an object that a caller gives for a flag: its code and its values."""
    walk = _Walk()
    walk.add(value)
    return {f"{OBJECT}{flag}": walk.hexdigest()}


def of_files(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the checksums of files by a description of each; missing files are left out.

    Raises:
        InputError: one cannot be read.
    """
    checksums = {}
    for description, path in files.items():
        if not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                checksums[description] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{description}: {path} cannot be read ({error.strerror})") from None
    return checksums


def model_file(model: object) -> dict[str, Path]:
    """Return the file of a model by its description; empty where the model is in no file."""
    path = file_of(model)
    return {f"file of --model {model}": path} if path else {}


def files_of(run: Run) -> dict[str, Path]:
    """Return the files that a run reads besides its data, by a description of each."""
    files = dict[str, Path]()
    if path := getattr(_links(run.links), "path", None):
        files[f"file of --links {run.described().links}"] = path
    if run.init_from is not None:
        for name in ("state.safetensors", "peers.csv"):
            files[f"{name} of --init-from {run.init_from}"] = run.init_from / name
    return files | model_file(run.model)


def changed_file(run: Run, record: Mapping[str, Any]) -> str:
    """Return the description of a file that is not the one that a run read; empty where all are.

    Files that are missing now are not compared, and relative paths begin at the current folder.

    Args:
        run: the run.
        record: its run.json.
    """
    given = record.get("given", {})
    now = of_files(files_of(run))
    return next((name for name, known in now.items() if given.get(name, known) != known), "")


def _links(links: object) -> object:
    """Return the link model of a run; None where this process knows none by its spec."""
    if not isinstance(links, str):
        return links
    with suppress(InputError):
        return choose("--links", links, LINK_MODELS)()
    return None


def _extra(module: Module) -> str:
    """Return the text that a module prints of itself; empty where it cannot."""
    try:
        return str(module.extra_repr())
    except Exception:
        return ""


def _options(module: Module) -> list[tuple[str, object]]:
    """Return the attributes of a module that are plain values or tensors, but for its mode."""
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training"
    }
    return sorted(
        ((name, value) for name, value in own.items() if _constant(value)), key=lambda item: item[0]
    )


def _called(kind: FunctionType | type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


PLAIN = (type(None), bool, int, float, complex, str, bytes, np.generic)
"""Types of values that their `repr` describes completely."""
OWN_KINDS = ("torch.dtype", "torch.device", "torch.Size", "torch.memory_format")
"""Types of torch of which the same holds."""
INSTALLED = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
"""The folders of Python and of installed packages."""


class _Walk:
    """A checksum of values and of all their parts.

    A part that occurs again counts by its first occurrence.
    """

    def __init__(self) -> None:
        self.whole, self.known = hashlib.sha256(), dict[int, int]()
        self.kept: list[object] = []  # a reference keeps another value from getting its id

    def add(self, *values: object) -> None:
        """Add values to the checksum."""
        waiting = [*reversed(values)]
        while waiting:
            value = waiting.pop()
            if _plain(value) or (type(value) is tuple and all(map(_plain, value))):
                self._note(type(value).__name__, repr(value).encode())
            elif (number := self.known.get(id(value))) is not None:
                self._note("again", str(number).encode())
            else:
                self.leave_out([value])
                head, parts = _look(value)
                self._note(f"{type(value).__name__} of {len(parts)}", head)
                waiting += reversed(parts)

    def leave_out(self, values: Iterable[object]) -> None:
        """Treat values as if they had occurred."""
        for value in values:
            self.known[id(value)] = len(self.known)
            self.kept.append(value)

    def hexdigest(self) -> str:
        """Return the checksum."""
        return self.whole.hexdigest()

    def _note(self, kind: str, head: bytes) -> None:
        self.whole.update(f"{kind} {len(head)} ".encode() + head)


def _look(value: object) -> tuple[bytes, Sequence[object]]:
    """Return a description of a value that is not plain, and its parts."""
    if isinstance(value, ModuleType):
        return value.__name__.encode(), ()
    if isinstance(value, torch.Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, CodeType):
        return _code(value)
    if isinstance(value, FunctionType | type):
        name = _called(value).encode()
        return name, () if _installed(value) else _function(value) if isinstance(
            value, FunctionType
        ) else _class(value)
    if hasattr(value, "__wrapped__"):
        return b"wrapper", [value.__wrapped__]
    if inspect.isroutine(value) and not inspect.ismethod(value):
        return str(getattr(value, "__qualname__", value)).encode(), ()
    return _called(type(value)).encode(), _parts(value)


def _parts(value: object) -> Sequence[object]:
    """Return the parts of a value that is neither plain nor code."""
    if isinstance(value, tuple | list):
        return value
    if isinstance(value, dict):
        return [each for item in value.items() for each in item]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if inspect.ismethod(value):
        return value.__func__, value.__self__
    if isinstance(value, torch.nn.Module):
        return _module(value)
    own = dict(sorted(getattr(value, "__dict__", {}).items()))
    if isinstance(value, torch.utils.data.Dataset):  # such as a Subset of the caller's examples
        return [own]
    if _installed(type(value)):
        return [{name: each for name, each in own.items() if _constant(each)}]
    return type(value), own


def _module(module: Module) -> Sequence[object]:
    parts = [
        (name, type(part), _extra(part), _options(part)) for name, part in module.named_modules()
    ]
    return [parts, *module.named_parameters(remove_duplicate=False), *module.named_buffers()]


def _installed(value: object) -> bool:
    """Return whether a function or class is of Python, of an installed package, or of dfl."""
    name = str(value.__module__)
    if name in sys.builtin_module_names or name.partition(".")[0] in ("dfl", "topologies"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and file.startswith(INSTALLED)


def _class(kind: type) -> Sequence[object]:
    """Return the parts of a class: its bases, its functions and its plain values."""
    own: list[object] = [*kind.__bases__]
    for name, value in sorted(vars(kind).items()):
        function = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", None) or value))
        if inspect.isfunction(function) or (_constant(value) and not name.startswith("__")):
            own += [name, function]
    return own


def _function(function: FunctionType) -> Sequence[object]:
    """Return the parts of a function: its code and the values that it uses."""
    cells = [_cell(each) for each in function.__closure__ or ()]
    return [
        *_code(function.__code__, function.__doc__)[1],
        function.__code__.co_code,
        function.__defaults__,
        function.__kwdefaults__,
        cells,
        *_globals(function),
    ]


def _cell(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return "empty"


def _globals(function: FunctionType) -> Iterator[object]:
    """Yield the global names that a function or one inside it reads, not sets, with values."""
    codes, read, written = [function.__code__], set[str](), set[str]()
    for code in codes:  # the list grows
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                read.add(step.argval)
            elif step.opname == "STORE_GLOBAL":
                written.add(step.argval)
    for name in sorted(read - written):
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        walked = (FunctionType, type, ModuleType, functools.partial, torch.nn.Module)
        yield name
        yield (
            value
            if isinstance(value, walked) or inspect.isroutine(value) or _constant(value)
            else type(value)
        )


def _plain(value: object) -> bool:
    return isinstance(value, PLAIN) or _called(type(value)) in OWN_KINDS


def _constant(value: object) -> bool:
    """Return whether a value is plain, a tensor, an array, or a tuple, list, dict, set of these."""
    waiting, seen = [value], set[int]()
    for each in waiting:  # the list grows
        if isinstance(each, tuple | list | dict | set | frozenset):
            if id(each) not in seen:
                seen.add(id(each))
                waiting += [*each, *each.values()] if isinstance(each, dict) else each
        elif not _plain(each) and not isinstance(each, torch.Tensor | np.ndarray):
            return False
    return True


def _code(code: CodeType, text: str | None = None) -> tuple[bytes, Sequence[object]]:
    """Return the bytecode of code, its names and its constants without the docstring."""
    constants = [each for each in code.co_consts if text is None or each != text]
    return code.co_code, [code.co_names, code.co_varnames, code.co_freevars, *constants]


def _array(value: torch.Tensor | np.ndarray) -> tuple[bytes, Sequence[object]]:
    head = f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, torch.Tensor):
        return head.encode(), [_bytes(value)]
    return head.encode(), list(value.flat) if value.dtype.hasobject else [value.tobytes()]


def _bytes(value: torch.Tensor) -> bytes:
    """Return the bytes of a tensor of any dtype."""
    if value.is_meta or not value.numel():
        return b""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
