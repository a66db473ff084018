"""Checkpoints: the complete state of a run between two rounds, saved and restored on any number of
ranks.

The checkpoint of round t is written before round t is evaluated: a resumed run first makes that
evaluation, if one is due. Nothing in it depends on the launch. It holds the tensors of the method's
`State`, the personal parameters, the counters of traffic and the rows of metrics.csv.
`dfl.store.checkpoint_files` reads and writes its files and has the number of its format.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from signal import Signals
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError, Suspended
from dfl.core.layout import put_back
from dfl.core.profiling import in_phase
from dfl.simulation.distribute_data import pack, unpack
from dfl.simulation.evaluator import is_evaluated
from dfl.simulation.run_state import RunState, narrowed, tensors
from dfl.store import checkpoint_files
from dfl.store.record import versions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.comm.mpi import World
    from dfl.simulation.evaluator import Evaluator
    from dfl.simulation.prepared import Prepared
    from dfl.store.run_files import RunFiles
else:
    from dfl.core.lazy import torch

_S = TypeVar("_S", bound=np.generic)

COUNTERS = "counters"
"""Name of the traffic counters of the peers among the arrays; fields of states have other names."""
CLOCK = "clock"
"""Name of the simulated time of the peers among the arrays."""
PERSONAL = "personal"
"""Name of the personal parameters of the peers among the arrays."""
SERVER_PERSONAL = "personal of the server"
"""Name of the personal parameters of the server's own task, which rank 0 has."""


def keep(
    run_state: RunState,
    prepared: Prepared,
    evaluator: Evaluator,
    files: RunFiles | None,
    signal: int,
) -> None:
    """Write a checkpoint if one is due or a signal stops the run; in that case, raise `Suspended`.

    Args:
        run_state: where the run is.
        prepared: the run.
        evaluator: what has been evaluated.
        files: the run directory, on rank 0 of a run that has one.
        signal: the number of the signal, 0 for none.

    Raises:
        InputError: on every rank, if it cannot be written; earlier checkpoints stay.
        Suspended: on every rank, if a signal stops the run.
    """
    run = prepared.run
    if run.out is not None and (signal or due(run_state.t, run)):
        save(run_state, prepared, evaluator, files)
    if signal:
        resume = (
            f"go on with --resume {run.out}"
            if run.out
            else "it has no folder, so no checkpoint is kept"
        )
        name = Signals(signal).name
        raise Suspended(f"stopped by {name} after round {run_state.t} of {run.rounds}: {resume}")


def due(t: int, run: Run) -> bool:
    """Return whether a checkpoint is written after t rounds."""
    every = run.checkpoint_every
    return every is not None and (t % every == 0 or t == run.rounds)


@in_phase("write")
def save(
    run_state: RunState, prepared: Prepared, evaluator: Evaluator, files: RunFiles | None
) -> None:
    """Write a checkpoint; called on every rank. Checkpoints that are too old are removed.

    Raises:
        InputError: on every rank, if it cannot be written; earlier checkpoints stay.
    """
    world, network, run = prepared.world, prepared.network, prepared.run
    task, state, traffic = run_state.task, run_state.state, network.traffic
    replicated = prepared.algorithm.replicated
    begun = time.perf_counter()
    arrays: dict[str, Any] = {}
    for name, value in tensors(state).items():
        rows = value.cpu().numpy()
        arrays[name] = rows if name in replicated else _gathered(name, rows, prepared)
    if task.personal.shape[1]:
        arrays[PERSONAL] = _gathered(PERSONAL, task.personal.cpu().numpy(), prepared)
        if task.server:
            arrays[SERVER_PERSONAL] = task.server.personal.cpu().numpy()
    counters = np.stack([traffic.payload, traffic.downloaded], axis=1)
    arrays[COUNTERS] = _gathered(COUNTERS, counters, prepared)
    arrays |= {CLOCK: network.clock.now} if network.clock else {}
    counts = world.gather(np.array([[traffic.wire, traffic.lost]]))
    content = {
        "round": run_state.t,
        "run": replace(run, resume=None).to_dict(),
        "shared": task.parameter_layout.shared,
        "sharing_all": evaluator.sharing_all,
        "seconds": time.perf_counter() - evaluator.begun,
        "parameters": traffic.parameters,
    }

    def write() -> bytes:
        assert run.out is not None
        assert prepared.progress is not None
        assert counts is not None
        assert files is not None
        wire, lost = counts.sum(0).tolist()
        content.update(wire=wire, lost=lost, table=files.table(), versions=versions())
        content.update(data=prepared.progress.data, given=dict(prepared.progress.given))
        checkpoint_files.write(run.out, arrays, content)
        return b""

    world.from_root(write)
    seconds = time.perf_counter() - begun
    logging.getLogger("dfl").info("checkpoint after round %d in %.2f s", run_state.t, seconds)


