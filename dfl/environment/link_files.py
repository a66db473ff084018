"""Files of the speed and the delay of every edge of a graph."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dfl.core.errors import InputError
from dfl.core.parse import read
from dfl.core.reading import read_text
from dfl.environment.clock import Floats, Ints

HEADER = ["sender", "receiver", "mbps", "latency_ms"]
"""The columns of the file; they may be its first line."""
MBPS = (1e-6, 1e9)
"""The least and the largest speed, a bit a second and a petabit a second."""
LATENCY_MS = (0, 1e9)
"""The least and the largest delay, which is eleven days."""
ROOM, LINE = 2**20, 200
"""Bytes that the file may have, and bytes more for every edge, which bounds memory."""


def of_edges(path: Path, edges: Ints, peers: int) -> Floats:
    """Return Mbit/s and milliseconds of every edge, (k, 2), from a CSV file.

    Args:
        path: the file.
        edges: (k,) sender * P + receiver, ascending.
        peers: P.

    Raises:
        InputError: it cannot be read, has a line for no such edge, or lacks one of them.
    """
    try:
        text = read_text(path, ROOM + LINE * len(edges))
        lines = enumerate(csv.reader(io.StringIO(text, newline="")), 1)
        rows = [(n, row) for n, row in lines if row and row != HEADER]
    except OSError as error:
        raise InputError(f"--links links: path {path} cannot be read ({error.strerror})") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--links links: {path} is no CSV file ({error})") from None
    figures = np.full((len(edges), 2), np.nan)
    places = {divmod(int(edge), peers): k for k, edge in enumerate(edges)}
    for n, row in rows:
        edge, line = _edge(row, where := f"--links links: {path}, line {n}")
        if edge not in places or not np.isnan(figures[places[edge]]).all():
            wrong = "is there already" if edge in places else "is no edge of the graph"
            raise InputError(f"{where}: {edge[0]} to {edge[1]} {wrong}")
        figures[places[edge]] = line
    for sender, receiver in (edge for edge, k in places.items() if np.isnan(figures[k, 0])):
        raise InputError(
            f"--links links: {path} has no line for {sender} to {receiver}, an edge of the graph"
        )
    return figures


def _edge(row: Sequence[str], where: str) -> tuple[tuple[int, int], tuple[float, float]]:
    """Return sender and receiver, and Mbit/s and milliseconds, of a line.

    Raises:
        InputError: the line has another form.
    """
    if len(row) != len(HEADER):
        raise InputError(f"{where} must be {','.join(HEADER)}, not {','.join(row)[:60]!r}")
    kinds = ("int", "int", "float", "float")
    sender, receiver, mbps, latency_ms = (
        read(f"{where}: {name}", text.strip(), kind)
        for name, text, kind in zip(HEADER, row, kinds, strict=True)
    )
    for name, value, (low, high) in (("mbps", mbps, MBPS), ("latency_ms", latency_ms, LATENCY_MS)):
        if not low <= value <= high:
            raise InputError(f"{where}: {name} must be from {low:g} to {high:g}, not {value:g}")
    return (sender, receiver), (mbps, latency_ms)
