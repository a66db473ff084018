"""What else should a representation be good for? Losses of a small net on it, the auxiliary model
of LG-FedAvg.

To add one, write a frozen dataclass whose fields are its options and decorate it with
`@AUXILIARIES.register("its name")`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import permutations
from typing import TYPE_CHECKING, ClassVar

from dfl.core.errors import InputError
from dfl.core.options import Count, NotNegative
from dfl.core.registry import Registry
from dfl.models.zoo import Widths
from dfl.training.augmentation import rearranged
from dfl.training.losses import cross_entropy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.training.batch import Batch
else:
    from dfl.core.lazy import torch

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """A net a on the representation h = f(x), and what it is to say; this one is to say the labels.

    Attributes:
        weight: of its loss in what f learns from.
        hidden: the widths of its hidden layers, with ReLU between them; none where not given.
        head_layers: how many of the model's layers with parameters lie behind h.
    """

    weight: NotNegative = 1.0
    hidden: Widths | None = None
    head_layers: Count = 1

    name: ClassVar[str]
    """What the command line calls it."""

    @property
    def flag(self) -> str:
        """What messages call it."""
        return f"--auxiliary {self.name}"

    def outputs(self, shape: Shape, classes: int) -> int:
        """How many numbers the net says of an example.

        Args:
            shape: of an example.
            classes: how many labels there are; 0 where labels are no classes.

        Raises:
            InputError: there is nothing to say of such examples.
        """
        if not classes:
            raise InputError(f"{self.flag} needs labels that are classes")
        return classes

    def pose(self, inputs: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """What the net is shown, by way of f, and what it is to say of it, for a batch (a, b, ...)
        each.
        """
        return inputs, labels

    def loss(self, said: Tensor, wanted: Tensor) -> Tensor:
        """The loss (n,) of what is said (n, outputs)."""
        return cross_entropy(said, wanted)


def none() -> None:
    """No auxiliary net."""


AUXILIARIES: Registry[Callable[..., Auxiliary | None]] = Registry("auxiliary", "dfl.auxiliaries")
"""Name -> frozen dataclass whose fields are the options; nothing for none."""

AUXILIARIES.register("none")(none)


@AUXILIARIES.register("supervised")
@dataclass(frozen=True, kw_only=True)
class Supervised(Auxiliary):
    """The labels, by cross entropy (LG-FedAvg, Figure 1c)."""


@AUXILIARIES.register("autoencoder")
@dataclass(frozen=True, kw_only=True)
class Autoencoder(Auxiliary):
    """The example as the model sees it, by the mean over its numbers of the squared error
    (LG-FedAvg, Figure 1b).
    """

    def outputs(self, shape: Shape, classes: int) -> int:
        """As many as an example has."""
        return math.prod(shape)

    def pose(self, inputs: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The examples, and the examples."""
        return inputs, inputs

    def loss(self, said: Tensor, wanted: Tensor) -> Tensor:
        """The mean squared error."""
        return (said - wanted.flatten(1)).square().mean(1)


@dataclass(frozen=True, kw_only=True)
class Puzzle(Auxiliary, ABC):
    """Which of a few rearrangements of its pixels an image has gone through, drawn for every image
    and step.
    """

    def outputs(self, shape: Shape, classes: int) -> int:
        """One for every rearrangement.

        Raises:
            InputError: the examples are no images that can be rearranged so.
        """
        if len(shape) != 3 or not self.fits(*shape[1:]):
            size = "x".join(map(str, shape))
            raise InputError(f"{self.flag} needs images {self.needs}, not inputs of {size}")
        return len(self.table(*shape[1:]))

    def pose(self, inputs: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The images rearranged, and how."""
        table = self.table(*inputs.shape[3:]).to(inputs.device)
        which = (batch.draw(self.name) * len(table)).long()
        return rearranged(inputs, table[which]), which

    needs: ClassVar[str]
    """Of which form images must be."""

    @staticmethod
    @abstractmethod
    def fits(height: int, width: int) -> bool:
        """Whether images are of that form."""

    @staticmethod
    @abstractmethod
    def table(height: int, width: int) -> Tensor:
        """Every rearrangement by the places (height * width,) that the pixels come from."""


@AUXILIARIES.register("rotation")
@dataclass(frozen=True, kw_only=True)
class Rotation(Puzzle):
    """By how many quarters of a turn an image is turned, against the clock (Gidaris, Singh,
    Komodakis 2018).
    """

    needs: ClassVar[str] = "as high as they are wide"

    @staticmethod
    def fits(height: int, width: int) -> bool:
        """Squares do."""
        return height == width

    @staticmethod
    @lru_cache
    def table(height: int, width: int) -> Tensor:
        """No turn, and one to three quarters."""
        places = torch.arange(height * width).view(height, width)
        return torch.stack([places.rot90(quarters).flatten() for quarters in range(4)])


@AUXILIARIES.register("jigsaw")
@dataclass(frozen=True, kw_only=True)
class Jigsaw(Puzzle):
    """In which of the 24 orders the four quarters of an image are put (Noroozi, Favaro 2016, with 2
    x 2 pieces).
    """

    needs: ClassVar[str] = "with sides that are even"

    @staticmethod
    def fits(height: int, width: int) -> bool:
        """Even sides do."""
        return height % 2 == width % 2 == 0

    @staticmethod
    @lru_cache
    def table(height: int, width: int) -> Tensor:
        """All orders of upper left, upper right, lower left and lower right, as
        `itertools.permutations` lists them.
        """
        places = torch.arange(height * width).view(height, width)
        pieces = [piece for half in places.chunk(2, 0) for piece in half.chunk(2, 1)]
        orders = [[pieces[k] for k in order] for order in permutations(range(4))]
        return torch.stack(
            [torch.cat([torch.cat(p[:2], 1), torch.cat(p[2:], 1)]).flatten() for p in orders]
        )
