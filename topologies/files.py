"""The topology `edges`: a graph from a user's file, a list of edges or a mixing matrix."""

import errno
import math
import os
import re
import stat
import warnings
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import IO
from zipfile import ZipFile, ZipInfo

import numpy as np
from numpy.lib import format
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array, diags_array, load_npz

from topologies.errors import GraphError
from topologies.graphs import from_pairs, topology

MOST_BYTES = 2**20
"""The most bytes of a file, on the disk and decompressed, beside those for the pairs of peers."""
MOST_BYTES_PER_PAIR = 64
"""The bytes of a file for every pair of peers that are added to `MOST_BYTES`."""
WEIGHT = r"(\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+)"
LINE = re.compile(
    rf"(\d{{1,18}})\s+(\d{{1,18}})(?:\s+(?:{WEIGHT}|\{{'weight': {WEIGHT}\}}|\{{\}}))?", re.ASCII
)
"""An edge: two peer ids, and its weight or none, also as `networkx.write_edgelist` writes them."""

Ints = NDArray[np.int64]


@topology
def edges(peers: int, rng: Generator, *, path: Path) -> csr_array:
    """A file: lines "i j" or "i j weight" (undirected, from 0, # comments), or a mixing matrix in
    .npz or .csv. Weights are used as they are.

    A line "i j weight" has the weight of i for j and of j for i, and "i i weight" that of a peer
    for itself, which without such a line is what is missing from 1. A .npz is written by
    `scipy.sparse.save_npz`, or by `numpy.savez` of one dense matrix; a .csv has one row a line.
    Nothing is unpickled.

    Raises:
        GraphError: the file is missing, damaged or for another number of peers.
    """
    path = Path(os.path.expanduser(path))  # keeps ~ where there is no such user
    read = {".npz": _npz, ".csv": _csv}.get(path.suffix.lower())
    try:
        limit = MOST_BYTES + MOST_BYTES_PER_PAIR * peers**2
        raw = _bounded(path, limit)
        return _weights(read(raw, limit), peers) if read else _edges(raw.decode("utf-8-sig"), peers)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror or 'cannot be read'}") from error
    except Exception as error:  # readers fail on damaged files with errors of many kinds
        kind = "a mixing matrix" if read else "a text file of edges"
        raise GraphError(
            f"{path}: not {kind} ({' '.join(str(error).split()) or type(error).__name__})"
        ) from error


def _edges(text: str, peers: int) -> csr_array:
    """Return the graph of a list of edges, (P, P) bool, or its weights, (P, P) float64."""
    found: dict[tuple[int, int], tuple[int, float | None]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if content := line.split("#")[0].strip():
            i, j, weight = _edge(number, content, peers)
            first, known = found.setdefault((min(i, j), max(i, j)), (number, weight))
            if weight != known:
                raise GraphError(f"line {number}: another weight than line {first} has for {i} {j}")
    if not found:
        raise GraphError('no edges; expected lines "i j"')
    low, high = np.array(list(found)).T
    weights = np.array([weight for _, weight in found.values()], dtype=np.float64)
    if (none := np.isnan(weights)).all():
        return from_pairs(peers, low[low != high], high[low != high])
    if none.any():
        line_without = next(number for number, weight in found.values() if weight is None)
        raise GraphError(f"line {line_without}: no weight, and other lines have one")
    return _symmetric(peers, low, high, weights)


def _edge(number: int, line: str, peers: int) -> tuple[int, int, float | None]:
    """Return the ends of an edge, and its weight or None."""
    match = LINE.fullmatch(line)
    if not match:
        raise GraphError(
            f'line {number}: {line[:40]!r} is not an edge; expected "i j" or "i j weight"'
        )
    i, j, weight = int(match[1]), int(match[2]), match[3] or match[4]
    if max(i, j) >= peers:
        raise GraphError(
            f"line {number}: peer {max(i, j)} does not exist; {peers} peers are 0 to {peers - 1}, "
            "and --peers states how many there are"
        )
    return i, j, float(weight) if weight else None


def _symmetric(peers: int, i: Ints, j: Ints, weight: NDArray[np.float64]) -> csr_array:
    """Return weights for each other, or of a peer for itself, else what is missing from 1."""
    own = i == j
    ends = (np.append(i[~own], j[~own]), np.append(j[~own], i[~own]))
    others = csr_array((np.tile(weight[~own], 2), ends), shape=(peers, peers))
    diagonal = np.maximum(1 - others.sum(axis=1), 0)
    diagonal[i[own]] = weight[own]
    return csr_array(others + diags_array(diagonal, format="csr"))


def _weights(matrix: csr_array | NDArray[np.float64], peers: int) -> csr_array:
    if matrix.shape != (peers, peers):
        found = " x ".join(map(str, matrix.shape)) or "a single number"
        raise GraphError(f"the matrix is {found}; {peers} peers need {peers} x {peers}")
    if matrix.dtype.kind not in "buif":
        raise GraphError(f"the matrix holds {matrix.dtype}; expected real numbers")
    return csr_array(matrix, dtype=np.float64)


def _bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes.

    A FIFO or a device, which may not end, is not opened.

    Raises:
        OSError: it is no regular file, or larger.
    """
    _check(path, os.stat(path), limit)
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _check(path, status, limit)  # another file may have taken the name
        return file.read(status.st_size)


def _check(path: Path, status: os.stat_result, limit: int) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if status.st_size > limit:
        raise OSError(
            errno.EFBIG, f"a file of {status.st_size:,} bytes, more than {limit:,}", str(path)
        )


def _npz(raw: bytes, limit: int) -> csr_array | NDArray[np.float64]:
    with ZipFile(BytesIO(raw)) as packed:
        size = sum(member.file_size for member in packed.infolist())  # as many are decompressed
        if size > limit:
            raise GraphError(f"{size:,} bytes are packed in it, more than {limit:,}")
        for member in packed.infolist():
            with packed.open(member) as file:
                _check_header(file, member)
    arrays = np.load(BytesIO(raw), allow_pickle=False)
    if "format" not in arrays.files:
        if len(arrays.files) != 1:
            found = ", ".join(map(repr, arrays.files)) or "none"
            raise ValueError(f"it holds {found}, not one array or a sparse matrix of scipy")
        return np.asarray(arrays[arrays.files[0]])
    matrix = load_npz(BytesIO(raw))
    if hasattr(matrix, "check_format"):
        matrix.check_format()  # indices beyond the shape would be read out of bounds
    return matrix


def _check_header(file: IO[bytes], member: ZipInfo) -> None:
    """Raise an error for an array whose header announces more bytes than the file has.

    numpy would allocate memory for them before it reads.
    """
    version = format.read_magic(file)
    read = format.read_array_header_1_0 if version == (1, 0) else format.read_array_header_2_0
    shape, _, dtype = read(file)
    if (announced := math.prod(shape) * dtype.itemsize) > member.file_size:
        raise GraphError(
            f"{member.filename} promises {announced:,} bytes and has {member.file_size:,}"
        )


def _csv(raw: bytes, _: int) -> NDArray[np.float64]:
    with warnings.catch_warnings(action="ignore"):  # of no data, which the shape shows
        return np.loadtxt(TextIOWrapper(BytesIO(raw), encoding="utf-8-sig"), delimiter=",", ndmin=2)
