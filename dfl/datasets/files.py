"""Files of data sets: found in a user's folder or downloaded, decompressed and verified."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO

from dfl.core.errors import InputError, one_line
from dfl.core.reading import check_size, open_regular

if TYPE_CHECKING:
    from requests import Session
    from rich.progress import Progress

Unpacked = BinaryIO | gzip.GzipFile | lzma.LZMAFile
"""The content of a file, read from its beginning."""
PACKINGS: dict[str, tuple[str, Callable[[BinaryIO], Unpacked]]] = {
    ".gz": ("gzipped ", lambda file: gzip.GzipFile(fileobj=file)),
    ".xz": ("xz-packed ", lzma.LZMAFile),
    "": ("", lambda file: file),
}
"""Suffix of a file -> an adjective for messages, and the decompressor."""
CHUNK = 2**20
"""Bytes of one read."""
ENTRIES = 1000
"""The most entries of a tar archive, as a bound on time."""
PATIENCE = 30
"""Seconds for which a download may stand still."""
SLOWEST = 16_000
"""The least mean speed of a download, in bytes per second."""


@dataclass(frozen=True)
class Official:
    """A file as its publisher offers it.

    Attributes:
        size: its length in bytes.
        md5, sha256: its checksums, in hexadecimal.
    """

    size: int
    md5: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where the files of a data set come from.

    Attributes:
        url: the https address of their folder, with a slash at its end.
        files: file name -> its published size and checksums.
        contents: name of a decompressed file -> the SHA-256 checksum of its content.
        others: names of decompressed files or folders that replace a download.
    """

    url: str
    files: Mapping[str, Official]
    contents: Mapping[str, str]
    others: tuple[str, ...] = ()


def locate(name: str, directory: Path | None, source: Source) -> Path:
    """Return the folder that holds a data set's files, after a download where there is none.

    That is directory/name if it exists, whatever it holds, or `directory` if it holds one of the
    files. Otherwise all files are downloaded into directory/name, if the source has any.

    Args:
        name: the name of the data set and of its folder.
        directory: the folder of the data sets; None is the user's cache.
        source: the files to download.

    Raises:
        InputError: a download failed, or there is none.
    """
    if directory is None:
        import pooch

        directory = Path(pooch.os_cache("dfl"))
    if os.path.exists(directory / name):
        return directory / name
    if any(look(directory, name.removesuffix(".gz")) for name in (*source.files, *source.others)):
        return directory
    if not source.files:
        raise InputError(
            f"{directory / name}: found no such folder, expected the files of {source.url} in it: "
            "they are not downloaded"
        )
    download(source, directory / name)
    return directory / name


def download(source: Source, folder: Path) -> None:
    """Fetch all files of a source over https, verify their checksums and put them into a new
    folder.

    The folder appears with all of its files or not at all: they are collected in a hidden folder
    beside it, which is removed at the end, also after an error. A killed process leaves the hidden
    folder; it is never read. At most the official size of a file is fetched. A progress bar is
    shown where stderr is a terminal.

    Args:
        source: the files to fetch.
        folder: the new folder; it is created with its parents.

    Raises:
        InputError: no network, an error of the server, a wrong checksum, a redirection to something
            that is not https, a transfer that takes too long, a folder that cannot be written.
    """
    from urllib3.exceptions import HTTPError

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as hidden:
            whole = Path(hidden) / folder.name
            whole.mkdir()
            _fetch_all(source, whole)
            _settle(whole, folder)
    except (OSError, ValueError, HTTPError) as error:  # errors of requests are OSErrors
        reason = " ".join(str(error).split())
        files = ", ".join(source.files)
        raise InputError(
            f"cannot download {source.url}: {reason}; or put {files} into {folder}"
        ) from None


def look(folder: Path, file: str) -> Path | None:
    """Return the path of file.gz in a folder, else of file.xz, else of the file, else None."""
    paths = (folder / f"{file}{packing}" for packing in PACKINGS)
    return next((path for path in paths if os.path.exists(path)), None)


def find(folder: Path, file: str) -> Path:
    """Return the path that `look` returns.

    Raises:
        InputError: there is no such file.
    """
    if path := look(folder, file):
        return path
    raise InputError(
        f"{folder / file}.gz: found no such file, expected it here, packed or unpacked, beside the "
        "others"
    )


@contextmanager
def unpacked(path: Path, kind: str, limit: int) -> Iterator[Unpacked]:
    """Open a regular file, to be decompressed while it is read if its suffix is .gz or .xz.

    Args:
        path: the file.
        kind: the expected kind of file, for messages.
        limit: the most bytes of the file on the disk.

    Raises:
        InputError: it cannot be read or decompressed; also for errors inside the block.
    """
    called, unpack = PACKINGS.get(path.suffix, PACKINGS[""])
    try:
        with open_regular(path) as file:
            check_size(file, limit)
            yield unpack(file)
    except (OSError, EOFError, zlib.error, lzma.LZMAError, MemoryError) as error:
        reason = (
            getattr(error, "strerror", None) or " ".join(str(error).split()) or "no memory for it"
        )
        raise InputError(f"{path}: found {reason}, expected a readable {called}{kind}") from None


def take(file: Unpacked, size: int) -> bytearray:
    """Return the next `size` bytes of a file, or those that are left.

    Memory grows with the bytes that there are, not with `size`.
    """
    held = bytearray()
    while len(held) < size and (chunk := file.read(min(size - len(held), CHUNK))):
        held += chunk
    return held


