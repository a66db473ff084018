"""Grids of runs: settings that are fixed, and lists of values whose combinations are the cells.

As a TOML file, which `read` reads:

    peers = 16
    rounds = 50
    [sweep]
    topology = ["ring", "torus"]
    bits = ["none", 8, 4]
    seed = [0, 1]

From Python:

    combinations({"peers": 16, "rounds": 50}, {"topology": ["ring", "torus"], "seed": [0, 1]})

The last list changes fastest.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np

from dfl.config import Run, is_object
from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.core.parse import nearest, unquoted
from dfl.core.reading import SETTINGS, read_text
from dfl.core.registry import own

SET_BY_SWEEP = ("out", "resume")
"""The fields of `Run` that a sweep sets for its cells."""
LONGEST_VALUE = 40
"""Maximum number of characters of a value in a name; the middle of a longer one is left out."""
LONGEST_NAME = 200
"""Maximum number of characters of a name without its checksum."""


@dataclass(frozen=True)
class Cell:
    """A run of a grid.

    Attributes:
        values: what distinguishes the cell, by label: the values of the fields that vary, or labels
            of the caller's own. None is a field that is not given.
        run: all its settings.
    """

    values: Mapping[str, Any]
    run: Run

    @cached_property
    def name(self) -> str:
        """The name of the cell and of its folder, as `name_of` makes it."""
        return name_of(self.values)


@dataclass(frozen=True)
class Grid:
    """The cells of a sweep.

    Attributes:
        text: the file, as it was written.
        varies: the fields that vary.
        cells: all combinations, in the order of the file.
    """

    text: str
    varies: tuple[str, ...]
    cells: tuple[Cell, ...]


def read(path: Path, ranks: int, *, runs: bool = True) -> Grid:
    """Read a grid from a TOML file.

    Args:
        path: the file.
        ranks: the number of ranks of a cell, and of its peers where the file gives none.
        runs: whether to check that every cell can be run. To look at what has run, no component and
            no file that it names is needed.

    Raises:
        InputError: the file cannot be read, has a bad value, or some cell cannot be run.
    """
    try:
        text = read_text(path, SETTINGS)
        settings = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a TOML file of settings ({error})") from None
    try:
        lists = settings.pop("sweep", None)
        if not isinstance(lists, dict) or not lists:
            raise InputError(
                'a table [sweep] must list what varies, as topology = ["ring", "torus"]'
            )
        return Grid(text, tuple(lists), _combinations(settings, lists, ranks, runs))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def combinations(
    settings: Mapping[str, object], lists: Mapping[str, Iterable[object]], ranks: int = 1
) -> tuple[Cell, ...]:
    """Return a cell for every combination of the values of some fields, the last changing fastest.

    Every cell is checked as a command line is.

    Args:
        settings: the fields of `Run` that all cells have. Fields that take objects may have them.
        lists: the values of the fields that vary; "none" or None for an optional one not given. The
            label of an object is its description, with a number from the second one of the list on
            that has the same.
        ranks: the number of ranks of a cell, which is its number of peers where none is given.

    Raises:
        InputError: an unknown field or a bad value, a cell that cannot be run, or two that are the
            same run.
    """
    return _combinations(settings, lists, ranks, True)


def _combinations(
    settings: Mapping[str, object], lists: Mapping[str, Iterable[object]], ranks: int, runs: bool
) -> tuple[Cell, ...]:
    """Return the cells, as `combinations` does; `runs` is as in `read`."""
    _check_lists(lists, settings)
    lists = {name: tuple(values) for name, values in lists.items()}
    given = settings.keys() | lists.keys()
    graph = any(
        is_object(settings.get(name)) or all(map(is_object, lists.get(name, [None])))
        for name in ("topology", "mixing")
    )
    if ranks == 1 and "peers" not in given and not graph:
        raise InputError(
            "peers is missing: write how many there are, as peers = 16, or give --ranks"
        )
    return tuple(_cells(settings, lists, ranks, runs))


def _check_lists(lists: Mapping[str, object], settings: Mapping[str, object]) -> None:
    """Refuse fields that cannot vary, and fields that are given twice.

    Raises:
        InputError: there is one.
    """
    known = [name for name in options(Run) if name not in SET_BY_SWEEP]
    for name in SET_BY_SWEEP:
        if name in settings or name in lists:
            raise InputError(
                f"{name} cannot be set in a grid: every cell has a folder of its own, in --out"
            )
    for name, values in lists.items():
        if name not in known:
            raise InputError(f"[sweep]: unknown setting {name!r}{nearest(name, known)}")
        if not _is_list(values):
            raise InputError(f"[sweep] {name} must be a list of values, not {values!r}")
        if name in settings:
            raise InputError(f"{name} is given twice, at the top and in [sweep]: give it once")


def _is_list(values: object) -> bool:
    """Return whether there are values, one or more; a text or a table is not a list of them."""
    if not isinstance(values, Iterable) or isinstance(values, str | Mapping):
        return False
    return not isinstance(values, Sized) or len(values) > 0


def _cells(
    settings: Mapping[str, object], lists: Mapping[str, Iterable[object]], ranks: int, runs: bool
) -> Iterator[Cell]:
    """Yield all combinations, each checked where `runs` is True.

    Raises:
        InputError: one has a bad value, cannot be run, or is the same as another.
    """
    optional = {name for name, hint in get_type_hints(Run).items() if NoneType in get_args(hint)}
    names: dict[Run, str] = {}
    for combination in product(
        *(_labelled(values, name in optional) for name, values in lists.items())
    ):
        values = {name: value for name, (value, _) in zip(lists, combination, strict=True)}
        labels = {name: label for name, (_, label) in zip(lists, combination, strict=True)}
        name = name_of(labels)
        try:
            run = Run.from_dict({**settings, **values})
            settled = _checked(run, ranks) if runs else replace(run, peers=run.peers or ranks)
            run = replace(run, peers=settled.peers)
        except InputError as error:
            raise InputError(f"cell {name}: {error}") from None
        if settled in names:
            raise InputError(
                f"cell {name} is the same run as {names[settled]}: leave one of them out"
            )
        if name in names.values():
            raise InputError(f"two cells are called {name}: write one of them otherwise")
        names[settled] = name
        yield Cell(labels, run)


def _checked(run: Run, ranks: int) -> Run:
    """Return a run settled.

    Raises:
        InputError: it cannot be run.
    """
    from dfl.simulation.components import check
    from dfl.simulation.defaults import settle

    settled = settle(run, ranks)
    check(settled)
    return settled


def _labelled(values: Iterable[object], optional: bool) -> Iterator[tuple[object, object]]:
    """Yield the values of a field with their labels.

    The label of an object is its description, and a number from the second one on that has the
    same.

    Args:
        values: the values.
        optional: whether the field may be left out, by "none" or None.
    """
    described = Counter[str]()
    for given in values:
        plain = given.item() if isinstance(given, np.generic) else given
        value = None if optional and isinstance(plain, str) and plain == "none" else plain
        label: object = value
        if is_object(value):
            label = text = own(value)
            described[text] += 1
            if described[text] > 1:
                label = f"{text} {described[text]}"
        yield value, label


def name_of(values: Mapping[str, object]) -> str:
    """Return the name of a cell: its values in characters that suit every disk and every shell.

    small_world:k=4 becomes small_world-k=4. Where more than that colon is replaced, as in a path,
    or a value is too long, a checksum of all values follows. Different cells have different names,
    but for x:y and x-y, which a grid refuses.
    """
    texts = {name: unquoted(value) for name, value in values.items()}
    plain = ",".join(f"{name}={text}" for name, text in texts.items())
    kept = {name: re.sub(r"^(\w+):", r"\1-", text, flags=re.ASCII) for name, text in texts.items()}
    short = {name: re.sub(r"[^\w.+=,-]+", "-", text, flags=re.ASCII) for name, text in kept.items()}
    half = LONGEST_VALUE // 2 - 1
    short = {
        name: text if len(text) <= LONGEST_VALUE else f"{text[:half]}..{text[-half:]}"
        for name, text in short.items()
    }
    name = ",".join(f"{field}={text}" for field, text in short.items())
    if short == kept and len(name) <= LONGEST_NAME:
        return name
    return f"{name[:LONGEST_NAME]},{hashlib.sha256(plain.encode()).hexdigest()[:8]}"
