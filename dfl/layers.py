"""Which layers does a model need that torch's own would not do? Those that draw take their numbers as an input.

This file imports torch when it is imported: what a command line is checked with imports it late.
"""

from __future__ import annotations

from torch import Tensor, nn

from dfl.errors import InputError


class Dropout(nn.Module):
    """Units that are left out at random, by a mask that somebody gives: x * mask; where nobody does, x.

    In training `mask` is replaced by name, as a parameter is (`torch.func.functional_call`). It is 1 / (1 - rate) for
    units that stay, so that nothing is left to do where a model is measured.

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
