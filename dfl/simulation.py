"""The loop: peers train, speak, and are looked at. The only file that knows where mixing matrices come from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl import cost, dealing, keys, metrics, setup, watch
from dfl.aggregators import AGGREGATORS, Words
from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.attacks import ATTACKS, Seen
from dfl.augment import AUGMENTS
from dfl.auxiliaries import AUXILIARIES
from dfl.compressors import COMPRESSORS
from dfl.config import Run
from dfl.errors import DivergedError, InputError
from dfl.layout import Layout
from dfl.local import SCHEDULES
from dfl.models import MODELS
from dfl.mpi import World, connect
from dfl.net import Net
from dfl.network import Network, Speech
from dfl.objectives import ADVERSARIES, objective
from dfl.roots import everything
from dfl.specs import Component, choose, flag
from dfl.task import cross_entropy

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from scipy.sparse import csr_array
    from torch import Tensor
    from torch.nn import Module

    import topologies
    from dfl.datasets.data import Data
    from dfl.report import Report
    from dfl.task import Loss, Task
else:
    from dfl.lazy import torch

LOCAL: dict[str, Mapping[str, Component]] = {
    "algorithm": ALGORITHMS,
    "compressor": COMPRESSORS,
    "aggregator": AGGREGATORS,
    "attack": ATTACKS,
    "model": MODELS,
    "augment": AUGMENTS,
    "auxiliary": AUXILIARIES,
    "adversary": ADVERSARIES,
    "lr_schedule": SCHEDULES,
}
"""The kinds of component that every rank has a use for, by the field of `Run` that chooses one."""


def components() -> dict[str, Mapping[str, Component]]:
    """Every kind of component; graphs and data come in here because only rank 0 should pay for their imports."""
    import topologies
    from dfl.datasets import DATASETS, PARTITIONS

    graphs: dict[str, Mapping[str, Component]] = {"topology": topologies.TOPOLOGIES, "mixing": topologies.MIXINGS}
    return {**graphs, "dataset": DATASETS, "partition": PARTITIONS, **LOCAL}


@dataclass(frozen=True)
class Setting:
    """A run that is ready to start, as one rank sees it; `facts` are on rank 0."""

    run: Run
    world: World
    task: Task
    network: Network
    algorithm: Algorithm
    exam: setup.Exam
    own_module: bool
    facts: setup.Facts | None

    @property
    def layout(self) -> Layout:
        """Which peers live where."""
        return self.network.layout

    @cached_property
    def payload_per_round(self) -> float:
        """Bytes that all peers, and a server, say in a round."""
        return cost.payload_per_round(self.algorithm, self.network, self.task.spec.d, self.task.scale.dtype)


def simulate(
    run: Run,
    model: Module | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
    report: Report | None = None,
) -> Iterator[dict[str, float]]:
    """Run a simulation and yield a row of figures at round 0, at every `eval_every`-th round and at the last.

    Args:
        run: what to simulate; `run.out` is the folder to write to, if any.
        model: the caller's own module in place of `run.model`; its parameters are the common starting point.
        data: the caller's own data in place of `run.dataset`.
        loss: (outputs, labels) -> (n,); cross entropy where not given.
        report: who is told of the progress; by default the files of `run.out`.

    Yields:
        The columns of metrics.csv, on every rank.

    Raises:
        InputError: something asked for cannot be done.
        DivergedError: a peer's model is no longer finite.
    """
    world = connect()
    world.busy = True
    setting = prepare(run, world, model, data, loss)
    if report is None and run.out is not None and world.rank == 0:
        from dfl.report import Report

        report = Report(run.out)
    if report is None and setting.facts:
        for note in setting.facts.notes:
            warnings.warn(note, stacklevel=2)
    yield from _rounds(setting, report)


def _rounds(setting: Setting, report: Report | None) -> Iterator[dict[str, float]]:
    run, algorithm, network, task = setting.run, setting.algorithm, setting.network, setting.task
    with watch.told(report, setting) as watching:
        t, state = 0, algorithm.init(*setup.start(run, task, setting.own_module, algorithm.serves), Net(network, 0))
        yield from watching.look(t, state)
        while not watching.done:
            state = algorithm.round(state, task, Net(network, t, seen=watch.due(t + 1, run)), t)
            _stop_unless_finite(state.x, setting, t)
            t += 1
            yield from watching.look(t, state)
    network.close()
    setting.world.busy = False


def _stop_unless_finite(x: Tensor, setting: Setting, t: int) -> None:
    """End every rank where some model is no longer finite; what becomes of a liar's is its own affair."""
    broken, nobody = metrics.broken(x), setting.layout.peers
    if setting.algorithm.serves:
        who, stop = "the server's model", bool(len(broken))
    else:
        honest = np.setdiff1d(setting.task.peers[broken], setting.network.speech.liars)
        peer = setting.world.smallest(int(honest[0]) if len(honest) else nobody)
        who, stop = f"peer {peer}", peer < nobody
    if stop:
        raise DivergedError(
            f"{who} is no longer finite after round {t + 1}: "
            f"try a smaller --lr (it is {setting.run.lr}) or other messages"
        )


