"""Which layers does a model need that torch's own would not do? Those that draw take their numbers
as an input.

This file imports torch when it is imported: what a command line is checked with imports it late.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from dfl.core.errors import InputError
from dfl.models.modules import HOOKS


class Dropout(nn.Module):
    """Units that are left out at random, by a mask that somebody gives: x * mask; where nobody
    does, x.

    In training `mask` is replaced by name, as a parameter is (`torch.func.functional_call`). It is
    1 / (1 - rate) for units that stay, so that nothing is left to do where a model is measured.

    Attributes:
        rate: the share of the units that are left out, in [0, 1).
        units: how many units an example has.
        mask: (n, units) for n examples; no part of a model's state.

    Source:
        Srivastava et al., "Dropout", JMLR 2014, scaled in training as torch's own.
    """

    mask: Tensor | None

    def __init__(self, rate: float, units: int) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise InputError(f"a Dropout's rate must be at least 0 and below 1, not {rate}")
        self.rate, self.units = rate, units
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Leave units of x (n, ...) out."""
        return x if self.mask is None else x * self.mask.view(x.shape)

    def extra_repr(self) -> str:
        """What stands between the brackets when a model is printed."""
        return f"rate={self.rate}, units={self.units}"


def dropouts(module: nn.Module) -> dict[str, Dropout]:
    """The Dropout layers of a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Dropout)}


class Split(nn.Module):
    """A stack in two, f and then g, and further nets on what f says; it says g(f(x)) unless it is
    asked for a part.

    Layers keep the names that they have in the stack.

    Attributes:
        parts: the trained parameters of every part, by name: of f, of g, and of each further net
            under its own name.
    """

    def __init__(self, stack: nn.Sequential, cut: int, nets: nn.ModuleDict) -> None:
        super().__init__()
        for name, layer in (*stack._modules.items(), *nets.items()):
            self.add_module(name, layer)
        layers = tuple(stack._modules)
        self._layers = {"f": layers[:cut], "g": layers[cut:], **{name: (name,) for name in nets}}
        self.parts = {
            part: tuple(
                name
                for name, value in self.named_parameters()
                if value.requires_grad and name.partition(".")[0] in inside
            )
            for part, inside in self._layers.items()
        }

    def forward(self, x: Tensor, part: str = "") -> Tensor:
        """What the model says of x, or f does; or what another part says of what f said."""
        for name in self._layers[part] if part else (*self._layers["f"], *self._layers["g"]):
            x = self._modules[name](x)  # type: ignore[misc]  # none of them is None
        return x


def split(
    module: nn.Module,
    head_layers: int,
    sizes: Mapping[str, tuple[int, ...]],
    about: tuple[tuple[int, ...], str],
) -> tuple[Split, nn.ModuleDict]:
    """Take a model apart and put nets to it.

    Args:
        module: the model, a plain stack.
        head_layers: how many of its layers with parameters are g; whatever comes before the first
            of them is f.
        sizes: the widths of the layers of every further net, by name, with ReLU between them.
        about: the shape of an example, and the flag that asks for this.

    Returns:
        The model, and the further nets, whose values are still to come.

    Raises:
        InputError: it is no plain stack, or there is no such place.
    """
    shape, flag = about
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    alone = len(names) == len(list(module.parameters())) and not any(
        getattr(module, hooks) for hooks in HOOKS
    )
    if type(module) is not nn.Sequential or not alone or set(sizes) & set(module._modules):
        raise InputError(
            f"{flag} takes apart a plain nn.Sequential whose layers share nothing, not this {type(module).__name__}"
        )
    assert isinstance(module, nn.Sequential)
    places = [k for k, layer in enumerate(module) if any(True for _ in layer.parameters())]
    if not head_layers < len(places):
        raise InputError(
            f"{flag}: head_layers={head_layers} leaves nothing before the representation: "
            f"the model has {len(places)} layers "
            "with parameters"
        )
    cut = places[-head_layers]
    if not any(value.requires_grad for value in nn.Sequential(*list(module)[:cut]).parameters()):
        raise InputError(
            f"{flag}: head_layers={head_layers} leaves only frozen parameters before the representation"
        )
    with torch.device("meta"):
        width = _width(nn.Sequential(*list(module)[:cut]), shape, next(module.parameters()).dtype)
        nets = nn.ModuleDict({name: _stack(width, each) for name, each in sizes.items()})
    return Split(module, cut, nets), nets


def _width(f: nn.Sequential, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """How many numbers f says of an example, found without any."""
    values = {name: torch.empty_like(value, device="meta") for name, value in f.named_parameters()}
    h: Tensor = torch.func.functional_call(f, values, (torch.empty(1, *shape, dtype=dtype),))
    return h.numel()


def _stack(width: int, sizes: tuple[int, ...]) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise((width, *sizes)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
