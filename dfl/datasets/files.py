"""Where are the files of a data set, and what is in them, unpacked? In a user's folder, or downloaded, checked."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dfl.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

PACKINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    ".gz": ("gzipped ", gzip.decompress),
    ".xz": ("xz-packed ", lzma.decompress),
    "": ("", lambda raw: raw),
}
"""What a file's name may have behind it, what that is called, and how such a file is unpacked."""


@dataclass(frozen=True)
class Source:
    """Where the files of a data set come from.

    Attributes:
        url: what stands before a file's name, with its slash.
        md5: file name -> its published MD5 checksum, in hexadecimal.
        others: files or folders, named as they are unpacked, that are as good as a download.
    """

    url: str
    md5: Mapping[str, str]
    others: tuple[str, ...] = ()


def locate(name: str, directory: Path | None, source: Source) -> Path:
    """The folder that holds a data set's files, after a download where there is none.

    Looked for are directory/name, whatever it holds, and then the files lying in `directory` itself. Where
    neither is there, all files are downloaded into directory/name. `directory` None is the user's cache.

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
    if any(look(directory, name.removesuffix(".gz")) for name in (*source.md5, *source.others)):
        return directory
    download(source, directory / name)
    return directory / name


def download(source: Source, folder: Path) -> None:
    """Fetch all files of a source, verify their checksums and put them into a new folder.

    The folder appears with all of its files or not at all: they are gathered in a hidden one beside it, which is
    removed whatever happens (a killed process leaves it, and nobody reads it). A progress bar is shown where
    stderr is a terminal.

    Args:
        source: what to fetch.
        folder: where to; created, with its parents.

    Raises:
        InputError: no network, an error of the server, a wrong checksum, a folder that cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as hidden:
            _fetch_all(source, Path(hidden) / folder.name)
            _settle(Path(hidden) / folder.name, folder)
    except (OSError, ValueError) as error:  # errors of requests are OSErrors, a wrong checksum is a ValueError
        reason, files = " ".join(str(error).split()), ", ".join(source.md5)
        raise InputError(f"cannot download {source.url}: {reason}; or put {files} into {folder}") from None


def look(folder: Path, file: str) -> Path | None:
    """The path of file.gz in a folder, or of file.xz or of the unpacked file where that is all there is, or None."""
    paths = (folder / f"{file}{packing}" for packing in PACKINGS)
    return next((path for path in paths if os.path.exists(path)), None)


def find(folder: Path, file: str) -> Path:
    """As `look`, for a file that must be there.

    Raises:
        InputError: it is not.
    """
    if path := look(folder, file):
        return path
    raise InputError(f"{folder / file}.gz: found no such file, expected it here, packed or unpacked, beside the others")


def content(path: Path, kind: str) -> bytes:
    """What is in a file, unpacked if its name says that it is packed.

    Args:
        path: the file.
        kind: what it should be, for messages.

    Raises:
        InputError: it cannot be read or unpacked.
    """
    called, unpack = PACKINGS.get(path.suffix, PACKINGS[""])
    try:
        return unpack(path.read_bytes())
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise InputError(f"{path}: found {reason}, expected a readable {called}{kind}") from None


def members(path: Path, names: Sequence[str]) -> dict[str, bytes]:
    """What is in some files of a tar archive, read into memory; nothing is written to any place.

    Args:
        path: the archive, packed or not.
        names: the files, exactly as the archive names them.

    Raises:
        InputError: not such an archive, or one of the files is missing or no plain file.
    """
    try:
        with tarfile.open(fileobj=io.BytesIO(content(path, "tar archive")), mode="r:") as tar:
            return {name: _member(tar, name) for name in names}
    except tarfile.TarError as error:
        raise InputError(f"{path}: found {error}, expected a tar archive of {', '.join(names)}") from None


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    plain = [member for member in tar.getmembers() if member.name == name and member.isreg()]
    file = tar.extractfile(plain[-1]) if plain else None
    if file is None:
        raise tarfile.TarError(f"no plain file {name}")
    return file.read()


def _fetch_all(source: Source, folder: Path) -> None:
    import pooch

    pooch.get_logger().setLevel("WARNING")  # it tells of every file otherwise
    with _progress() as progress:
        for name, md5 in source.md5.items():
            fetch = partial(_stream, progress)
            pooch.retrieve(source.url + name, f"md5:{md5}", fname=name, path=folder, downloader=fetch)
            (folder / name).chmod(0o644)  # pooch leaves what only its owner can read; data folders are shared


def _stream(progress: Progress, url: str, output: str, _: object) -> None:
    """Copy a URL to a file, as pooch does, which however leaves the connection open when that fails."""
    import requests

    with requests.get(url, stream=True, timeout=30) as response, open(output, "wb") as file:
        response.raise_for_status()
        size = int(response.headers.get("Content-Length", 0))
        task = progress.add_task(url.rpartition("/")[2], total=size or None)
        for chunk in response.iter_content(1 << 16):
            progress.advance(task, file.write(chunk))


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
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
