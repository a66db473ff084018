"""The loop: peers train, speak, and are looked at. The only file that knows where mixing matrices come from."""

from __future__ import annotations

import warnings
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfl import checkpoint, cost, dealing, events, fingerprints, keeping, keys, logs, metrics, setup, starts, watch
from dfl.aggregators import AGGREGATORS
from dfl.algorithms import ALGORITHMS, Algorithm, State
from dfl.attacks import ATTACKS
from dfl.augment import AUGMENTS
from dfl.auxiliaries import AUXILIARIES
from dfl.compressors import COMPRESSORS
from dfl.config import Run
from dfl.errors import DivergedError, InputError
from dfl.faults import FAULTS
from dfl.isolation import isolated
from dfl.layout import Layout
from dfl.local import SCHEDULES
from dfl.models import MODELS, modules_of
from dfl.mpi import World, connect
from dfl.net import Net
from dfl.network import Network, Speech
from dfl.objectives import ADVERSARIES, objective
from dfl.pulse import alive
from dfl.rehearsal import rehearse
from dfl.resume import finished
from dfl.roots import everything
from dfl.run_directory import refuse_unusable
from dfl.specs import Component, choose, choose_several, flag
from dfl.speeds import NETWORKS, with_clock
from dfl.task import cross_entropy
from dfl.values import shown

if TYPE_CHECKING:
    import torch

    import topologies
    from dfl.datasets.data import Data
    from dfl.report import Listener, Report
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
    report: Listener | None = None,
) -> Iterator[dict[str, float]]:
    """Run a simulation and yield a row of figures at round 0, at every `eval_every`-th round and at the last.

    Args:
        run: what to simulate; `run.out` is the folder to write to, if any.
        model: the caller's own module in place of `run.model`; its parameters are the common starting point. Of
            several, which agree in what `run.share` says is shared, peer i has the one numbered i mod their number. The
            run works on copies. Frozen parameters (`requires_grad=False`) are neither trained nor sent; tied weights
            are one parameter. All parameters are float32 or all float64.
        data: the caller's own data in place of `run.dataset`; lists and torch tensors will do for arrays.
        loss: (outputs, labels) -> (n,); cross entropy where not given.
        report: who is told of the progress, on rank 0; besides it the files of `run.out` are written.

    Yields:
        The columns of metrics.csv, on every rank; nothing where the run to go on with is finished.

    Raises:
        InputError: something asked for cannot be done.
        DivergedError: an honest peer's model is no longer finite, or its training loss or accuracy at an evaluation
            although it has examples.
    """
    if not isinstance(run, Run):
        raise InputError(f"run must be a dfl.Run, not {shown(run)}: write dfl.Run(rounds=20)")
    if run.tensorboard and run.out is None:
        raise InputError("--tensorboard writes into the folder of the run: give --out")
    world = connect(run.timeout)
    world.busy = True
    brought = _brought(model, data)
    if done := world.from_root(lambda: _usable(run, report, replace(run.settled(world.size), **brought))):
        if not world.rank:
            warnings.warn(f"{done.decode()}: dfl.load reads it back", stacklevel=2)
        world.busy = False
        return
    with alive(world, run.out, run.timeout), logs.gathered(run):
        with logs.listening(world, run):
            decided = _decide(run, world, model, data, loss)
            with isolated(run.threads):
                setting = _build(decided, world, model, loss)
            reported = _reported(setting, report)
        rows = _rounds(setting, reported)
        try:
            while True:
                with logs.listening(world, run), isolated(run.threads):
                    row = next(rows, None)
                if row is None:
                    break
                yield row
        finally:  # of a caller that leaves as well
            with logs.listening(world, run), isolated(run.threads):
                rows.close()
    world.busy = False


def _check_report(report: Any) -> None:
    """Refuse a report that lacks a method of `dfl.report.Listener`.

    Raises:
        InputError: it does.
    """
    methods = ("start", "tick", "row", "finish", "close")
    missing = [name for name in methods if not callable(getattr(report, name, None))]
    if report is not None and missing:
        raise InputError(f"report must have the methods {', '.join(methods)}: {shown(report)} has no {missing[0]}")


def _usable(run: Run, report: Any, settled: Run) -> bytes:
    """On rank 0: refuse a report or a folder that cannot be used, before anything is written.

    Returns:
        A line where the run is finished already, else nothing.
    """
    _check_report(report)
    if run.out is not None:
        refuse_unusable(run.out, run.resume is not None)
    return finished(settled).encode()


def _reported(setting: Setting, report: Listener | None) -> Report | None:
    """The files of a run besides a caller's report, on rank 0; who asked for neither is warned of what they would say.

    A report of ours that writes files is taken as it is.
    """
    if not setting.facts:
        return None
    if setting.run.out is None and report is None:
        for note in setting.facts.notes:
            warnings.warn(note, stacklevel=3)
        return None
    from dfl.report import Report

    return report if isinstance(report, Report) and report.folder else Report(setting.run.out, report)


