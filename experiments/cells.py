"""The finished cells of an experiment in one small file, from which another machine continues.

    python -m experiments.cells pack results/shakespeare_rounds
    python -m experiments.cells unpack experiments/results/shakespeare_rounds \\
        results/shakespeare_rounds

The first writes results/shakespeare_rounds/cells.zip, which is committed beside the tables. After
the second the command of the experiment runs the cells that are left, and computes its tables and
figures of all. The file has the settings, the evaluations and the ending of every finished cell,
peers.csv where the run wrote one, no models, and no names of folders or machines.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from zipfile import ZIP_DEFLATED, BadZipFile, ZipFile, ZipInfo

from cyclopts import App

import dfl
from dfl.config import Run
from dfl.core.files import atomically, writing
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep.status import DAMAGED, read_state

NAME = "cells.zip"
SETTINGS, EVALUATIONS, PEERS = "cell.toml", "metrics.csv", "peers.csv"
FILES = (SETTINGS, EVALUATIONS, manifest.NAME)
"""What the file has of every cell; it has `PEERS` too where the run wrote it."""
KEPT = ("objects", "versions", "ranks", "threads", "device", "seconds", "exit", "ending", "data")
"""The entries of run.json that are kept, besides the settings and the checksums of the tables."""
LARGEST = 2**26
"""Maximum number of bytes of all cells of a file."""

app = App(name="python -m experiments.cells", help_format="plaintext", version_flags=[])


@app.command
def pack(folder: Path) -> None:
    """Write cells.zip in the folder of an experiment.

    Raises:
        InputError: no cell in it has finished, one is damaged, or it cannot be written to.
    """
    states = {path.parent: read_state(path.parent) for path in sorted(folder.rglob(SETTINGS))}
    for cell, state in states.items():
        if state.status == DAMAGED:
            raise dfl.InputError(f"{cell} is damaged, {state.reason}: remove it, or run it again")
    # a run that diverged before its first evaluation has none: it is run again elsewhere
    cells = [c for c, state in states.items() if state.over and (c / EVALUATIONS).exists()]
    if not cells:
        raise dfl.InputError(f"{folder} holds no finished cell: give the folder of an experiment")
    with (
        writing(str(folder)),
        atomically(folder / NAME) as part,
        ZipFile(part, "w") as archive,
    ):
        for cell in cells:
            for name, text in _texts(cell):
                place = ZipInfo((cell.relative_to(folder) / name).as_posix())
                archive.writestr(place, text, ZIP_DEFLATED, 9)
    print(f"{folder / NAME}: {len(cells)} cells, {(folder / NAME).stat().st_size:,} bytes")


@app.command
def unpack(results: Path, folder: Path) -> None:
    """Write the cells of results/cells.zip that the folder of an experiment does not hold.

    Raises:
        InputError: the file is missing or damaged, or the folder cannot be written to.
    """
    path = results / NAME
    try:
        with ZipFile(path) as archive:
            members = archive.infolist()
            if sum(member.file_size for member in members) > LARGEST:
                raise dfl.InputError(f"{path} is damaged: it has more than {LARGEST:,} bytes")
            held = {member.filename for member in members}
            for place in sorted({_cell_of(path, name) for name in held}):
                if not (cell := folder / place).exists():
                    names = (*FILES, PEERS) if str(place / PEERS) in held else FILES
                    texts = {name: archive.read(str(place / name)) for name in names}
                    claim(cell.parent)
                    _write(cell, texts)
    except (BadZipFile, KeyError, EOFError, RuntimeError, zlib.error) as error:
        raise dfl.InputError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise dfl.InputError(f"{error.filename or path}: {error.strerror}") from None


def _write(cell: Path, texts: Mapping[str, bytes]) -> None:
    """Write the files of a cell, all of them or none.

    Raises:
        InputError: they are damaged.
    """
    with TemporaryDirectory(dir=cell.parent) as name:
        part = Path(name) / cell.name
        claim(part)
        for each, content in texts.items():
            (part / each).write_bytes(content)
        if damage := manifest.damage(part):
            raise dfl.InputError(damage)
        if PEERS in texts and PEERS not in manifest.read(part)["files"]:
            raise dfl.InputError(f"{part / PEERS} is damaged: {manifest.NAME} does not name it")
        part.rename(cell)


def _texts(cell: Path) -> Iterator[tuple[str, str]]:
    """Yield the names and the content of the files of a cell, without places of this machine."""
    record = manifest.read(cell)
    run = Run.from_dict(record["run"] | {"data_dir": None, "out": None, "resume": None})
    page = {"run": run.to_dict(), **{name: record[name] for name in KEPT if name in record}}
    tables = [name for name in (EVALUATIONS, PEERS) if name in record["files"]]
    page["files"] = {name: record["files"][name] for name in tables}
    settings = (cell / SETTINGS).read_text(encoding="utf-8").splitlines(keepends=True)
    yield SETTINGS, "".join(line for line in settings if not line.startswith("data_dir ="))
    for name in tables:
        yield name, (cell / name).read_text(encoding="utf-8")
    yield manifest.NAME, json.dumps({**page, "checksum": manifest.checksum(page)}, indent=2) + "\n"


def _cell_of(path: Path, name: str) -> PurePosixPath:
    """Return the folder of a member of the file, relative to that of the experiment.

    Raises:
        InputError: the name is none of `FILES`, nor `PEERS`, in a folder below.
    """
    place = PurePosixPath(name)
    below = len(place.parts) > 1
    if (
        place.name not in (*FILES, PEERS)
        or not below
        or place.is_absolute()
        or ".." in place.parts
        or "\\" in name
    ):
        raise dfl.InputError(f"{path} is damaged: it holds {name!r}, which is no file of a cell")
    return place.parent


if __name__ == "__main__":
    try:
        app(result_action="return_value")
    except dfl.InputError as error:
        print(f"cells: {error}", file=sys.stderr)
        sys.exit(2)
