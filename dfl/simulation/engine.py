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
    """Return whether a rank trains its peers together, by the model and the batches alone.

    It does not depend on the number of peers on a rank. Dense layers always gain from it, and on a
    GPU all layers do. Other models gain while they are small; convolutions do not, nor do large
    models on several threads, which one peer keeps busy. Recurrent layers gain while their states
    are few; where torch has a fused kernel for one peer, those of all steps, and their parameters.

    Raises:
        InputError: the run requires it of a model with recurrent layers that cannot.
    """
    modules = [module for module, _ in task.every_kind]
    recurrent = [layer for each in modules for layer in each.modules() if is_recurrent(layer)]
    alone = _alone(recurrent, run.threads)
    if alone and run.engine == "batched":
        raise InputError(f"--engine batched{alone}: choose loop or auto")
    if run.engine != "auto" or alone:
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

    A fused kernel of one peer saves most of what is saved at once, but for the start of a batch.
    Without one every step costs several calls.
    """
    if getattr(layer, "fused", True):
        states = widest * task.recurrent_states
        return states <= FEW_STATES and task.parameter_layout.d <= FEW_PARAMETERS
    return widest * int(getattr(layer, "hidden_size", 0)) <= FEW_STEP_STATES


def _alone(recurrent: Sequence[Module], threads: int) -> str:
    """Return why recurrent layers are computed for one peer after the other; "" if they are not."""
    if recurrent and threads > 1:
        return (
            f" with --threads {threads}: recurrent layers of several peers are computed on one "
            "thread"
        )
    for layer in recurrent:
        if not getattr(layer, "together", False):
            return f": no {type(layer).__name__} of several peers is computed at once"
    return ""


def convolves(module: Module) -> bool:
    """Return whether a model has a layer of convolutions."""
    return any(isinstance(layer, convolutions()) for layer in module.modules())


def is_captured(task: Task, modules: Sequence[Module]) -> bool:
    """Return whether a local step is the same operations every time: no dropout, no objective."""
    from dfl.models.layers import dropouts

    return task.objective is None and not any(dropouts(module) for module in modules)
