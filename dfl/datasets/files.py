"""Where are the files of a data set, and what is in them, unpacked? In a user's folder, or
downloaded, checked.
"""

from __future__ import annotations

import gzip
import hashlib
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
from typing import TYPE_CHECKING, BinaryIO

from dfl.core.errors import InputError
from dfl.core.reading import check_size, open_regular

if TYPE_CHECKING:
    from requests import Session
    from rich.progress import Progress

Unpacked = BinaryIO | gzip.GzipFile | lzma.LZMAFile
"""What is in a file, to be read from its beginning."""
PACKINGS: dict[str, tuple[str, Callable[[BinaryIO], Unpacked]]] = {
    ".gz": ("gzipped ", lambda file: gzip.GzipFile(fileobj=file)),
    ".xz": ("xz-packed ", lzma.LZMAFile),
    "": ("", lambda file: file),
}
"""What a file's name may have behind it, what that is called, and how such a file is unpacked."""
CHUNK = 2**20
"""Bytes that are read at once."""
ENTRIES = 1000
"""Entries that a tar archive may have, as a bound on time."""
PATIENCE, SLOWEST = 30, 16_000
"""Seconds for which a download may stand still, and bytes a second that it must have in the
mean.
"""


@dataclass(frozen=True)
class Official:
    """A published file, as it is downloaded.

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
        url: what stands before a file's name, with its slash; https.
        files: file name -> what is published of it.
        contents: name of an unpacked file -> the SHA-256 checksum of what is in it.
        others: files or folders, named as they are unpacked, that are as good as a download.
    """

    url: str
    files: Mapping[str, Official]
    contents: Mapping[str, str]
    others: tuple[str, ...] = ()


def locate(name: str, directory: Path | None, source: Source) -> Path:
    """The folder that holds a data set's files, after a download where there is none.

    Looked for are directory/name, whatever it holds, and then the files lying in `directory`
    itself. Where neither is there, all files are downloaded into directory/name. `directory` None
    is the user's cache.

    Args:
        name: the data set's name, and its folder's.
        directory: the folder of the data sets, or None.
        source: what to download.

    Raises:
        InputError: a download failed.
    """
    if directory is None:
        import pooch

        directory = Path(pooch.os_cache("dfl"))
    if os.path.exists(directory / name):
        return directory / name
    if any(look(directory, name.removesuffix(".gz")) for name in (*source.files, *source.others)):
        return directory
    download(source, directory / name)
    return directory / name


