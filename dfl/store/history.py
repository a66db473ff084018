"""The history of a run: what it began with, and the figures of every peer at every evaluation.

    DIR/history/start.safetensors   mixing matrix, label counts and sizes; the rest as metadata
    DIR/history/peers.bin           a line of JSON, {"peers": P, "columns": [...]}, and a record per
                                    evaluation: the round as int64, the columns (C, P) as float32

The report is made from it. Records are appended, little-endian; one that is incomplete is left out.
A run that is resumed keeps the records before its checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array

from dfl.core.errors import InputError, one_line
from dfl.core.files import atomically, make_directory, no_follow, read_bytes, writing
from dfl.core.reading import open_regular
from dfl.store.callbacks import Callback, Peers, RunInfo

FOLDER = "history"
"""The name of the folder in that of the run."""
ENTRIES = 400_000
"""The most entries of a mixing matrix that are kept."""
LONGEST_HEADER = 2**16
"""Maximum number of bytes of the first line of peers.bin."""
DAMAGE = (LookupError, ValueError, TypeError, OverflowError, RecursionError)
"""What the content of a damaged file raises when it is parsed."""


@dataclass(frozen=True)
class Start:
    """What a run began with.

    Attributes:
        facts: plain values, as `_facts` returns them.
        label_counts: (P, classes) training examples; (P, 0) where labels are no classes.
        sizes: (P, 3) training, validation and own test examples.
        ranks: (P,), the rank that hosts a peer.
        degrees: (P,), neighbours of each peer; None where peers have none.
        attackers: ids of the attackers.
        weights: (P, P), the mean of the mixing matrices; None where peers have no neighbours, or
            it has more than `ENTRIES` entries.
    """

    facts: Mapping[str, Any]
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    ranks: NDArray[np.int64]
    degrees: NDArray[np.int64] | None
    attackers: NDArray[np.int64]
    weights: csr_array | None

    @classmethod
    def of(cls, info: RunInfo) -> Start:
        """Return what the report needs to know of a run before round 0."""
        graph = info.graph
        weights = None
        if graph and sum(w.nnz for w in graph.weights) <= ENTRIES:
            total = sum(graph.weights, start=csr_array(graph.weights[0].shape))
            weights = csr_array(total / len(graph.weights))
        return cls(
            facts=_facts(info),
            label_counts=info.label_counts,
            sizes=info.sizes,
            ranks=info.layout.ranks_of(np.arange(info.layout.peers)),
            degrees=graph.degrees if graph else None,
            attackers=np.asarray(info.attackers, dtype=np.int64),
            weights=weights,
        )

    def to_bytes(self) -> bytes:
        """Encode it as safetensors."""
        from safetensors.numpy import save

        arrays = {"label_counts": self.label_counts, "sizes": self.sizes, "ranks": self.ranks}
        arrays = {name: value.astype(np.int64) for name, value in arrays.items()}
        arrays["attackers"] = self.attackers
        if self.degrees is not None:
            arrays["degrees"] = self.degrees.astype(np.int64)
        held: dict[str, NDArray[Any]] = dict(arrays)
        if self.weights is not None:
            entries = coo_array(self.weights)
            held |= {"rows": entries.row.astype(np.int32), "columns": entries.col.astype(np.int32)}
            held["weights"] = entries.data.astype(np.float64)
        held = {name: np.ascontiguousarray(value) for name, value in held.items()}
        return save(held, {"facts": json.dumps(self.facts)})

    @classmethod
    def from_bytes(cls, encoded: bytes) -> Start:
        """The inverse of `to_bytes`."""
        from safetensors.numpy import load

        held = load(encoded)
        header = json.loads(encoded[8 : 8 + int.from_bytes(encoded[:8], "little")])
        peers = len(held["ranks"])
        weights = None
        if "weights" in held:
            places = (held["rows"], held["columns"])
            weights = csr_array((held["weights"], places), shape=(peers, peers))
        return cls(
            facts=json.loads(header["__metadata__"]["facts"]),
            label_counts=held["label_counts"],
            sizes=held["sizes"],
            ranks=held["ranks"],
            degrees=held.get("degrees"),
            attackers=held["attackers"],
            weights=weights,
        )


@dataclass(frozen=True)
class Evaluations:
    """The figures of the peers at the evaluations so far.

    Attributes:
        columns: the names of the figures.
        rounds: (E,), the rounds done at each evaluation.
        values: (E, C, P), the figures; read from the disk where they are used.
    """

    columns: tuple[str, ...]
    rounds: NDArray[np.int64]
    values: NDArray[np.float32]


class History(Callback):
    """Writes the history of a run into its directory.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / FOLDER
        self.run_folder = folder
        self.header = b""

    def start(self, info: RunInfo) -> None:
        """Write what the run begins with, and keep the records before its checkpoint.

        Raises:
            InputError: the folder cannot be written to.
        """
        with writing(f"--out {self.run_folder}"):
            make_directory(self.folder)
            kept = _before(self.folder, info.resumed[0]) if info.resumed else b""
            for name, content in (
                ("start.safetensors", Start.of(info).to_bytes()),
                ("peers.bin", kept),
            ):
                with atomically(self.folder / name) as part, part.open("wb") as file:
                    file.write(content)

    def evaluated(self, t: int, peers: Peers) -> None:
        """Append a record.

        Raises:
            InputError: the folder cannot be written to.
        """
        figures = {name: value for name, value in peers.items() if name != "is_attacker"}
        columns = np.stack(list(figures.values())).astype("<f4")
        with writing(f"--out {self.run_folder}"):
            if not self.header:
                header = {"peers": columns.shape[1], "columns": list(figures)}
                self.header = json.dumps(header).encode() + b"\n"
                self._begin()
            with open(self.folder / "peers.bin", "ab", opener=no_follow) as file:
                file.write(np.int64(t).astype("<i8").tobytes() + columns.tobytes())

    def _begin(self) -> None:
        """Write the first line, unless the records that were kept are under the same one."""
        path = self.folder / "peers.bin"
        if not read_bytes(path).startswith(self.header):
            with atomically(path) as part, part.open("wb") as file:
                file.write(self.header)


