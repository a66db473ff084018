"""Layers that torch lacks: dropout whose mask is an input, convolutions that choose the order of
numbers in memory, adapters, a model that is split, and embeddings that are quick to make without
values.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from dfl.core.errors import InputError, in_one_line
from dfl.models.convolution import convolved
from dfl.models.modules import HOOKS, STACKED


class Dropout(nn.Module):
    """Dropout with a given mask: x * mask, or x where no mask is given.

    In training `mask` is replaced by name, like a parameter (`torch.func.functional_call`). It is 1
    / (1 - rate) for units that stay, so that evaluation needs no scaling.

    A layer that is used twice in a forward pass drops the same units at both places.

    Attributes:
        rate: the share of the units that are dropped, in [0, 1).
        units: the number of units of an example: of all channels and places of x together.
        mask: (n, units) for n examples; not in a model's `state_dict`.

    Source:
        Srivastava et al., "Dropout", JMLR 2014, scaled in training as in torch.
    """

    mask: Tensor | None

    def __init__(self, rate: float, units: int) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise InputError(f"a Dropout's rate must be at least 0 and below 1, not {rate}")
        if units < 1:
            raise InputError(f"a Dropout's units must be at least 1, not {units}")
        self.rate = rate
        self.units = units
        self.register_buffer("mask", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x (n, ...) with the dropped units at 0."""
        return x if self.mask is None else x * self.mask.view(x.shape)

    def extra_repr(self) -> str:
        """Return the arguments that torch shows when it prints a model."""
        return f"rate={self.rate}, units={self.units}"


def embedding_layer(tokens: int, width: int) -> nn.Embedding:
    """Return `nn.Embedding(tokens, width)`.

    Its values are not drawn on the meta device: torch would import hundreds of modules for that,
    which takes a second.
    """
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(tokens, width), freeze=False)
    if not table.weight.is_meta:
        table.reset_parameters()
    return table


class Conv2d(nn.Conv2d):
    """Torch's convolution of images, computed in another way where that is faster. Outputs equal
    those of torch's layer up to rounding.

    On a processor, outputs have the channels of a pixel side by side in memory: there torch
    convolves, pools and normalises such images up to ten times as fast. On a GPU, several models
    are computed by one product, see `dfl.models.convolution`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, channels, height, width) for images x; or those of a single image.

        `torch.func.vmap` over models needs `stacked_models`.
        """
        if x.dim() == 4 and x.is_cpu and not STACKED.get():
            x = x.to(memory_format=torch.channels_last)
        return super().forward(x)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = _product_padding(self, x)
        if x.dim() != 4 or padding is None:
            out: Tensor = super()._conv_forward(x, weight, bias)
            return out
        return convolved(x, weight, bias, self.stride, padding)


class Conv1d(nn.Conv1d):
    """Torch's convolution of signals; on a GPU, several models are computed as by `Conv2d`."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding = _product_padding(self, x)
        if x.dim() != 3 or padding is None:
            out: Tensor = super()._conv_forward(x, weight, bias)
            return out
        row, stride = weight.unsqueeze(2), (1, *self.stride)
        return convolved(x.unsqueeze(2), row, bias, stride, (0, *padding)).squeeze(2)


def _product_padding(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> tuple[int, ...] | None:
    """Return the zeros around images where a convolution is computed as a product; None elsewhere.

    It is for several models on a GPU, with all channels in one group and a kernel without gaps. The
    grouped convolution is faster in bfloat16, and in TF32 where channels are multiples of 8.
    """
    if x.is_cpu or not STACKED.get() or torch.is_autocast_enabled("cuda"):
        return None
    even = layer.in_channels % 8 == layer.out_channels % 8 == 0
    if torch.backends.cudnn.allow_tf32 and even:
        return None
    plain = layer.groups == 1 and set(layer.dilation) == {1} and layer.padding_mode == "zeros"
    return layer.padding if plain and not isinstance(layer.padding, str) else None


class ReluConv2d(Conv2d):
    """A convolution before a ReLU, in a stack without normalisation.

    Its initial weights are uniform on +-sqrt(6 / fan-in), so that the outputs of many such layers
    neither vanish nor grow.

    Attributes:
        gain: the bound of initial weights relative to that of other layers.

    Source:
        He et al., "Delving Deep into Rectifiers", ICCV 2015, section 2.2.
    """

    gain = math.sqrt(6)


class LoRALinear(nn.Linear):
    """A linear layer with a low-rank adapter, x W^T + b + (alpha / r) x A^T B^T.

    It starts as the layer without the adapter.

    Attributes:
        scale: alpha / r.
        lora_a: A (r, inputs), which starts at normal numbers of variance 1 / inputs.
        lora_b: B (outputs, r), which starts at zero.

    Source:
        Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022, section 4.1.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, alpha: float) -> None:
        super().__init__(inputs, outputs)
        self.scale = alpha / rank
        a = torch.empty(rank, inputs)
        if not a.is_meta:  # its values are not drawn there, as in `embedding_layer`
            a = torch.randn(rank, inputs) / math.sqrt(inputs)
        self.lora_a = nn.Parameter(a)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, ..., outputs) for x (n, ..., inputs)."""
        linear = nn.functional.linear
        return super().forward(x) + linear(linear(x, self.lora_a), self.lora_b) * self.scale


def adapters(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that are adapters."""
    return tuple(
        f"{name}.{kind}" if name else kind
        for name, layer in module.named_modules()
        if isinstance(layer, LoRALinear)
        for kind in ("lora_a", "lora_b")
    )


