"""The loop: peers train, speak, and are looked at. The only file that knows where mixing matrices come from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl import cost, dealing, keys, metrics, setup, starts, watch
from dfl.aggregators import AGGREGATORS
from dfl.algorithms import ALGORITHMS, Algorithm, State
from dfl.attacks import ATTACKS
from dfl.augment import AUGMENTS
from dfl.auxiliaries import AUXILIARIES
from dfl.compressors import COMPRESSORS
from dfl.config import Run
from dfl.errors import DivergedError, InputError
from dfl.faults import FAULTS
from dfl.layout import Layout
from dfl.local import SCHEDULES
from dfl.models import MODELS
from dfl.mpi import World, connect
from dfl.net import Net
from dfl.network import Network, Speech
from dfl.objectives import ADVERSARIES, objective
from dfl.rehearsal import rehearse
from dfl.roots import everything
from dfl.specs import Component, choose, choose_several, flag
from dfl.speeds import NETWORKS, with_clock
from dfl.task import cross_entropy

if TYPE_CHECKING:
    import torch

    import topologies
    from dfl.datasets.data import Data
    from dfl.report import Report
    from dfl.setup import Models
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
    "network": NETWORKS,
    "faults": FAULTS,
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
    starts: starts.Starts | None
    facts: setup.Facts | None

    @property
    def layout(self) -> Layout:
        """Which peers live where."""
        return self.network.layout

    @cached_property
    def payload_per_round(self) -> float:
        """Bytes that all peers, and a server, say in a round."""
        return cost.payload_per_round(self.algorithm, self.network, self.task.spec.shared, self.task.scale.dtype)


def simulate(
    run: Run,
    model: Models | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
    report: Report | None = None,
) -> Iterator[dict[str, float]]:
    """Run a simulation and yield a row of figures at round 0, at every `eval_every`-th round and at the last.

    Args:
        run: what to simulate; `run.out` is the folder to write to, if any.
        model: the caller's own module in place of `run.model`; its parameters are the common starting point. Of
            several, which agree in what `run.share` says is shared, peer i has the one numbered i mod their number.
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
        t, task = 0, replace(task, spec=task.spec.whole) if run.pretrain else task
        state = algorithm.init(
            *starts.start(run, task, setting.own_module, algorithm.serves, setting.starts), Net(network, 0)
        )
        yield from watching.look(t, state)
        while not watching.done:
            task, state = _phase(setting, watching.opening, task, state)
            state = algorithm.round(state, task, Net(network, t, seen=watch.due(t + 1, run)), t)
            _stop_unless_finite(state, setting, t)
            network.turn()
            t += 1
            yield from watching.look(t, state)
    network.close()
    setting.world.busy = False


def _phase(setting: Setting, opening: bool, task: Task, state: Any) -> tuple[Task, Any]:
    """The problem and the state of the next round: when everything has been shared long enough, a part of it is."""
    if opening or task is setting.task:
        return task, state
    return setting.task, setting.algorithm.part(state, setting.task.spec.shared)


def _stop_unless_finite(state: State, setting: Setting, t: int) -> None:
    """End every rank where some model is no longer finite."""
    if who := _broken(state, setting):
        raise DivergedError(
            f"{who} is no longer finite after round {t + 1}: "
            f"try a smaller --lr (it is {setting.run.lr}) or other messages"
        )


def _broken(state: State, setting: Setting) -> str:
    """Whose model is not finite, if somebody's; what becomes of a liar's is its own affair."""
    (*shared, own), nobody = [metrics.broken(part) for part in state.parts], setting.layout.peers
    if any(map(len, shared)) or (state.one and len(own)):
        return "the server's model"
    if state.one:
        return ""
    honest = np.setdiff1d(setting.task.peers[own], setting.network.speech.liars)
    peer = setting.world.smallest(int(honest[0]) if len(honest) else nobody)
    return f"peer {peer}" if peer < nobody else ""


def prepare(
    run: Run, world: World, model: Models | None = None, data: Data | None = None, loss: Loss | None = None
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
        rehearse(run, parts, read, graph.weights if graph else ())
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
    given = starts.given(run, world, layout)
    root = dealing.root(found["data"], found["deal"]) if found else None
    found.clear()  # the data set, which everybody has its part of
    torch.set_num_threads(run.threads)
    modules = setup.make_modules(run, parts, common, model)
    place = setup.Place(np.arange(mine.start, mine.stop), setup.device(run.device, world))
    task = setup.make_task(run, parts, (modules, loss or cross_entropy), (common, own), place)
    starts.check(run, task, given or "model" in brought, (parts["algorithm"].serves, layout.widest), world)
    if root is not None and len(root["labels"]):
        task = setup.with_server(task, root, common["sizes"][:, 0], parts["algorithm"].root_rule is everything)
    speech = Speech(parts["compressor"], parts["aggregator"], attack, liars)
    network = Network(layout, dealing.matrices(common), world, speech, run.seed)
    task = with_clock(network, parts["network"], task, common["sizes"][:, 0])
    exam = setup.make_exam(run, task, (common, own), attack)
    world.doing = f"peers {mine.start} to {mine.stop - 1}"
    return Setting(run, world, task, network, parts["algorithm"], exam, "model" in brought, given, facts)


def check(run: Run) -> setup.Parts:
    """The components that a settled run names, with their options; needs no torch.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    return _chosen(run, components())


def _chosen(run: Run, registries: Mapping[str, Mapping[str, Component]]) -> setup.Parts:
    named = {name: getattr(run, name) for name in registries}  # no graph where peers do not gossip
    several = named.pop("faults")
    parts: setup.Parts = {n: choose(flag(n), spec, registries[n]) for n, spec in named.items() if spec is not None}
    made = ("algorithm", "compressor", "attack", "augment", "auxiliary", "adversary", "network")
    parts |= {name: parts[name]() for name in made}
    parts["faults"] = tuple(each() for each in choose_several(flag("faults"), several, registries["faults"]))
    parts["objective"] = objective(parts["auxiliary"], parts["adversary"])
    parts["lr_schedule"](0, run.rounds)
    return parts


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
