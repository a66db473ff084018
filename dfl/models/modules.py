"""Functions on torch modules: a caller's modules, parameter values, and stacks of dense layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.parse import shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

STACKED: ContextVar[bool] = ContextVar("STACKED", default=False)
"""Whether several models are computed at once, see `stacked_models`."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module that hold its hooks."""


def modules_of(model: object, where: str = "model") -> tuple[Module, ...]:
    """Return a caller's module, or the modules of a list, as a tuple.

    Args:
        model: what the caller gives.
        where: its name in messages.

    Raises:
        InputError: an element is no module, or has a lazy parameter without a shape.
    """
    given = tuple(model) if isinstance(model, list | tuple) else (model,)
    if not given:
        raise InputError(f"{where}: no module is given")
    modules: list[Module] = []
    for module in given:
        if not isinstance(module, torch.nn.Module):
            raise InputError(
                f"{where} must be a torch.nn.Module or a list of them, not {shown(module)}: a "
                "built-in one is named in Run(model=...)"
            )
        for name, value in module.named_parameters():
            if torch.nn.parameter.is_lazy(value):
                raise InputError(
                    f"the parameter {name} of a {type(module).__name__} is lazy: call it on an "
                    "example first"
                )
        modules.append(module)
    return tuple(modules)


def is_recurrent(layer: Module) -> bool:
    """Return whether a layer goes through the steps of a sequence: one of torch, or one that states
    by `together` whether several peers are computed at once.
    """
    return isinstance(layer, torch.nn.RNNBase) or isinstance(getattr(layer, "together", None), bool)


def is_causal(module: Module) -> bool:
    """Return whether a row may end at any place, and outputs do not depend on later ones, as a
    class of this package states by `causal`.

    A caller's module may mean something else by the name, such as a mask of causal attention.
    """
    kind = type(module)
    return kind.__module__.startswith("dfl.") and getattr(kind, "causal", False) is True


@contextmanager
def stacked_models() -> Iterator[None]:
    """State, while it is open, that `torch.func.vmap` computes several models at once."""
    token = STACKED.set(True)
    try:
        yield
    finally:
        STACKED.reset(token)


def callers_layers(modules: Iterable[Module]) -> list[Module]:
    """Return the layers in training whose forward is neither torch's nor this package's.

    The mode of other layers decides nothing here but which kernels compute them, which round
    otherwise: a model with torch's dropout or with statistics of the batch is refused.
    """
    layers = (layer for module in modules for layer in module.modules())
    known = ("torch.nn.", "dfl.")
    return [
        layer
        for layer in layers
        if layer.training and not (layer.forward.__module__ or "").startswith(known)
    ]


@contextmanager
def in_evaluation(modules: Iterable[Module]) -> Iterator[None]:
    """Put a caller's layers into evaluation mode while it is open, as `eval()` does."""
    changed = callers_layers(modules)
    try:
        for layer in changed:
            layer.training = False
        yield
    finally:
        for layer in changed:
            layer.training = True


def convolutions() -> tuple[type[Module], ...]:
    """Return the convolutional layers of torch."""
    nn = torch.nn
    return (
        nn.Conv1d, nn.Conv2d, nn.Conv3d,
        nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    )  # fmt: skip


def fill(module: Module, values: Mapping[str, Tensor]) -> None:
    """Replace the parameters of a module, also on the meta device; tied weights stay tied.

    Args:
        module: the module, changed in place.
        values: the new values by the first name of a parameter, or the name of a running statistic;
            others stay.
    """
    for name in running_statistics(module).keys() & values.keys():
        path, _, kind = name.rpartition(".")
        setattr(module.get_submodule(path), kind, values[name])
    named = dict(module.named_parameters())
    new = {
        id(named[name]): torch.nn.Parameter(value, requires_grad=named[name].requires_grad)
        for name, value in values.items()
        if name in named
    }
    for layer in module.modules():
        for name, old in layer._parameters.items():
            if id(old) in new:
                setattr(layer, name, new[id(old)])


def running_statistics(module: Module) -> dict[str, Tensor]:
    """Return the running means and variances of the BatchNorm layers of a module, by name."""
    from dfl.models.normalization import STATISTICS, TORCHS

    return {
        name: value
        for layer, each in module.named_modules()
        if type(each) in TORCHS
        for name, value in each.named_buffers(layer, recurse=False)
        if name.rpartition(".")[2] in STATISTICS
    }


def frozen(module: Module) -> dict[str, Tensor]:
    """Return the parameters of a module that are not trained, by name."""
    return {
        name: value.detach() for name, value in module.named_parameters() if not value.requires_grad
    }


@dataclass(frozen=True)
class Dense:
    """The parameter names of a layer x W^T + b, and whether a ReLU follows it."""

    weight: str
    bias: str | None
    relu: bool


def dense_layers(module: Module, shape: Sequence[int]) -> tuple[Dense, ...]:
    """Return the layers of a plain stack of linear layers on flattened inputs of `shape`.

    Each layer is followed by a ReLU or by nothing.

    Returns:
        The layers in order; none if the module is anything else, or has a hook or a frozen
        parameter.
    """
    nn = torch.nn
    layers: list[Dense] = []
    flat = len(shape) == 1
    # A layer that is used twice comes twice.
    for name, layer in module._modules.items() if type(module) is nn.Sequential else ():
        if type(layer) is nn.Linear:
            layers.append(
                Dense(
                    f"{name}.weight", f"{name}.bias" if layer.bias is not None else None, relu=False
                )
            )
        elif type(layer) is nn.ReLU and layers:
            layers[-1] = replace(layers[-1], relu=True)
        elif (
            type(layer) is nn.Flatten and not layers and (layer.start_dim, layer.end_dim) == (1, -1)
        ):
            flat = True
        else:
            return ()
    hooked = any(getattr(each, hooks) for each in module.modules() for hooks in HOOKS)
    names = [name for layer in layers for name in (layer.weight, layer.bias) if name]
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    whole = names == trained and not frozen(module)
    return tuple(layers) if flat and not hooked and whole else ()
