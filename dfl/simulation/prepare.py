"""Set-up of a run in four steps: read on root, broadcast, scatter, build."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.placement import placed
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.core.isolation import isolated
from dfl.core.layout import Layout
from dfl.core.parts import joined, parts_of
from dfl.core.registry import flag
from dfl.datasets.server_data import peers_keep
from dfl.evaluation.test_sets import make_test_sets
from dfl.models.model_file import ModelFile
from dfl.models.modules import callers_layers, in_evaluation, modules_of
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
from dfl.simulation.components import Components, components_of
from dfl.simulation.defaults import settle
from dfl.simulation.describe import run_info, sizes_of_states
from dfl.simulation.graph import known_matrices
from dfl.simulation.prepared import Prepared
from dfl.simulation.read_on_root import Root, RootFacts, read_on_root
from dfl.simulation.run_state import check_state
from dfl.simulation.timing import set_clock
from dfl.store import fingerprints

if TYPE_CHECKING:
    import torch

    from dfl.evaluation.test_sets import TestSets
    from dfl.robust.attacks import Attack
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch


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
    facts, known = (root.facts, root.matrices) if root else (None, None)
    del root  # the data set, of which every rank has its part
    matrices = known_matrices(settled, common, world, known)
    with isolated(run.threads):
        return build(run, world, layout, components, threat_model, common, data, facts, matrices)


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
    matrices: MixingMatrices,
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
        matrices: the mixing matrices.

    Raises:
        InputError: on every rank, if the model cannot be trained here, or the method returns no
            state.
    """
    algorithm = components.algorithm
    task, starts = _task(run, world, layout, components, common, data)
    network = Network(
        layout,
        matrices,
        world,
        threat_model,
        run.seed,
        shapes=task.parameter_layout.shapes,
    )
    x = cost.blank_models(algorithm, network, task.parameter_layout.shared, task.dtype)
    with world.agreed():
        state = cost.blank_state(algorithm, network, x)
        check_state(f"--algorithm {run.algorithm}: what init returns", state, x)
    task = set_clock(network, components.links, task, common["sizes"][:, 0])
    test_sets = _test_sets(run, task, components, threat_model.attack, common, data.own)
    world.pulse.doing = _named(task.peers)
    held = sizes_of_states(task, state, world)
    info = None
    if facts and held:
        own_module = components.own_module
        notes = try_models.lone_examples(run, task, common) if algorithm.peers_train else ()
        facts = facts._replace(notes=(*facts.notes, *notes))
        info = run_info(run, task, network, algorithm, test_sets, own_module, facts, held)
    return Prepared(
        run=run,
        world=world,
        task=task,
        network=network,
        algorithm=algorithm,
        test_sets=test_sets,
        own_module=components.own_module,
        starts=starts,
        info=info,
        progress=facts.progress if facts else None,
    )


def _task(
    run: Run,
    world: World,
    layout: Layout,
    components: Components,
    common: Arrays,
    data: RankData,
) -> tuple[Task, initialization.Starts | None]:
    """Return the learning problem of this rank, with that of the server on rank 0, and the models
    of `--init-from`. The arguments and errors are those of `build`.
    """
    algorithm = components.algorithm
    modules = make_models.make_modules(run, components, common)
    if isinstance(components.model, ModelFile) and world.size > 1:
        check_equal(fingerprints.of_models(modules), world)
    starts = initialization.read_starts(run, world, layout, modules)
    initialization.give_values(run, modules, starts)
    device, peers = engine.device_of(run.device, world), layout.hosted(world.rank)
    task = build_task.make_task(run, components, modules, common, data.own, peers, device)
    own_module = components.own_module
    initialization.check(run, task, own_module, starts, algorithm.has_server, layout.widest, world)
    with world.agreed():  # a model may refuse the examples of some ranks
        task = _tried(run, task, common, own_module)
    if data.server is not None and len(data.server["labels"]):
        sizes, pools = common["sizes"][:, 0], peers_keep(algorithm.server_data_rule)
        task = build_task.with_server(task, data.server, sizes, pools, algorithm.server_solver)
    return task, starts


def _tried(run: Run, task: Task, common: Arrays, own_module: bool) -> Task:
    """Return the task after trials of the models and the loss: in training, and in evaluation where
    a caller's layers may compute something else there.
    """
    task = try_models.tried(run, task, common, own_module)
    modules = [module for module, _ in task.every_kind]
    if not callers_layers(modules):
        return task
    try:
        with in_evaluation(modules):
            return try_models.tried(run, task, common, own_module, training=False)
    except InputError as error:
        raise InputError(f"in evaluation mode (eval()), {error}") from error


def _test_sets(
    run: Run, task: Task, components: Components, attack: Attack, common: Arrays, own: Arrays
) -> TestSets:
    """Return what the peers of this rank are evaluated on.

    Args:
        run, task, components, common: as in `build`.
        attack: gives the examples with a trigger, where it is a backdoor.
        own: the examples of this rank's peers.
    """
    takes_tokens = isinstance(components.model, NamedModels) and components.model.takes_tokens
    return make_test_sets(
        task,
        common,
        own,
        attack=attack,
        eval_examples=run.eval_examples,
        validates=run.validation > 0,
        tokens=task.is_sequence or takes_tokens,
        seed=run.seed,
    )


def _named(peers: NDArray[np.int64]) -> str:
    """Return the peers of a rank in a few words."""
    if not len(peers):
        return "no peers"
    if peers[-1] - peers[0] == len(peers) - 1:
        return f"peers {peers[0]} to {peers[-1]}"
    return f"{len(peers)} of the peers {peers[0]} to {peers[-1]}"


def _checksums(settled: Run) -> dict[str, str]:
    """Return checksums of the caller's objects and code that every rank uses, by name.

    The checksum of data and graph covers a topology, a mixing, a data set and a partition.
    """
    found = fingerprints.of_files(fingerprints.model_file(settled.model))
    for field, value in settled.objects.items():
        if field == "model":
            found |= fingerprints.of_models(modules_of(value, flag(field)))
        elif field not in ("topology", "mixing", "dataset", "partition"):
            found |= fingerprints.of_object(flag(field), value)
    return found
