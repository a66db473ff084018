"""Random augmentations of training examples; test examples are never augmented.

To add one, write a frozen dataclass whose fields are its options and decorate it with
`@AUGMENTS.register("its name")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.options import Index, Share
from dfl.core.parts import IMAGE, Parts, Shape, images_in, shapes_of
from dfl.core.registry import Registry

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.training.batch import Batch
else:
    from dfl.core.lazy import torch


@dataclass(frozen=True, kw_only=True)
class Augment:
    """No augmentation; the base class of all."""

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that examples of a shape can be augmented.

        Raises:
            InputError: they cannot.
        """

    def __call__(self, examples: Tensor, batch: Batch, zero: Tensor) -> Tensor:
        """Return the examples of a batch, augmented.

        Args:
            examples: (a, b, *shape), in the dtype of the files, or as normalized floats.
            batch: draws the random numbers of the examples.
            zero: the value that a raw pixel of zero has among the examples, a scalar or an array
                that broadcasts over one example.

        Returns:
            (a, b, *shape), in the same dtype.
        """
        return examples

    def check_parts(self, shape: Shape) -> None:
        """Check that examples can be augmented: of several parts, the images among them.

        Raises:
            InputError: they cannot.
        """
        for k in images_in(shape):
            self.check(shapes_of(shape)[k])

    def of_parts(self, examples: Parts, batch: Batch, zero: Parts) -> Parts:
        """Return the examples of a batch, augmented; of several parts, the images, all by the same
        random numbers, or the first part where none is an image.

        Args:
            examples, batch, zero: as for a call, or a tuple of examples and of zeros.
        """
        if not isinstance(examples, tuple):
            return self(examples, batch, zero)
        changed = images_in(tuple(tuple(part.shape[2:]) for part in examples))
        return tuple(
            self(part, batch, zero[k]) if k in changed else part for k, part in enumerate(examples)
        )


NO_AUGMENTATION = Augment()

AUGMENTS: Registry[type[Augment]] = Registry("augment", "dfl.augmentations")
"""Name -> frozen dataclass whose fields are the options."""

AUGMENTS.register("none")(Augment)


@AUGMENTS.register("crop_flip")
@dataclass(frozen=True, kw_only=True)
class CropFlip(Augment):
    """Shift every image and mirror some, as torchvision's RandomCrop(side, padding) and
    RandomHorizontalFlip(flip).

    An image is padded by `padding` pixels of zero on each side and cropped to its size at one of
    (2 padding + 1)^2 places, drawn uniformly. Then left and right are swapped with probability
    `flip`. Both happen before pixels are normalized. Of inputs of several parts the images are
    changed, all alike.

    Attributes:
        padding: the largest shift, in pixels.
        flip: the probability that an image is mirrored.

    Source:
        LG-FedAvg (Liang et al. 2020), section 7.1.2, and its released code for CIFAR-10.
    """

    padding: Index = 4
    flip: Share = 0.5

    def check(self, shape: tuple[int, ...]) -> None:
        """Check that examples are images, with sides longer than the padding.

        Raises:
            InputError: they are not.
        """
        if len(shape) != IMAGE:
            raise InputError(
                f"--augment crop_flip needs images, not inputs of {'x'.join(map(str, shape))}"
            )
        if self.padding >= min(shape[1:]):
            raise InputError(
                "--augment crop_flip: padding must be less than a side of the images, "
                f"{min(shape[1:])}, not {self.padding}"
            )

    def __call__(self, examples: Tensor, batch: Batch, zero: Tensor) -> Tensor:
        """Shift and mirror images (a, b, channels, height, width), each by three random numbers."""
        height, width = examples.shape[3:]
        down, right, mirrored = batch.draw("crop and flip", 3).unsqueeze(3).unbind(2)
        row, column = (torch.arange(side, device=examples.device) for side in (height, width))
        column = torch.where(mirrored < self.flip, width - 1 - column, column)
        row = row + self._shift(down)  # (a, b, height)
        column = column + self._shift(right)  # (a, b, width)
        inside = _within(row, height).unsqueeze(3) & _within(column, width).unsqueeze(2)
        row, column = row.clamp(0, height - 1), column.clamp(0, width - 1)
        sources = row.unsqueeze(3) * width + column.unsqueeze(2)
        return torch.where(inside.unsqueeze(2), rearrange(examples, sources.flatten(2)), zero)

    def _shift(self, drawn: Tensor) -> Tensor:
        """Return integers from -padding to padding for uniform float32 numbers in [0, 1).

        The largest float32 below 1 gives `padding`: its product is not rounded up.
        """
        return (drawn * (2 * self.padding + 1)).long() - self.padding


def rearrange(images: Tensor, sources: Tensor) -> Tensor:
    """Return images (a, b, channels, height, width) with their pixels rearranged.

    Args:
        images: of the same shape, the images to take the pixels from.
        sources: (a, b, height * width), the flat index from which each pixel is taken, row by row;
            the same for all channels.
    """
    flat = images.flatten(3)
    return flat.gather(3, sources.unsqueeze(2).expand_as(flat)).view(images.shape)


def _within(position: Tensor, side: int) -> Tensor:
    return (position >= 0) & (position < side)
