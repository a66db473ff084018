"""What does every attack know, and what is every attack asked? `AttackView`, `Attack` and the
registry, `ATTACKS`.

To add one, write a frozen dataclass whose fields are its options and decorate it with
`@ATTACKS.register("its name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.options import Share, require
from dfl.core.registry import Registry
from dfl.robust.aggregators import Updates

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AttackView:
    """What attackers know when they speak.

    Attributes:
        words: of all n who speak, ascending; the attackers' own rows are what they would say if
            they were honest.
        bad: (f,) which rows are the attackers'.
        ids: (f,) the attackers' numbers among all peers.
        places: which coordinates these are.
        address: the seed, and the round and the slot in which this is said.
    """

    words: Updates
    bad: Ints
    ids: Ints
    places: slice
    address: tuple[int, int, str]

    @cached_property
    def models(self) -> Ints:
        """(h,) the rows to imitate: of those who are honest, or all where nobody is."""
        honest = np.setdiff1d(np.arange(len(self.words.rows)), self.bad)
        return honest if len(honest) else self.bad

    def within(self, block: slice) -> AttackView:
        """The same in some of the coordinates, in float64 and in memory order, so that sums know no
        other order.
        """
        rows = self.words.rows[:, block].astype(np.float64, order="C")
        places = slice(self.places.start + block.start, self.places.start + block.stop)
        return replace(self, words=replace(self.words, rows=rows, trusted=None), places=places)

    def uniform(self, what: str = "", step: int = 0) -> NDArray[np.float32]:
        """Uniform numbers in (0, 1), (f, c), an attacker's own in every round, coordinate and draw
        of a round.

        Twenty-three bits and a half: float32 holds each exactly, and none is 0 or 1.
        """
        seed, t, slot = self.address
        drawn = randomness.bits(
            seed, "attack", self.ids, t, slot, what, step, n=self.places
        ).numpy()
        return np.asarray(
            ((drawn >> 9 & 0x7FFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
        )


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Peers that lie; this one does not name any.

    Attributes:
        fraction: share of all peers, drawn at random, that attack.
        peers: the attackers by number, in place of a share.
    """

    fraction: Share = 0.2
    peers: tuple[int, ...] | None = None

    name: ClassVar[str]
    """What the command line calls it."""
    speaks: ClassVar[bool] = False
    """Whether attackers lie in their messages."""
    per_edge: ClassVar[bool] = False
    """Whether an attacker tells neighbours different things."""

    def chosen(self, peers: int, seed: int) -> Ints:
        """The attackers among `peers`, ascending.

        Raises:
            InputError: a peer that there is not, or nobody left who is honest.
        """
        if self.peers:
            good = all(0 <= peer < peers for peer in self.peers)
            require(good, f"--attack {self.name}: peers", f"from 0 to {peers - 1}", self.peers)
            found = np.unique(self.peers)
        else:
            order = randomness.generator(seed, "attackers").permutation(peers)
            found = np.sort(order[: round(self.fraction * peers)])
            someone = len(found) > 0 or self.fraction == 0
            accepted = f"0 or enough for one of {peers} peers"
            require(someone, f"--attack {self.name}: fraction", accepted, self.fraction)
        if len(found) == peers:
            raise InputError(f"--attack {self.name}: all {peers} peers lie; leave somebody honest")
        return found.astype(np.int64)

    def knowing(self, largest: float) -> Attack:
        """The same attack by those who know the largest value of the training inputs."""
        return self

    def poison(
        self, inputs: NDArray[Any], labels: NDArray[Any], classes: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """What an attacker learns from in place of its own examples (n, *shape) and labels (n,)."""
        return inputs, labels

    def say(self, seen: AttackView) -> NDArray[Any]:
        """What the attackers say, (f, c)."""
        return seen.words.rows[seen.bad]

    def tell(self, seen: AttackView, matrix: csr_array, pairs: Ints) -> NDArray[Any]:
        """What attackers say to neighbours, one word for each edge, (k, c); the same to all unless
        `per_edge`.

        Args:
            seen: as for `say`, where all P peers speak.
            matrix: (P, P), the weight of j at v in row v.
            pairs: (k, 2), the attacker and the neighbour of every edge.
        """
        return self.say(seen)[np.searchsorted(seen.ids, pairs[:, 0])]

    def triggered(
        self, inputs: NDArray[Any], labels: NDArray[Any]
    ) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Test examples on which accuracy is the attack's success rate; None for an attack without
        such a rate.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Pointwise(Attack):
    """Peers whose lie about a coordinate depends on what is said about it alone; this one tells the
    truth.
    """

    speaks: ClassVar[bool] = True

    def say(self, seen: AttackView) -> NDArray[Any]:
        """What the attackers say, (f, c), worked out block by block."""
        said = np.empty((len(seen.bad), seen.words.rows.shape[1]), seen.words.rows.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            for block in blocks(said.shape[1] if len(said) else 0):
                said[:, block] = self.lie(seen.within(block))
        return said

    def lie(self, seen: AttackView) -> NDArray[Any]:
        """What the attackers say in one block, (f, c), or (c,) where all say the same."""
        return seen.words.rows[seen.bad]


ATTACKS: Registry[Callable[..., Attack]] = Registry("attack", "dfl.attacks")
"""Name -> frozen dataclass whose fields are the attack's options."""


@ATTACKS.register("none")
@dataclass(frozen=True, kw_only=True)
class Honest(Attack):
    """Nobody lies."""

    fraction: float = field(default=0.0, init=False)
    peers: tuple[int, ...] | None = field(default=None, init=False)
