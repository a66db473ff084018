"""The device, the precision and the engine by which a rank trains its peers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.models.modules import convolutions, is_recurrent
from dfl.training.task import Task

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from dfl.comm.mpi import World
else:
    from dfl.core.lazy import torch

SMALL = 2**20
"""Parameters, frozen ones too, times examples of a batch up to which any model but a convolutional
one gains from the batched engine.
"""
FEW_STATES = 2**15
"""Numbers of all states of a recurrent layer with a fused kernel, for a batch, up to which peers
train together on a processor.
"""
FEW_PARAMETERS = 2**17
"""Parameters of a model with such a layer, up to which a group of peers is large enough to gain."""
FEW_STEP_STATES = 2**13
"""Numbers of a state of a recurrent layer without a fused kernel, for a batch, up to which peers
train together on a processor.
"""


def device_of(name: str, world: World) -> torch.device:
    """Return the device of training on this rank; ranks on one machine take its GPUs in turn.

    Args:
        name: the value of `--device`.
        world: the ranks.

    Raises:
        InputError: on every rank, if some rank lacks the GPU.
    """
    if name == "cpu":
        return torch.device("cpu")
    _, colon, number = name.partition(":")
    (found,) = world.minimum(torch.cuda.device_count())
    index = int(number) if colon else world.local_rank % max(found, 1)
    if index < found:
        return torch.device("cuda", index)
    if name == "auto":
        return torch.device("cpu")
    raise InputError(f"--device {name}: every rank can have {found} GPUs here; choose cpu or auto")


def check_precision(
    precision: str, modules: Sequence[Module], dtype: torch.dtype, device: torch.device
) -> None:
    """Refuse a precision that the device or the models do not have.

    Raises:
        InputError: tf32 without a GPU, or bf16 of float64 models or of recurrent layers.
    """
    if precision == "tf32" and device.type == "cpu":
        raise InputError("--precision tf32 needs a GPU: choose float32 or bf16")
    if precision != "bf16":
        return
    if dtype != torch.float32:
        raise InputError(
            f"--precision bf16 is that of products of float32 models, and these are of "
            f"{str(dtype).removeprefix('torch.')}: choose float32"
        )
    for layer in (layer for each in modules for layer in each.modules()):
        if is_recurrent(layer):
            raise InputError(
                f"--precision bf16 does not reach the products inside a {type(layer).__name__}: "
                "choose float32"
            )


def is_batched(run: Run, task: Task, widest: int) -> bool:
    """Return whether a rank trains its peers together, by model, batches, threads and device, never
    by the layout.

    All models gain from it on a GPU. On a processor, dense layers gain on one thread; other models
    gain while they are small, except those with convolutions. A large model of one peer keeps
    several threads busy. Recurrent layers gain while they are small, see `_gains`.

    Args:
        run: the settled run.
        task: the learning problem of this rank's peers.
        widest: the examples of the largest batch of all peers.

    Raises:
        InputError: the run requires it of a model with recurrent layers that cannot.
    """
    modules = [module for module, _ in task.every_kind]
    recurrent = [layer for each in modules for layer in each.modules() if is_recurrent(layer)]
    together = not recurrent or (run.threads == 1 and all(map(_computes_together, recurrent)))
    if run.engine == "batched" and not together:
        raise InputError(
            f"--engine batched{_obstacle(recurrent, run.threads)}: choose loop or auto"
        )
    if run.engine != "auto" or not together:
        return run.engine == "batched"
    if recurrent:
        return task.device.type != "cpu" or all(_gains(each, task, widest) for each in recurrent)
    small = (task.parameter_layout.d + task.frozen_numbers) * widest <= SMALL
    return (
        task.device.type != "cpu"
        or bool(task.dense and run.threads == 1)
        or (small and not task.by_model)
    )


def _gains(layer: Module, task: Task, widest: int) -> bool:
    """Return whether a recurrent layer of several peers is faster at once, on a processor.

    The fused kernel of one peer computes all steps in one call, so several peers gain only while
    the states of all steps and the parameters are few. Without one, every step costs several calls,
    and the state of one step counts.
    """
    if getattr(layer, "fused", True):
        states = widest * task.recurrent_states
        return states <= FEW_STATES and task.parameter_layout.d <= FEW_PARAMETERS
    return widest * int(getattr(layer, "hidden_size", 0)) <= FEW_STEP_STATES


def _computes_together(layer: Module) -> bool:
    """Return whether a recurrent layer of several peers can be computed at once."""
    return bool(getattr(layer, "together", False))


def _obstacle(recurrent: Sequence[Module], threads: int) -> str:
    """Return why recurrent layers of several peers are not computed at once, for a message."""
    if threads > 1:
        return (
            f" with --threads {threads}: recurrent layers of several peers are computed on one "
            "thread"
        )
    layer = next(each for each in recurrent if not _computes_together(each))
    return f": no {type(layer).__name__} of several peers is computed at once"


def convolves(module: Module) -> bool:
    """Return whether a model has a layer of convolutions."""
    return any(isinstance(layer, convolutions()) for layer in module.modules())


def is_captured(task: Task, modules: Sequence[Module]) -> bool:
    """Return whether a local step is the same operations every time: no dropout, no objective."""
    from dfl.models.layers import dropouts

    return task.objective is None and not any(dropouts(module) for module in modules)
