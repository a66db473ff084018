"""Attacks that need only an attacker's own message, those of other attackers, or its own data."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from dfl.core.arrays import Array
from dfl.core.errors import InputError
from dfl.core.options import Count, Index, Positive, require
from dfl.core.parts import Parts, shape_of, shown_shape
from dfl.robust.aggregators import Rows
from dfl.robust.attacks.base import ATTACKS, Attack, AttackView, Pointwise


@ATTACKS.register("label_flip")
@dataclass(frozen=True, kw_only=True)
class LabelFlip(Attack):
    """Train on wrong labels, classes - 1 - l in place of l, and send the result unchanged."""

    def poison(self, inputs: Parts, labels: Array, classes: int) -> tuple[Parts, Array]:
        """Return the same inputs with reversed labels.

        Raises:
            InputError: labels are not classes.
        """
        _check_classes("label_flip", classes)
        return inputs, np.where(labels < 0, labels, classes - 1 - labels)


@ATTACKS.register("sign_flip")
@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Send the opposite, -v."""

    falsifies: ClassVar[bool] = True

    def falsify(self, view: AttackView) -> Rows:
        """Return minus what the attackers would have sent."""
        return -view.updates.rows[view.attackers]


@ATTACKS.register("scale")
@dataclass(frozen=True, kw_only=True)
class Scale(Attack):
    """Send the honest message times `factor`.

    Raises:
        InputError: a factor that is not positive.
    """

    factor: Positive = 10.0

    falsifies: ClassVar[bool] = True

    def falsify(self, view: AttackView) -> Rows:
        """Return what the attackers would have sent, scaled."""
        return _scaled(view, self.factor)


@ATTACKS.register("gaussian")
@dataclass(frozen=True, kw_only=True)
class Gaussian(Pointwise):
    """Send noise N(μ, σ²) in every coordinate, with the moments of the attackers' honest messages.

    A lone attacker has σ = 0, and sends its honest message.

    Source: Fang et al., "Local model poisoning attacks to Byzantine-robust federated learning"
        (USENIX Security 2020), section 5.1, Gaussian attack.
    """

    def falsify_block(self, view: AttackView) -> Rows:
        """Return numbers drawn by address, (f, c)."""
        from scipy.special import ndtri  # 35 ms at every start, for this attack only

        own = view.updates.rows[view.attackers]
        return np.asarray(own.mean(0) + own.std(0) * ndtri(view.uniform("gaussian")))


@ATTACKS.register("backdoor")
@dataclass(frozen=True, kw_only=True)
class Backdoor(Attack):
    """Train on examples in which a trigger, a small white square, means `target`; send it scaled.

    White is the largest value of the training inputs, because not all images range from 0 to 255.
    The square is in the lower right corner of an image (..., height, width), in every channel;
    where examples have no height and width, (n, features), it is the last size² features. A `share`
    of an attacker's examples, spread evenly over them, gets the trigger and the target.

    Source: the scaling attack of Bagdasaryan et al. 2020 as in FLTrust (Cao et al. 2021), with the
        factor n; the trigger is that of BadNets (Gu et al., arXiv 1708.06733).

    Attributes:
        target: the label that the trigger is to mean.
        share: share of an attacker's examples, above 0 and at most 1.
        size: height and width of the square.
        factor: factor of the message; the number of all senders where not given.
        white: the value of the square; the largest of the inputs at hand until `knowing` sets it.

    Raises:
        InputError: an option out of its range.
    """

    target: Index = 0
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    size: Count = 3
    factor: Positive | None = None
    white: float | None = field(default=None, init=False)

    falsifies: ClassVar[bool] = True

    def knowing(self, largest: float) -> Backdoor:
        """Return the attack with the largest value as white."""
        known = copy(self)
        object.__setattr__(known, "white", largest)
        return known

    def poison(self, inputs: Parts, labels: Array, classes: int) -> tuple[Parts, Array]:
        """Return the attacker's examples, a share of them with trigger and target.

        Raises:
            InputError: labels are not classes, the target is none of them, the square does not
                fit, or examples have several parts or labels.
        """
        _check_classes("backdoor", classes)
        if isinstance(inputs, tuple) or labels.ndim > 1:
            raise InputError(
                "--attack backdoor needs inputs of one part and one label of an example, not "
                f"inputs of {shown_shape(shape_of(inputs))} and labels of "
                f"{shown_shape(labels.shape[1:] or (1,))}"
            )
        accepted = f"a label, from 0 to {classes - 1}"
        require(self.target < classes, "--attack backdoor: target", accepted, self.target)
        count = math.ceil(self.share * len(labels))
        places = np.arange(count) * len(labels) // max(count, 1)
        poisoned = inputs.copy()
        poisoned[places] = self._marked(inputs)[places]
        targets = labels.copy()
        targets[places] = self.target
        return poisoned, targets

    def triggered(self, inputs: Parts, labels: Array) -> tuple[Parts, Array]:
        """Return the examples of other labels than the target, with trigger, labelled with it."""
        others = labels != self.target
        return self._marked(inputs)[others], np.full_like(labels[others], self.target)

    def falsify(self, view: AttackView) -> Rows:
        """Return what the attackers would have sent, scaled."""
        senders = len(view.updates.rows)
        return _scaled(view, float(senders) if self.factor is None else self.factor)

    def _marked(self, inputs: Array) -> Array:
        """Return a copy of inputs, all of them with the trigger."""
        square = (self.size,) * 2 if inputs.ndim > 2 else (self.size**2,)
        shape = inputs.shape[-len(square) :]
        room = " x ".join(map(str, shape))
        fits = all(a < b for a, b in zip(square, shape, strict=True))
        require(fits, "--attack backdoor: size", f"smaller, for inputs of {room}", self.size)
        marked = inputs.copy()
        if len(inputs):
            square_of_image = np.s_[..., -self.size :, -self.size :]
            last_features = np.s_[:, -(self.size**2) :]
            corner = marked[square_of_image if inputs.ndim > 2 else last_features]
            corner[...] = inputs.max() if self.white is None else self.white
        return marked


def _check_classes(name: str, classes: int) -> None:
    if not classes:
        raise InputError(
            f"--attack {name} needs labels that are classes, and those of this data set are not"
        )


def _scaled(view: AttackView, factor: float) -> Rows:
    with np.errstate(over="ignore"):  # where peers diverge
        return view.updates.rows[view.attackers] * factor
