"""What does a file of settings make of one run when some of them vary? A grid of cells, each with a name and a folder.

    peers = 16
    rounds = 50
    [sweep]
    topology = ["ring", "torus"]
    bits = ["none", 8, 4]
    seed = [0, 1]

A cell is a run with the settings at the top and one of every list; the last list changes fastest.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_type_hints

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically, make_directory, read_bytes
from dfl.core.parse import nearest
from dfl.core.reading import SETTINGS, read_bounded
from dfl.core.registry import options
from dfl.store import manifest
from dfl.store.run_directory import claim, refuse_foreign

OURS = ("out", "resume")
"""The fields of `Run` that a sweep gives to its cells."""
FREE = ("checkpoint_every", "timeout", "log_level")
"""The fields that may change from one call to the next: no result depends on them."""
LONGEST = 40
"""Characters of a value in a name; the middle of a longer one is left out."""
PATIENCE = 60.0
"""Seconds for which a sweep waits while another writes its tables into the same folder."""
LONGEST_PATH = Path("checkpoint") / ".0000000000.safetensors.part"
"""No path that a run writes to in its folder is longer."""
_WHOLE = 200


@dataclass(frozen=True)
class Cell:
    """A run of a grid.

    Attributes:
        name: what it is called, its folder too.
        values: what it has of everything that varies; None where that is not given.
        run: all its settings.
    """

    name: str
    values: Mapping[str, Any]
    run: Run


@dataclass(frozen=True)
class Grid:
    """What a sweep is to run.

    Attributes:
        text: the file, as it was written.
        varies: the fields that vary.
        cells: all combinations, in the order of the file.
    """

    text: str
    varies: tuple[str, ...]
    cells: tuple[Cell, ...]


def read(path: Path, ranks: int) -> Grid:
    """Read a grid from a TOML file, and check every cell of it.

    Args:
        path: the file.
        ranks: on how many a cell is to run, and so the number of its peers where the file says none.

    Raises:
        InputError: it cannot be read, names something unknown, or some cell cannot be run.
    """
    try:
        text = read_bounded(path, SETTINGS).decode("utf-8")
        settings = tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a TOML file of settings ({error})") from None
    try:
        lists = settings.pop("sweep", None)
        varies = _varying(lists, settings)
        if ranks == 1 and "peers" not in settings and "peers" not in varies:
            raise InputError(
                "peers is missing: write how many there are, as peers = 16, or give --ranks"
            )
        return Grid(text, tuple(varies), tuple(_cells(settings, varies, ranks)))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def _varying(lists: Any, settings: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What the table [sweep] says.

    Raises:
        InputError: it is missing, or says something that cannot vary.
    """
    if not isinstance(lists, dict) or not lists:
        raise InputError('a table [sweep] must say what varies, as topology = ["ring", "torus"]')
    known = [name for name in options(Run) if name not in OURS]
    for name, values in lists.items():
        if name not in known:
            raise InputError(f"[sweep]: unknown setting {name!r}{nearest(name, known)}")
        if not isinstance(values, list) or not values:
            raise InputError(f"[sweep] {name} must be a list of values, not {values!r}")
        if name in settings:
            raise InputError(f"{name} is given twice, at the top and in [sweep]: give it once")
    for name in OURS:
        if name in settings:
            raise InputError(
                f"{name} has no part in a grid: every cell has a folder of its own, in --out"
            )
    return lists


def _cells(
    settings: Mapping[str, Any], varies: Mapping[str, list[Any]], ranks: int
) -> Iterator[Cell]:
    """All combinations, each checked as a command line is.

    Raises:
        InputError: one cannot be run, or is the same as another.
    """
    from dfl.simulation.components import check

    optional = {name for name, hint in get_type_hints(Run).items() if NoneType in get_args(hint)}
    seen: dict[Run, str] = {}
    for chosen in product(*varies.values()):
        pairs = zip(varies, chosen, strict=True)
        values = {
            name: None if name in optional and value == "none" else value for name, value in pairs
        }
        name = name_of(values)
        try:
            run = Run.from_dict({**settings, **values})
            run = Run.from_dict(run.to_dict() | {"peers": run.peers or ranks})
            settled = run.settled(ranks)
            check(settled)
        except InputError as error:
            raise InputError(f"cell {name}: {error}") from None
        if settled in seen:
            raise InputError(
                f"cell {name} is the same run as {seen[settled]}: leave one of them out"
            )
        if name in seen.values():
            raise InputError(f"two cells are called {name}: write one of them otherwise")
        seen[settled] = name
        yield Cell(name, values, run)