def skip(file: Unpacked, size: int) -> int:
    """Skip the next `size` bytes of a file, or those that are left; return how many there were."""
    passed = 0
    while passed < size and (chunk := file.read(min(size - passed, CHUNK))):
        passed += len(chunk)
    return passed


def content(path: Path, kind: str, limit: int) -> bytearray:
    """Return the content of a file, decompressed if its suffix is .gz or .xz.

    Args:
        path, kind: as for `unpacked`.
        limit: the most bytes of the content.

    Raises:
        InputError: it cannot be read or decompressed, or its content is longer.
    """
    with unpacked(path, kind, limit) as file:
        held = take(file, limit + 1)
    if len(held) > limit:
        raise InputError(f"{path}: found more than {limit:,} bytes, expected a {kind}")
    return held


def read_json(where: str, raw: bytes | bytearray) -> Any:
    """Return the content of a JSON file.

    Raises:
        InputError: it is none.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: found no JSON ({one_line(error)})") from None


def members(
    path: Path, names: Sequence[str], limit: int, most_entries: int = ENTRIES
) -> dict[str, bytearray]:
    """Return the contents of some files of a tar archive; nothing is written to the disk.

    The archive is read from its beginning to its end; other files are skipped in chunks.

    Args:
        path: the archive, compressed or not.
        names: the files, exactly as the archive names them.
        limit: the most bytes of one of them.
        most_entries: the most entries of the archive.

    Raises:
        InputError: it is no such archive, or one of the files is missing, no plain file or too
            large.
    """
    most = (len(names) + 1) * limit
    wanted = set(names)
    some = ", ".join([*names[:4], *["..."][: len(names) > 4]])
    entries = 0
    found: dict[str, bytearray] = {}
    with unpacked(path, "tar archive", most) as file:
        try:
            while any(block := take(file, tarfile.BLOCKSIZE)):
                entry = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
                entries += 1
                if entries > most_entries:
                    raise tarfile.ReadError(f"more than {most_entries} entries")
                most -= tarfile.BLOCKSIZE + entry.size
                if most < 0 or entry.size < 0 or (entry.name in wanted and entry.size > limit):
                    raise tarfile.ReadError(f"{entry.size:,} bytes of {entry.name[:100]!r}")
                if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.name in wanted:
                    found[entry.name] = take(file, entry.size)
                    _check_complete(len(found[entry.name]), entry.size)
                elif entry.type not in _WITHOUT_DATA:
                    _check_complete(skip(file, entry.size), entry.size)
                skip(file, -entry.size % tarfile.BLOCKSIZE)
            skip(file, most)  # verifies the checksum at the end of a compressed file
        except tarfile.TarError as error:
            raise InputError(f"{path}: found {error}, expected a tar archive of {some}") from None
    for name in names:
        if name not in found:
            raise InputError(
                f"{path}: found no plain file {name}, expected a tar archive of {some}"
            )
    return {name: found[name] for name in names}


_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)  # fmt: skip
"""Types of entries of a tar archive that have no data."""


def _check_complete(found: int, size: int) -> None:
    if found < size:
        raise tarfile.ReadError("unexpected end of data")


def differing(name: str, source: Source, found: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Return a note that names the files whose content is not the official one, if there are any.

    Args:
        name: the name of the data set.
        source: the official checksums.
        found: name of a decompressed file -> the path it was read from, and the SHA-256 checksum of
            its content.
    """
    others = [where for file, (where, sha256) in found.items() if sha256 != source.contents[file]]
    if not others:
        return ()
    return (f"not the official files of {name}, by their SHA-256: {', '.join(others)}",)


def _fetch_all(source: Source, folder: Path) -> None:
    with _progress() as progress, _https() as session:
        for name, official in source.files.items():
            _fetch(source.url + name, folder / name, official, session, progress)


def _fetch(url: str, path: Path, official: Official, session: Session, progress: Progress) -> None:
    """Copy a URL to a new file, and verify it."""
    deadline = time.monotonic() + PATIENCE + official.size / SLOWEST
    task = progress.add_task(path.name, total=official.size)
    digests = [hashlib.md5(usedforsecurity=False), hashlib.sha256()]
    size = 0
    handle = os.open(
        path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644
    )
    with (
        open(handle, "wb") as file,
        session.get(
            url, stream=True, timeout=PATIENCE, headers={"Accept-Encoding": "identity"}
        ) as response,
    ):
        response.raise_for_status()
        while chunk := response.raw.read1(CHUNK):
            size += len(chunk)
            if size > official.size:
                raise ValueError(f"{path.name} has more than its official {official.size:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{path.name} comes too slowly, {size:,} of {official.size:,} bytes so far"
                )
            for each in digests:
                each.update(chunk)
            progress.advance(task, file.write(chunk))
    for each, wanted in zip(digests, (official.md5, official.sha256), strict=True):
        if each.hexdigest() != wanted:
            raise ValueError(
                f"the {each.name} of {path.name} is {each.hexdigest()}, not the official {wanted}"
            )


def _https() -> Session:
    """Return a session that sends nothing over http, also when a server redirects there."""
    import requests
    from requests.adapters import BaseAdapter

    class Refused(BaseAdapter):
        def send(
            self, request: requests.PreparedRequest, *_: object, **__: object
        ) -> requests.Response:
            raise requests.exceptions.InvalidSchema(f"{request.url} is not https")

        def close(self) -> None:
            pass

    session = requests.Session()
    session.mount("http://", Refused())
    return session


def _settle(whole: Path, folder: Path) -> None:
    """Give the folder its name, unless another run has created it in the meantime."""
    try:
        whole.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    return Progress(
        *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    )
