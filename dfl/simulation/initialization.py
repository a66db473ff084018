"""The starting models of the peers: one common point, a point for each, or those of another run."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dfl.config import Run
from dfl.core.arrays import Arrays
from dfl.core.errors import InputError
from dfl.core.rows import flat_rows
from dfl.models.modules import fill, frozen
from dfl.models.parameter_layout import draw, drawn
from dfl.simulation.distribute_data import pack, scatter, unpack
from dfl.store.results import load
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn import Module

    from dfl.comm.mpi import World
    from dfl.core.layout import Layout
    from dfl.models.parameter_layout import ParameterLayout
else:
    from dfl.core.lazy import torch


class Starts(NamedTuple):
    """The models of `--init-from`.

    Attributes:
        rows: (p, *shape) of this rank's peers by parameter name, or (1, *shape) for all, as of
            frozen parameters.
        alike: whether all peers start at one model.
    """

    rows: Arrays
    alike: bool


def read_starts(run: Run, world: World, layout: Layout, modules: Sequence[Module]) -> Starts | None:
    """Return the models of `--init-from` of this rank; None where it is not given.

    Peers beyond those of the other run start at the mean of its honest peers, summed in float64.
    This mean is also what peers have in common: the frozen parameters of built-in models.

    Args:
        run: the settled run.
        world, layout: the ranks, and which peers they host.
        modules: the kinds of model.

    Raises:
        InputError: on every rank, for no finished run, or one of more models than there are peers.
    """
    if run.init_from is None:
        return None
    found: Arrays = {}

    def read() -> bytes:
        common = {name for module in modules for name in _to_set(module)}
        found.update(_models(run, common))
        return pack({"models": np.array(max(map(len, found.values())))})

    alike = int(unpack(world.from_root(read))["models"]) == 1
    return Starts(scatter(world, layout, lambda peers: _some(found, peers)), alike)


def give_values(run: Run, modules: Sequence[Module], starts: Starts | None) -> None:
    """Set the frozen parameters of built-in models, which have no values yet.

    They are those of `--init-from`, where it has them in this shape; else they are drawn as those
    of a trained model with a common start.

    Args:
        run: the settled run.
        modules: the kinds of model, changed in place.
        starts: the models of `--init-from`, where it is given.
    """
    rows = starts.rows if starts else {}
    for module in modules:
        wanted = _to_set(module)
        known = {
            name: torch.from_numpy(rows[name][0])
            for name, value in wanted.items()
            if name in rows and rows[name].shape[1:] == value.shape
        }
        new = drawn(module, wanted.keys() - known.keys(), run.seed, [0])
        values = {name: row[0].view(wanted[name].shape) for name, row in new.items()} | known
        fill(module, {name: value.to(wanted[name].dtype) for name, value in values.items()})


def _to_set(module: Module) -> dict[str, Tensor]:
    """Return the frozen parameters of a module that have no values yet, by name."""
    return {name: value for name, value in frozen(module).items() if value.is_meta}


def _models(run: Run, common: Collection[str]) -> Arrays:
    """Return (P, *shape) or (1, *shape) by parameter name; the latter of those in `common`."""
    assert run.init_from is not None
    ended = load(run.init_from)
    models = {name: value.numpy() for name, value in ended.state.items()}
    if any("/" in name for name in models):
        raise InputError(
            f"--init-from {run.init_from} has models of several kinds, and a run starts from one"
        )
    peers, known = run.peers or 1, max(map(len, models.values()))
    for name, rows in models.items():
        if len(rows) not in (1, known):
            raise InputError(
                f"--init-from {run.init_from} has {known} models, and {len(rows)} rows of {name}"
            )
        if not np.isfinite(rows).all():
            raise InputError(
                f"--init-from {run.init_from} has models that are not finite in {name}"
            )
    if known > peers:
        raise InputError(
            f"--init-from {run.init_from} has {known} models for {peers} peers: one or at most as "
            "many as peers"
        )
    if known == 1:
        return models
    honest = ended.honest
    if len(honest) != known:
        raise InputError(
            f"--init-from {run.init_from} has {known} models, and {len(honest)} rows in peers.csv"
        )
    for name, rows in models.items():
        if len(rows) == 1:
            continue
        mean = rows[honest].mean(0, dtype=np.float64, keepdims=True).astype(rows.dtype)
        added = np.repeat(mean, peers - known, 0)
        models[name] = mean if name in common else np.concatenate([rows, added])
    return models


def _some(models: Arrays, peers: NDArray[np.int64]) -> Arrays:
    """Return the rows of some peers; the first row where there is only one, or no peer."""
    return {
        n: rows[peers] if len(rows) > 1 and len(peers) else rows[:1] for n, rows in models.items()
    }


def start(
    run: Run, task: Task, own_module: bool, has_server: bool = False, starts: Starts | None = None
) -> Tensor:
    """Return the models where this rank's peers start, (p, d).

    They are (1, d) where there is a server and all peers start at one model; with a server, the
    first row is there on ranks without peers, too. Of several kinds of model, rows of the shorter
    end with zeros.

    Args:
        run: the settled run.
        task: the learning problem.
        own_module: whether the module is the caller's own: its parameters are the common point.
        has_server: whether there is a server.
        starts: the models of `--init-from`, where it is given.
    """
    p, dtype, layout = len(task.peers), task.dtype, task.parameter_layout
    if task.kinds:
        return _by_kind(run, task, own_module, has_server)
    if run.init == "independent":
        return draw(task.module, layout, run.seed, task.peers.tolist()).to(task.device, dtype)
    if starts:
        models = _joined(run, task, starts.rows).to(task.device, dtype)
    else:
        models = _point(run, task.module, layout, own_module).to(task.device, dtype)[None]
    return models if has_server or len(models) == p else models.expand(p, -1).contiguous()


def _joined(run: Run, task: Task, rows: Arrays) -> Tensor:
    """Return the models of `--init-from` as rows (p, d), or (1, d) for all; adapters that they lack
    are drawn as those of a common start.
    """
    names = task.parameter_layout.names
    new = drawn(task.module, set(names) - rows.keys(), run.seed, [0])
    columns = [new[n] if n in new else flat_rows(torch.from_numpy(rows[n])) for n in names]
    most = max(map(len, columns))
    return torch.cat([each.expand(most, -1) for each in columns], dim=1)


def agree(run: Run, starts: Starts | None) -> bool:
    """Return whether all peers start at the same shared parameters, so that they know each
    other's.
    """
    return run.init == "common" and (starts is None or starts.alike)


def _by_kind(run: Run, task: Task, own_module: bool, has_server: bool) -> Tensor:
    """Return the starting models of several kinds; shared parameters start as those of the
    first.
    """
    p, shared = len(task.peers), task.parameter_layout.shared
    rows = max(1, p) if has_server else p
    x = torch.zeros(rows, task.parameter_layout.d, dtype=task.dtype, device=task.device)
    for here, part in task.by_kind():
        x[here, : part.parameter_layout.d] = start(run, part, own_module)
    if run.init == "independent":
        return x
    point = _point(run, *task.kinds[0], own_module)
    x[:, :shared] = point[:shared]
    if not p:
        x[:, : len(point)] = point
    return x


def _point(run: Run, module: Module, parameter_layout: ParameterLayout, own_module: bool) -> Tensor:
    """Return the common starting point (d,) of a model."""
    if own_module:
        return parameter_layout.row(module)
    return draw(module, parameter_layout, run.seed, [0])[0]


def check(
    run: Run,
    task: Task,
    own_module: bool,
    starts: Starts | None,
    has_server: bool,
    peers: int,
    world: World,
) -> None:
    """Refuse what `start` could not do, on every rank or none.

    Args:
        run, task, own_module, starts, has_server: as for `start`.
        peers: the number of peers on the fullest rank.
        world: the ranks.

    Raises:
        InputError: the models do not fit into memory even once; models of `--init-from` have other
            parameters, or differ in those of a server; or no rule draws a parameter.
    """
    (room,) = world.minimum(memory())
    count, fixed = task.parameter_layout.d, task.frozen_numbers
    if (needed := (peers * count + fixed) * task.dtype.itemsize) > room:
        also = f" and {fixed:,} frozen ones" if fixed else ""
        raise InputError(
            f"--model {run.model} has {count:,} parameters{also}: "
            f"for {peers:,} peers on one rank they take "
            f"{needed / 1e9:,.0f} GB, the machine has {room / 1e9:,.0f} GB"
        )
    if starts:
        whole = (
            replace(task, parameter_layout=task.parameter_layout.all_shared)
            if run.share_all_until
            else task
        )
        _check_starts(run, whole, starts, has_server, world)
    for module, parameter_layout in task.every_kind:
        if run.init == "independent" or not (starts or own_module):
            draw(module, parameter_layout, run.seed, [])


def _check_starts(run: Run, task: Task, starts: Starts, has_server: bool, world: World) -> None:
    from dfl.models.layers import adapters

    found, fixed = {name: rows.shape[1:] for name, rows in starts.rows.items()}, frozen(task.module)
    wanted = dict(zip(task.parameter_layout.names, task.parameter_layout.shapes, strict=True))
    wanted |= {name: tuple(value.shape) for name, value in fixed.items()}
    for name in set(adapters(task.module)) - found.keys():
        del wanted[name]
    if found != wanted:
        odd = sorted(found.items() ^ wanted.items())
        raise InputError(
            f"--init-from {run.init_from} has other parameters than --model {run.model}: they "
            f"differ in {', '.join(f'{name} {shape}' for name, shape in odd[:4])}"
        )
    agreed = [
        name
        for name, value in fixed.items()
        if bool((value.cpu().numpy() == starts.rows[name]).all())
    ]
    if not world.minimum(int(len(agreed) == len(fixed)))[0]:
        raise InputError(
            f"--init-from {run.init_from} has other values of the frozen parameters than --model "
            f"{run.model}"
        )
    models = start(run, task, own_module=True, starts=starts)
    shared = models[:, : task.parameter_layout.shared]
    first = world.all_gather(shared[:1].cpu().numpy())
    same = bool((shared == shared[:1]).all()) and bool((first == first[:1]).all())
    if has_server and not starts.alike and not world.minimum(int(same))[0]:
        raise InputError(
            f"--init-from {run.init_from}: a server starts at one model, and the shared parameters "
            "of these differ"
        )


def memory() -> int:
    """Return the bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