def prepare(
    run: Run, world: World, model: Module | None = None, data: Data | None = None, loss: Loss | None = None
) -> Setting:
    """Check a run, read and deal its data, and set every rank up.

    Raises:
        InputError: on every rank, if anything asked for cannot be done.
    """
    asked = run.settled(world.size)
    brought: dict[str, Any] = {
        name: "own" for name, given in (("model", model), ("dataset", data)) if given is not None
    }
    run = replace(asked, **brought)
    found: dict[str, Any] = {}

    def decide() -> bytes:
        parts = check(asked)
        read, dealt = dealing.read(run, parts, data)  # before the graph: too many peers are refused at once
        graph = _graph(run, parts) if parts["algorithm"].gossips else None
        found.update(data=read, deal=dealt, graph=graph)
        _rehearse(run, parts, read, graph.weights if graph else ())
        return dealing.packed(dealing.known_to_all(read, dealt, graph.weights if graph else ()))

    if world.rank:  # while rank 0 reads and decides
        torch.set_num_threads(run.threads)
    common = dealing.unpacked(world.from_root(decide))
    parts = _chosen(asked, LOCAL)
    layout = Layout(len(common["sizes"]), world.size)
    mine, attack = layout.block(world.rank), parts["attack"]
    attack, liars = attack.knowing(float(common["largest"])), attack.chosen(layout.peers, run.seed)
    facts = _facts(found, parts["algorithm"]) if found else None
    own = dealing.handed_out(
        world, layout, lambda peers: dealing.owned(found["data"], found["deal"], peers, attack, liars)
    )
    root = dealing.root(found["data"], found["deal"]) if found else None
    found.clear()  # the data set, which everybody has its part of
    torch.set_num_threads(run.threads)
    model = setup.trained_module(model, parts, common, run.seed)
    place = setup.Place(np.arange(mine.start, mine.stop), setup.device(run.device, world))
    task = setup.make_task(run, parts, (model, loss or cross_entropy), (common, own), place)
    setup.check_start(run, task, "model" in brought, (layout.widest, world.smallest(setup.memory())))
    if root is not None and len(root["labels"]):
        task = setup.with_server(task, root, common["sizes"][:, 0], parts["algorithm"].root_rule is everything)
    speech = Speech(parts["compressor"], parts["aggregator"], attack, liars)
    network = Network(layout, dealing.matrices(common), world, speech, run.seed)
    exam = setup.make_exam(run, task, (common, own), attack)
    world.doing = f"peers {mine.start} to {mine.stop - 1}"
    return Setting(run, world, task, network, parts["algorithm"], exam, "model" in brought, facts)


def check(run: Run) -> setup.Parts:
    """The components that a settled run names, with their options; needs no torch.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    return _chosen(run, components())


def _chosen(run: Run, registries: Mapping[str, Mapping[str, Component]]) -> setup.Parts:
    named = {name: getattr(run, name) for name in registries}  # no graph where peers do not gossip
    parts: setup.Parts = {n: choose(flag(n), spec, registries[n]) for n, spec in named.items() if spec is not None}
    made = ("algorithm", "compressor", "attack", "augment", "auxiliary", "adversary")
    parts |= {name: parts[name]() for name in made}
    parts["objective"] = objective(parts["auxiliary"], parts["adversary"])
    parts["lr_schedule"](0, run.rounds)
    return parts


def _rehearse(run: Run, parts: setup.Parts, data: Data, weights: Sequence[csr_array]) -> None:
    """Show the attack and the aggregator what they will see, so that what they cannot do is refused now."""
    assert run.peers is not None
    algorithm, attack = parts["algorithm"], parts["attack"]
    parts["augment"].check(data.train_inputs.shape[1:])
    if run.goal and "accuracy" in run.goal[0] and not data.classes:
        raise InputError(f"--until {run.until}: labels that are no classes have no accuracy, choose train_loss")
    liars, trusted = attack.chosen(run.peers, run.seed), np.zeros(1)
    n, _ = algorithm.traffic(run.peers, 0)
    heard = min(int((np.diff(matrix.indptr)).min()) for matrix in weights) if weights else int(n)
    said = run.peers if weights else int(n)
    if "aggregator" in algorithm.takes:
        parts["aggregator"](_blank(heard, trusted if weights or algorithm.root_rule else None))
    if len(liars):
        attack.poison(data.train_inputs[:1], data.train_labels[:1], data.classes)
    if attack.per_edge and not (weights and "aggregator" in algorithm.takes):
        raise InputError(f"--attack {run.attack} tells neighbours different things: choose --algorithm dfedavgm")
    if attack.speaks and not said:
        raise InputError(f"--attack {run.attack} lies in messages, and --algorithm {run.algorithm} sends none")
    if attack.speaks and not attack.per_edge and len(liars):
        bad = np.arange(min(len(liars), said))
        attack.say(Seen(_blank(said, trusted if algorithm.root_rule else None), bad, bad, slice(0, 1), (0, 0, "")))


def _blank(n: int, trusted: NDArray[np.float64] | None) -> Words:
    return Words(np.zeros((n, 1)), np.full(n, 1 / n), trusted)


def _graph(run: Run, parts: setup.Parts) -> topologies.Network:
    """Build the peers' graph and its mixing matrices."""
    import topologies

    assert run.peers is not None
    try:
        return topologies.build(parts["topology"], parts["mixing"], run.peers, keys.generator(run.seed, "topology"))
    except topologies.GraphError as error:
        raise InputError(f"--topology {run.topology} with {run.peers} peers: {error}") from None


def _facts(found: Mapping[str, Any], algorithm: Algorithm) -> setup.Facts:
    graph, data, deal = found["graph"], found["data"], found["deal"]
    counts, shape = dealing.count_labels(data, deal), data.train_inputs.shape[1:]
    known = counts, dealing.sizes(deal), shape, len(data.test_labels)
    if graph is None:
        return setup.Facts(None, None, *known, ())
    alone = ("one peer talks to nobody: say --peers 16, or start several ranks",) if len(graph.degrees) == 1 else ()
    notes = (*graph.notes, *algorithm.notes(graph.spectrum.smallest), *alone)
    return setup.Facts(graph, graph.spectrum, *known, notes)
