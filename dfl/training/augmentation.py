"""What becomes of an example before a peer learns from it? Ways to alter images by chance, at
training only.

To add one, write a frozen dataclass whose fields are its options and decorate it with
`@AUGMENTS.register("its name")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.options import Index, Share
from dfl.core.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.training.batch import Batch
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Examples stay as they are."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse examples of a shape that this cannot alter.

        Raises:
            InputError: they are of such a shape.
        """

    def __call__(self, examples: Tensor, batch: Batch, zero: Tensor) -> Tensor:
        """Alter the examples of a batch.

        Args:
            examples: (a, b, *shape), in the dtype of the files, or floats as the model sees them.
            batch: draws random numbers for them.
            zero: what a pixel of zero is among them, a number or an array that broadcasts over one
                example.

        Returns:
            (a, b, *shape), in the same dtype.
        """
        return examples


AS_THEY_ARE = Augment()

AUGMENTS: Registry[type[Augment]] = Registry("augment", "dfl.augmentations")
"""Name -> frozen dataclass whose fields are the options."""

AUGMENTS.register("none")(Augment)


@AUGMENTS.register("crop_flip")
@dataclass(frozen=True, kw_only=True)
class CropFlip(Augment):
    """Shift every image and mirror some, as torchvision's RandomCrop(side, padding) and
    RandomHorizontalFlip(flip).

    An image is surrounded by `padding` pixels of zero and cut to its size at a random place, all (2
    padding + 1)^2 of them alike; then left and right change places with probability `flip`. That is
    before pixels are normalised.

    Attributes:
        padding: the farthest shift, in pixels.
        flip: the share of images that are mirrored.

    Source:
        LG-FedAvg (Liang et al. 2020), section 7.1.2, and its released code for CIFAR-10.
    """

    padding: Index = 4
    flip: Share = 0.5

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse what is no image, and shifts that leave nothing of one."""
        if len(shape) != 3:
            raise InputError(
                f"--augment crop_flip needs images, not inputs of {'x'.join(map(str, shape))}"
            )
        if self.padding >= min(shape[1:]):
            raise InputError(
                f"--augment crop_flip: padding must be less than a side of the images, {min(shape[1:])}, "
                f"not {self.padding}"
            )

    def __call__(self, examples: Tensor, batch: Batch, zero: Tensor) -> Tensor:
        """Shift and mirror images (a, b, channels, height, width), each by three numbers of its
        own.
        """
        height, width = examples.shape[3:]
        down, right, mirrored = batch.draw("crop and flip", 3).unsqueeze(3).unbind(2)
        row, column = (torch.arange(side, device=examples.device) for side in (height, width))
        column = torch.where(mirrored < self.flip, width - 1 - column, column)
        row, column = (
            row + self._shift(down),
            column + self._shift(right),
        )  # (a, b, height) and (a, b, width)
        inside = _within(row, height).unsqueeze(3) & _within(column, width).unsqueeze(2)
        places = row.clamp(0, height - 1).unsqueeze(3) * width + column.clamp(
            0, width - 1
        ).unsqueeze(2)
        return torch.where(inside.unsqueeze(2), rearranged(examples, places.flatten(2)), zero)

    def _shift(self, drawn: Tensor) -> Tensor:
        """Whole numbers from -padding to padding; no float32 below 1 is rounded up to the number
        behind them.
        """
        return (drawn * (2 * self.padding + 1)).long() - self.padding


def rearranged(images: Tensor, places: Tensor) -> Tensor:
    """Images (a, b, channels, height, width) of the same pixels in other places.

    Args:
        images: those to take the pixels from.
        places: (a, b, height * width), row by row where each pixel comes from, in all channels.
    """
    flat = images.flatten(3)
    return flat.gather(3, places.unsqueeze(2).expand_as(flat)).view(images.shape)


def _within(place: Tensor, side: int) -> Tensor:
    return (place >= 0) & (place < side)
