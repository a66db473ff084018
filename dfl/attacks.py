"""What do lying peers say, and what do they learn from? `ATTACKS`, on messages and on data.

An attack names its peers by number or by a share of all, drawn by address. One that lies in its messages is shown what
everybody is about to say, in this rank's coordinates, whether it makes use of that or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl import keys
from dfl.aggregators import Words
from dfl.errors import InputError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Seen:
    """What attackers know when they speak.

    Attributes:
        words: of all n who speak, ascending; the attackers' own rows are what they would say if they were honest.
        bad: (f,) which rows are the attackers'.
        ids: (f,) the attackers' numbers among all peers.
        places: which coordinates these are.
        address: the seed, and the round and the slot in which this is said.
    """

    words: Words
    bad: Ints
    ids: Ints
    places: slice
    address: tuple[int, int, str]

    def uniform(self) -> Floats:
        """Uniform numbers in (0, 1), (f, c), an attacker's own in every round and coordinate."""
        seed, t, slot = self.address
        drawn = keys.bits(seed, "attack", self.ids, t, slot, n=self.places).numpy()
        return np.asarray(((drawn >> 8 & 0xFFFFFF) + 0.5) * 2.0**-24)


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Peers that lie; this one does not name any.

    Attributes:
        fraction: share of all peers, drawn at random, that attack.
        peers: the attackers by number, in place of a share.
    """

    fraction: float = 0.2
    peers: tuple[int, ...] = ()

    speaks: ClassVar[bool] = False
    """Whether attackers lie in their messages."""

    def chosen(self, peers: int, seed: int) -> Ints:
        """The attackers among `peers`, ascending.

        Raises:
            InputError: a peer that there is not, or nobody left who is honest.
        """
        if self.peers:
            wrong = [peer for peer in self.peers if not 0 <= peer < peers]
            if wrong:
                raise InputError(f"--attack: peers must be from 0 to {peers - 1}, not {wrong[0]}")
            found = np.unique(self.peers)
        else:
            if not 0 <= self.fraction <= 1:
                raise InputError(f"--attack: fraction must be from 0 to 1, not {self.fraction}")
            order = keys.generator(seed, "attackers").permutation(peers)
            found = np.sort(order[: round(self.fraction * peers)])
        if len(found) == peers:
            raise InputError(f"--attack: all {peers} peers attack; leave somebody honest")
        return found.astype(np.int64)

    def poison(self, inputs: NDArray[Any], labels: NDArray[Any], classes: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """What an attacker learns from in place of its own examples (n, *shape) and labels (n,)."""
        return inputs, labels

    def say(self, seen: Seen) -> NDArray[Any]:
        """What the attackers say, (f, c)."""
        return seen.words.rows[seen.bad]


_A = TypeVar("_A", bound=type[Attack])

ATTACKS: dict[str, Callable[..., Attack]] = {}
"""Name -> frozen dataclass whose fields are the attack's options."""


def attack(name: str) -> Callable[[_A], _A]:
    """Register an attack under `name`."""

    def register(kind: _A) -> _A:
        ATTACKS[name] = kind
        return kind

    return register


@attack("none")
@dataclass(frozen=True, kw_only=True)
class Honest(Attack):
    """Nobody lies."""

    fraction: float = 0.0


@attack("sign_flip")
@dataclass(frozen=True, kw_only=True)
class SignFlip(Attack):
    """Say the opposite, -v."""

    speaks: ClassVar[bool] = True

    def say(self, seen: Seen) -> NDArray[Any]:
        """Minus what they would have said."""
        return -seen.words.rows[seen.bad]
