"""The shared and the personal parameters of a model.

A row of d numbers begins with the m shared ones (`ParameterLayout.shared`), so a message is the
beginning of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from dfl.core.errors import InputError
from dfl.core.parse import nearest, shown

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    from dfl.core.lazy import torch

NormStats = Literal["refuse", "local", "share", "recompute"]
"""What happens to running statistics: the values of `--norm-stats`."""

NETS = ("auxiliary", "adversary")
"""Parts of a model that only training uses, and that are no layers. The names of their parameters
begin with these.
"""


def nets_of(auxiliary: str, adversary: str) -> tuple[str, ...]:
    """Return the `NETS` that a run has, given the specs of its auxiliary and its adversary."""
    specs = zip(NETS, (auxiliary, adversary), strict=True)
    return tuple(name for name, spec in specs if spec != "none")


_ENDS = {"head": lambda layers, k: layers[-k:], "first": lambda layers, k: layers[:k]}


def shared_names(share: str, names: Sequence[str], nets: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names of the parameters that `--share` selects, in their order.

    Args:
        share: all; nothing; head:K or first:K, the last or the first K layers; or patterns of
            parameter or layer names, joined by +, in which * matches anything.
        names: the model's parameters, layer by layer: `layer.kind`.
        nets: the first components of the names of parameters that belong to no layer, but to nets
            that only training uses. `all` shares these parameters, too, and so does a pattern that
            matches them and does not begin with *.

    Raises:
        InputError: a pattern that matches no name, more layers than the model has, or a part
            joined by + that is not a pattern.
    """
    layers = tuple(
        dict.fromkeys(_layer(name) for name in names if name.partition(".")[0] not in nets)
    )
    if share in ("all", "nothing"):
        return tuple(names) if share == "all" else ()
    patterns = share.split("+")
    whole = [each for each in patterns if each in ("all", "nothing") or _is_end(each)]
    if whole and len(patterns) > 1:
        raise InputError(f"--share {share}: {whole[0]} cannot be joined to others by +")
    if _is_end(share):
        end, _, number = share.partition(":")
        if not (number.isascii() and number.isdecimal()) or not 1 <= int(number) <= len(layers):
            raise InputError(
                f"--share {share}: the model has 1 to {len(layers)} layers to share, not {number!r}"
            )
        chosen = _ENDS[end](layers, int(number))
        return tuple(name for name in names if _layer(name) in chosen)
    for pattern in patterns:
        if not any(_matches(name, pattern, nets) for name in names):
            choices = ["all", "nothing", "head:1", *filter(None, layers), *names]
            raise InputError(
                f"--share: no layer or parameter is called {shown(pattern)}"
                f"{nearest(pattern, choices)}"
            )
    return tuple(
        name for name in names if any(_matches(name, pattern, nets) for pattern in patterns)
    )


def _is_end(share: str) -> bool:
    """Return whether `--share` selects the last or the first layers, by head:K or first:K."""
    end, colon, _ = share.partition(":")
    return bool(colon) and end in _ENDS


def _matches(name: str, pattern: str, nets: Sequence[str]) -> bool:
    if name.partition(".")[0] in nets and pattern.startswith("*"):
        return False
    return fnmatchcase(name, pattern) or fnmatchcase(_layer(name), pattern)


def _layer(name: str) -> str:
    """Return the layer of a parameter; of one that torch's parametrizations hold, that which they
    compute a parameter of.
    """
    layer, parametrized, _ = f".{name}".partition(".parametrizations.")
    return (layer if parametrized else layer.rpartition(".")[0])[1:]


def split_shared(x: Tensor, shared: int) -> tuple[Tensor, Tensor]:
    """Return the shared coordinates (p, m) and the personal ones (p, d - m) of rows x (p, d)."""
    return x[:, :shared].contiguous(), x[:, shared:]


def merge_shared(shared: Tensor, personal: Tensor) -> Tensor:
    """Return rows (p, d) of shared coordinates, (p, m) or (1, m) for all peers, and personal ones,
    (p, d - m).
    """
    if not personal.shape[1]:
        return shared
    return torch.cat([shared.expand(len(personal), -1), personal], dim=1)
