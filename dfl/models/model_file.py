"""Models in a Python file of the user: `--model my_model.py:build`."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl.core import generators, randomness
from dfl.core.errors import InputError, one_line
from dfl.core.parse import nearest
from dfl.core.parts import Shape
from dfl.core.reading import read_bounded
from dfl.core.registry import choose
from dfl.models.modules import modules_of

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

MOST_BYTES = 2**20
"""The most bytes of the file."""
LOADED = "dfl_model_file"
"""The name of the file as a module of Python, where classes find it."""


def file_of(model: object) -> Path | None:
    """Return the Python file that a spec names; None where it names a component, or is no spec."""
    file = model.partition(":")[0] if isinstance(model, str) else ""
    return Path(os.path.expanduser(file)) if file.endswith(".py") else None


@dataclass(frozen=True)
class ModelFile:
    """A function f(shape, classes, *, options) -> module, or several, in a Python file.

    Attributes:
        path: the file.
        function: the name of the function in it.
        options: its options as in a spec, key=value,key=value; None where there are none.
    """

    path: Path
    function: str
    options: str | None

    @classmethod
    def of(cls, spec: str) -> ModelFile:
        """Read FILE.py:FUNCTION or FILE.py:FUNCTION:key=value,key=value; runs nothing.

        Raises:
            InputError: no function is named, or the file cannot be read or is no Python.
        """
        file, _, rest = spec.partition(":")
        function, colon, options = rest.partition(":")
        if not function.isidentifier():
            raise InputError(f"--model {spec} names no function in {file}: write {file}:FUNCTION")
        found = cls(Path(os.path.expanduser(file)), function, options if colon else None)
        found._code()
        return found

    def build(self, shape: Shape, classes: int, seed: int) -> tuple[Module, ...]:
        """Run the file and return the modules that its function makes, one for each kind of peer.

        The values of its parameters depend on the seed of the run alone, where they come from the
        generators of torch, numpy or Python: these start at a state drawn by address ("model
        file"), and are put back afterwards.

        Args:
            shape: of an example.
            classes: the number of labels; 0 where labels are no classes.
            seed: the seed of the run.

        Raises:
            InputError: the file or the function fails, there is no such function, its options are
                others, or what it returns is neither a module nor a list of them.
        """
        where = f"--model {self.path}"
        with _seeded(seed):
            module = ModuleType(LOADED)
            module.__file__ = str(self.path)
            sys.modules[LOADED] = module
            try:
                exec(self._code(), module.__dict__)  # noqa: S102  the user asks for it
            except (Exception, SystemExit) as error:
                raise InputError(f"{where} fails when it is run: {one_line(error)}") from error
            function = getattr(module, self.function, None)
            if not callable(function):
                own = [name for name, value in vars(module).items() if _is_own(value)]
                raise InputError(
                    f"{where} has no function {self.function}{nearest(self.function, own)}"
                )
            spec = self.function if self.options is None else f"{self.function}:{self.options}"
            bound = choose(where, spec, {self.function: function})
            try:
                made: Any = bound(shape, classes)
            except (Exception, SystemExit) as error:
                raise InputError(
                    f"{where}: {self.function}({shape}, {classes}) fails: {one_line(error)}"
                ) from error
        return modules_of(made, f"{where}: what {self.function} returns")

    def _code(self) -> CodeType:
        """Return the file as compiled code.

        Raises:
            InputError: it cannot be read, or is no Python.
        """
        try:
            return compile(read_bounded(self.path, MOST_BYTES), str(self.path), "exec")
        except OSError as error:
            raise InputError(f"--model {self.path} cannot be read ({error.strerror})") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
            raise InputError(f"--model {self.path} is no Python{line}: {one_line(error)}") from None


def _is_own(value: object) -> bool:
    return callable(value) and getattr(value, "__module__", "") == LOADED


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Start the global generators at a state of this seed, and put theirs back at the end."""
    number = int(randomness.generator(seed, "model file").integers(2**32))
    with generators.restored():
        torch.default_generator.manual_seed(number)
        np.random.seed(number)  # noqa: NPY002  what a user's file may draw from
        random.seed(number)
        yield