def restore(run_state: RunState, prepared: Prepared, evaluator: Evaluator) -> RunState:
    """Return where a run goes on: at the checkpoint that rank 0 has found, else where it begins.

    Args:
        run_state: where it begins; its state has the form of this rank's state.
        prepared, evaluator: the run; what has been counted is put back into them.

    Raises:
        InputError: on every rank, if the checkpoint holds another state.
    """
    world, network = prepared.world, prepared.network
    traffic = network.traffic
    last = prepared.progress.found if prepared.progress else None
    message = world.from_root(lambda: json.dumps(last.content).encode() if last else b"")
    if not message:
        return run_state
    content = json.loads(message)
    if content["shared"] != run_state.task.parameter_layout.shared:
        run_state = narrowed(run_state, prepared)
    task, state = run_state.task, run_state.state
    like = {name: value.cpu().numpy() for name, value in tensors(state).items()}
    like[COUNTERS] = np.stack([traffic.payload, traffic.downloaded], axis=1)
    like |= {CLOCK: network.clock.now} if network.clock else {}
    if task.personal.shape[1]:
        like[PERSONAL] = task.personal.cpu().numpy()
    at_root = {SERVER_PERSONAL: task.server.personal} if task.server else {}
    at_root = {name: value for name, value in at_root.items() if value.shape[1]}
    replicated = (*prepared.algorithm.replicated, CLOCK)
    places = {
        name: _places(name, len(value), prepared)
        for name, value in sorted(like.items())
        if name not in replicated
    }
    rows = _scatter(last, like, places, at_root, world)
    if task.personal.shape[1]:
        task.personal.copy_(torch.from_numpy(rows.pop(PERSONAL)))
    traffic.payload[:], traffic.downloaded[:] = rows.pop(COUNTERS).T
    traffic.wire, traffic.lost = (0, 0) if world.rank else (content["wire"], content["lost"])
    if network.clock:
        network.clock.now = rows.pop(CLOCK)
    traffic.parameters = content["parameters"]
    evaluator.sharing_all = content["sharing_all"]
    evaluator.begun -= content["seconds"]
    values = {
        name: torch.from_numpy(value).to(getattr(state, name).device)
        for name, value in rows.items()
    }
    restored = RunState(content["round"], task, replace(state, **values))
    if is_evaluated(restored.t, prepared.run):  # it may not have been due when it was written
        task.recompute_statistics(restored.state.x)
    return restored


def _gathered(name: str, rows: NDArray[_S], prepared: Prepared) -> NDArray[_S] | None:
    """Return the rows of all ranks on rank 0, by ascending owner; None elsewhere."""
    places = _places(name, len(rows), prepared)
    everyone = prepared.world.gather(rows)
    return None if everyone is None else put_back(everyone, places)


def _places(name: str, rows: int, prepared: Prepared) -> NDArray[np.int64] | None:
    """Return the places (k,) of the rows of all ranks, given rank by rank, by ascending owner.

    A row belongs to a peer, or to an edge and so to the peer that owns it. The number of rows
    decides: `dfl.comm.placement` orders no peers where there are as many edges as peers. The places
    of edges are on rank 0 only. The result is None elsewhere, and where rows are in this order
    already.

    Args:
        name: the field of a state, or what else has a row per peer.
        rows: the rows on this rank.
        prepared: the run.

    Raises:
        InputError: on every rank, if the rows are neither of peers nor of edges.
    """
    world, layout = prepared.world, prepared.layout
    if layout.order is None:
        return None
    everyone = world.all_gather(np.array([rows]))
    if everyone.tolist() == layout.counts:
        return layout.order
    union = prepared.network.schedule.union
    edges = union.into if name in prepared.algorithm.incoming else union.out
    wanted = world.all_gather(np.array([len(edges)]))
    if everyone.tolist() != wanted.tolist():
        raise InputError(
            f"the state of {type(prepared.algorithm).__name__} has {everyone.sum()} rows of "
            f"{name!r}: give it {layout.peers}, one for each peer, or {wanted.sum()}, one for each "
            "directed edge, or name it in `incoming` if they are of incoming edges"
        )
    owners = world.gather(edges // layout.peers)
    if owners is None:
        return None
    return put_back(np.arange(len(owners)), np.argsort(owners, kind="stable"))


def _scatter(
    found: checkpoint_files.Checkpoint | None,
    like: Arrays,
    places: Mapping[str, NDArray[np.int64] | None],
    at_root: Mapping[str, Tensor],
    world: World,
) -> Arrays:
    """Return this rank's rows of a checkpoint: as many of each field as `like` has.

    Args:
        found: the checkpoint, on rank 0.
        like: arrays of the form of this rank's rows.
        places: those of the rows of all ranks, as `_places` returns them; without the fields that
            are the same on every rank.
        at_root: tensors that only rank 0 has, which are overwritten.
        world: the ranks.

    Raises:
        InputError: on every rank, if the checkpoint holds other arrays.
    """
    names, whole = sorted(like), Arrays()
    mine = np.array([[len(like[name]) if name in places else 0 for name in names]])
    everyone = world.all_gather(mine)
    ends = np.cumsum(everyone, axis=0)
    begins = ends - everyone

    def fits() -> bytes:
        assert found is not None
        whole.update(found.arrays())
        known = {
            name: int(ends[-1, k]) if name in places else len(like[name])
            for k, name in enumerate(names)
        }
        wanted = {name: ((n, *like[name].shape[1:]), like[name].dtype) for name, n in known.items()}
        wanted |= {n: (tuple(v.shape), v.cpu().numpy().dtype) for n, v in at_root.items()}
        there = {name: (value.shape, value.dtype) for name, value in sorted(whole.items())}
        if wanted != there:
            raise InputError(
                f"{found.path} holds another state than this run has: {there}, not {wanted}"
            )
        for name, value in at_root.items():
            value.copy_(torch.from_numpy(whole[name]))
        return b""

    def part(rank: int) -> bytes:
        cut: dict[str, Any] = dict.fromkeys(names, slice(None))
        for k, name in enumerate(names):
            if name in places:
                rows, at = slice(begins[rank, k], ends[rank, k]), places[name]
                cut[name] = rows if at is None else at[rows]
        return pack({name: whole[name][cut[name]] for name in names})

    world.from_root(fits)
    return {name: value.copy() for name, value in unpack(world.scatter(part)).items()}
