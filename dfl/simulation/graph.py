"""The graph of the peers: built on rank 0, checked against the method, and known to every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.algorithms import Method
from dfl.comm.mpi import World
from dfl.comm.schedule import SAMPLED, MixingMatrices
from dfl.config import Run
from dfl.core import randomness
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.simulation import distribute_data
from dfl.simulation.components import Sources, sources_of
from dfl.store.callbacks import GraphInfo

if TYPE_CHECKING:
    import topologies


def known_matrices(
    settled: Run, common: Arrays, world: World, known: MixingMatrices | None
) -> MixingMatrices:
    """Return the mixing matrices: those in what all ranks have; a sequence without a period is
    built on every rank.

    Args:
        settled: the run.
        common: what all ranks have.
        world: the ranks.
        known: those that rank 0 has checked, None elsewhere.

    Raises:
        InputError: on every rank, if the ranks do not draw the same.
    """
    sent = distribute_data.matrices(common)
    if distribute_data.ENDLESS not in common:
        return MixingMatrices(sent, distribute_data.stationary(common))
    graph = build_graph(settled, sources_of(settled), examine=False)
    first = zip(sent, graph.weights[: len(sent)], strict=True)
    (same,) = world.minimum(int(all((one != other).nnz == 0 for one, other in first)))
    if not same:
        raise InputError(
            "--topology draws other graphs on some rank, or at its second call: every rank must "
            "draw the same, from the generator that it is given"
        )
    return known or MixingMatrices(graph.weights, graph.stationary, graph.possible)


def build_graph(
    settled: Run,
    sources: Sources,
    labels: NDArray[np.int64] | None = None,
    examine: bool = True,
) -> topologies.WeightedGraph:
    """Build the graph of the peers and its mixing matrices.

    Args:
        settled: the run.
        sources: its graph and its rule for weights.
        labels: (P, classes), the training examples of every label at every peer.
        examine: as of `topologies.build`.
    """
    import topologies
    from topologies.sequences import entries

    run, mixing = settled.described(), settled.mixing
    assert run.peers is not None
    assert sources.topology is not None
    assert sources.mixing is not None
    generator = randomness.generator(run.seed, "topology")
    try:
        graph = topologies.build(
            sources.topology, sources.mixing, run.peers, generator, labels, examine
        )
    except topologies.GraphError as error:
        raise InputError(f"--topology {run.topology} with {run.peers} peers: {error}") from None
    if graph.own_weights and not isinstance(mixing, str | None):
        raise InputError("--topology and --mixing both give weights: leave one of them out")
    matrices = 1 if isinstance(mixing, str | None) else len(entries(mixing))
    if matrices not in (1, len(graph.weights)):
        raise InputError(
            f"--mixing has {matrices} matrices, and --topology {len(graph.weights)} graphs"
        )
    return graph


def network_matrices(algorithm: Method, graph: topologies.WeightedGraph | None) -> MixingMatrices:
    """Return what the network has of a graph, the edges within clusters for a method that uses them
    too; nothing where peers have no neighbours.
    """
    if graph is None:
        return MixingMatrices()
    if algorithm.within_clusters and graph.within is not None:
        return MixingMatrices((*graph.weights, graph.within), (*graph.stationary, None))
    return MixingMatrices(graph.weights, graph.stationary, graph.possible)


def check_sums(run: Run, algorithm: Method, graph: topologies.WeightedGraph) -> None:
    """Refuse a mixing matrix whose rows, or columns, do not sum to 1 as the method needs."""
    needed = algorithm.mixing_sums
    if graph.rows_sum if needed == "rows" else graph.columns_sum:
        return
    there = "rows" if needed == "columns" else "columns"
    choices = (
        "metropolis or uniform"
        if needed == "rows"
        else "out_degree, or metropolis where edges go both ways"
    )
    raise InputError(
        f"--mixing {run.mixing} on --topology {run.topology}: only the {there} of the matrix sum "
        f"to 1, and --algorithm {run.algorithm} needs {needed} that do: choose {choices}"
    )


def check_later_rounds(
    run: Run, algorithm: Method, sources: Sources, graph: topologies.WeightedGraph
) -> None:
    """Refuse a mixing rule or a method that needs a way back over every edge, where rounds that
    are not looked at may lack one.

    Raises:
        InputError: it is such a rule or method.
    """
    if not graph.one_way or run.rounds <= SAMPLED:
        return
    rounds = f"--topology {run.topology}: a round after the first {SAMPLED} may have an edge over"
    rule = getattr(sources.mixing, "func", sources.mixing)
    if not graph.own_weights and getattr(rule, "needs_ways_back", False):
        raise InputError(
            f"{rounds} which no way leads back, and --mixing {run.mixing} refuses it: choose "
            f"another --mixing, or at most --rounds {SAMPLED}"
        )
    if algorithm.averaging_step is not None and not graph.columns_sum:
        raise InputError(
            f"{rounds} which no way leads back, so that no average of all peers is kept, which "
            f"copies per edge of --algorithm {run.algorithm} need: choose --algorithm dfedavgm, or "
            f"at most --rounds {SAMPLED}"
        )


def graph_info(graph: topologies.WeightedGraph) -> GraphInfo:
    """Return the facts of a graph that callbacks receive."""
    spectrum = graph.spectrum
    return GraphInfo(
        edges=graph.edges,
        directed=graph.directed,
        degrees=graph.degrees,
        weights=graph.examples,
        endless=graph.endless,
        own_weights=graph.own_weights,
        gap=spectrum.gap,
        smallest=spectrum.smallest,
        half_rounds=spectrum.half_rounds,
    )