def _rounds(setting: Setting, report: Report | None) -> Generator[dict[str, float], None, None]:
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
    return _build(_decide(run, world, model, data, loss), world, model, loss)


class Decided(NamedTuple):
    """What is known of a run before torch is needed.

    Attributes:
        run, asked: the settled run, with and without the names of what the caller brings.
        common: what every rank was told.
        found: what only rank 0 knows; nothing elsewhere.
    """

    run: Run
    asked: Run
    common: dealing.Arrays
    found: dict[str, Any]


def _decide(run: Run, world: World, model: Models | None, data: Data | None, loss: Loss | None) -> Decided:
    """Check a run, and read and deal its data."""
    asked = run.settled(world.size)
    run = replace(asked, **_brought(model, data))
    found: dict[str, Any] = {}
    if world.rank:  # import torch while rank 0 reads and decides
        torch.get_num_threads()
    common = dealing.unpacked(world.from_root(lambda: _decided(run, asked, (model, data, loss), found)))
    return Decided(run, asked, common, found)


def _brought(model: Models | None, data: Data | None) -> dict[str, Any]:
    """The settings in whose place a caller brings something."""
    return {name: "own" for name, given in (("model", model), ("dataset", data)) if given is not None}


def _build(decided: Decided, world: World, model: Models | None, loss: Loss | None) -> Setting:
    """Set every rank up."""
    run, asked, common, found = decided
    if loss is not None and not callable(loss):
        raise InputError(f"loss must be a function of outputs and labels, not {shown(loss)}")
    torch.set_num_threads(run.threads)
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
    modules = setup.make_modules(run, parts, common, model)
    place = setup.Place(np.arange(mine.start, mine.stop), setup.device(run.device, world))
    task = setup.make_task(run, parts, (modules, loss or cross_entropy), (common, own), place)
    starts.check(run, task, given or model is not None, (parts["algorithm"].serves, layout.widest), world)
    task = setup.tried(run, task, common, model is not None)
    if root is not None and len(root["labels"]):
        task = setup.with_server(task, root, common["sizes"][:, 0], parts["algorithm"].root_rule is everything)
    speech = Speech(parts["compressor"], parts["aggregator"], attack, liars, parts["faults"])
    graphs = dealing.matrices(common), dealing.stationary(common)
    network = Network(layout, graphs[0], world, speech, run.seed, stationary=graphs[1])
    task = with_clock(network, parts["network"], task, common["sizes"][:, 0])
    exam = setup.make_exam(run, task, (common, own), attack)
    world.pulse.doing = f"peers {mine.start} to {mine.stop - 1}"
    return Setting(run, world, task, network, parts["algorithm"], exam, model is not None, given, facts)


def _decided(run: Run, asked: Run, own: tuple[Models | None, Data | None, Loss | None], found: dict[str, Any]) -> bytes:
    """On rank 0: what everybody is told; what only rank 0 needs to know is put into `found`.

    `own` is a caller's own model, data and loss.
    """
    model, data, loss = own
    parts = check(asked)
    trace = keeping.trace(run.out) if run.out else ()
    last = checkpoint.found(run, parts["lr_schedule"])
    read, dealt = dealing.read(run, parts, data)  # before the graph: too many peers are refused at once
    graph = _graph(run, parts) if parts["algorithm"].gossips else None
    weights, stationary = (graph.weights, graph.stationary) if graph else ((), ())
    notes = rehearse(run, parts, read, weights, stationary)
    said = dealing.packed(dealing.known_to_all(read, dealt, weights, stationary))
    mark = dealing.fingerprint(said, read, dealt) if run.out else ""
    given = _given(run, parts, model, loss) if run.out else {}
    begun = checkpoint.begun(run, last, trace, mark, given)
    found.update(data=read, deal=dealt, graph=graph, notes=notes, begun=begun)
    return said


def _given(run: Run, parts: setup.Parts, model: Models | None, loss: Loss | None) -> dict[str, str]:
    """Checksums of a caller's own model and loss, and of the files that a run reads besides its data and its graph."""
    files = {f"file of --network {run.network}": getattr(parts["network"], "path", None)}
    if run.start is not None:
        files |= {f"{name} of --start {run.start}": run.start / name for name in ("state.safetensors", "peers.csv")}
    found = fingerprints.of_files({asked: path for asked, path in files.items() if path is not None})
    if model is not None:
        found |= fingerprints.of_models(modules_of(model))
    return found | (fingerprints.of_loss(loss) if loss is not None else {})


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
    notes = (
        *begun.notes,
        *data.notes,
        *graph.notes,
        *algorithm.notes(graph.spectrum.smallest),
        *found["notes"],
        *alone,
    )
    return setup.Facts(graph, graph.spectrum, *known, notes, begun)
