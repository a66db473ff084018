"""The loop: peers train, speak, and are looked at. The only file that knows where mixing matrices come from."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dfl import cost, dealing, keys, metrics, setup
from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.compressors import COMPRESSORS
from dfl.config import Component, Run, choose, flag
from dfl.errors import DivergedError, InputError
from dfl.layout import Layout
from dfl.local import SCHEDULES
from dfl.models import MODELS
from dfl.mpi import World, connect
from dfl.net import Network
from dfl.task import cross_entropy

if TYPE_CHECKING:
    import torch
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
    "model": MODELS,
    "lr_schedule": SCHEDULES,
}
"""The kinds of component that every rank has a use for, by the field of `Run` that chooses one."""


def components() -> dict[str, Mapping[str, Component]]:
    """Every kind of component; graphs and data come in here because only rank 0 should pay for their imports."""
    import topologies
    from dfl.datasets import DATASETS, PARTITIONS

    graphs: dict[str, Mapping[str, Component]] = {"topology": topologies.TOPOLOGIES, "mixing": topologies.MIXINGS}
    return {**graphs, "dataset": DATASETS, "partition": PARTITIONS, **LOCAL}


COLUMNS = (
    "round", "seconds", "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max", "accuracy_std",
    "accuracy_mean_model", "local_accuracy_mean", "consensus_distance", "payload_bytes", "wire_bytes",
)  # fmt: skip
"""The columns of metrics.csv; those that the run or its algorithm adds come behind."""


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
        """Bytes that all peers together say in a round."""
        return cost.payload_per_round(self.network, self.task.spec.d, self.task.scale.dtype)


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
    with _told(report, setting) as watch:
        state = algorithm.init(*setup.start(run, task, setting.own_module), network.at(0))
        yield from watch.look(0, state)
        for t in range(run.rounds):
            state = algorithm.round(state, task, network.at(t, seen=_due(t + 1, run)), t)
            _stop_unless_finite(state.x, setting, t)
            yield from watch.look(t + 1, state)
    network.close()
    setting.world.busy = False


def _due(t: int, run: Run) -> bool:
    """Whether the state after t rounds is looked at."""
    return t % run.eval_every == 0 or t == run.rounds


@contextmanager
def _told(report: Report | None, setting: Setting) -> Iterator[_Watch]:
    """Begin a report, and say in it how the run ended, whatever ended it."""
    watch = _Watch(setting, report)
    try:
        yield watch
        watch.finish()
    except BaseException as error:
        if report:
            report.close(error)
        raise
    if report:
        report.close(None)


class _Watch:
    """Looks at states when it is time to, and tells the report, which only rank 0 may have."""

    def __init__(self, setting: Setting, report: Report | None) -> None:
        self.setting, self.report = setting, report
        self.begun = time.perf_counter()
        self.last: tuple[Any, Any] = (None, None)
        self.telling = bool(setting.world.from_root(self._begin))

    def _begin(self) -> bytes:
        if self.report is None:
            return b""
        self.report.start(self.setting)
        return b"told"

    def look(self, t: int, state: Any) -> Iterator[dict[str, float]]:
        """Yield a row of figures on the state after t rounds, if one is due."""
        run, world = self.setting.run, self.setting.world
        if not _due(t, run):
            if self.report:
                self.report.tick(t)
            return
        figures, peers = _row(state, self.setting)
        row = {"round": t, "seconds": time.perf_counter() - self.begun} | figures
        row = json.loads(world.from_root(lambda: json.dumps(row).encode()))
        if t == run.rounds:  # not before: it would be kept beside the states to come
            self.last = state, peers
        if self.report:
            self.report.row(row)
        yield row

    def finish(self) -> None:
        """Hand the last state to the report."""
        state, peers = self.last
        models = metrics.models(state.x, self.setting.world) if self.telling else None
        if self.report and models is not None:
            self.report.finish(peers, models)


def _row(state: Any, setting: Setting) -> tuple[dict[str, float], dict[str, Any] | None]:
    """A row of metrics.csv without its clock, and every peer's figures; on rank 0, else nothing."""
    peers = metrics.measure(state, setting)
    apart, mean = metrics.consensus(state.x, setting.world, setting.layout)
    wire = setting.world.gather(np.array([setting.network.wire]))
    if peers is None or mean is None or wire is None:
        return {}, None
    row = metrics.summary(peers, setting.algorithm.columns)
    row |= {"consensus_distance": apart, "wire_bytes": int(wire.sum())}
    row["accuracy_mean_model"] = float(metrics.on_common(mean[None], setting.task, setting.exam)[0])
    return {name: row[name] for name in (*COLUMNS, *row) if name in row}, peers


def _stop_unless_finite(x: Tensor, setting: Setting, t: int) -> None:
    """End every rank where some peer's model is no longer finite."""
    broken, nobody = metrics.broken(x), setting.layout.peers
    peer = setting.world.smallest(setting.task.peers[broken[0]] if len(broken) else nobody)
    if peer < nobody:
        raise DivergedError(
            f"peer {peer} is no longer finite after round {t + 1}: "
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
        found.update(data=read, deal=dealt, graph=_graph(run, parts))
        return dealing.packed(dealing.known_to_all(read, dealt, found["graph"].weights))

    if world.rank:  # while rank 0 reads and decides
        torch.set_num_threads(run.threads)
    common = dealing.unpacked(world.from_root(decide))
    parts = _chosen(asked, LOCAL)
    layout = Layout(len(common["sizes"]), world.size)
    mine = layout.block(world.rank)
    facts = _facts(found, parts["algorithm"]) if found else None
    own = dealing.handed_out(world, layout, lambda peers: dealing.owned(found["data"], found["deal"], peers))
    found.clear()  # the data set, which everybody has its part of
    torch.set_num_threads(run.threads)
    if model is None:
        model = setup.make_module(parts, common["inputs"].shape[1:], int(common["classes"]))
    place = setup.Place(mine, setup.device(run.device, world))
    task = setup.make_task(run, parts, (model, loss or cross_entropy), (common, own), place)
    setup.check_start(run, task, "model" in brought, (layout.widest, world.smallest(setup.memory())))
    network = Network(dealing.matrices(common), world, parts["compressor"], run.seed)
    exam = setup.make_exam(run, task, (common, own))
    world.doing = f"peers {mine.start} to {mine.stop - 1}"
    return Setting(run, world, task, network, parts["algorithm"], exam, "model" in brought, facts)


def check(run: Run) -> setup.Parts:
    """The components that a settled run names, with their options; needs no torch.

    Raises:
        InputError: an unknown component or option, or a bad value.
    """
    return _chosen(run, components())


def _chosen(run: Run, registries: Mapping[str, Mapping[str, Component]]) -> setup.Parts:
    parts: setup.Parts = {name: choose(flag(name), getattr(run, name), kind) for name, kind in registries.items()}
    parts |= {name: parts[name]() for name in ("algorithm", "compressor")}
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
    spectrum = graph.spectrum
    alone = ("one peer talks to nobody: say --peers 16, or start several ranks",) if len(graph.degrees) == 1 else ()
    notes = (*graph.notes, *algorithm.notes(spectrum.smallest), *alone)
    counts = dealing.count_labels(data, deal)
    return setup.Facts(
        graph, spectrum, counts, dealing.sizes(deal), data.train_inputs.shape[1:], len(data.test_labels), notes
    )
