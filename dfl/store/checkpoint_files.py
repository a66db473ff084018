"""The files of checkpoints, which rank 0 reads and writes for `dfl.simulation.checkpointing`.

    DIR/checkpoint/0000000050.safetensors   arrays
    DIR/checkpoint/0000000050.json          format, content, checksums of the content and the arrays

The JSON is written last and has the checksums of both: a pair that was cut short, or damaged since,
is never read.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dfl.core.arrays import Array, Arrays
from dfl.core.errors import InputError
from dfl.core.files import atomically, make_directory, read_bytes, sha256
from dfl.core.reading import read_bounded
from dfl.store import manifest
from dfl.store.manifest import checksum

FORMAT = 3
"""The version of the format; files of another one are refused."""
KEPT = 2
"""Number of checkpoints that are kept."""
METADATA = {"dfl": "checkpoint"}
"""The metadata of the arrays of a checkpoint."""
BEGINNINGS = {
    ".json": b'{\n "checksum": "',
    ".safetensors": b'{"__metadata__":{"dfl":"checkpoint"}',
}
"""The first bytes of the files of a checkpoint; of arrays, those after the eight of a length."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole.

    Attributes:
        path: its JSON.
        content: the content of its JSON.
        damaged: a line for each newer checkpoint that is not whole.
    """

    path: Path
    content: dict[str, Any]
    damaged: tuple[str, ...] = ()

    @property
    def round(self) -> int:
        """Number of rounds done."""
        return int(self.content["round"])

    def arrays(self) -> Arrays:
        """Read the arrays beside it.

        Raises:
            InputError: they cannot be read any more.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(_beside(self.path))
        except (OSError, SafetensorError) as error:
            raise InputError(f"{_beside(self.path)} cannot be read: {error}") from None


def trace(run: Path) -> tuple[bytes, ...]:
    """Return what changes when a run is resumed: its run.json, and the names of its checkpoints."""
    try:
        record = read_bounded(run / manifest.NAME, manifest.LONGEST)
    except OSError:
        record = b""
    return record, *(os.fsencode(each.name) for each in _newest_first(run / "checkpoint"))


def write(run: Path, arrays: Mapping[str, Array], content: Mapping[str, object]) -> None:
    """Write a checkpoint to the folder of a run, and remove those that are too old.

    Raises:
        InputError: it cannot be written; the earlier ones are still there.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    folder = run / "checkpoint"
    path = folder / f"{content['round']:010}.json"
    try:
        make_directory(folder)
        with atomically(_beside(path)) as part:
            # Of a view, safetensors would write other numbers.
            rows = {name: np.asarray(value, order="C") for name, value in arrays.items()}
            save_file(rows, part, metadata=METADATA)
            part.chmod(0o644)  # save_file makes it readable by its owner alone
            digest = sha256(part)
        page = {"format": FORMAT, "arrays": digest, "content": content}
        with atomically(path) as part:
            part.write_text(json.dumps({"checksum": checksum(page), **page}, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        last = max((each.stem.lstrip("0") for each in _newest_first(folder)), key=int, default="")
        kept = f"the one of round {last} is still there" if last else "there is none yet"
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: the checkpoint cannot be written ({reason}); {kept}") from None
    _tidy(folder, path)


def find(run: Path) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is whole; None where there is none at all.

    Raises:
        InputError: there are some, and none is whole; or one is of another format.
    """
    damaged: list[str] = []
    for path in _newest_first(run / "checkpoint"):
        try:
            return Checkpoint(path, _read(path), tuple(damaged))
        except InputError:
            raise
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            damaged.append(f"{path} is damaged ({type(error).__name__}: {error})")
    if damaged:
        raise InputError(
            f"{damaged[0]}, and no other checkpoint is whole: "
            f"remove {run / 'checkpoint'} to start again"
        )
    return None


def _read(path: Path) -> dict[str, Any]:
    """Return the content of a checkpoint that is whole.

    Raises:
        ValueError: a checksum does not match.
        InputError: it has another format.
    """
    page = json.loads(read_bytes(path).decode())
    if page["checksum"] != checksum(page):
        raise ValueError("its checksum does not match")
    if page["format"] != FORMAT:
        raise InputError(
            f"{path} is of format {page['format']}: this version of dfl reads {FORMAT}"
        )
    if page["arrays"] != sha256(_beside(path)):
        raise ValueError(f"the checksum of {_beside(path).name} does not match")
    content: dict[str, Any] = page["content"]
    return content


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{'[0-9]' * 10}.json"), reverse=True)


def _tidy(folder: Path, last: Path) -> None:
    """Remove all but the last checkpoints, and the unfinished files of a killed launch.

    A file stays unless its name and its first bytes are those of a checkpoint.
    """
    up_to_last = [path for path in _newest_first(folder) if path.name <= last.name]
    kept = {path.stem for path in up_to_last[:KEPT]}
    for path in sorted(folder.iterdir()):  # the JSON is removed first
        known = re.fullmatch(r"(\.?)([0-9]{10})(\.json|\.safetensors)(\.part)?", path.name)
        if known and bool(known[1]) == bool(known[4]) and (known[1] or known[2] not in kept):
            with suppress(OSError):
                if _ours(path, known[3]):
                    path.unlink()


def _ours(path: Path, kind: str) -> bool:
    """Return whether a file starts as one of a checkpoint, as far as it goes; no link does."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    with path.open("rb") as file:
        begins = file.read(8 + len(BEGINNINGS[kind]))[8 if kind == ".safetensors" else 0 :]
    return begins.startswith(BEGINNINGS[kind]) or BEGINNINGS[kind].startswith(begins)


def _beside(path: Path) -> Path:
    return path.with_suffix(".safetensors")