def shown(value: Any) -> str:
    """A value as it is written in a grid, without quotes."""
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def name_of(values: Mapping[str, Any]) -> str:
    """What a cell is called: the values that it has, in letters that suit every disk and every shell.

    small_world:k=4 becomes small_world-k=4. Where more had to go than the colon, as in a path, or is too long, a
    checksum of it all stands behind, so that different cells have different names, whatever else is in the grid.
    """
    texts = {name: shown(value) for name, value in values.items()}
    plain = ",".join(f"{name}={text}" for name, text in texts.items())
    kept = {name: re.sub(r"^(\w+):", r"\1-", text, flags=re.ASCII) for name, text in texts.items()}
    short = {name: re.sub(r"[^\w.+=,-]+", "-", text, flags=re.ASCII) for name, text in kept.items()}
    half = LONGEST // 2 - 1
    short = {
        n: text if len(text) <= LONGEST else f"{text[:half]}..{text[-half:]}"
        for n, text in short.items()
    }
    name = ",".join(f"{field}={text}" for field, text in short.items())
    if short == kept and len(name) <= _WHOLE:
        return name
    return f"{name[:_WHOLE]},{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def keep(grid: Grid, folder: Path) -> None:
    """Write grid.toml, and a cell.toml for every cell, into the folder of a sweep.

    Cells may be added to those that it holds, and what is `FREE` may change; all else must be as it was.

    Raises:
        InputError: the folder holds something else, or cannot be written to.
    """
    fits(grid, folder)
    files = {folder / "grid.toml": grid.text}
    files |= {folder / cell.name / "cell.toml": as_toml(cell.run) for cell in grid.cells}
    claim(folder)
    try:
        with Lock(folder, patience=PATIENCE):
            fits(grid, folder)  # another sweep may have been faster
            for cell in grid.cells:
                make_directory(folder / cell.name)
                claim(folder / cell.name)
            for path, text in files.items():
                _write(path, text)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be written to: {error.strerror}") from None


def fits(grid: Grid, folder: Path) -> None:
    """See that a folder holds cells of a grid, which may be all, some or none, and nothing else.

    Raises:
        InputError: it holds something that is no sweep, a cell that is none of the grid's, or one with other settings.
    """
    refuse_foreign("--out", folder)
    if os.path.lexists(folder / manifest.NAME):
        raise InputError(f"--out {folder} holds a run, which is no sweep: give another folder")
    cells = {cell.name: cell.run for cell in grid.cells}
    for name in cells:
        try:
            (folder / name / LONGEST_PATH).lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise InputError(
                f"--out {folder} cannot hold the cell {name}: {error.strerror}"
            ) from None
    found = [path.parent.name for path in folder.glob("*/cell.toml")]
    for name in sorted(found):
        if name not in cells:
            raise InputError(
                f"--out {folder} holds a cell that is not in this grid, {name}: give another folder"
            )
        if (other := _differing(folder / name / "cell.toml", cells[name])) is not None:
            raise InputError(
                f"--out {folder} holds {name} with another {other}: give another folder"
            )


def _differing(path: Path, run: Run) -> str | None:
    """The first setting that a cell's file says otherwise, if there is one."""
    try:
        ours, theirs = (
            run.to_dict(),
            Run.from_dict(tomllib.loads(read_bytes(path).decode())).to_dict(),
        )
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} is damaged ({why}): remove it") from None
    fixed = (name for name in options(Run) if name not in FREE)
    return next((name for name in fixed if ours.get(name) != theirs.get(name)), None)


def as_toml(run: Run) -> str:
    """A run as a file for --config."""
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in run.to_dict().items()
    ]
    return "".join(lines).replace("\x7f", "\\u007f")  # which only JSON takes as it is


def _write(path: Path, text: str) -> None:
    """Write a file unless it is as it should be."""
    with suppress(OSError):
        if read_bytes(path) == text.encode():
            return
    with atomically(path) as part:
        part.write_text(text, encoding="utf-8")
