"""Which coordinates of a model do peers share, and which does every peer keep to itself?

A row of d numbers begins with the s shared ones (`ParameterLayout.shared`), so that what is said is
its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.parse import nearest, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

NETS = ("auxiliary", "adversary")
"""The parts of a model that only training has use for, and that are no layers; names of their
parameters begin so.
"""


def nets_of(auxiliary: str, adversary: str) -> tuple[str, ...]:
    """Return those of `NETS` that a run has, by the specs of its auxiliary and adversary."""
    specs = zip(NETS, (auxiliary, adversary), strict=True)
    return tuple(name for name, spec in specs if spec != "none")


_ENDS = {"head": lambda layers, k: layers[-k:], "first": lambda layers, k: layers[:k]}


def shared_names(share: str, names: Sequence[str], nets: Sequence[str] = ()) -> tuple[str, ...]:
    """The parameters that `--share` means, in their order.

    Args:
        share: all; nothing; head:K or first:K, the last or the first K layers; or patterns of
            parameter or layer names, joined by +, in which * stands for anything.
        names: of the model's parameters, layer by layer: `layer.kind`.
        nets: the first words of names of parameters that belong to no layer, but to nets that only
            training has use for: `all` shares them, too, and a pattern that does not begin with *.

    Raises:
        InputError: a pattern that no name matches, or a number of layers that the model does not
            have.
    """
    layers = tuple(
        dict.fromkeys(
            name.rpartition(".")[0] for name in names if name.partition(".")[0] not in nets
        )
    )
    if share in ("all", "nothing"):
        return tuple(names) if share == "all" else ()
    end, colon, number = share.partition(":")
    if colon and end in _ENDS:
        if not number.isdecimal() or not 1 <= int(number) <= len(layers):
            raise InputError(
                f"--share {share}: the model has 1 to {len(layers)} layers to share, not {number!r}"
            )
        chosen = _ENDS[end](layers, int(number))
        return tuple(name for name in names if name.rpartition(".")[0] in chosen)
    patterns = share.split("+")
    for pattern in patterns:
        if not any(_matches(name, pattern, nets) for name in names):
            choices = ["all", "nothing", "head:1", *layers, *names]
            raise InputError(
                f"--share: no layer or parameter is called {shown(pattern)}{nearest(pattern, choices)}"
            )
    return tuple(
        name for name in names if any(_matches(name, pattern, nets) for pattern in patterns)
    )


def _matches(name: str, pattern: str, nets: Sequence[str]) -> bool:
    if name.partition(".")[0] in nets and pattern.startswith("*"):
        return False
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[0], pattern)


def split_shared(x: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """What rows x (p, d) have in common with others, (p, s), and what is their own, (p, d - s)."""
    return x[:, :shared].contiguous(), x[:, shared:]


def merge_shared(shared: Tensor, own: Tensor) -> Tensor:
    """Rows (p, d) again, of shared coordinates (p, s), or (1, s) that all have, and each peer's own
    (p, d - s).
    """
    if not own.shape[1]:
        return shared
    return torch.cat([shared.expand(len(own), -1), own], dim=1)
