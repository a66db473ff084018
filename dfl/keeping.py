"""Where do checkpoints lie, and which of them are whole? The files behind `dfl.checkpoint`, which rank 0 handles.

    DIR/checkpoint/0000000050.safetensors   arrays
    DIR/checkpoint/0000000050.json          format, content, and checksums of the content and of the arrays

The JSON is written last and vouches for both: a pair that was cut short, or damaged since, is never taken for whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dfl.errors import InputError
from dfl.files import atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
"""The version of what is written; another one is refused."""
KEPT = 2
"""How many checkpoints there are at a time."""


@dataclass(frozen=True)
class Found:
    """A checkpoint that is whole.

    Attributes:
        path: its JSON.
        content: what that says.
        damaged: newer ones that are not whole, and what is wrong with them.
    """

    path: Path
    content: dict[str, Any]
    damaged: tuple[str, ...] = ()

    @property
    def round(self) -> int:
        """How many rounds it has behind it."""
        return int(self.content["round"])

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What lies beside it.

        Raises:
            InputError: it cannot be read any more.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            return load_file(_beside(self.path))
        except (OSError, SafetensorError) as error:
            raise InputError(f"{_beside(self.path)} cannot be read: {error}") from None


def trace(run: Path) -> tuple[bytes, ...]:
    """What tells whether somebody has gone on with a run since: its run.json, and the names of its checkpoints."""
    page = run / "run.json"
    said = page.read_bytes() if page.exists() else b""
    return said, *(os.fsencode(each.name) for each in _newest_first(run / "checkpoint"))


def write(run: Path, arrays: Mapping[str, NDArray[Any]], content: Mapping[str, Any]) -> None:
    """Write a checkpoint of a run's folder, and remove those that are too old.

    Raises:
        InputError: it cannot be written; the earlier ones are still there.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    folder = run / "checkpoint"
    path = folder / f"{content['round']:010}.json"
    try:
        folder.mkdir(exist_ok=True)
        with atomically(_beside(path)) as part:
            save_file(dict(arrays), part)
            part.chmod(0o644)  # it makes it for its owner alone
            digest = _digest(part)
        page = {"format": FORMAT, "arrays": digest, "content": content}
        with atomically(path) as part:
            part.write_text(json.dumps({"checksum": _checksum(page), **page}, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        last = max((each.stem.lstrip("0") for each in _newest_first(folder)), key=int, default="")
        kept = f"the one of round {last} is still there" if last else "there is none yet"
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{path}: the checkpoint cannot be written ({reason}); {kept}") from None
    _tidy(folder, path)


def find(run: Path) -> Found | None:
    """The newest checkpoint of a run's folder that is whole; None where there is none at all.

    Raises:
        InputError: there are some, and none is whole; or one is of another format.
    """
    damaged: list[str] = []
    for path in _newest_first(run / "checkpoint"):
        try:
            return Found(path, _opened(path), tuple(damaged))
        except InputError:
            raise
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            damaged.append(f"{path} is damaged ({type(error).__name__}: {error})")
    if damaged:
        raise InputError(
            f"{damaged[0]}, and no other checkpoint is whole: take {run / 'checkpoint'} away to begin anew"
        )
    return None


def _opened(path: Path) -> dict[str, Any]:
    """What a checkpoint says, if it is whole."""
    page = json.loads(path.read_text(encoding="utf-8"))
    if page["checksum"] != _checksum(page):
        raise ValueError("its checksum is another")
    if page["format"] != FORMAT:
        raise InputError(f"{path} is of format {page['format']}: this version of dfl reads {FORMAT}")
    if page["arrays"] != _digest(_beside(path)):
        raise ValueError(f"the checksum of {_beside(path).name} is another")
    content: dict[str, Any] = page["content"]
    return content


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"{'[0-9]' * 10}.json"), reverse=True)


def _tidy(folder: Path, last: Path) -> None:
    """Remove all but the last checkpoints, and what a launch that was killed left half-written."""
    kept = {path.stem for path in [path for path in _newest_first(folder) if path.name <= last.name][:KEPT]}
    old = [path for path in sorted(folder.iterdir()) if path.name.startswith(".") or path.stem not in kept]
    for path in old:  # the JSON goes first: no page may vouch for what is gone
        with suppress(OSError):
            path.unlink()


def _beside(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _checksum(page: Mapping[str, Any]) -> str:
    """Of all that a page says, however it is laid out."""
    said = {name: value for name, value in page.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
