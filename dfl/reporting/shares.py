"""Who has how much of what? Lines of text for --dry-run."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dfl.simulation.setup import RunInfo

MATRIX = (32, 20)
"""Up to how many peers and labels --dry-run shows who has how much of what."""
BARS = 8
"""Bars of a histogram."""


def shares(run_info: RunInfo) -> list[str]:
    """Who has how much of what: a matrix where it fits, else the spread over the peers and a histogram."""
    counts, train = run_info.label_counts, run_info.sizes[:, 0]
    columns = dict(
        zip(
            ("training examples", "validation examples", "own test examples"),
            run_info.sizes.T,
            strict=True,
        )
    )
    if counts.size:
        columns["different labels"] = (counts > 0).sum(1)
    spread = [f"{name:<20} {_spread(column)}" for name, column in columns.items() if column.any()]
    if counts.size and counts.shape[0] <= MATRIX[0] and counts.shape[1] <= MATRIX[1]:
        return ["", *spread, "", *_matrix(counts)]
    return ["", *spread, "", *_histogram(train)] if train.min() < train.max() else ["", *spread]


def span(values: NDArray[np.int64]) -> str:
    """From the smallest to the largest."""
    return ends(int(values.min()), int(values.max()))


def ends(low: int, high: int) -> str:
    """One number, or from one to another."""
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _matrix(counts: NDArray[np.int64]) -> list[str]:
    """Peers by labels; nothing where a peer has none."""
    wide = max(len(str(counts.max())), len(str(counts.shape[1]))) + 1
    head = "peer / label" + "".join(f"{label:>{wide}}" for label in range(counts.shape[1]))
    body = (
        f"{i:>12}" + "".join(f"{n or '.':>{wide}}" for n in row)
        for i, row in enumerate(counts.tolist())
    )
    return ["training examples", head, *body]


def _histogram(values: NDArray[np.int64]) -> list[str]:
    """How many peers have how many training examples."""
    low, high = int(values.min()), int(values.max())
    edges = np.unique(np.linspace(low, high + 1, BARS + 1).round().astype(np.int64))
    peers, _ = np.histogram(values, edges)
    longest = int(peers.max())
    spans = (ends(a, b - 1) for a, b in pairwise(edges.tolist()))
    bars = (
        f"{span:>20}: {n:>7,} {'#' * -(-40 * n // longest)}"
        for span, n in zip(spans, peers.tolist(), strict=True)
    )
    return ["training examples: peers", *bars]


def _spread(values: NDArray[np.int64]) -> str:
    mean = "" if values.min() == values.max() else f", mean {values.mean():,.1f}"
    return f"{span(values)} per peer{mean}"
