"""Which graph is in this file? The topology `edges`, for a list of edges or a mixing matrix that the user brings."""

import re
import warnings
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from scipy.sparse import csr_array, load_npz

from topologies.errors import GraphError
from topologies.graphs import topology

LINE = re.compile(r"\s*(\d{1,18})\s+(\d{1,18})\s*(\{\}\s*)?", re.ASCII)
"""Two peer ids; networkx.write_edgelist appends an empty {}."""


@topology
def edges(peers: int, rng: Generator, *, path: Path) -> csr_array:
    """A file: lines "i j" (undirected, from 0, # comments), or a mixing matrix in .npz or .csv, used as it is.

    A .npz is what `scipy.sparse.save_npz` or `numpy.savez` of one dense matrix writes; a .csv has one row a line.
    Nothing is unpickled. Errors: `GraphError` for a file that is missing, damaged or not for this many peers.
    """
    path = Path(path).expanduser()
    read = {".npz": _npz, ".csv": _csv}.get(path.suffix.lower())
    try:
        return _weights(read(path), peers) if read else _pairs(path.read_text(encoding="utf-8"), peers)
    except GraphError as error:
        raise GraphError(f"{path}: {error}") from None
    except OSError as error:
        raise GraphError(f"{path}: {error.strerror or 'cannot be read'}") from error
    except Exception as error:  # a damaged file fails in whatever way its reader has
        kind = "a mixing matrix" if read else "a text file of edges"
        raise GraphError(f"{path}: not {kind} ({' '.join(str(error).split()) or type(error).__name__})") from error


def _pairs(text: str, peers: int) -> csr_array:
    lines = ((number, line.split("#")[0]) for number, line in enumerate(text.splitlines(), start=1))
    pairs = np.array([_pair(number, line, peers) for number, line in lines if line.strip()], dtype=np.int64)
    if not len(pairs):
        raise GraphError('no edges; expected lines "i j"')
    i, j = pairs[pairs[:, 0] != pairs[:, 1]].T
    ones = np.ones(2 * len(i), dtype=bool)
    return csr_array((ones, (np.append(i, j), np.append(j, i))), shape=(peers, peers))


def _pair(number: int, line: str, peers: int) -> tuple[int, int]:
    match = LINE.fullmatch(line)
    if not match:
        raise GraphError(f'line {number}: {line.strip()[:40]!r} is not an edge; expected "i j"')
    i, j = int(match[1]), int(match[2])
    if max(i, j) >= peers:
        raise GraphError(f"line {number}: peer {max(i, j)} does not exist; {peers} peers are 0 to {peers - 1}")
    return i, j


def _weights(matrix: csr_array | NDArray[np.float64], peers: int) -> csr_array:
    if matrix.shape != (peers, peers):
        raise GraphError(f"the matrix is {' x '.join(map(str, matrix.shape))}; {peers} peers need {peers} x {peers}")
    if matrix.dtype.kind not in "buif":
        raise GraphError(f"the matrix holds {matrix.dtype}; expected real numbers")
    return csr_array(matrix, dtype=np.float64)


def _npz(path: Path) -> csr_array | NDArray[np.float64]:
    with path.open("rb") as file:
        arrays = np.load(file, allow_pickle=False)
        if "format" not in arrays.files and len(arrays.files) == 1:
            return np.asarray(arrays[arrays.files[0]])
        matrix = load_npz(file)
    if hasattr(matrix, "check_format"):
        matrix.check_format()  # indices beyond the shape would be followed into foreign memory
    return matrix


def _csv(path: Path) -> NDArray[np.float64]:
    with path.open(encoding="utf-8") as file, warnings.catch_warnings(action="ignore"):  # "no data": the shape says so
        return np.loadtxt(file, delimiter=",", ndmin=2)
