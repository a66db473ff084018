"""The models that peers train, by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, Self, TypeVar

from annotated_types import Interval

from dfl.core.errors import InputError
from dfl.core.options import BelowOne, Count, Index, Positive
from dfl.core.parts import Shape, shown_shape
from dfl.core.registry import Registry, choose, example_with, split_specs

if TYPE_CHECKING:
    import torch
    from torch.nn import Module
else:
    from dfl.core.lazy import torch

MODELS: Registry[Callable[..., Module]] = Registry("model", "dfl.models")
"""Name -> f(shape, classes, *, options) -> module, for inputs of `shape` and `classes` outputs.

Pooling comes before the ReLU after a convolution: the outputs and gradients are the same, and the
ReLU has a quarter of the numbers.

A model states by `takes_several_parts` that it takes inputs of several parts: `shape` is a tuple of
their shapes then. It states by `predicts_places` that it has outputs at every place of a
sequence; it is called as f(shape, classes, places, *, options), where `places` is the shape of an
example's labels, or () where it has one label.
"""

WIDEST = 1_000_000
"""The most units of a layer."""
ALPHA = 16.0
"""The scale of adapters where none is given."""

Width = Annotated[int, Interval(ge=1, le=WIDEST)]
Widths = tuple[Width, ...]
Layers = Annotated[int, Interval(ge=1, le=100)]
Cell = Literal["lstm", "gru"]

_M = TypeVar("_M", bound=Callable[..., "Module"])


def takes_tokens(model: _M) -> _M:
    """State that the inputs of a model are whole numbers in range(classes)."""
    setattr(model, "takes_tokens", True)  # noqa: B010  no attribute of a function's type
    return model


def takes_several_parts(model: _M) -> _M:
    """State that the inputs of a model have several parts, which are its arguments."""
    setattr(model, "takes_several_parts", True)  # noqa: B010  no attribute of a function's type
    return model


def predicts_places(model: _M) -> _M:
    """State that a model predicts a label at every place where the data have one."""
    setattr(model, "predicts_places", True)  # noqa: B010  no attribute of a function's type
    return model


def has_several_parts(model: object) -> bool:
    """Return whether a model states that its inputs have several parts."""
    return bool(getattr(model, "takes_several_parts", False))


def has_tokens(model: object) -> bool:
    """Return whether a model states that its inputs are whole numbers in range(classes)."""
    return bool(getattr(model, "takes_tokens", False))


def has_places(model: object) -> bool:
    """Return whether a model states that it predicts a label at every place."""
    return bool(getattr(model, "predicts_places", False))


@dataclass(frozen=True)
class NamedModels:
    """The models that `--model` names, one for each kind of peer.

    Attributes:
        specs: `name` or `name:key=value,key=value`, of each.
        builds: the models, their options bound.
    """

    specs: tuple[str, ...]
    builds: tuple[partial[Module], ...]

    @classmethod
    def of(cls, specs: str) -> Self:
        """Read specs that are joined by +.

        Raises:
            InputError: an unknown model or option, or a bad value.
        """
        every = tuple(split_specs(specs))
        return cls(every, tuple(choose("--model", each, MODELS) for each in every))

    @property
    def takes_tokens(self) -> bool:
        """Whether the inputs of one of them are whole numbers in range(classes)."""
        return any(has_tokens(build.func) for build in self.builds)


def without_values(
    build: partial[Module], shape: Shape, classes: int, places: tuple[int, ...] = ()
) -> Module:
    """Return a built-in model on the meta device.

    Args:
        build: the model, its options bound.
        shape: of an example.
        classes: the number of labels.
        places: the shape of an example's labels where they are several.
    """
    arguments = (shape, classes, places) if has_places(build.func) else (shape, classes)
    with torch.device("meta"):
        return build(*arguments)


@MODELS.register("softmax")
def softmax(shape: Shape, classes: int) -> Module:
    """Multinomial logistic regression."""
    return mlp(shape, classes, hidden=())


@MODELS.register("mlp")
def mlp(shape: Shape, classes: int, *, hidden: Widths = (64,), dropout: BelowOne = 0.0) -> Module:
    """Fully connected layers with ReLU between them; `hidden=200+200` are two of 200 units.

    After every ReLU a share `dropout` of the units is dropped in training.
    """
    nn = torch.nn
    widths = [math.prod(shape), *hidden]
    body: list[Module] = []
    for a, b in zip(widths, hidden, strict=False):
        body += [nn.Linear(a, b), nn.ReLU(), *_dropout(dropout, b)]
    return nn.Sequential(nn.Flatten(), *body, nn.Linear(widths[-1], classes))


@MODELS.register("2nn")
def two_nn(shape: Shape, classes: int) -> Module:
    """The 2NN of McMahan et al. (2017), section 3: 784-200-200-10, 199,210 parameters on MNIST."""
    return mlp(shape, classes, hidden=(200, 200))


@MODELS.register("cnn")
def cnn(
    shape: Shape,
    classes: int,
    *,
    channels: Widths = (32, 64),
    kernel: Count = 5,
    padding: Index | None = None,
    hidden: Width = 512,
) -> Module:
    """Convolutions, each with max pooling and ReLU, under two dense layers; by default the CNN of
    McMahan et al. (2017), section 3: 1,663,370 parameters on MNIST, which takes 'same' padding.

    `channels=30+50,kernel=3,padding=0,hidden=100` is the CNN of Cao et al. (2021): 139,960.

    Args:
        shape: of an example.
        classes: the number of labels.
        channels: the output channels of every convolution.
        kernel: its height and width.
        padding: zeros around an image, on every side; kernel // 2 where not given.
        hidden: the units between the dense layers.
    """
    from dfl.models.layers import Conv2d

    nn = torch.nn
    around = kernel // 2 if padding is None else padding
    narrower = kernel - 1 - 2 * around  # pixels of a side, by every convolution
    smallest = 1
    for _ in channels:
        smallest = 2 * smallest + narrower
    before, *sides = _image("cnn", shape, smallest=max(1, smallest))
    body: list[Module] = []
    for after in channels:
        body += [Conv2d(before, after, kernel, padding=around), nn.MaxPool2d(2), nn.ReLU()]
        before, sides = after, [(side - narrower) // 2 for side in sides]
    return nn.Sequential(
        *body, nn.Flatten(), nn.Linear(before * math.prod(sides), hidden), nn.ReLU(),
        nn.Linear(hidden, classes),
    )  # fmt: skip


@MODELS.register("lenet")
@example_with("--dataset cifar10")
def lenet(shape: Shape, classes: int, *, fc2: Width = 100) -> Module:
    """The LeNet of LG-FedAvg's released code: 64,102 parameters for 3x32x32 (the classical one has
    fc2=84).
    """
    from dfl.models.layers import Conv2d

    nn = torch.nn
    channels, height, width = _image("lenet", shape, smallest=16)
    rows, cols = ((side - 4) // 2 - 4 for side in (height, width))
    return nn.Sequential(
        Conv2d(channels, 6, 5), nn.MaxPool2d(2), nn.ReLU(),
        Conv2d(6, 16, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * (rows // 2) * (cols // 2), 120), nn.ReLU(),
        nn.Linear(120, fc2), nn.ReLU(), nn.Linear(fc2, classes),
    )  # fmt: skip


@MODELS.register("resnet20")
def resnet20(
    shape: Shape, classes: int, *, norm: Literal["group", "batch", "none"] = "group"
) -> Module:
    """The ResNet-20 of He et al. (2016), section 4.2: 269,722 parameters on CIFAR-10, with
    GroupNorm of two groups in place of BatchNorm, with BatchNorm, or without normalisation.
    """
    from dfl.models.residual import ResNet

    channels, _, _ = _image("resnet20", shape, smallest=4)
    return ResNet(channels, classes, 3, norm)


@MODELS.register("vgg11")
@example_with("--dataset cifar10")
def vgg11(shape: Shape, classes: int) -> Module:
    """The convolutions of VGG-11 (Simonyan and Zisserman 2015) and one dense layer, without
    normalisation: 9,225,610 parameters on CIFAR-10.
    """
    from dfl.models.layers import ReluConv2d

    nn = torch.nn
    channels, height, width = _image("vgg11", shape, smallest=32)
    body: list[Module] = []
    for group in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
        for out in group:
            body += [ReluConv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        body.insert(-1, nn.MaxPool2d(2))
    return nn.Sequential(
        *body, nn.Flatten(), nn.Linear(512 * (height // 32) * (width // 32), classes)
    )


@MODELS.register("har_cnn")
@example_with("--dataset har --partition natural")
def har_cnn(shape: Shape, classes: int) -> Module:
    """Two convolutions over time and two dense layers, 274,822 parameters on HAR."""
    from dfl.models.layers import Conv1d

    nn = torch.nn
    channels, steps = _signals("har_cnn", shape, fewest=4)
    return nn.Sequential(
        Conv1d(channels, 32, 5, padding=2), nn.MaxPool1d(2), nn.ReLU(),
        Conv1d(32, 64, 5, padding=2), nn.MaxPool1d(2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64 * (steps // 4), 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip


@MODELS.register("har_lstm")
@example_with("--dataset har --partition natural")
def har_lstm(
    shape: Shape,
    classes: int,
    *,
    hidden: Width = 32,
    layers: Layers = 2,
    cell: Cell = "lstm",
) -> Module:
    """LSTM layers over time, or GRU layers with `cell=gru`, and a dense layer on the last state;
    14,150 parameters on HAR.
    """
    from dfl.models.recurrent import LastState

    channels, _ = _signals("har_lstm", shape, fewest=1)
    return LastState(channels, classes, hidden, layers, cell)


@MODELS.register("vqa")
@example_with("--dataset easy_vqa")
@takes_several_parts
def vqa(
    shape: Shape,
    classes: int,
    *,
    inputs: Literal["both", "image", "question"] = "both",
    width: Width = 32,
) -> Module:
    """Encoders `image` and `question`, and a `head` on the product of their encodings.

    The image encoder is that of easy-VQA, two convolutions and a dense layer, or one dense layer
    where an image is a row of features. The question, a bag of words, goes through two dense
    layers. With `inputs=image` or `question` a device has this modality alone, and no other
    encoder: `--share "head.*"` shares what all devices have.
    """
    from dfl.models.layers import ReluConv2d
    from dfl.models.vqa import VQA

    nn = torch.nn
    if len(shape) != 2 or len(shape[0]) not in (1, 3) or len(shape[1]) != 1:
        raise InputError(
            "--model vqa needs an image or a row of features, and a bag of words, not inputs of "
            f"{shown_shape(shape)}"
        )
    picture, (words,) = shape
    image: list[Module] = [nn.Linear(picture[0], width)]
    if len(picture) == 3:
        channels, height, side = _image("vqa", picture, smallest=4)
        image = [
            ReluConv2d(channels, 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            ReluConv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(16 * (height // 4) * (side // 4), width),
        ]  # fmt: skip
    question = [nn.Linear(words, width), nn.Tanh(), nn.Linear(width, width)]
    head = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)]
    return VQA(
        nn.Sequential(*image) if inputs != "question" else None,
        nn.Sequential(*question) if inputs != "image" else None,
        nn.Sequential(*head),
    )


@MODELS.register("char_lstm")
@example_with("--dataset shakespeare --partition natural")
@takes_tokens
@predicts_places
def char_lstm(
    shape: Shape,
    classes: int,
    places: tuple[int, ...] = (),
    *,
    embedding: Width = 8,
    hidden: Width = 256,
    layers: Layers = 2,
    cell: Cell = "lstm",
    peepholes: bool = False,
) -> Module:
    """The character model of McMahan et al. (2017), section 3: an embedding, LSTM layers, and the
    next character from every state; from the last state where an example has one label, as in LEAF
    (Caldas et al. 2018).

    It has 819,920 parameters for the 80 characters of `shakespeare_leaf`, and 867,090 for the 258
    of `shakespeare`. With `cell=gru` the layers are GRUs. With `peepholes`, the gates of the LSTM
    see the cell and have one bias each, as in the published count of 866,578; then peers train one
    after the other.
    """
    from dfl.models.recurrent import NextToken

    if len(shape) != 1:
        raise InputError(
            f"--model char_lstm needs rows of characters, not inputs of {shown_shape(shape)}"
        )
    check_places("char_lstm", shape, places)
    _check_peepholes("char_lstm", cell, peepholes)
    return NextToken(classes, embedding, hidden, layers, bool(places), cell, peepholes)


@MODELS.register("word_lstm")
@example_with("--dataset words --partition natural")
@takes_tokens
@predicts_places
def word_lstm(
    shape: Shape,
    classes: int,
    places: tuple[int, ...] = (),
    *,
    embedding: Width = 192,
    hidden: Width = 256,
    layers: Layers = 1,
    tied: bool = False,
    cell: Cell = "lstm",
    peepholes: bool = False,
) -> Module:
    """The word model of McMahan et al. (2017), section 3: an embedding, an LSTM layer, and the next
    word from every state; 4,950,800 parameters for 10,000 words.

    With `tied`, the embedding is also the matrix of the outputs, after a dense layer of its width
    (Press and Wolf 2017). With `cell=gru` the layer is a GRU. With `peepholes`, the gates of the
    LSTM see the cell and have one bias each, as in the published count of 4,950,544.
    """
    from dfl.models.recurrent import NextToken

    if len(shape) != 1:
        raise InputError(
            f"--model word_lstm needs rows of words, not inputs of {shown_shape(shape)}"
        )
    check_places("word_lstm", shape, places)
    _check_peepholes("word_lstm", cell, peepholes)
    return NextToken(classes, embedding, hidden, layers, bool(places), cell, peepholes, tied)


@MODELS.register("transformer")
@example_with("--dataset shakespeare --partition natural")
@takes_tokens
@predicts_places
def transformer(
    shape: Shape,
    classes: int,
    places: tuple[int, ...] = (),
    *,
    width: Width = 128,
    depth: Layers = 4,
    heads: Width = 4,
    lora: Annotated[int, Interval(ge=0, le=WIDEST)] = 0,
    alpha: Positive = ALPHA,
    base: Literal["frozen", "trained"] = "frozen",
) -> Module:
    """A causal transformer of text: learned positions, and blocks with normalisation before each
    sublayer, GELU and dense layers of four times the width (Radford et al. 2019).

    It predicts the next token at every place, or at the last where an example has one label;
    824,144 parameters for the 80 characters of `shakespeare_leaf`. With `width=384,depth=6,heads=6`
    it has 10.7 million.

    With `lora` the query and value layers have adapters of this rank, scaled by alpha / rank (Hu et
    al. 2022). With `base=frozen` they alone are trained and sent, and all peers of a rank have one
    base: that of `--init-from`, or one drawn from the seed. With `base=trained` and `--share
    "*.lora_*"` every peer has a base of its own.
    """
    from dfl.models.transformer import Transformer

    if len(shape) != 1:
        raise InputError(
            f"--model transformer needs rows of tokens, not inputs of {shown_shape(shape)}"
        )
    if width % heads:
        raise InputError(
            f"--model transformer: width={width} is no multiple of heads={heads}: choose "
            f"width={-(-width // heads) * heads}"
        )
    for option, idle in (("alpha", alpha != ALPHA), ("base=trained", base == "trained")):
        if idle and not lora:
            raise InputError(
                f"--model transformer: {option} is of adapters, and lora=0 has none: leave it out, "
                "or give lora=8"
            )
    check_places("transformer", shape, places)
    everywhere, frozen = bool(places), base == "frozen"
    return Transformer(classes, *shape, width, depth, heads, everywhere, lora, alpha, frozen)


def check_places(name: str, shape: Shape, places: tuple[int, ...]) -> None:
    """Refuse data with labels at other places than those of the inputs.

    Raises:
        InputError: an example has several labels, and not one for each of its inputs.
    """
    if places and places != shape:
        raise InputError(
            f"--model {name} predicts a label at every place of {shown_shape(shape)}, not at "
            f"{shown_shape(places)}"
        )


def _check_peepholes(name: str, cell: Cell, peepholes: bool) -> None:
    if peepholes and cell != "lstm":
        raise InputError(
            f"--model {name}: peepholes=true is for cell=lstm, not cell={cell}, which has no cell "
            "to see"
        )


def _dropout(rate: float, units: int) -> list[Module]:
    from dfl.models.layers import Dropout

    return [Dropout(rate, units)] if rate else []


def _signals(name: str, shape: Shape, fewest: int) -> tuple[int, int]:
    if len(shape) != 2 or shape[1] < fewest:
        raise InputError(
            f"--model {name} needs signals of at least {fewest} steps, channels x steps, not "
            f"inputs of {shown_shape(shape)}"
        )
    channels, steps = shape
    return channels, steps


def _image(name: str, shape: Shape, smallest: int) -> tuple[int, int, int]:
    if len(shape) != 3 or min(shape[1:]) < smallest:
        raise InputError(
            f"--model {name} needs images of at least {smallest}x{smallest}, channels x height x "
            f"width, not inputs of {shown_shape(shape)}"
        )
    channels, height, width = shape
    return channels, height, width