def read_start(folder: Path) -> Start | None:
    """Return what a run began with; None where its folder does not have it.

    Raises:
        InputError: it is damaged.
    """
    from safetensors import SafetensorError

    path = folder / FOLDER / "start.safetensors"
    try:
        return Start.from_bytes(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, SafetensorError, *DAMAGE) as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from None


def read_evaluations(folder: Path) -> Evaluations | None:
    """Return the figures of the peers at the evaluations so far; None where there is none.

    Raises:
        InputError: they are damaged.
    """
    path = folder / FOLDER / "peers.bin"
    try:
        with open_regular(path) as file:
            line = file.readline(LONGEST_HEADER)
        if not line:
            return None
        header = json.loads(line)
        columns, peers = tuple(map(str, header["columns"])), int(header["peers"])
        record = _record(len(columns), peers)
        whole = (path.stat().st_size - len(line)) // record.itemsize
        if not whole:
            return None
        held = np.memmap(path, record, "r", len(line), (whole,))
    except FileNotFoundError:
        return None
    except (OSError, *DAMAGE) as error:
        raise InputError(f"{path} is damaged: {one_line(error)}") from None
    return Evaluations(columns, np.array(held["round"]), held["values"])


def _record(columns: int, peers: int) -> np.dtype[np.void]:
    return np.dtype([("round", "<i8"), ("values", "<f4", (columns, peers))])


def _before(folder: Path, t: int) -> bytes:
    """Return peers.bin with the records of evaluations before round t; empty where it has none.

    Where it is damaged it is empty, too: no result of the run depends on it.
    """
    path = folder / "peers.bin"
    try:
        held = read_evaluations(folder.parent)
        if held is None:
            return b""
        content = read_bytes(path)
    except (InputError, OSError):
        return b""
    first = content.index(b"\n") + 1
    size = _record(*held.values.shape[1:]).itemsize
    early = (held.rounds < t) & (np.diff(held.rounds, prepend=-1) > 0)
    return content[: first + size * int(np.cumprod(early).sum())]


def _facts(info: RunInfo) -> dict[str, object]:
    """Return the plain values of a description of a run."""
    steps, graph = info.local_steps, info.graph
    facts: dict[str, object] = {
        "parameters": info.parameters,
        "shared": info.shared,
        "frozen": info.frozen,
        "dtype": info.dtype,
        "batch_size": info.batch_size,
        "local_steps": [int(steps.min()), int(steps.max())],
        "n_test": info.n_test,
        "has_server": info.has_server,
        "payload_shared": info.payload_shared,
        "payload_whole": info.payload_whole,
        "assumes": list(info.method.assumes),
        "notes": list(info.notes),
    }
    if graph:
        facts["graph"] = {
            "edges": graph.edges,
            "directed": graph.directed,
            "matrices": len(graph.weights),
            "endless": graph.endless,
            "own_weights": graph.own_weights,
            "gap": float(graph.gap),
            "smallest": float(graph.smallest),
            "half_rounds": float(graph.half_rounds),
        }
    return facts
