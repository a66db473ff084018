"""What rank 0 reads and checks before round 0: data, their split, the graph, and a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.algorithms import Method
from dfl.comm.schedule import MixingMatrices
from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.parts import Shape, shape_of
from dfl.datasets.given import has_test_set, parts_given
from dfl.datasets.server_data import peers_keep
from dfl.evaluation.goals import Goal
from dfl.models.zoo import NamedModels
from dfl.simulation import distribute_data, make_models
from dfl.simulation.components import Components, check
from dfl.simulation.defaults import compresses
from dfl.simulation.graph import (
    build_graph,
    check_later_rounds,
    check_sums,
    graph_info,
    network_matrices,
)
from dfl.simulation.preflight import check_assumptions, check_components
from dfl.store import checkpoint_files, fingerprints
from dfl.store.callbacks import GraphInfo
from dfl.store.progress import Progress, find_checkpoint, progress_of

if TYPE_CHECKING:
    import topologies
    from dfl.datasets.data import Data
    from dfl.datasets.partitions.base import DataSplit


class RootFacts(NamedTuple):
    """What rank 0 keeps of the data and the graph for `RunInfo`."""

    graph: GraphInfo | None
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shape: Shape
    n_test: int
    notes: tuple[str, ...]
    progress: Progress


class Root(NamedTuple):
    """What rank 0 has read.

    Attributes:
        data, split: the data set, and which examples are whose.
        common: what all ranks get, packed.
        facts: what is kept after the data are scattered.
        matrices: the mixing matrices; none where peers have no neighbours.
    """

    data: Data
    split: DataSplit
    common: bytes
    facts: RootFacts
    matrices: MixingMatrices


def read_on_root(settled: Run, objects: Mapping[str, str] = MappingProxyType({})) -> Root:
    """Check a settled run, read its data, split them, and build its graph.

    Args:
        settled: the run.
        objects: checksums of the caller's objects, by name.

    Raises:
        InputError: anything cannot be done.
    """
    components, sources = check(settled)
    algorithm, run = components.algorithm, settled.described()
    trace = checkpoint_files.trace(run.out) if run.out else ()
    last = find_checkpoint(run, components.lr_schedule)
    # The data come before the graph: too many peers are refused at once.
    rule = algorithm.server_data_rule
    _check_statistics(run, algorithm)
    if parts_given(settled.partition) is not None:
        if rule is not None and not peers_keep(rule):
            raise InputError(
                f"--partition as indices has no part in --algorithm {run.algorithm}, whose server "
                "has examples of its own: choose a partition by its name"
            )
        if not isinstance(settled.dataset, str) and not has_test_set(settled.dataset):
            raise InputError(
                "--partition as indices needs a --dataset with a test set: give (train, test)"
            )
    data, split = distribute_data.read(run, sources, rule)
    _check_local_goals(run, split)
    if isinstance(components.model, NamedModels):
        make_models.check_tokens(run, components.model, data)
    labels = distribute_data.count_labels(data, split)
    graph = build_graph(settled, sources, labels) if algorithm.gossips else None
    if graph:
        check_sums(run, algorithm, graph)
        check_later_rounds(run, algorithm, sources, graph)
    matrices = network_matrices(algorithm, graph)
    warnings = check_components(run, components, data, matrices)
    common = distribute_data.pack(distribute_data.known_to_all(data, split, matrices))
    fingerprint = distribute_data.fingerprint(common, data, split) if run.out else ""
    given = {**fingerprints.of_files(fingerprints.files_of(settled)), **objects} if run.out else {}
    progress = progress_of(run, last, trace, fingerprint, given)
    notes = (*progress.notes, *data.notes, *_notes(run, components, graph), *warnings)
    facts = RootFacts(
        graph=graph_info(graph) if graph else None,
        label_counts=labels,
        sizes=distribute_data.sizes(split),
        shape=shape_of(data.train_inputs),
        n_test=len(data.test_labels),
        notes=notes,
        progress=progress,
    )
    return Root(data, split, common, facts, matrices)


def _check_local_goals(run: Run, split: DataSplit) -> None:
    """Refuse goals for the local accuracy of peers that have no test examples of their own.

    Raises:
        InputError: there is such a goal.
    """
    goals = {"--until": run.goal, "--share-all-until": run.share_all_goal}
    for name, goal in goals.items():
        local = isinstance(goal, Goal) and goal.column == "local_accuracy_mean"
        if local and not len(split.test.values):
            raise InputError(
                f"{name} local_accuracy: no peer has test examples of its own, choose another "
                "figure, or --partition by a name"
            )


def _notes(
    run: Run, components: Components, graph: topologies.WeightedGraph | None
) -> tuple[str, ...]:
    """Return warnings of the running statistics in messages, of what the method expects of the
    graph, of a graph with its own weights, and of a peer without neighbours.
    """
    notes: list[str] = []
    if run.norm_stats == "share":
        notes.append(
            "--norm-stats share: messages hold running statistics, whose mean is not that of the "
            "mean model: where peers' data differ, accuracy may fall; choose local or recompute"
        )
    if graph is None:
        return tuple(notes)
    algorithm = components.algorithm
    unmet = check_assumptions(run, components, graph)
    notes += [*graph.notes, *algorithm.notes(graph.spectrum.smallest), *unmet]
    if graph.own_weights and run.mixing != algorithm.default_mixing:
        notes.append(
            f"--mixing {run.mixing}: no mixing rule is applied, since --topology {run.topology} "
            "comes with its weights"
        )
    if len(graph.degrees) == 1:
        notes.append("one peer has no neighbours: give --peers 16, or start several ranks")
    return tuple(notes)


def _check_statistics(run: Run, algorithm: Method) -> None:
    """Refuse a policy for running statistics that does not suit the method or its messages."""
    if run.norm_stats == "local" and not algorithm.peers_train:
        raise InputError(
            f"--norm-stats local keeps statistics with peers, and --algorithm {run.algorithm} "
            "trains the server's model: choose share or recompute"
        )
    if run.norm_stats != "share":
        return
    if not algorithm.averages:
        raise InputError(
            f"--norm-stats share averages running statistics, and --algorithm {run.algorithm} "
            "moves what is shared beyond the mean, variances below 0: choose local or recompute"
        )
    if compresses(run):
        raise InputError(
            f"--norm-stats share sends running statistics, and --compressor {run.compressor} "
            "changes them, variances below 0: choose local or recompute, or exact messages"
        )
