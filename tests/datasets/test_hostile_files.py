"""Hostile files end in one line, quickly, and in little memory."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dfl
from dfl.core.errors import InputError
from dfl.core.reading import open_regular, read_bounded
from dfl.datasets import DATASETS, adult, cifar, idx
from dfl.environment.link_files import of_edges
from tests.conftest import Command
from tests.support.adult_files import write_adult
from tests.support.cifar_files import FOLDER, NAMES, OFFICIAL, archive, write_batches
from tests.support.idx_files import IMAGES, LABELS, refused, write
from topologies import TOPOLOGIES, GraphError

GIGA = 2**30
LITTLE = 64 * 2**20
"""The most bytes of memory for refusing a hostile file."""


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < LITTLE
    finally:
        tracemalloc.stop()


PIECE = 2**22
BOMB = gzip.compress(bytes(PIECE)) * (4 * GIGA // PIECE)
"""4 GB of zeros in 4 MB."""


def sparse(path: Path, size: int, head: bytes = b"") -> None:
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)


def header(n: int) -> bytes:
    return struct.pack(">4I", 2051, n, 28, 28)


HOSTILE: dict[str, Callable[[Path], object]] = {
    "gzip bomb": lambda path: path.with_suffix(".gz").write_bytes(BOMB),
    "gzip bomb behind an official header": lambda path: path.with_suffix(".gz").write_bytes(
        gzip.compress(header(30)) + BOMB
    ),
    "gzip bomb behind a header of billions": lambda path: path.with_suffix(".gz").write_bytes(
        gzip.compress(header(2**32 - 1)) + BOMB
    ),
    "xz bomb": lambda path: path.with_suffix(".xz").write_bytes(
        lzma.compress(bytes(PIECE)) * (GIGA // PIECE)
    ),
    "a sparse file": lambda path: sparse(path, 8 * GIGA),
    "a sparse file behind a header": lambda path: sparse(path, 8 * GIGA, header(2**20)),
    "a FIFO": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a terminal": lambda path: path.symlink_to("/dev/tty"),
    "a link to itself": lambda path: path.symlink_to(path),
    "a directory": Path.mkdir,
}
"""Name -> f(path) that puts a hostile file at a path without suffix; packed files get a suffix."""


def replaced(path: Path, kind: str) -> None:
    for suffix in ("", ".gz", ".xz"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)
    suffix = {"g": ".gz", "x": ".xz"}.get(kind[0], "")
    HOSTILE[kind](Path(f"{path}{suffix}"))


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["mnist", "cifar10", "adult"])
def test_a_hostile_file_of_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.setattr(cifar, "MOST", 5000)  # its files have no header with a size
    file = {"mnist": IMAGES, "cifar10": NAMES[1], "adult": "adult.data"}[name]
    writers: dict[str, Callable[[Path], Path]] = {
        "mnist": write,
        "cifar10": write_batches,
        "adult": write_adult,
    }
    folder = writers[name](tmp_path / name)
    replaced(folder / file, kind)
    with little_memory():
        message = refused(lambda: DATASETS[name](tmp_path))
    assert message.startswith(f"{folder / file}")
    assert "found " in message
    assert "expected " in message


def entry(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """Return the header of a file in a tar archive, without data."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.type = kind
    return info.tobuf(tarfile.GNU_FORMAT)


SECOND = f"{FOLDER}/{NAMES[1]}"
ARCHIVES: dict[str, Callable[[], bytes]] = {
    "8 GB of a batch": lambda: gzip.compress(entry(SECOND, 8 * GIGA)),
    "8 GB of a sparse batch": lambda: gzip.compress(
        entry(SECOND, 8 * GIGA, tarfile.GNUTYPE_SPARSE)
    ),
    "8 GB of something else": lambda: gzip.compress(entry("other", 8 * GIGA)) + BOMB,
    "8 GB of a long name": lambda: (
        gzip.compress(entry("x", 8 * GIGA, tarfile.GNUTYPE_LONGNAME)) + BOMB
    ),
    "8 GB of a pax header": lambda: gzip.compress(entry("x", 8 * GIGA, tarfile.XHDTYPE)) + BOMB,
    "a pax header of all that is allowed": lambda: (
        gzip.compress(entry("x", 2**26, tarfile.XHDTYPE)) + BOMB
    ),
    "a negative size": lambda: gzip.compress(entry("other", -(2**40))),
    "4 GB behind the end": lambda: gzip.compress(archive({SECOND: OFFICIAL[SECOND]})) + BOMB,
    "zeros": lambda: BOMB,
    "files without end": lambda: gzip.compress(entry("other", 0) * 1000) * 5,
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_a_hostile_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cifar, "MOST", 5000)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(ARCHIVES[kind]())
    with little_memory():
        message = refused(lambda: DATASETS["cifar10"](tmp_path))
    assert message.startswith(f"{path}: found ")
    assert os.listdir(tmp_path) == [path.name]


