"""How does a run survive? All that it knows between two rounds is kept, and taken up again on any number of ranks.

A checkpoint holds what there is before an evaluation that is due: a run that goes on begins with that evaluation, as
every run begins with one. Nothing in it is about the launch. `dfl.keeping` is about its files.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from signal import Signals
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dfl import fingerprints, keeping, manifest
from dfl.config import Run
from dfl.dealing import Arrays, packed, unpacked
from dfl.errors import InputError, Suspended
from dfl.files import read_bytes
from dfl.record import versions
from dfl.resume import before, comparable, refuse_others, refuse_too_late
from dfl.run_directory import outputs

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.mpi import World
    from dfl.simulation import Setting
    from dfl.task import Task
    from dfl.watch import Watch
else:
    from dfl.lazy import torch

COUNTERS = "counters"
"""Under which name there is what is counted of every peer; fields of states have other names."""
CLOCK = "clock"
"""Under which name there is the simulated time of every peer."""


class Moment(NamedTuple):
    """Where a run is between two rounds: how many it has done, on which problem, and the state."""

    t: int
    task: Task
    state: Any


class Begun(NamedTuple):
    """What rank 0 knows of how far a run has come: its last checkpoint, and what tells its data and graph from others.

    Attributes:
        found: None where there is none.
        data: a checksum.
        trace: what its folder held then, as `keeping.trace` says.
        notes: what to warn of, one line each.
        given: checksums of what else it is given, by what that is called; see `dfl.fingerprints`.
    """

    found: keeping.Found | None
    data: str
    trace: tuple[bytes, ...]
    notes: tuple[str, ...] = ()
    given: Mapping[str, str] = MappingProxyType({})


def found(run: Run, schedule: Callable[[int, int], float]) -> keeping.Found | None:
    """The checkpoint from which a run is to go on, on rank 0; None where it begins.

    Args:
        run: as it is settled.
        schedule: its factor on the learning rate in round t of so many.

    Raises:
        InputError: what is in `run.resume` is damaged, of another run, or finished without a checkpoint.
    """
    if run.resume is None or (begun := before(run.resume)) is None:
        return None
    refuse_others(run.resume, begun, run)
    last = keeping.find(run.resume)
    if last is None:
        if line := manifest.damage(run.resume):
            raise InputError(f"{line}, and there is no checkpoint to go on from: begin another run")
        if manifest.read(run.resume).get("exit") == 0:
            raise InputError(
                f"--resume {run.resume} is finished and has no checkpoint to go on from: begin another run, with "
                "--checkpoint-every to go on with later"
            )
        return None
    if comparable(last.content["run"]) != comparable(run.to_dict()):
        raise InputError(f"{last.path} is a checkpoint of another run than {run.resume}/run.json")
    refuse_too_late(run.resume, run, (last.round, begun.rounds), schedule)
    return last


def begun(
    run: Run,
    last: keeping.Found | None,
    trace: tuple[bytes, ...],
    data: str,
    given: Mapping[str, str] = MappingProxyType({}),
) -> Begun:
    """The checkpoint together with what it must go with: the data and the graph (a checksum), and what else is given.

    Where there is no checkpoint, run.json has them. What an earlier version of dfl wrote without such checksums is not
    compared by them.

    Raises:
        InputError: it does not.
    """
    if last is None or run.resume is None:
        if run.resume is None or not outputs(run.resume):
            return Begun(None, data, trace, (), given)
        notes = _compared(run.resume, manifest.read(run.resume), data, given)
        return Begun(None, data, trace, (f"{run.resume} has no checkpoint: the run starts at round 0", *notes), given)
    known = _compared(run.resume, last.content, data, given)
    other = {n: v for n, v in versions().items() if last.content["versions"].get(n) != v and n != "mpi4py"}
    said = ", ".join(f"{name} {last.content['versions'].get(name)}, now {now}" for name, now in other.items())
    notes = (f"the checkpoint is of {said}: last bits may differ",) if said else ()
    again = _unlike(run.resume, last.content["table"])
    return Begun(last, data, trace, (*last.damaged, *notes, *again, *known), given)


def _unlike(folder: Path, table: str) -> tuple[str, ...]:
    """What in a run's folder is not as the run wrote it, in one line; it is written again."""
    try:
        rows = read_bytes(folder / "metrics.csv")
    except OSError:
        rows = b""
    line = "" if rows.startswith(table.encode()) else f"{folder}/metrics.csv is damaged"
    return (f"{line}: it is written again",) if (line := manifest.damage(folder) or line) else ()


def _compared(folder: Path, began: Mapping[str, Any], data: str, given: Mapping[str, str]) -> tuple[str, ...]:
    """What to warn of where what is given is not what the run began with, and does not change how it goes on.

    Args:
        folder: of the run.
        began: what its checkpoint, or its run.json, has of how it began.
        data, given: as `begun` takes them.

    Raises:
        InputError: it does.
    """
    if began.get("data", data) != data:
        raise InputError(f"--resume {folder}: the data set or the graph is not the one that the run began with")
    before = began.get("given")
    if before is None:
        return ()
    minor = [str(each).rsplit(".", 1)[0] for each in (began["versions"].get("python"), versions().get("python"))]
    skipped = fingerprints.BYTECODE if minor[0] != minor[1] else ()
    for name in sorted((before.keys() | given.keys()) - {fingerprints.VALUES, *skipped}):
        if before.get(name) != given.get(name):
            raise InputError(f"--resume {folder}: the {name} is not the one that the run began with")
    if before.get(fingerprints.VALUES) != given.get(fingerprints.VALUES):
        return ("the model given has other initial values than at the start of the run, which goes on with its own",)
    return ()


