"""The layout of a module's parameters in one row of d numbers, and the initialization of a row.

The simulation holds a model as a row and a `ParameterLayout`, which maps slices of the row to
parameters.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.rows import flat_rows, rows_at
from dfl.models.modules import convolutions, running_statistics
from dfl.models.sharing import NormStats, shared_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
else:
    from dfl.core.lazy import torch


PLAIN = "a plain attribute, self.name = tensor"
"""What a mask or a table of indices should be: buffers are refused, and parameters are floats."""


@dataclass(frozen=True)
class ParameterLayout:
    """Names, shapes and offsets of the parameters in a row of d numbers.

    The first `shared` of the d are those that peers share (`dfl.models.sharing`). Within the shared
    and within the personal parameters, the order is that of the module, and running statistics
    follow the others.

    Attributes:
        names, shapes, offsets: of the parameters, in the order of the row.
        d: the numbers of the row.
        shared: how many of them peers share.
        statistics: the names that are running statistics: training sets them by its forward pass,
            and no gradient, velocity or decay of local steps acts on them. Peers share them only
            where the method does no more than average (`Algorithm.averages`).
        own: the last numbers of the row, which no setting shares: statistics that stay with peers.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    d: int
    shared: int
    statistics: tuple[str, ...] = ()
    own: int = 0

    @classmethod
    def of(
        cls,
        module: Module,
        share: str = "all",
        nets: Sequence[str] = (),
        norm_stats: NormStats = "refuse",
    ) -> ParameterLayout:
        """Read the layout off a module.

        Args:
            module: the model.
            share: which of its parameters are shared, in the syntax of `--share`.
            nets: its children that only training uses, which do not count as layers.
            norm_stats: what happens to running statistics, as `--norm-stats`.

        Frozen parameters (`requires_grad=False`) have no place in a row. Tied weights have one
        place, under their first name, and are shared if any of their names is.

        Raises:
            InputError: the module has no parameters to train, has buffers that are no running
                statistics or that `norm_stats` refuses, or draws from torch's own generator
                (dropout).
        """
        draws = [name for name, layer in module.named_modules() if _draws(layer)]
        if draws:
            which = f"the model's layer {draws[0]}" if draws[0] else "the model"
            raise InputError(
                f"{which} drops units at random, independently of the run's seed: set p=0, or take "
                "dfl.models.layers.Dropout"
            )
        statistics = _statistics(module, norm_stats)
        named = {name: value for name, value in module.named_parameters() if value.requires_grad}
        if not named:
            frozen = len(list(module.parameters()))
            why = f": all {frozen} of them are frozen (requires_grad=False)" if frozen else ""
            raise InputError(f"the model {type(module).__name__} has no parameters to train{why}")
        first = {id(value): name for name, value in named.items()}
        # Every name of a parameter -> its first name.
        first_names = {
            name: first[id(value)]
            for name, value in module.named_parameters(remove_duplicate=False)
            if id(value) in first
        }
        known = list(first_names)
        if norm_stats == "share":
            first_names |= {name: name for name in statistics}
            known = [name for name in module.state_dict(keep_vars=True) if name in first_names]
        chosen = {first_names[name] for name in shared_names(share, known, nets)}
        whole: dict[str, Tensor] = {**named, **statistics}
        shared = [name for name in whole if name in chosen]
        names = (*shared, *(name for name in whole if name not in chosen))
        shapes = tuple(tuple(whole[name].shape) for name in names)
        ends = [0, *accumulate(map(math.prod, shapes))]
        own = sum(value.numel() for value in statistics.values()) if norm_stats != "share" else 0
        return cls(
            names, shapes, tuple(ends[:-1]), ends[-1], ends[len(shared)], tuple(statistics), own
        )

    @property
    def all_shared(self) -> ParameterLayout:
        """The same layout with all shared that any setting shares."""
        return replace(self, shared=self.d - self.own)

    @property
    def trained(self) -> tuple[str, ...]:
        """The names of the parameters that gradients move."""
        return tuple(name for name in self.names if name not in self.statistics)

    @property
    def is_parameter(self) -> NDArray[np.bool_]:
        """(d,), whether a number of the row is a parameter, and no running statistic."""
        found = np.ones(self.d, bool)
        for name, shape, start in zip(self.names, self.shapes, self.offsets, strict=True):
            found[start : start + math.prod(shape)] = name not in self.statistics
        return found

    @property
    def shared_parameters(self) -> tuple[str, ...]:
        """The names of the shared parameters."""
        return tuple(
            name
            for name, start in zip(self.names, self.offsets, strict=True)
            if start < self.shared
        )

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Return views (p, *shape) of rows (p, d), by parameter name; `shape` for a row (d,)."""
        return {
            name: rows.narrow(-1, start, math.prod(shape)).view((*rows.shape[:-1], *shape))
            for name, shape, start in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def some(self, rows: Tensor, which: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the parameters (a, *shape) of some rows, to read: views of them where the rows are
        consecutive.
        """
        span = _span(which)
        return self.views(rows[span] if isinstance(span, slice) else rows_at(rows, span))

    def take(self, rows: Tensor, which: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return copies (a, *shape) of the parameters of some rows, each of them contiguous."""
        return {
            name: value.clone(memory_format=torch.contiguous_format)
            for name, value in self.some(rows, which).items()
        }

    def put(self, values: dict[str, Tensor], rows: Tensor, which: NDArray[np.int64]) -> None:
        """Write parameters (a, *shape) into some rows; the inverse of `take`."""
        span, parts = _span(which), [flat_rows(values[name]) for name in self.names]
        if isinstance(span, slice):
            torch.cat(parts, dim=1, out=rows[span])
        else:
            rows[span] = torch.cat(parts, dim=1)

    def row(self, module: Module) -> Tensor:
        """Return the values of the module's parameters and statistics as one row (d,)."""
        named: dict[str, Tensor] = {
            **dict(module.named_parameters()),
            **dict(module.named_buffers()),
        }
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])