def test_a_header_that_announces_more_than_the_file_has_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "mnist", packed=False)
    (folder / IMAGES).write_bytes(header(idx.MOST) + bytes(100))
    with little_memory():
        message = refused(lambda: DATASETS["mnist"](tmp_path))
    assert f"found 100 bytes of values, expected {784 * idx.MOST}" in message


def test_too_many_lines_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adult, "MOST_LINES", 79)
    write_adult(tmp_path)
    assert "found more than 79 lines" in refused(lambda: DATASETS["adult"](tmp_path))


def test_a_bomb_is_refused_under_a_memory_limit_of_the_system(tmp_path: Path) -> None:
    """The reader does not allocate memory for the content of a bomb, as in a job with a limit."""
    write(tmp_path / "mnist")
    replaced(tmp_path / "mnist" / LABELS, "gzip bomb behind an official header")
    program = (
        "import resource, sys, numpy; from pathlib import Path; from dfl.datasets import DATASETS;"
        "room = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize() + 2**27;"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room));"
        "DATASETS['mnist'](Path(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True
    )
    assert "dfl.core.errors.InputError" in ended.stderr.splitlines()[-1]
    assert LABELS in ended.stderr.splitlines()[-1]


# --- other files of the user

OTHERS = [kind for kind in HOSTILE if "zip" not in kind and "xz" not in kind]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_hostile_file_of_links_is_refused(tmp_path: Path, kind: str) -> None:
    HOSTILE[kind](path := tmp_path / "links.csv")
    with little_memory(), pytest.raises(InputError, match=str(path)) as caught:
        of_edges(path, np.array([1, 2]), 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.edges", "w.csv", "w.npz"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_hostile_file_of_edges_is_refused(tmp_path: Path, kind: str, name: str) -> None:
    HOSTILE[kind](path := tmp_path / name)
    with little_memory(), pytest.raises(GraphError, match=str(path)) as caught:
        TOPOLOGIES["edges"](5, np.random.default_rng(0), path=path)
    assert "\n" not in str(caught.value)


def packed_matrix(path: Path, rows: int, values: int) -> None:
    """Write a .npz whose header announces rows x rows numbers, and that has `values` zeros."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f8", "fortran_order": False, "shape": (rows, rows)}
    )
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file,
        file.open("w.npy", "w", force_zip64=True) as inner,
    ):
        inner.write(head.getvalue())
        for _ in range(8 * values // PIECE):
            inner.write(bytes(PIECE))


@pytest.mark.slow
@pytest.mark.parametrize("values", [0, 2**25])
@pytest.mark.parametrize("rows", [5, 2**13, 2**20])
def test_a_packed_matrix_that_is_a_bomb_is_refused(tmp_path: Path, rows: int, values: int) -> None:
    packed_matrix(path := tmp_path / "w.npz", rows, values)
    with little_memory(), pytest.raises(GraphError, match=str(path)):
        TOPOLOGIES["edges"](5, np.random.default_rng(0), path=path)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_hostile_file_of_settings_is_refused(dfl_run: Command, kind: str, suffix: str) -> None:
    HOSTILE[kind](Path(f"settings{suffix}"))
    with little_memory():
        assert dfl_run.refused("--config", f"settings{suffix}").startswith(
            f"--config settings{suffix}: cannot be read"
        )


def test_the_largest_file_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(b"12345")
    assert read_bounded(path, 5) == b"12345"
    with pytest.raises(OSError, match="5 bytes, more than 4"):
        read_bounded(path, 4)


def test_a_file_that_becomes_a_fifo_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    (path := tmp_path / "file").touch()
    before = os.stat(path)
    monkeypatch.setattr(os, "stat", lambda _: before)
    with pytest.raises(OSError, match="no regular file"):
        open_regular(fifo)


def test_notes_on_data_are_shown_before_the_run(dfl_run: Command) -> None:
    write_adult(Path("adult"))
    ended = dfl_run("--dataset", "adult", "--data-dir", ".", "--peers", "4", "--dry-run")
    assert ended.code == 0
    assert "warning: not the official files of adult" in ended.out
    assert "adult/adult.data" in ended.out
    served = ("--algorithm", "fedavg", "--model", "softmax", "--rounds", "1", "--out", "run")
    assert (
        "adult/adult.data"
        in dfl_run("--dataset", "adult", "--data-dir", ".", "--peers", "4", *served).out
    )


def test_notes_on_data_are_warnings_in_python(tmp_path: Path) -> None:
    write_adult(tmp_path)
    run = dfl.Run(dataset="adult", data_dir=tmp_path, peers=4, rounds=0)
    with pytest.warns(UserWarning, match="not the official files of adult"):
        list(dfl.simulate(run))


def test_a_folder_whose_name_is_no_text_is_printed_escaped(dfl_run: Command) -> None:
    few = ("--peers", "2", "--rounds", "1", "--model", "softmax", "--examples-per-peer", "12")
    ended = dfl_run(*few, "--out", "caf\udce9")
    assert (ended.code, ended.err) == (0, "")
    assert "caf\\udce9" in ended.out
    assert Path("caf\udce9", "run.json").is_file()
