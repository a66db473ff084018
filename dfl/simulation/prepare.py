"""Set-up of a run in four steps: read on root, broadcast, scatter, build."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.algorithms import Method, State
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.placement import placed
from dfl.comm.threat_model import ThreatModel
from dfl.config import Run
from dfl.core import randomness
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.core.isolation import isolated
from dfl.core.layout import Layout
from dfl.core.parts import Shape, joined, parts_of, shape_of
from dfl.core.registry import flag
from dfl.datasets.given import has_test_set
from dfl.datasets.server_data import all_examples
from dfl.evaluation.test_sets import TestSets, make_test_sets
from dfl.models.model_file import ModelFile, file_of
from dfl.models.modules import modules_of
from dfl.models.zoo import NamedModels
from dfl.simulation import (
    build_task,
    cost,
    distribute_data,
    engine,
    initialization,
    make_models,
    try_models,
)
from dfl.simulation.components import Components, Sources, check, components_of, sources_of
from dfl.simulation.defaults import compresses, settle
from dfl.simulation.preflight import check_assumptions, rehearse
from dfl.simulation.run_state import check_state
from dfl.simulation.timing import with_clock
from dfl.store import checkpoint_files, fingerprints
from dfl.store.callbacks import GraphInfo, Memory, MethodInfo, RunInfo, rows_of
from dfl.store.progress import Progress, find_checkpoint, progress_of

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_array

    import topologies
    from dfl.datasets.data import Data
    from dfl.datasets.partitions.base import DataSplit
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch

WORK_ROWS = 2
"""Rows per peer that a round needs besides the state: the trained models, and the next state."""


@dataclass(frozen=True)
class Prepared:
    """One rank of a run before round 0.

    Attributes:
        run: the settled run.
        world: the ranks.
        task: the learning problem of this rank's peers.
        network: what connects the peers.
        algorithm: the method.
        test_sets: what this rank's peers are evaluated on.
        own_module: whether the caller gave the model.
        starts: the models of `--init-from`, where it is given.
        info: facts of the run, on rank 0; None elsewhere.
        progress: how far the run has come, on rank 0; None elsewhere.
    """

    run: Run
    world: World
    task: Task
    network: Network
    algorithm: Method
    test_sets: TestSets
    own_module: bool
    starts: initialization.Starts | None
    info: RunInfo | None
    progress: Progress | None

    @property
    def layout(self) -> Layout:
        """Peers and ranks."""
        return self.network.layout


class RootFacts(NamedTuple):
    """What rank 0 keeps of the data and the graph for `RunInfo`."""

    graph: GraphInfo | None
    label_counts: NDArray[np.int64]
    sizes: NDArray[np.int64]
    shape: Shape
    n_test: int
    notes: tuple[str, ...]
    progress: Progress


class Graph(NamedTuple):
    """The graph of the peers on every rank; see `Schedule`."""

    weights: Sequence[csr_array]
    stationary: Sequence[NDArray[np.float64] | None]
    possible: csr_array | None


class Root(NamedTuple):
    """What rank 0 has read.

    Attributes:
        data, split: the data set, and which examples are whose.
        common: what all ranks get, packed.
        facts: what is kept after the data are scattered.
        graph: the graph; without matrices where peers have no neighbours.
    """

    data: Data
    split: DataSplit
    common: bytes
    facts: RootFacts
    graph: Graph


class RankData(NamedTuple):
    """What one rank gets of the data.

    Attributes:
        own: the examples of its peers.
        server: the examples of the server, on rank 0.
    """

    own: Arrays
    server: Arrays | None


def prepare(run: Run, world: World) -> Prepared:
    """Set all ranks up for a run.

    Raises:
        InputError: on every rank, if anything cannot be done.
    """
    settled = settle(run, world.size)
    objects = _checksums(settled) if world.size > 1 or settled.out else {}
    check_equal(objects, world)
    run = settled.described()
    if world.rank:  # import torch while rank 0 reads
        torch.get_num_threads()

    root, common = broadcast(world, lambda: read_on_root(settled, objects))
    components = components_of(settled)
    layout = layout_of(common, world)
    largest = tuple(map(float, parts_of(joined(common, "largest"))))
    threat_model = threat_model_of(components, layout, largest, run.seed)
    data = scatter(world, layout, threat_model, root)
    facts, known = (root.facts, root.graph) if root else (None, None)
    del root  # the data set, of which every rank has its part
    graph = graph_of(settled, common, world, known)
    with isolated(run.threads):
        return build(run, world, layout, components, threat_model, common, data, facts, graph)


def layout_of(common: Arrays, world: World) -> Layout:
    """Return which peers each rank hosts. Rank 0 computes it: processors of different kinds sort
    equal numbers differently.
    """
    peers = len(common["sizes"])

    def order() -> bytes:
        drawn = distribute_data.ENDLESS in common  # a new graph in every round has no order
        matrices = () if drawn else distribute_data.matrices(common)
        found = placed(matrices, peers, world.size).order
        return b"" if found is None else found.tobytes()

    message = world.from_root(order)
    return Layout(peers, world.size, np.frombuffer(message, np.int64) if message else None)


def check_equal(mine: Mapping[str, str], world: World) -> None:
    """Refuse objects that differ between the ranks, where every rank uses its own.

    Args:
        mine: checksums of this rank's objects, by name.
        world: the ranks.

    Raises:
        InputError: on every rank.
    """
    if world.size == 1:
        return
    first = json.loads(world.from_root(lambda: json.dumps(dict(mine)).encode()))
    names = sorted(mine.keys() | first.keys())
    unequal = [k for k, name in enumerate(names) if mine.get(name) != first.get(name)]
    (lowest,) = world.minimum(unequal[0] if unequal else len(names))
    if lowest < len(names):
        raise InputError(
            f"the {names[lowest]} differs between the ranks: every rank must give the same; seed "
            "what is drawn, for a model by torch.manual_seed(0)"
        )


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
    if isinstance(settled.partition, list | tuple):
        if rule not in (None, all_examples):
            raise InputError(
                f"--partition as indices has no part in --algorithm {run.algorithm}, whose server "
                "has examples of its own: choose a partition by its name"
            )
        if not isinstance(settled.dataset, str) and not has_test_set(settled.dataset):
            raise InputError(
                "--partition as indices needs a --dataset with a test set: give (train, test)"
            )
    data, split = distribute_data.read(run, sources, rule)
    if isinstance(components.model, NamedModels):
        make_models.check_tokens(run, components.model, data)
    labels = distribute_data.count_labels(data, split)
    graph = _graph(settled, sources, labels) if algorithm.gossips else None
    if graph:
        _check_sums(run, algorithm, graph)
    known = _known(algorithm, graph)
    warnings = rehearse(run, components, data, *known)
    common = distribute_data.pack(
        distribute_data.known_to_all(data, split, known.weights, known.stationary)
    )
    fingerprint = distribute_data.fingerprint(common, data, split) if run.out else ""
    given = {**_files(settled, components), **objects} if run.out else {}
    progress = progress_of(run, last, trace, fingerprint, given)
    notes = (*progress.notes, *data.notes)
    if run.norm_stats == "share":
        notes += (
            "--norm-stats share: messages hold running statistics, whose mean is not that of the "
            "mean model: where peers' data differ, accuracy may fall; choose local or recompute",
        )
    if graph:
        smallest = graph.spectrum.smallest
        clustered = graph.clusters is not None
        unmet = check_assumptions(run, components, graph.weights, smallest, clustered)
        notes += (*graph.notes, *algorithm.notes(smallest), *unmet)
        if graph.own_weights and run.mixing != algorithm.default_mixing:
            notes += (
                f"--mixing {run.mixing}: no mixing rule is applied, since --topology "
                f"{run.topology} comes with its weights",
            )
    notes += warnings
    if graph and len(graph.degrees) == 1:
        notes += ("one peer has no neighbours: give --peers 16, or start several ranks",)
    facts = RootFacts(
        graph=_graph_info(graph) if graph else None,
        label_counts=labels,
        sizes=distribute_data.sizes(split),
        shape=shape_of(data.train_inputs),
        n_test=len(data.test_labels),
        notes=notes,
        progress=progress,
    )
    return Root(data, split, common, facts, known)


def _check_statistics(run: Run, algorithm: Method) -> None:
    """Refuse a policy for running statistics that does not suit the method or its messages."""
    if run.norm_stats == "local" and algorithm.server_data_rule is all_examples:
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


def graph_of(settled: Run, common: Arrays, world: World, known: Graph | None) -> Graph:
    """Return the graph: that in what all ranks have; one without a period is built on every rank.

    Args:
        settled: the run.
        common: what all ranks have.
        world: the ranks.
        known: the graph that rank 0 has checked, None elsewhere.

    Raises:
        InputError: on every rank, if the ranks do not draw the same.
    """
    sent = distribute_data.matrices(common)
    if distribute_data.ENDLESS not in common:
        return Graph(sent, distribute_data.stationary(common), None)
    graph = _graph(settled, sources_of(settled), examine=False)
    first = zip(sent, graph.weights[: len(sent)], strict=True)
    (same,) = world.minimum(int(all((one != other).nnz == 0 for one, other in first)))
    if not same:
        raise InputError(
            "--topology draws other graphs on some rank, or at its second call: every rank must "
            "draw the same, from the generator that it is given"
        )
    return known or Graph(graph.weights, graph.stationary, graph.possible)


def broadcast(world: World, read: Callable[[], Root]) -> tuple[Root | None, Arrays]:
    """Return what rank 0 reads, None elsewhere, and what all ranks get of it: mixing matrices,
    common test set, sizes of the peers' data.

    Raises:
        InputError: on every rank, if rank 0 raises one.
    """
    root: list[Root] = []

    def common() -> bytes:
        root.append(read())
        return root[0].common

    arrays = distribute_data.unpack(world.from_root(common))
    return (root[0] if root else None), arrays


def threat_model_of(
    components: Components, layout: Layout, largest: tuple[float, ...], seed: int
) -> ThreatModel:
    """Return what happens to messages, with the attackers drawn.

    Args:
        components: the components of the run.
        layout: peers and ranks.
        largest: the largest value of each part of the training inputs, which attackers know.
        seed: of the run.
    """
    attack = components.attack.knowing(largest)
    attackers = attack.chosen(layout.peers, seed)
    return ThreatModel(
        components.compressor, components.aggregator, attack, attackers, components.faults
    )


def scatter(world: World, layout: Layout, threat_model: ThreatModel, root: Root | None) -> RankData:
    """Return what this rank gets; the examples of attackers are poisoned here."""

    def examples(peers: NDArray[np.int64]) -> Arrays:
        assert root is not None
        return distribute_data.owned(
            root.data, root.split, peers, threat_model.attack, threat_model.attackers
        )

    own = distribute_data.scatter(world, layout, examples)
    return RankData(own, distribute_data.server(root.data, root.split) if root else None)


def build(
    run: Run,
    world: World,
    layout: Layout,
    components: Components,
    threat_model: ThreatModel,
    common: Arrays,
    data: RankData,
    facts: RootFacts | None,
    graph: Graph,
) -> Prepared:
    """Return this rank, ready for round 0.

    Args:
        run: the settled run, its objects described.
        world, layout: the ranks, and which peers they host.
        components: the components.
        threat_model: what happens to messages.
        common: what all ranks have.
        data: what this rank has.
        facts: what is known on rank 0.
        graph: the graph of the peers.

    Raises:
        InputError: on every rank, if the model cannot be trained here, or the method returns no
            state.
    """
    algorithm, sizes = components.algorithm, common["sizes"][:, 0]
    peers = layout.hosted(world.rank)
    own_module = not isinstance(components.model, NamedModels)
    modules = make_models.make_modules(run, components, common)
    if isinstance(components.model, ModelFile) and world.size > 1:
        check_equal(fingerprints.of_models(modules), world)
    starts = initialization.read_starts(run, world, layout, modules)
    initialization.give_values(run, modules, starts)
    device = engine.device_of(run.device, world)
    task = build_task.make_task(run, components, modules, common, data.own, peers, device)
    initialization.check(run, task, own_module, starts, algorithm.has_server, layout.widest, world)
    with world.agreed():  # a model may refuse the examples of some ranks
        task = try_models.tried(run, task, common, own_module)
    if data.server is not None and len(data.server["labels"]):
        pools = algorithm.server_data_rule is all_examples
        task = build_task.with_server(task, data.server, sizes, pools, algorithm.server_solver)
    network = Network(
        layout,
        graph.weights,
        world,
        threat_model,
        run.seed,
        stationary=graph.stationary,
        possible=graph.possible,
        shapes=task.parameter_layout.shapes,
    )
    x = cost.blank_models(algorithm, network, task.parameter_layout.shared, task.dtype)
    with world.agreed():
        state = cost.blank_state(algorithm, network, x)
    check_state(f"--algorithm {run.algorithm}: what init returns", state, {"x": x}, world)
    task = with_clock(network, components.links, task, sizes)
    takes_tokens = isinstance(components.model, NamedModels) and components.model.takes_tokens
    test_sets = make_test_sets(
        task,
        common,
        data.own,
        attack=threat_model.attack,
        eval_examples=run.eval_examples,
        validates=run.validation > 0,
        tokens=task.is_sequence or takes_tokens,
        seed=run.seed,
    )
    world.pulse.doing = _named(peers)
    sizes_of_states = _sizes_of_states(task, state, world)
    info = None
    if facts and sizes_of_states:
        info = _run_info(
            run, task, network, algorithm, test_sets, own_module, facts, sizes_of_states
        )
    return Prepared(
        run=run,
        world=world,
        task=task,
        network=network,
        algorithm=algorithm,
        test_sets=test_sets,
        own_module=own_module,
        starts=starts,
        info=info,
        progress=facts.progress if facts else None,
    )


def _named(peers: NDArray[np.int64]) -> str:
    """Return the peers of a rank in a few words."""
    if not len(peers):
        return "no peers"
    if peers[-1] - peers[0] == len(peers) - 1:
        return f"peers {peers[0]} to {peers[-1]}"
    return f"{len(peers)} of the peers {peers[0]} to {peers[-1]}"


def _sizes_of_states(task: Task, state: State, world: World) -> tuple[float, int] | None:
    """Return, on rank 0, the rows of m numbers that a peer remembers besides its model, the mean
    over all peers; and the bytes of models and work on the fullest rank. None elsewhere.
    """
    layout, p = task.parameter_layout, len(task.peers)
    work = (WORK_ROWS * p * layout.d + task.frozen_numbers) * task.dtype.itemsize
    models = cost.memory_of_state(state, p, layout) + work
    sizes = world.gather(np.array([[*cost.numbers_of_state(state), models]]))
    if sizes is None:
        return None
    held, own, _ = sizes.sum(0).tolist()
    return held / own - 1 if own else 0.0, int(sizes[:, 2].max())


def _run_info(
    run: Run,
    task: Task,
    network: Network,
    algorithm: Method,
    test_sets: TestSets,
    own_module: bool,
    facts: RootFacts,
    sizes_of_states: tuple[float, int],
) -> RunInfo:
    """Return the facts that callbacks receive."""
    layout, dtype, progress = network.layout, task.dtype, facts.progress
    rows, models = sizes_of_states

    def payload(coordinates: int) -> float:
        return cost.payload_per_round(algorithm, network, coordinates, dtype)

    found = progress.found
    return RunInfo(
        run=run,
        layout=layout,
        device=str(task.device),
        own_module=own_module,
        parameters=task.parameter_layout.d,
        shared=task.parameter_layout.shared,
        frozen=task.frozen_numbers,
        dtype=str(dtype).removeprefix("torch."),
        attackers=np.asarray(network.threat_model.attackers),
        local_steps=task.solver.steps_for(facts.sizes[:, 0]),
        batch_size=task.solver.batch_size,
        classes=test_sets.classes,
        shape=facts.shape,
        places=tuple(test_sets.labels.shape[1:]) if task.is_sequence else (),
        label_counts=facts.label_counts,
        sizes=facts.sizes,
        n_test=facts.n_test,
        evaluated_train=test_sets.longest_train,
        graph=facts.graph,
        has_server=algorithm.has_server,
        broadcasts=algorithm.traffic(layout.peers, 0)[1],
        payload_shared=payload(task.parameter_layout.shared),
        payload_whole=payload(task.parameter_layout.all_shared.shared),
        method=MethodInfo(
            rows=rows,
            messages=algorithm.messages,
            within_clusters=algorithm.within_clusters,
            assumes=tuple(each.text for each in (*algorithm.requires, *algorithm.expects)),
        ),
        memory=_memory(models, layout, test_sets, facts),
        notes=facts.notes,
        resumed=(found.round, found.path) if found else None,
        earlier=rows_of(found.content["table"]) if found else (),
    )


def _memory(models: int, layout: Layout, test_sets: TestSets, facts: RootFacts) -> Memory:
    """Return the estimated bytes on the fullest rank."""
    ends = np.concatenate([[0], np.cumsum(layout.by_rank(facts.sizes.sum(1)))])
    tensors = (*parts_of(test_sets.inputs), test_sets.labels)
    example = sum(each.element_size() * math.prod(each.shape[1:]) for each in tensors)
    return Memory(
        models=models,
        examples=int(np.diff(ends[layout.starts]).max()) * example,
        test_set=facts.n_test * example,
    )


def _files(settled: Run, components: Components) -> dict[str, str]:
    """Return checksums of files read besides data and graph, by name."""
    files = {
        f"file of --links {settled.described().links}": getattr(components.links, "path", None)
    }
    if settled.init_from is not None:
        files |= {
            f"{name} of --init-from {settled.init_from}": settled.init_from / name
            for name in ("state.safetensors", "peers.csv")
        }
    return fingerprints.of_files({name: path for name, path in files.items() if path is not None})


def _checksums(settled: Run) -> dict[str, str]:
    """Return checksums of the caller's objects and code that every rank uses, by name.

    The checksum of data and graph covers a topology, a mixing, a data set and a partition.
    """
    found: dict[str, str] = {}
    if path := file_of(settled.model):
        found |= fingerprints.of_files({f"file of --model {settled.model}": path})
    for field, value in settled.objects.items():
        if field == "model":
            found |= fingerprints.of_models(modules_of(value, flag(field)))
        elif field not in ("topology", "mixing", "dataset", "partition"):
            found |= fingerprints.of_object(flag(field), value)
    return found


def _graph(
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
    if isinstance(mixing, list | tuple) and len(mixing) not in (1, len(graph.weights)):
        raise InputError(
            f"--mixing has {len(mixing)} matrices, and --topology {len(graph.weights)} graphs"
        )
    return graph


def _known(algorithm: Method, graph: topologies.WeightedGraph | None) -> Graph:
    """Return what the network has of a graph, the edges within clusters for a method that uses them
    too; nothing where peers have no neighbours.
    """
    if graph is None:
        return Graph((), (), None)
    if algorithm.within_clusters and graph.within is not None:
        return Graph((*graph.weights, graph.within), (*graph.stationary, None), None)
    return Graph(graph.weights, graph.stationary, graph.possible)


def _check_sums(run: Run, algorithm: Method, graph: topologies.WeightedGraph) -> None:
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


def _graph_info(graph: topologies.WeightedGraph) -> GraphInfo:
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