def download(source: Source, folder: Path) -> None:
    """Fetch all files of a source over https, verify their checksums and put them into a new
    folder.

    The folder appears with all of its files or not at all: they are gathered in a hidden one beside
    it, which is removed at the end, also after an error. A killed process leaves it; it is never
    read. At most the official size of a file is fetched. A progress bar is shown where stderr is a
    terminal.

    Args:
        source: what to fetch.
        folder: where to; created, with its parents.

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
        reason, files = " ".join(str(error).split()), ", ".join(source.files)
        raise InputError(
            f"cannot download {source.url}: {reason}; or put {files} into {folder}"
        ) from None


def look(folder: Path, file: str) -> Path | None:
    """The path of file.gz in a folder, or of file.xz or of the unpacked file where that is all
    there is, or None.
    """
    paths = (folder / f"{file}{packing}" for packing in PACKINGS)
    return next((path for path in paths if os.path.exists(path)), None)


def find(folder: Path, file: str) -> Path:
    """As `look`, for a file that must be there.

    Raises:
        InputError: it is not.
    """
    if path := look(folder, file):
        return path
    raise InputError(
        f"{folder / file}.gz: found no such file, expected it here, packed or unpacked, beside the others"
    )


@contextmanager
def unpacked(path: Path, kind: str, limit: int) -> Iterator[Unpacked]:
    """Open a regular file, to be unpacked while it is read if its name says that it is packed.

    Args:
        path: the file.
        kind: what it should be, for messages.
        limit: the most bytes that it may have on the disk.

    Raises:
        InputError: it cannot be read or unpacked, also later, where the context is.
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

    Memory grows with what is there, not with what is asked for.
    """
    held = bytearray()
    while len(held) < size and (chunk := file.read(min(size - len(held), CHUNK))):
        held += chunk
    return held


def skip(file: Unpacked, size: int) -> int:
    """Pass over the next `size` bytes of a file, or those that are left; return how many there
    were.
    """
    passed = 0
    while passed < size and (chunk := file.read(min(size - passed, CHUNK))):
        passed += len(chunk)
    return passed


def content(path: Path, kind: str, limit: int) -> bytearray:
    """Return what is in a file, unpacked if its name says that it is packed.

    Args:
        path, kind: as for `unpacked`.
        limit: the most bytes that may be in it.

    Raises:
        InputError: it cannot be read or unpacked, or more is in it.
    """
    with unpacked(path, kind, limit) as file:
        held = take(file, limit + 1)
    if len(held) > limit:
        raise InputError(f"{path}: found more than {limit:,} bytes, expected a {kind}")
    return held


def members(path: Path, names: Sequence[str], limit: int) -> dict[str, bytearray]:
    """Return what is in some files of a tar archive; nothing is written to any place.

    The archive is read from its beginning to its end, and of no other file than these more than a
    piece is held.

    Args:
        path: the archive, packed or not.
        names: the files, exactly as the archive names them.
        limit: the most bytes that one of them may have.

    Raises:
        InputError: not such an archive, or one of the files is missing, no plain file or too large.
    """
    most, entries = (len(names) + 1) * limit, 0
    found: dict[str, bytearray] = {}
    with unpacked(path, "tar archive", most) as file:
        try:
            while any(block := take(file, tarfile.BLOCKSIZE)):
                entry = tarfile.TarInfo.frombuf(bytes(block), "utf-8", "surrogateescape")
                entries += 1
                if entries > ENTRIES:
                    raise tarfile.ReadError(f"more than {ENTRIES} entries")
                most -= tarfile.BLOCKSIZE + entry.size
                if most < 0 or entry.size < 0 or (entry.name in names and entry.size > limit):
                    raise tarfile.ReadError(f"{entry.size:,} bytes of {entry.name[:100]!r}")
                if entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and entry.name in names:
                    found[entry.name] = take(file, entry.size)
                    _check_all_there(len(found[entry.name]), entry.size)
                elif entry.type not in _WITHOUT_DATA:
                    _check_all_there(skip(file, entry.size), entry.size)
                skip(file, -entry.size % tarfile.BLOCKSIZE)
            skip(file, most)  # the checksum of a packed file is at its end
        except tarfile.TarError as error:
            raise InputError(
                f"{path}: found {error}, expected a tar archive of {', '.join(names)}"
            ) from None
    for name in names:
        if name not in found:
            raise InputError(
                f"{path}: found no plain file {name}, expected a tar archive of {', '.join(names)}"
            )
    return {name: found[name] for name in names}


_WITHOUT_DATA = (
    tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE
)  # fmt: skip
"""Entries of a tar archive that nothing stands behind."""


def _check_all_there(found: int, size: int) -> None:
    if found < size:
        raise tarfile.ReadError("unexpected end of data")


def differing(name: str, source: Source, found: Mapping[str, tuple[str, str]]) -> tuple[str, ...]:
    """Return a note that names the files whose content is not the official one; none where there
    are none.

    Args:
        name: the data set's.
        source: what is published.
        found: name of an unpacked file -> where it was read, and the SHA-256 checksum of what is in
            it.
    """
    others = [where for file, (where, sha256) in found.items() if sha256 != source.contents[file]]
    return (
        (f"not the official files of {name}, by their SHA-256: {', '.join(others)}",)
        if others
        else ()
    )


def _fetch_all(source: Source, folder: Path) -> None:
    with _progress() as progress, _https() as session:
        for name, official in source.files.items():
            _fetch(source.url + name, folder / name, official, session, progress)


def _fetch(url: str, path: Path, official: Official, session: Session, progress: Progress) -> None:
    """Copy a URL to a new file, and verify it."""
    deadline = time.monotonic() + PATIENCE + official.size / SLOWEST
    task = progress.add_task(path.name, total=official.size)
    found, size = [hashlib.md5(usedforsecurity=False), hashlib.sha256()], 0
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
            for each in found:
                each.update(chunk)
            progress.advance(task, file.write(chunk))
    for each, wanted in zip(found, (official.md5, official.sha256), strict=True):
        if each.hexdigest() != wanted:
            raise ValueError(
                f"the {each.name} of {path.name} is {each.hexdigest()}, not the official {wanted}"
            )


def _https() -> Session:
    """Return a session that sends nothing over http, wherever a server redirects to."""
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
    """Give the folder its name, unless another run was faster."""
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