def keep(moment: Moment, setting: Setting, watch: Watch, told: int) -> None:
    """Write a checkpoint if it is time to, or if the run was told to stop; and stop it then.

    Args:
        moment: where the run is.
        setting, watch: the run, and what has been seen of it.
        told: the signal, 0 for none.

    Raises:
        InputError: on every rank, if it cannot be written; the earlier ones are still there.
        Suspended: on every rank, if the run was told to stop.
    """
    out = setting.run.out
    if out is not None and (told or due(moment.t, setting)):
        save(moment, setting, watch)
    if told:
        on = f"go on with --resume {out}" if out else "there is no folder to keep it in"
        raise Suspended(f"stopped by {Signals(told).name} after round {moment.t} of {setting.run.rounds}: {on}")


def due(t: int, setting: Setting) -> bool:
    """Whether a checkpoint is to be written after t rounds."""
    every = setting.run.checkpoint_every
    return every is not None and (t % every == 0 or t == setting.run.rounds)


def save(moment: Moment, setting: Setting, watch: Watch) -> None:
    """Write a checkpoint, on every rank at a time, and remove those that are too old.

    Raises:
        InputError: on every rank, if it cannot be written; the earlier ones are still there.
    """
    world, network, (t, task, state) = setting.world, setting.network, moment
    begun, arrays = time.perf_counter(), dict[str, Any]()
    for name, value in _tensors(state).items():
        rows = value.cpu().numpy()
        arrays[name] = rows if name in state.alike else world.gather(rows)
    arrays[COUNTERS] = world.gather(np.stack([network.payload, network.told], axis=1))
    arrays |= {CLOCK: network.clock.now} if network.clock else {}
    counts = world.gather(np.array([[network.wire, network.lost]]))
    content = {
        "round": t,
        "run": replace(setting.run, resume=None).to_dict(),
        "parted": task is setting.task,
        "opening": watch.opening,
        "seconds": time.perf_counter() - watch.begun,
        "parameters": network.parameters,
    }

    def write() -> bytes:
        assert setting.run.out is not None
        assert setting.facts is not None
        assert counts is not None
        table = watch.report.table() if watch.report else ""
        wire, lost = counts.sum(0).tolist()
        content.update(wire=wire, lost=lost, table=table, versions=versions())
        content.update(data=setting.facts.begun.data, given=dict(setting.facts.begun.given))
        keeping.write(setting.run.out, arrays, content)
        return b""

    world.from_root(write)
    logging.getLogger("dfl").info("checkpoint after round %d in %.2f s", t, time.perf_counter() - begun)


def restore(moment: Moment, setting: Setting, watch: Watch) -> Moment:
    """Where a run goes on: at the checkpoint that rank 0 has found, else where it would begin.

    Args:
        moment: where it would begin, from which is learned what its state looks like here.
        setting, watch: the run; what has been counted is put back into them.

    Raises:
        InputError: on every rank, if the checkpoint is of another state.
    """
    world, network, (_, task, state) = setting.world, setting.network, moment
    last = setting.facts.begun.found if setting.facts else None
    said = world.from_root(lambda: json.dumps(last.content).encode() if last else b"")
    if not said:
        return moment
    content = json.loads(said)
    if content["parted"] and task is not setting.task:
        task, state = setting.task, setting.algorithm.part(state, setting.task.spec.shared)
    like = {name: value.cpu().numpy() for name, value in _tensors(state).items()}
    like[COUNTERS] = np.stack([network.payload, network.told], axis=1)
    like |= {CLOCK: network.clock.now} if network.clock else {}
    rows = _handed_out(last, like, (*state.alike, CLOCK), world)
    network.payload[:], network.told[:] = rows.pop(COUNTERS).T
    network.wire, network.lost = (0, 0) if world.rank else (content["wire"], content["lost"])
    if network.clock:
        network.clock.now = rows.pop(CLOCK)
    network.parameters, watch.opening = content["parameters"], content["opening"]
    watch.begun -= content["seconds"]
    values = {name: torch.from_numpy(value).to(getattr(state, name).device) for name, value in rows.items()}
    return Moment(content["round"], task, replace(state, **values))


def _handed_out(found: keeping.Found | None, like: Arrays, alike: tuple[str, ...], world: World) -> Arrays:
    """The rows of a checkpoint that are this rank's: as many of each field as `like` has."""
    names, whole = sorted(like), dict[str, Any]()
    mine = np.array([[0 if name in alike else len(like[name]) for name in names]])
    everyone = world.everywhere(mine)
    ends = np.cumsum(everyone, axis=0)
    begins = ends - everyone

    def fits() -> bytes:
        assert found is not None
        whole.update(found.arrays())
        known = {name: len(like[name]) if name in alike else int(ends[-1, k]) for k, name in enumerate(names)}
        wanted = {name: ((n, *like[name].shape[1:]), like[name].dtype) for name, n in known.items()}
        there = {name: (value.shape, value.dtype) for name, value in sorted(whole.items())}
        if wanted != there:
            raise InputError(f"{found.path} holds another state than this run has: {there}, not {wanted}")
        return b""

    def part(rank: int) -> bytes:
        cut = {name: slice(begins[rank, k], ends[rank, k]) for k, name in enumerate(names)}
        return packed({name: whole[name][slice(None) if name in alike else cut[name]] for name in names})

    world.from_root(fits)
    return {name: value.copy() for name, value in unpacked(world.scatter(part)).items()}


def _tensors(state: Any) -> dict[str, Tensor]:
    """The fields of a state that are tensors; others are the same in every round."""
    values = {each.name: getattr(state, each.name) for each in fields(state)}
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