def dropouts(module: nn.Module) -> dict[str, Dropout]:
    """Return the Dropout layers of a module, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, Dropout)}


class SplitModel(nn.Module):
    """A stack g(f(x)) split into f and g, with further nets on the representation f(x).

    Layers keep the names that they have in the stack.

    Attributes:
        parts: the names of the trained parameters of every part: "f", "g", and each further net
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
        """Return g(f(x)), or the output of one part: f takes examples, the others take f(x)."""
        for name in self._layers[part] if part else (*self._layers["f"], *self._layers["g"]):
            x = self._modules[name](x)  # type: ignore[misc]  # none of them is None
        return x


def split_model(
    module: nn.Module,
    head_layers: int,
    sizes: Mapping[str, tuple[int, ...]],
    *,
    shape: tuple[int, ...],
    flag: str,
) -> tuple[SplitModel, nn.ModuleDict]:
    """Split a model in two and add nets on its representation.

    Args:
        module: the model, a plain stack.
        head_layers: the number of its layers with parameters that are g; all layers before the
            first of them are f.
        sizes: the widths of the layers of every further net, by name, with ReLU between them.
        shape: the shape of an example.
        flag: the flag that requires the split, for messages.

    Returns:
        The model, and the further nets, on the meta device: without values.

    Raises:
        InputError: the model is no plain stack, has too few layers, or fails.
    """
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tied = len(names) != len(list(module.parameters()))
    hooked = any(getattr(module, hooks) for hooks in HOOKS)
    plain = type(module) is nn.Sequential and not tied and not hooked
    if not plain or set(sizes) & set(module._modules):
        raise InputError(
            f"{flag} splits a plain nn.Sequential whose layers share nothing, not this "
            f"{type(module).__name__}"
        )
    assert isinstance(module, nn.Sequential)
    places = [k for k, layer in enumerate(module) if any(True for _ in layer.parameters())]
    if not head_layers < len(places):
        raise InputError(
            f"{flag}: head_layers={head_layers} leaves nothing before the representation: "
            f"the model has {len(places)} layers with parameters"
        )
    cut = places[-head_layers]
    f = nn.Sequential(*list(module)[:cut])
    if not any(value.requires_grad for value in f.parameters()):
        raise InputError(
            f"{flag}: head_layers={head_layers} leaves only frozen parameters before the "
            "representation"
        )
    with in_one_line(f"{flag}: the layers before the representation fail on examples of {shape}"):
        width = _width(f, shape)
    with torch.device("meta"):
        nets = nn.ModuleDict({name: _stack(width, each) for name, each in sizes.items()})
    return SplitModel(module, cut, nets), nets


def _width(f: nn.Sequential, shape: tuple[int, ...]) -> int:
    """Return the size of the representation f(x) of an example, where the parameters of f are: on
    the meta device, it is computed without values.
    """
    first = next(f.parameters())
    tried = copy.deepcopy(f)  # whose running statistics change
    with first.device, torch.no_grad():
        h: Tensor = tried(torch.zeros(2, *shape, dtype=first.dtype))  # BatchNorm takes no fewer
    return math.prod(h.shape[1:])


def _stack(width: int, sizes: tuple[int, ...]) -> nn.Sequential:
    """Return linear layers with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in pairwise((width, *sizes)):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