def draw(module: Module, layout: ParameterLayout, seed: int, peers: Sequence[int]) -> Tensor:
    """Return initial rows, drawn by address from torch's default distributions.

    Weights and biases of linear and convolutional layers are uniform on +-1/sqrt(fan-in), weights
    of a layer with a `gain` on that times it, and those of recurrent layers on +-1/sqrt(width of
    the state), or on the `initial_bound` that a layer states; normalisation layers start at one and
    zero, running variances at one. Embeddings have a mean of 0 and a variance of 1 as in torch, and
    are uniform, except a padding row, which is 0. Adapters start as `LoRALinear` states.

    Returns:
        (len(peers), d) float32; rows of different peers are independent.

    Raises:
        InputError: the module has a layer of another kind.
    """
    columns = drawn(module, layout.names, seed, peers)
    return torch.cat([columns[name] for name in layout.names], dim=1)


def drawn(
    module: Module, names: Collection[str], seed: int, peers: Sequence[int]
) -> dict[str, Tensor]:
    """Return initial values (len(peers), n) of some parameters and statistics, as `draw` does."""
    columns = {}
    for name, layer in module.named_modules():
        own = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        for kind, value in own:
            full = f"{name}.{kind}" if name else kind
            if full in names:
                columns[full] = _draw_one(layer, f"{name}.{kind}", value, seed, peers)
    return columns


def _draw_one(layer: Module, name: str, value: Tensor, seed: int, peers: Sequence[int]) -> Tensor:
    """Return values (len(peers), n) for one parameter of a layer; `name` is in their address."""
    from dfl.models.layers import LoRALinear
    from dfl.models.normalization import BatchNorm

    nn = torch.nn
    n = value.numel()
    if isinstance(layer, LoRALinear) and name.endswith("lora_b"):
        return torch.zeros(len(peers), n)
    if isinstance(layer, LoRALinear) and name.endswith("lora_a"):
        normal = np.zeros((len(peers), n), np.float32)
        for row, peer in zip(normal, peers, strict=True):
            generator = randomness.generator(seed, "init", int(peer), name)
            generator.standard_normal(dtype=np.float32, out=row)
        return torch.from_numpy(normal).div_(math.sqrt(value.shape[1]))
    if isinstance(layer, (nn.Linear, *convolutions())):
        weight: Any = layer.weight
        bound = 1 / math.sqrt(math.prod(weight.shape[1:]))
        bound *= getattr(layer, "gain", 1.0) if name.endswith("weight") else 1.0
        return randomness.uniform(seed, "init", peers, name, n=n).mul_(2).sub_(1).mul_(bound)
    if isinstance(layer, nn.RNNBase | nn.Embedding) or hasattr(layer, "initial_bound"):
        bound = 1 / math.sqrt(layer.hidden_size) if isinstance(layer, nn.RNNBase) else math.sqrt(3)
        bound = float(getattr(layer, "initial_bound", bound))
        drawn = randomness.uniform(seed, "init", peers, name, n=n).mul_(2).sub_(1).mul_(bound)
        if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
            drawn.view(-1, *value.shape)[:, layer.padding_idx] = 0
        return drawn
    instance = nn.modules.instancenorm._InstanceNorm
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | instance | BatchNorm):
        one = name.endswith(("weight", "running_var"))
        return torch.full((len(peers), n), 1.0 if one else 0.0)
    raise InputError(
        f"--init independent cannot draw the parameter {name} of a {type(layer).__name__}: "
        "it knows linear, convolutional, recurrent, embedding and normalisation layers"
    )


def _statistics(module: Module, norm_stats: NormStats) -> dict[str, Tensor]:
    """Return the running statistics of a module, by name.

    Raises:
        InputError: they are refused, or the module has buffers that are none.
    """
    from dfl.models.normalization import STATISTICS, batch_norms

    statistics = {
        f"{name}.{kind}" if name else kind: getattr(layer, kind)
        for name, layer in batch_norms(module).items()
        for kind in STATISTICS
    }
    others = [name for name, _ in module.named_buffers() if name not in statistics]
    if others and norm_stats != "refuse":
        raise InputError(
            f"--norm-stats {norm_stats} is for the running statistics of torch's BatchNorm, and "
            f"the model keeps {others[0]}, which is none of them"
        )
    covered = {name.rpartition(".")[0] for name in running_statistics(module)}
    unknown = [name for name in others if name.rpartition(".")[0] not in covered]
    if unknown:
        constant = module.get_buffer(unknown[0])
        numbers = constant.is_floating_point()
        raise InputError(
            f"the model keeps the buffer {unknown[0]}, which is none of BatchNorm and which no "
            "--norm-stats covers: make a constant "
            + ("a frozen parameter (requires_grad=False)" if numbers else PLAIN)
        )
    if others:
        raise InputError(
            f"the model keeps running statistics ({others[0]}) that averaging would corrupt: "
            "choose --norm-stats local, recompute or share, or GroupNorm in place of BatchNorm"
        )
    return statistics


def _draws(layer: Module) -> bool:
    """Return whether a layer of torch draws from torch's own generator when it trains. Others are
    found when a model is tried.
    """
    nn = torch.nn
    if isinstance(layer, nn.modules.dropout._DropoutNd):
        return layer.p > 0
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
        return layer.dropout > 0
    return isinstance(layer, nn.RReLU)


def _span(which: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Return positions as a slice where they are consecutive, which indexes without a copy."""
    first = int(which[0])
    n = len(which)
    return slice(first, first + n) if (which == np.arange(first, first + n)).all() else which
