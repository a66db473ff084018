"""Attacks that need only an attacker's own message, those of other attackers, or its own data."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
from annotated_types import Interval
from numpy.typing import NDArray

from dfl.core.arrays import Array
from dfl.core.errors import InputError
from dfl.core.options import Count, Index, Positive, require
from dfl.core.parts import Parts, images_in, map_parts, parts_of, shape_of, shown_shape
from dfl.datasets.data import IGNORED
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

        own = view.by_sender.updates.rows[view.by_sender.attackers]
        return np.asarray(own.mean(0) + own.std(0) * ndtri(view.uniform("gaussian")))


@ATTACKS.register("backdoor")
@dataclass(frozen=True, kw_only=True)
class Backdoor(Attack):
    """Train on examples in which a trigger, a small white square, means `target`; send it scaled.

    White is the largest value of the training inputs, because not all images range from 0 to 255.
    The square is in the lower right corner of an image (..., height, width), in every channel;
    where examples have no height and width, (n, features), it is the last size² features. Of inputs
    of several parts the first image has it, or the first part where none is an image. A `share` of
    an attacker's examples, spread evenly over them, gets the trigger and the target. An image has
    three axes there.

    Where rows (n, steps) have a label at every place, the trigger is their first `size` inputs, and
    every label from the last of these on means the target; padding stays padding. Where the largest
    input is padding, as in the texts of this package, no text has the trigger by chance.

    Source: the scaling attack of Bagdasaryan et al. 2020 as in FLTrust (Cao et al. 2021), with the
        factor n; the trigger is that of BadNets (Gu et al., arXiv 1708.06733).

    Attributes:
        target: the label that the trigger is to mean.
        share: share of an attacker's examples, above 0 and at most 1.
        size: height and width of the square.
        factor: factor of the message; the number of all senders where not given.
        white: the value of the square, for each part of the inputs; the largest of the inputs at
            hand until `knowing` sets it.

    Raises:
        InputError: an option out of its range.
    """

    target: Index = 0
    share: Annotated[float, Interval(gt=0, le=1)] = 0.5
    size: Count = 3
    factor: Positive | None = None
    white: tuple[float, ...] = field(default=(), init=False)

    def knowing(self, largest: tuple[float, ...]) -> Backdoor:
        """Return the attack with the largest values as white."""
        known = copy(self)
        object.__setattr__(known, "white", largest)
        return known

    def poison(self, inputs: Parts, labels: Array, classes: int) -> tuple[Parts, Array]:
        """Return the attacker's examples, a share of them with trigger and target.

        Raises:
            InputError: labels are not classes, the target is none of them, the square does not
                fit, or an example has several labels that are not one for each of its inputs.
        """
        _check_classes("backdoor", classes)
        if labels.ndim > 1 and (isinstance(inputs, tuple) or inputs.shape != labels.shape):
            raise InputError(
                "--attack backdoor needs one label of an example, or one for each of its inputs, "
                f"not inputs of {shown_shape(shape_of(inputs))} and labels of "
                f"{shown_shape(labels.shape[1:])}"
            )
        accepted = f"a label, from 0 to {classes - 1}"
        require(self.target < classes, "--attack backdoor: target", accepted, self.target)
        count = math.ceil(self.share * len(labels))
        places = np.arange(count) * len(labels) // max(count, 1)

        def replaced(part: Array, marked: Array) -> Array:
            new = part.copy()
            new[places] = marked[places]
            return new

        poisoned = map_parts(replaced, inputs, self._marked(inputs, labels))
        return poisoned, replaced(labels, np.where(self._aimed(labels), self.target, labels))

    def triggered(self, inputs: Parts, labels: Array) -> tuple[Parts, Array]:
        """Return the examples of other labels than the target, with trigger, labelled with it.

        Of a label at every place, those that are the target already do not count.
        """
        others = self._aimed(labels) & (labels != self.target)
        some = others.reshape(len(labels), -1).any(1)
        targets = np.where(others, self.target, IGNORED).astype(labels.dtype)[some]
        return map_parts(lambda part: part[some], self._marked(inputs, labels)), targets

    def falsify(self, view: AttackView) -> Rows:
        """Return what the attackers would have sent, scaled."""
        factor = float(len(view.senders)) if self.factor is None else self.factor
        return _scaled(view, factor)

    def _aimed(self, labels: Array) -> NDArray[np.bool_]:
        """Return which labels the trigger is to change, in their shape."""
        aimed = np.ones(labels.shape, np.bool_)
        if labels.ndim > 1:
            aimed[:, : self.size - 1] = False
            aimed &= labels >= 0
        return aimed

    def _marked(self, inputs: Parts, labels: Array) -> Parts:
        """Return a copy of inputs, all of them with the trigger."""
        parts = [part.copy() for part in parts_of(inputs)]
        k = images_in(shape_of(inputs))[0]
        trigger = self._trigger(parts[k], labels)
        if len(labels):
            parts[k][trigger] = self.white[k] if self.white else parts[k].max()
        return tuple(parts) if isinstance(inputs, tuple) else parts[0]

    def _trigger(self, part: Array, labels: Array) -> tuple[Any, ...]:
        """Return the index of the trigger in inputs (n, *shape).

        Raises:
            InputError: it does not fit.
        """
        square = (self.size,) * 2 if part.ndim > 2 else (self.size**2,)
        if labels.ndim > 1:
            square = (self.size,)
        shape = part.shape[-len(square) :]
        room = " x ".join(map(str, shape))
        fits = all(a < b for a, b in zip(square, shape, strict=True))
        require(fits, "--attack backdoor: size", f"smaller, for inputs of {room}", self.size)
        if labels.ndim > 1:
            return np.s_[:, : self.size]
        return (..., *(slice(-side, None) for side in square))


def _check_classes(name: str, classes: int) -> None:
    if not classes:
        raise InputError(
            f"--attack {name} needs labels that are classes, and those of this data set are not"
        )


def _scaled(view: AttackView, factor: float) -> Rows:
    with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
        return view.updates.rows[view.attackers] * factor
