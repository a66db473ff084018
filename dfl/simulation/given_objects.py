"""Graphs, matrices and data sets that a caller gives as objects, as components."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.sparse import csr_array

import topologies
from dfl.core.errors import InputError, in_one_line
from dfl.core.parse import shown
from dfl.core.registry import own
from dfl.datasets.data import Data
from dfl.datasets.given import as_data
from topologies.graphs import in_order, takes_labels
from topologies.sequences import EveryRound, entries, is_endless

if TYPE_CHECKING:
    from numpy.random import Generator


FORMS = {
    "--topology": "a spec, a matrix, a networkx graph, a list or tuple of these, an EveryRound, or "
    "a function (peers, rng) that returns one of these or a Drawn",
    "--mixing": "a spec, a matrix, a list or tuple of matrices, or a function graph -> matrix",
}
"""What a caller may give, for messages."""


def topology(value: object) -> Callable[[int, Generator], topologies.Graph]:
    """Return a topology that has the caller's graph, or a sequence of graphs.

    Raises:
        InputError: something else than graphs, matrices, or a function (peers, rng) -> graph; or
            graphs of several rounds whose nodes are not the same peers.
    """
    if callable(value):
        _check_signature(value)
        return value
    if is_endless(value):
        return lambda peers, rng: value
    several = entries(value)
    _check_nodes(several)
    graphs = [_graph(each) for each in several]

    def given(peers: int, rng: Generator) -> topologies.Graph:
        for graph in graphs:
            if graph.shape != (peers, peers):
                raise topologies.GraphError(f"the graph given has {graph.shape[0]} nodes")
        return graphs[0] if len(graphs) == 1 else graphs

    return given


def mixing(value: object) -> Callable[[csr_array], csr_array]:
    """Return a rule that has the caller's mixing matrix, or one of a sequence for each graph.

    Raises:
        InputError: something else than matrices, or a function from graph to matrix.
    """
    if callable(value):
        return lambda graph: _fitting(_rule_result(value, graph), graph)
    several = _matrices(value)
    matrices = iter(several) if len(several) > 1 else repeat(several[0])

    def given(graph: csr_array) -> csr_array:
        matrix = next(matrices, None)
        if matrix is None:
            raise topologies.GraphError("--mixing has fewer matrices than --topology has graphs")
        return _fitting(matrix, graph)

    return given


def _rule_result(rule: Callable[[csr_array], object], graph: csr_array) -> csr_array:
    with in_one_line("--mixing fails"):
        matrix = rule(graph)
    return csr_array(_matrix("--mixing", matrix), dtype=np.float64)


def _fitting(matrix: csr_array, graph: csr_array) -> csr_array:
    """Return a mixing matrix after checking that it has weights on edges of the graph only.

    Raises:
        GraphError: it has not, or is of another size.
    """
    if matrix.shape != graph.shape:
        size = " x ".join(map(str, matrix.shape))
        raise topologies.GraphError(f"the matrix of --mixing is {size}")
    weights = csr_array(matrix != 0).astype(np.int8)
    off = (weights - weights.multiply(graph.astype(bool))).tocoo()
    outside = (off.row != off.col) & (off.data > 0)
    if outside.any():
        k = int(np.argmax(outside))
        raise topologies.GraphError(
            f"--mixing has a weight of peer {off.row[k]} for peer {off.col[k]}, and --topology "
            "no such edge"
        )
    return matrix


def graphs_of(mixing: object) -> list[csr_array]:
    """Return the graphs of mixing matrices, (P, P) of bool: their nonzero entries.

    Raises:
        InputError: something else than a matrix, or a sequence of them.
    """
    return [_without_loops(csr_array(matrix != 0)) for matrix in _matrices(mixing)]


def _matrices(value: object) -> list[csr_array]:
    several = [value] if is_endless(value) else entries(value)
    return [csr_array(_matrix("--mixing", each), dtype=np.float64) for each in several]


def dataset(value: object, *, seed: int, regression: bool) -> Callable[[Path | None], Data]:
    """Return a loader of the caller's data, see `dfl.datasets.given.as_data`."""
    return lambda directory: as_data(value, seed, regression)


def peers_of(topology: Any, mixing: Any) -> int | None:
    """Return the number of peers of a graph or matrix that is given as an object; None without.

    Raises:
        InputError: the graph of round 0 of an `EveryRound` fails.
    """
    for where, value in (("--topology", topology), ("--mixing", mixing)):
        with in_one_line(f"{where} fails in round 0"):
            first = value[0] if is_endless(value) else entries(value)[0]
        if hasattr(first, "number_of_nodes"):
            return int(first.number_of_nodes())
        if hasattr(first, "shape") and len(first.shape):
            return int(first.shape[0])
    return None


def _check_signature(function: Callable[..., object]) -> None:
    """Refuse a function that cannot be called as a topology is.

    Raises:
        InputError: it cannot.
    """
    arguments = ("peers", "rng", "labels")[: 3 if takes_labels(function) else 2]
    try:
        found = signature(function)
    except ValueError:  # of a function that is not written in Python
        return
    try:
        found.bind(*arguments)
    except TypeError:
        raise InputError(
            f"--topology {own(function)} must take ({', '.join(arguments)}) and return a graph, "
            f"and takes {found}"
        ) from None


def _check_nodes(several: list[object]) -> None:
    """Refuse graphs whose nodes are not the same peers in every round.

    Raises:
        InputError: there is one.
    """
    orders = [in_order(each) if hasattr(each, "number_of_nodes") else None for each in several]
    first = next((order for order in orders if order is not None), None)
    for t, order in enumerate(orders):
        if order is not None and order != first:
            raise InputError(
                f"--topology: the nodes of the graph of round {t} are {shown(order)}, and those of "
                f"another round {shown(first)}: number them, or add them in one order"
            )


def _graph(value: object) -> csr_array:
    import networkx as nx

    if isinstance(value, nx.Graph):
        if not len(value):
            raise InputError("--topology must be a graph with nodes, not one without")
        matrix = csr_array(nx.to_scipy_sparse_array(value, nodelist=in_order(value), weight=None))
        # An edge i -> j of a directed graph: j receives from i.
        return _without_loops(csr_array(matrix.T) if value.is_directed() else matrix)
    matrix = _matrix("--topology", value)
    return matrix if matrix.dtype.kind == "f" else _without_loops(matrix)


def _without_loops(matrix: csr_array) -> csr_array:
    entries = csr_array(matrix, dtype=bool).tocoo()
    off = (entries.row != entries.col) & entries.data
    return csr_array((entries.data[off], (entries.row[off], entries.col[off])), shape=matrix.shape)


def _matrix(where: str, value: object) -> csr_array:
    try:
        matrix = None if isinstance(value, EveryRound) else csr_array(value)
    except (TypeError, ValueError):
        matrix = None
    if matrix is None or len(matrix.shape) != 2 or matrix.dtype.kind not in "buif":
        raise InputError(f"{where} must be {FORMS[where]}, not {shown(value)}")
    return matrix
