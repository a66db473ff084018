"""The state of a run between two rounds: where it begins, and what is shared from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dfl.comm.exchange import Net
from dfl.core.errors import InputError
from dfl.core.forms import form_of, require_form
from dfl.models.modules import frozen
from dfl.simulation import initialization

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.algorithms import State
    from dfl.simulation.prepared import Prepared
    from dfl.training.task import Task
else:
    from dfl.core.lazy import torch

Form: TypeAlias = "tuple[torch.Size, torch.dtype]"
"""The shape and the type of a tensor."""


class RunState(NamedTuple):
    """Where a run is between two rounds.

    Attributes:
        t: rounds done.
        task: the learning problem, and the personal parameters of this rank's peers.
        state: the state of the method, in the shared parameters.
    """

    t: int
    task: Task
    state: Any

    @property
    def models(self) -> Tensor:
        """The models of this rank's peers, (p, d); (1, d) where `is_global`."""
        return self.task.models(self.state.x)


def is_global(task: Task, *, has_server: bool) -> bool:
    """Return whether all peers have one model, that of a server."""
    return has_server and not task.personal.shape[1]


def begin(prepared: Prepared) -> RunState:
    """Return where a run begins."""
    run, algorithm = prepared.run, prepared.algorithm
    layout = prepared.task.parameter_layout
    models = initialization.start(
        run, prepared.task, prepared.own_module, algorithm.has_server, prepared.starts
    )
    first = layout.all_shared if run.share_all_until else layout
    task, x = prepared.task.split(models, first.shared)
    if algorithm.has_server:
        x = x[:1]
    agree = initialization.agree(run, prepared.starts)
    state = algorithm.init(x, x if agree else torch.zeros_like(x), Net(prepared.network, 0))
    return RunState(0, task, state)


def narrowed(run_state: RunState, prepared: Prepared) -> RunState:
    """Return the same state where only the part of `--share` is shared from now on.

    The state keeps the shared coordinates, axis 1 of its tensors; each peer keeps its own copy of
    the others.
    """
    shared = prepared.task.parameter_layout.shared
    task, _ = run_state.task.split(run_state.models, shared)
    return RunState(run_state.t, task, cut(run_state.state, shared))


def cut(state: State, shared: int) -> Any:
    """Return a state with the first coordinates of its tensors (rows, m)."""
    values = tensors(state)
    return replace(
        state,  # type: ignore[type-var]  # a State is a dataclass
        **{n: v[:, :shared].contiguous() for n, v in values.items() if v.dim() == 2},
    )


def tensors(state: Any) -> dict[str, Tensor]:
    """Return the fields of a state, which are tensors."""
    return {each.name: getattr(state, each.name) for each in fields(state)}


def check_state(what: str, state: object, x: Tensor) -> None:
    """Refuse a state before round 0 that a checkpoint cannot keep.

    Args:
        what: its name in messages.
        state: what a method returned.
        x: a tensor of the form of its field x.

    Raises:
        InputError: it is such a state.
    """
    names = _names(state)
    if "x" not in names:
        raise InputError(
            f"{what} must be a frozen dataclass of tensors with a field x, not {form_of(state)}"
        )
    for name in sorted(names):
        value = getattr(state, name)
        if name == "x":
            require_form(f"{what}: x", value, torch.Tensor, x.shape, x.dtype)
        elif not isinstance(value, torch.Tensor) or not value.dim():
            raise InputError(
                f"{what}: {name} must be a tensor with a row for each peer or edge, not "
                f"{form_of(value)}"
            )


def forms(state: State) -> dict[str, Form]:
    """Return the form of each field of a state."""
    return {name: (value.shape, value.dtype) for name, value in tensors(state).items()}


def check_same_form(what: str, state: object, before: Mapping[str, Form]) -> None:
    """Refuse a state after a round of another form than before.

    Args:
        what: its name in messages.
        state: what a method returned.
        before: the forms of the state before the round.

    Raises:
        InputError: it has other fields, or one has another shape or type.
    """
    if _names(state) != before.keys():
        raise InputError(
            f"{what} must be a frozen dataclass of tensors with the fields that init returns, "
            f"{', '.join(before)}, not {form_of(state)}"
        )
    for name, (shape, dtype) in before.items():
        require_form(f"{what}: {name}", getattr(state, name), torch.Tensor, shape, dtype)


def _names(state: object) -> set[str]:
    """Return the fields of a dataclass, none of another object."""
    return {each.name for each in fields(state)} if is_dataclass(state) else set()


def arrays_by_name(
    run_state: RunState, models: NDArray[np.floating]
) -> dict[str, NDArray[np.floating]]:
    """Return gathered models by parameter name, without a copy."""
    values = by_name(run_state.task, torch.from_numpy(models))
    return {name: value.numpy() for name, value in values.items()}


def gathered(run_state: RunState, prepared: Prepared) -> NDArray[np.floating] | None:
    """Return all peers' models (P, d), or the one that all have (1, d), on rank 0; None
    elsewhere.
    """
    world, models = prepared.world, run_state.models
    if is_global(run_state.task, has_server=prepared.algorithm.has_server):
        return world.gather((models[:0] if world.rank else models).cpu().numpy())
    everyone = world.gather(models.cpu().numpy())
    return None if everyone is None else prepared.layout.ascending(everyone)


def by_name(task: Task, models: Tensor) -> dict[str, Tensor]:
    """Return models (P, d) by parameter name, (P, *shape).

    Frozen parameters have one row, (1, *shape). Of several kinds of model, personal parameters are
    named `kind/name`, with a row for each peer of the kind.
    """
    if not task.kinds:
        fixed = {name: value[None].cpu() for name, value in frozen(task.module).items()}
        return task.parameter_layout.views(models) | fixed
    shared = task.parameter_layout.shared_parameters
    every = task.parameter_layout.views(models)
    found = {name: value for name, value in every.items() if name in shared}
    for k, (module, spec) in enumerate(task.kinds):
        own = spec.views(models[k :: len(task.kinds)])
        own |= {name: value[None].cpu() for name, value in frozen(module).items()}
        found |= {f"{k}/{name}": value for name, value in own.items() if name not in shared}
    return found
