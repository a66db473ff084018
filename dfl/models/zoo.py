"""What do peers train? Models by name, and how their parameters lie in one row.

A model enters the simulation as a row of d numbers and a `Spec` that says which slice is which parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.parse import shown
from dfl.models.sharing import shared_names

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

MODELS: dict[str, Callable[..., Module]] = {}
"""Name -> f(shape, classes, *, options) -> module, for inputs of `shape` and `classes` outputs."""

WIDEST = 1_000_000
"""Units of the widest layer that is built."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where a module keeps what somebody else has it do."""

Shape = tuple[int, ...]


def model(name: str) -> Callable[[Callable[..., Module]], Callable[..., Module]]:
    """Register a model under `name`."""

    def register(build: Callable[..., Module]) -> Callable[..., Module]:
        MODELS[name] = build
        return build

    return register


@model("softmax")
def softmax(shape: Shape, classes: int) -> Module:
    """Multinomial logistic regression."""
    return mlp(shape, classes, hidden=())


@model("mlp")
def mlp(
    shape: Shape, classes: int, *, hidden: tuple[int, ...] = (64,), dropout: float = 0.0
) -> Module:
    """Fully connected layers with ReLU between them; `hidden=200+200` are two of 200 units.

    Behind every ReLU `dropout` of the units are left out in training.
    """
    if not all(1 <= width <= WIDEST for width in hidden):
        raise InputError(
            f"--model mlp: hidden must be from 1 to {WIDEST:,} each, not {'+'.join(map(str, hidden))}"
        )
    if not 0 <= dropout < 1:
        raise InputError(f"--model mlp: dropout must be at least 0 and below 1, not {dropout}")
    nn = torch.nn
    widths = [math.prod(shape), *hidden]
    body: list[Module] = []
    for a, b in zip(widths, hidden, strict=False):
        body += [nn.Linear(a, b), nn.ReLU(), *_dropout(dropout, b)]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(widths[-1], classes))


@model("2nn")
def two_nn(shape: Shape, classes: int) -> Module:
    """The 2NN of McMahan et al. (2017), section 3: 784-200-200-10, 199,210 parameters on MNIST."""
    return mlp(shape, classes, hidden=(200, 200))


@model("cnn")
def cnn(shape: Shape, classes: int) -> Module:
    """The CNN of McMahan et al. (2017), section 3: 1,663,370 parameters on MNIST, which takes 'same' padding."""
    nn = torch.nn
    channels, height, width = _image("cnn", shape, smallest=4)
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (height // 4) * (width // 4), 512), nn.ReLU(), nn.Linear(512, classes),
    )  # fmt: skip


