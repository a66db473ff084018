"""The folder of a sweep: grid.toml, and a folder with a cell.toml for every cell."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically, make_directory, writing
from dfl.core.options import options
from dfl.core.reading import SETTINGS, read_bounded
from dfl.store import manifest
from dfl.store.run_directory import CELL, GRID, claim, refuse_foreign
from dfl.sweep.grid import Cell

FREE = ("checkpoint_every", "timeout", "log_level", "data_dir", "report")
"""The fields that may differ between two calls with one folder: no result depends on them."""
PATIENCE = 60.0
"""Seconds for which a sweep waits while another writes to the same folder."""
LONGEST_PATH = Path("checkpoint") / ".0000000000.safetensors.part"
"""The longest path that a run writes in its folder."""


def write(folder: Path, cells: Sequence[Cell], text: str | None = None) -> None:
    """Write a cell.toml for every cell into the folder of a sweep, and grid.toml.

    Cells may be added to those that it holds, and fields in `FREE` may change; all else must be as
    it was.

    Args:
        folder: a new one, an empty one, or that of a sweep.
        cells: the cells.
        text: of grid.toml. Without it none is written, and the folder may hold further cells.

    Raises:
        InputError: the folder holds something else, or cannot be written to.
    """
    exclusive = text is not None
    check(folder, cells, exclusive)
    files = {folder / cell.name / CELL: as_toml(cell.run) for cell in cells}
    if text is not None:
        files[folder / GRID] = text
    claim(folder)
    with writing(f"--out {folder}"), Lock(folder, patience=PATIENCE):
        check(folder, cells, exclusive)  # another sweep may have written meanwhile
        for cell in cells:
            make_directory(folder / cell.name)
            claim(folder / cell.name)
        for path, content in files.items():
            _write_if_changed(path, content)


def check(folder: Path, cells: Sequence[Cell], exclusive: bool = True) -> None:
    """Check that a folder can hold some cells: what it holds of them has the same settings.

    Args:
        folder: which need not exist.
        cells: the cells.
        exclusive: whether the folder may hold no other cells.

    Raises:
        InputError: it holds something that is no sweep, another cell, or one with other settings.
    """
    refuse_foreign("--out", folder)
    if os.path.lexists(folder / manifest.NAME):
        raise InputError(f"--out {folder} holds a run, not a sweep: give another folder")
    runs = {cell.name: cell.run for cell in cells}
    for name in runs:
        try:
            (folder / name / LONGEST_PATH).lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise InputError(
                f"--out {folder} cannot hold the cell {name}: {error.strerror}"
            ) from None
    for name in sorted(path.parent.name for path in folder.glob(f"*/{CELL}")):
        if name not in runs:
            if exclusive:
                raise InputError(
                    f"--out {folder} holds a cell that is not in this grid, {name}: "
                    "give another folder"
                )
        elif (field := _differing_field(folder / name / CELL, runs[name])) is not None:
            raise InputError(
                f"--out {folder} holds {name} with another {field}: give another folder"
            )


def peers(folder: Path) -> int:
    """Return the peers of a cell, which a grid need not give; 1 where no cell has them."""
    paths = list[Path]()
    with suppress(OSError):  # `check` refuses such a folder
        paths = sorted(folder.glob(f"*/{CELL}"))
    for path in paths:
        with suppress(OSError, LookupError, ValueError, RecursionError, TypeError):
            return int(tomllib.loads(read_bounded(path, SETTINGS).decode())["peers"])
    return 1


def as_toml(run: Run) -> str:
    """Return a run as a file for --config."""
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        for name, value in run.to_dict().items()
    ]
    return "".join(lines).replace("\x7f", "\\u007f")  # TOML does not take it as it is


def read_cell(path: Path) -> Run:
    """Return the run of a cell.

    Args:
        path: the cell.toml.

    Raises:
        InputError: it is missing or damaged.
    """
    try:
        return Run.from_dict(tomllib.loads(read_bounded(path, SETTINGS).decode()))
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path} is damaged ({why}): remove it") from None


def _differing_field(path: Path, run: Run) -> str | None:
    """Return the first field that differs between a run and the file of a cell, if there is one."""
    held = read_cell(path).to_dict()
    given = run.to_dict()
    fixed = (name for name in options(Run) if name not in FREE)
    return next((name for name in fixed if given.get(name) != held.get(name)), None)


def _write_if_changed(path: Path, text: str) -> None:
    """Write a file, unless it holds the text already."""
    content = text.encode()
    with suppress(OSError):  # a longer file, too
        if read_bounded(path, len(content)) == content:
            return
    with atomically(path) as part:
        part.write_text(text, encoding="utf-8")
