"""The loop: peers train, speak, and are looked at. The only file that knows where mixing matrices come from."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl import checkpoint, cost, dealing, events, keeping, keys, logs, metrics, setup, starts, watch
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
from dfl.pulse import alive
from dfl.rehearsal import rehearse
from dfl.roots import everything
from dfl.run_directory import refuse_unusable
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
    if run.tensorboard and run.out is None:
        raise InputError("--tensorboard writes into the folder of the run: give --out")
    world = connect()
    world.busy = True
    world.from_root(lambda: _usable(run))
    with alive(world, run.out, run.timeout), logs.gathered(world, run):
        setting = prepare(run, world, model, data, loss)
        yield from _rounds(setting, report or _reported(setting))
    world.busy = False


def _usable(run: Run) -> bytes:
    if run.out is not None:
        refuse_unusable(run.out, run.resume is not None)
    return b""


def _reported(setting: Setting) -> Report | None:
    """The files of a run, on rank 0; who asked for none is warned of what the report would have said."""
    if setting.run.out is not None and setting.facts:
        from dfl.report import Report

        return Report(setting.run.out)
    for note in setting.facts.notes if setting.facts else ():
        warnings.warn(note, stacklevel=3)
    return None


def _rounds(setting: Setting, report: Report | None) -> Iterator[dict[str, float]]:
    run, algorithm, network = setting.run, setting.algorithm, setting.network
    with watch.told(report, setting) as watching:
        t, task, state = checkpoint.restore(_beginning(setting), setting, watching)
        yield from watching.look(t, state)
        while not watching.done:
            task, state = _phase(setting, watching.opening, task, state)
            net = Net(network, t, seen=watch.due(t + 1, run) or checkpoint.due(t + 1, setting))
            state = algorithm.round(state, net.paced(task), net, t)
            network.turn(t)
            told = _agreed(state, setting, t)
            t += 1
            checkpoint.keep(checkpoint.Moment(t, task, state), setting, watching, told)
            yield from watching.look(t, state)
    network.close()


def _beginning(setting: Setting) -> checkpoint.Moment:
    """Where a run starts that nobody has begun."""
    run, task, algorithm = setting.run, setting.task, setting.algorithm
    task = replace(task, spec=task.spec.whole) if run.pretrain else task
    x, known = starts.start(run, task, setting.own_module, algorithm.serves, setting.starts)
    return checkpoint.Moment(0, task, algorithm.init(x, known, Net(setting.network, 0)))


def _phase(setting: Setting, opening: bool, task: Task, state: Any) -> tuple[Task, Any]:
    """The problem and the state of the next round: when everything has been shared long enough, a part of it is."""
    if opening or task is setting.task:
        return task, state
    return setting.task, setting.algorithm.part(state, setting.task.spec.shared)


def _agreed(state: State, setting: Setting, t: int) -> int:
    """By which signal some rank was told to stop, 0 for none; and an end where some model is no longer finite.

    What becomes of a liar's model is its own affair.
    """
    (*shared, own), nobody = [metrics.broken(part) for part in state.parts], setting.layout.peers
    served = any(map(len, shared)) or (state.one and len(own))
    honest = np.setdiff1d(setting.task.peers[[] if state.one else own], setting.network.speech.liars)
    peer, told = setting.world.smallest(int(honest[0]) if len(honest) else nobody, -setting.world.told)
    if served or peer < nobody:
        raise DivergedError(
            f"{'the server' if served else f'peer {peer}'}'s model is no longer finite after round {t + 1}: "
            f"try a smaller --lr (it is {setting.run.lr}) or other messages"
        )
    return -told


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
    if world.rank:  # while rank 0 reads and decides
        torch.set_num_threads(run.threads)
    common = dealing.unpacked(world.from_root(lambda: _decided(run, asked, data, found)))
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
    speech = Speech(parts["compressor"], parts["aggregator"], attack, liars, parts["faults"])
    network = Network(layout, dealing.matrices(common), world, speech, run.seed)
    task = with_clock(network, parts["network"], task, common["sizes"][:, 0])
    exam = setup.make_exam(run, task, (common, own), attack)
    world.pulse.doing = f"peers {mine.start} to {mine.stop - 1}"
    return Setting(run, world, task, network, parts["algorithm"], exam, "model" in brought, given, facts)


def _decided(run: Run, asked: Run, data: Data | None, found: dict[str, Any]) -> bytes:
    """On rank 0: what everybody is told; what only rank 0 needs to know is put into `found`."""
    parts = check(asked)
    trace = keeping.trace(run.out) if run.out else ()
    last = checkpoint.found(run, parts["lr_schedule"])
    read, dealt = dealing.read(run, parts, data)  # before the graph: too many peers are refused at once
    graph = _graph(run, parts) if parts["algorithm"].gossips else None
    rehearse(run, parts, read, graph.weights if graph else ())
    said = dealing.packed(dealing.known_to_all(read, dealt, graph.weights if graph else ()))
    mark = dealing.fingerprint(said, read, dealt) if run.out else ""
    found.update(data=read, deal=dealt, graph=graph, begun=checkpoint.begun(run, last, trace, mark))
    return said


def check(run: Run) -> setup.Parts:
    """The components that a settled run names, with their options; needs no torch.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    events.check(run)
    return _chosen(run, components())


def _chosen(run: Run, registries: Mapping[str, Mapping[str, Component]]) -> setup.Parts:
    named = {name: getattr(run, name) for name in registries}  # no graph where peers do not gossip
    several = named.pop("faults")
    parts: setup.Parts = {n: choose(flag(n), spec, registries[n]) for n, spec in named.items() if spec is not None}
    made = ("algorithm", "compressor", "attack", "augment", "auxiliary", "adversary", "network")
    parts |= {name: parts[name]() for name in made}
    faults = (each() for each in choose_several(flag("faults"), several, registries["faults"]))
    parts["faults"] = tuple(each for each in faults if each.touches != "nothing")
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
    known, begun = (counts, dealing.sizes(deal), shape, len(data.test_labels)), found["begun"]
    if graph is None:
        return setup.Facts(None, None, *known, (*begun.notes, *data.notes), begun)
    alone = ("one peer talks to nobody: say --peers 16, or start several ranks",) if len(graph.degrees) == 1 else ()
    notes = (*begun.notes, *data.notes, *graph.notes, *algorithm.notes(graph.spectrum.smallest), *alone)
    return setup.Facts(graph, graph.spectrum, *known, notes, begun)
