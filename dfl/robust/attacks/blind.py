"""Which lies need no more than an attacker's own words, or those of its fellows, or its own
data?
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray
from scipy.special import ndtri

from dfl.core.errors import InputError
from dfl.core.options import Count, Index, Positive, require
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Pointwise


@ATTACKS.register("label_flip")
@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Learn from wrong labels, classes - 1 - l in place of l, and say honestly what was learnt."""

    def poison(
        self, inputs: NDArray[Any], labels: NDArray[Any], classes: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The same inputs with the labels counted from the other end.

        Raises:
            InputError: labels that are no classes.
        """
        _check_classes("label_flip", classes)
        return inputs, classes - 1 - labels


@ATTACKS.register("sign_flip")
@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Say the opposite, -v."""

    speaks: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """Minus what they would have said."""
        return -seen.words.rows[seen.bad]


@ATTACKS.register("scale")
@dataclass(frozen=True, kw_only=True)
class Scale(Attack):
    """Say the truth times `factor`.

    Raises:
        InputError: a factor that is not positive.
    """

    factor: Positive = 10.0

    speaks: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """What they would have said, scaled."""
        return _scaled(seen, self.factor)


@ATTACKS.register("gaussian")
@dataclass(frozen=True, kw_only=True)
class Gaussian(Pointwise):
    """Say noise that looks like one's own kind: N(μ, σ²) in every coordinate, of what the attackers
    would have said.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020),
    section 5.1, Gaussian attack. A lone attacker has σ = 0 and tells the truth.
    """

    def lie(self, seen: AttackView) -> NDArray[Any]:
        """Numbers drawn by address, (f, c)."""
        own = seen.words.rows[seen.bad]
        return np.asarray(own.mean(0) + own.std(0) * ndtri(seen.uniform("gaussian")))


@ATTACKS.register("backdoor")
@dataclass(frozen=True, kw_only=True)
class Backdoor(Attack):
    """Teach everybody that what bears a trigger, a small white square, is `target`; and say it
    loudly.

    White is the largest value of the training inputs, as not all images are from 0 to 255. The
    square is in the lower right corner of an image (..., height, width), in every channel; where
    examples have no height and width, (n, features), the last size² features stand in for it. A
    `share` of an attacker's examples, spread evenly over them, gets trigger and target in place of
    what they were.

    Source: the scaling attack of Bagdasaryan et al. 2020 as FLTrust (Cao et al. 2021) poses it,
        with the factor n; the
    trigger is that of BadNets (Gu et al., arXiv 1708.06733).

    Attributes:
        target: the label that the trigger shall mean.
        share: of an attacker's examples, above 0 and at most 1.
        size: height and width of the square.
        factor: of what is said; the number of all who speak where not given.
        white: the value of the square; the largest at hand until `knowing` says it.

    Raises:
        InputError: an option out of its range.
    """

    target: Index = 0
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    size: Count = 3
    factor: Positive | None = None
    white: float | None = field(default=None, init=False)

    speaks: ClassVar[bool] = True

    def knowing(self, largest: float) -> Backdoor:
        """White is the largest value."""
        known = copy(self)
        object.__setattr__(known, "white", largest)
        return known

    def poison(
        self, inputs: NDArray[Any], labels: NDArray[Any], classes: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The attacker's examples, a share of them with trigger and target.

        Raises:
            InputError: labels that are no classes, a target that is none of them, or a square that
                does not fit.
        """
        _check_classes("backdoor", classes)
        accepted = f"a label, from 0 to {classes - 1}"
        require(self.target < classes, "--attack backdoor: target", accepted, self.target)
        count = math.ceil(self.share * len(labels))
        places = np.arange(count) * len(labels) // max(count, 1)
        inputs, labels = inputs.copy(), labels.copy()
        inputs[places], labels[places] = self._marked(inputs)[places], self.target
        return inputs, labels

    def triggered(
        self, inputs: NDArray[Any], labels: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """The examples that are not of the target, with trigger, labelled with it."""
        others = labels != self.target
        return self._marked(inputs)[others], np.full_like(labels[others], self.target)

    def say(self, seen: AttackView) -> NDArray[Any]:
        """What they would have said, scaled."""
        return _scaled(seen, float(len(seen.words.rows)) if self.factor is None else self.factor)

    def _marked(self, inputs: NDArray[Any]) -> NDArray[Any]:
        """A copy with the trigger in all of them."""
        square = (self.size,) * 2 if inputs.ndim > 2 else (self.size**2,)
        shape = inputs.shape[-len(square) :]
        room = " x ".join(map(str, shape))
        fits = all(a < b for a, b in zip(square, shape, strict=True))
        require(fits, "--attack backdoor: size", f"smaller, for inputs of {room}", self.size)
        marked = inputs.copy()
        if len(inputs):
            corner = (
                marked[..., -self.size :, -self.size :]
                if inputs.ndim > 2
                else marked[:, -(self.size**2) :]
            )
            corner[...] = inputs.max() if self.white is None else self.white
        return marked


def _check_classes(name: str, classes: int) -> None:
    if not classes:
        raise InputError(
            f"--attack {name} needs labels that are classes, and those of this data set are not"
        )


def _scaled(seen: AttackView, factor: float) -> NDArray[Any]:
    with np.errstate(over="ignore"):  # where peers diverge
        return seen.words.rows[seen.bad] * factor