@model("lenet")
def lenet(shape: Shape, classes: int, *, fc2: int = 100) -> Module:
    """The LeNet of LG-FedAvg's released code: 64,102 parameters for 3x32x32 (the classical one has fc2=84)."""
    if not 1 <= fc2 <= WIDEST:
        raise InputError(f"--model lenet: fc2 must be from 1 to {WIDEST:,}, not {fc2}")
    nn = torch.nn
    channels, height, width = _image("lenet", shape, smallest=16)
    rows, cols = ((side - 4) // 2 - 4 for side in (height, width))
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * (rows // 2) * (cols // 2), 120), nn.ReLU(),
        nn.Linear(120, fc2), nn.ReLU(), nn.Linear(fc2, classes),
    )  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """Where each parameter lies in a row of d numbers: names, shapes and offsets.

    The first `shared` of the d are those that peers share (`dfl.models.sharing`); apart from that, the module's order holds.
    """

    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    offsets: tuple[int, ...]
    d: int
    shared: int

    @classmethod
    def of(cls, module: Module, share: str = "all", nets: Sequence[str] = ()) -> Spec:
        """Read the layout off a module.

        Args:
            module: the model.
            share: which of its parameters are shared, as `--share` says it.
            nets: its children that only training has use for, which are no layers.

        Frozen parameters (`requires_grad=False`) have no place in a row. Tied weights have one place, under their
        first name, and are shared if any of their names is.

        Raises:
            InputError: the module has no parameters to train, has buffers that averaging would corrupt (BatchNorm), or
                draws from torch's own generator (dropout).
        """
        draws = [name for name, layer in module.named_modules() if _draws(layer)]
        if draws:
            raise InputError(
                f"the model's layer {draws[0]} drops units at random, which no seed of the run decides: set p=0, "
                "or take dfl.models.layers.Dropout"
            )
        buffers = [name for name, _ in module.named_buffers()]
        if buffers:
            raise InputError(
                f"the model keeps running statistics ({buffers[0]}) that averaging would corrupt: "
                "use GroupNorm in place of BatchNorm"
            )
        named = {name: value for name, value in module.named_parameters() if value.requires_grad}
        if not named:
            frozen = len(list(module.parameters()))
            why = f": all {frozen} of them are frozen (requires_grad=False)" if frozen else ""
            raise InputError(f"the model {type(module).__name__} has no parameters to train{why}")
        first = {id(value): name for name, value in named.items()}
        every = {
            n: first[id(v)]
            for n, v in module.named_parameters(remove_duplicate=False)
            if id(v) in first
        }
        chosen = {every[name] for name in shared_names(share, list(every), nets)}
        common = [name for name in named if name in chosen]
        names = (*common, *(name for name in named if name not in chosen))
        shapes = tuple(tuple(named[name].shape) for name in names)
        ends = [0, *accumulate(map(math.prod, shapes))]
        return cls(names, shapes, tuple(ends[:-1]), ends[-1], ends[len(common)])

    @property
    def whole(self) -> Spec:
        """The same layout where everything is shared."""
        return replace(self, shared=self.d)

    @property
    def common(self) -> tuple[str, ...]:
        """The names of the parameters that are shared."""
        return tuple(
            name
            for name, start in zip(self.names, self.offsets, strict=True)
            if start < self.shared
        )

    def views(self, rows: Tensor) -> dict[str, Tensor]:
        """Views (p, *shape) of rows (p, d), by parameter name; a single row (d,) gives views of `shape`."""
        return {
            name: rows[..., start : start + math.prod(shape)]
            .unflatten(-1, shape or (1,))
            .reshape(*rows.shape[:-1], *shape)
            for name, shape, start in zip(self.names, self.shapes, self.offsets, strict=True)
        }

    def take(self, rows: Tensor, which: NDArray[np.int64]) -> dict[str, Tensor]:
        """Copies (a, *shape) of the parameters of some rows, each contiguous by itself."""
        chosen = rows[_span(which)]
        return {
            name: view.clone(memory_format=torch.contiguous_format)
            for name, view in self.views(chosen).items()
        }

    def put(self, values: dict[str, Tensor], rows: Tensor, which: NDArray[np.int64]) -> None:
        """Write parameters (a, *shape) into some rows; the inverse of `take`."""
        rows[_span(which)] = torch.cat([values[name].flatten(1) for name in self.names], dim=1)

    def row(self, module: Module) -> Tensor:
        """The module's own parameters as one row (d,)."""
        named = dict(module.named_parameters())
        return torch.cat([named[name].detach().reshape(-1) for name in self.names])


def modules_of(model: Any) -> tuple[Module, ...]:
    """Return a caller's module, or the modules of a list, as a tuple.

    Raises:
        InputError: something is no module, or is lazy and knows no shapes yet.
    """
    modules = tuple(model) if isinstance(model, list | tuple) else (model,)
    if not modules:
        raise InputError("model: no module is given")
    for module in modules:
        if not isinstance(module, torch.nn.Module):
            raise InputError(
                f"model must be a torch.nn.Module or a list of them, not {shown(module)}: a built-in one is named in "
                "Run(model=...)"
            )
        for name, value in module.named_parameters():
            if torch.nn.parameter.is_lazy(value):
                raise InputError(
                    f"the parameter {name} of a {type(module).__name__} is lazy: call it on an example first"
                )
    return modules


def fill(module: Module, values: Mapping[str, Tensor]) -> None:
    """Replace the parameters of a module, those on the meta device too; tied weights stay tied.

    Args:
        module: the module, changed in place.
        values: the new values by the first name of a parameter; others stay.
    """
    named = dict(module.named_parameters())
    new = {
        id(named[name]): torch.nn.Parameter(value, requires_grad=named[name].requires_grad)
        for name, value in values.items()
    }
    for layer in module.modules():
        for name, old in layer._parameters.items():
            if id(old) in new:
                setattr(layer, name, new[id(old)])


def frozen(module: Module) -> dict[str, Tensor]:
    """The parameters of a module that are not trained, by name."""
    return {
        name: value.detach() for name, value in module.named_parameters() if not value.requires_grad
    }


def _draws(layer: Module) -> bool:
    """Whether a layer draws from torch's own generator when it trains."""
    shares = (getattr(layer, name, 0) for name in ("p", "dropout"))
    return isinstance(layer, torch.nn.RReLU) or any(
        isinstance(each, int | float) and each > 0 for each in shares
    )


def _span(which: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Positions as a slice where they follow one another, which indexes without a copy."""
    first, n = int(which[0]), len(which)
    return slice(first, first + n) if (which == np.arange(first, first + n)).all() else which


@dataclass(frozen=True)
class Dense:
    """A layer x W^T + b by the names of its parameters in the `Spec`, with a ReLU behind it or not."""

    weight: str
    bias: str | None
    relu: bool


def dense_layers(module: Module, shape: Sequence[int]) -> tuple[Dense, ...]:
    """The layers of a plain stack, Linear with ReLU or nothing behind each, on flattened inputs of `shape`.

    Returns:
        The layers in order; none if the module is anything else, down to a hook or a frozen parameter.
    """
    nn = torch.nn
    layers: list[Dense] = []
    flat = len(shape) == 1
    for name, layer in (
        module._modules.items() if type(module) is nn.Sequential else ()
    ):  # one used twice comes twice
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


def draw(module: Module, spec: Spec, seed: int, peers: Sequence[int]) -> Tensor:
    """Starting points by address, with torch's default distributions.

    Weights and biases of linear and convolutional layers are uniform on +-1/sqrt(fan-in); normalisation layers
    start at one and zero.

    Returns:
        (len(peers), d) float32; rows of different peers are independent.

    Raises:
        InputError: the module has a layer whose distribution is not known here.
    """
    columns = {}
    for name, layer in module.named_modules():
        for kind, value in layer.named_parameters(recurse=False):
            full = f"{name}.{kind}" if name else kind
            if full in spec.names:
                columns[full] = _draw_one(layer, f"{name}.{kind}", value, (seed, peers))
    return torch.cat([columns[name] for name in spec.names], dim=1)


def _draw_one(
    layer: Module, name: str, value: Tensor, address: tuple[int, Sequence[int]]
) -> Tensor:
    nn = torch.nn
    seed, peers = address
    n = value.numel()
    if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
        bound = 1 / math.sqrt(math.prod(layer.weight.shape[1:]))
        return randomness.uniform(seed, "init", peers, name, n=n).mul_(2).sub_(1).mul_(bound)
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
        return torch.full((len(peers), n), 1.0 if name.endswith("weight") else 0.0)
    raise InputError(
        f"--init independent cannot draw the parameter {name} of a {type(layer).__name__}: "
        "it knows linear, convolutional and normalisation layers"
    )


def _dropout(rate: float, units: int) -> list[Module]:
    from dfl.models.layers import Dropout

    return [Dropout(rate, units)] if rate else []


def _image(name: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        size = "x".join(map(str, shape))
        raise InputError(
            f"--model {name} needs images of at least {smallest}x{smallest}, not inputs of {size}"
        )
    channels, height, width = shape
    return channels, height, width
