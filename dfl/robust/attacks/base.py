"""Base classes of attacks, the view that attackers have of messages, and the registry, `ATTACKS`.

To add an attack, write a frozen dataclass whose fields are its options and decorate it with
`@ATTACKS.register("its name")`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.core import randomness
from dfl.core.arrays import Array
from dfl.core.errors import InputError
from dfl.core.layout import blocks
from dfl.core.options import Share, check_chosen, require
from dfl.core.parts import Parts
from dfl.core.registry import Registry
from dfl.robust.aggregators import Rows, Updates

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class AttackView:
    """What attackers know when they send.

    Attributes:
        updates: the k messages, by ascending sender, one of each sender or one for each of its
            edges; the rows of attackers are what they would send if they were honest.
        attackers: (f,) positions of the attackers' rows.
        owners: (k,) the senders, by their numbers among all peers.
        coordinates: which coordinates of the messages these are.
        seed: the run's seed.
        t: the round.
        slot: the name of the exchange within the round.
    """

    updates: Updates
    attackers: Ints
    owners: Ints
    coordinates: slice
    seed: int
    t: int
    slot: str

    @property
    def ids(self) -> Ints:
        """The attacker that sends each of the attackers' rows, (f,)."""
        return self.owners[self.attackers]

    @cached_property
    def senders(self) -> Ints:
        """The numbers of the senders, ascending, each once."""
        return np.unique(self.owners)

    @cached_property
    def by_sender(self) -> AttackView:
        """The view with one row of each sender, the mean of those over its edges."""
        senders = self.senders
        if len(senders) == len(self.owners):
            return self
        rows = self.updates.rows
        places = np.searchsorted(senders, self.owners)
        edges = np.bincount(places)[:, None]
        ones = csr_array((np.ones(len(places)), (places, np.arange(len(places)))))
        means = np.empty((len(senders), rows.shape[1]), rows.dtype)
        for block in blocks(rows.shape[1]):
            means[:, block] = ones @ rows[:, block].astype(np.float64, order="C") / edges
        weights = np.full(len(senders), 1 / len(senders))
        return replace(
            self,
            updates=replace(self.updates, rows=means, weights=weights),
            attackers=np.flatnonzero(np.isin(senders, self.ids)),
            owners=senders,
        )

    @cached_property
    def imitated(self) -> Ints:
        """Positions (h,) of the rows to imitate, of honest senders or of all if none is honest."""
        honest = np.setdiff1d(np.arange(len(self.updates.rows)), self.attackers)
        return honest if len(honest) else self.attackers

    def within(self, block: slice) -> AttackView:
        """Return the view of some of the coordinates, in float64.

        Rows are in memory order, so that the order of a sum does not depend on the layout. There is
        no reference row.

        Args:
            block: among the coordinates of this view.
        """
        rows = self.updates.rows[:, block].astype(np.float64, order="C")
        start = self.coordinates.start
        return replace(
            self,
            updates=replace(self.updates, rows=rows, reference=None),
            coordinates=slice(start + block.start, start + block.stop),
        )

    def uniform(self, purpose: str = "", step: int = 0) -> NDArray[np.float32]:
        """Return uniform numbers in (0, 1), (f, c).

        Each belongs to one attacker, round, coordinate, purpose and step. They have 23.5 bits:
        float32 holds each exactly, and none is 0 or 1.

        Args:
            purpose, step: part of the address of the numbers, where a round draws several times.
        """
        drawn = randomness.bits(
            self.seed, "attack", self.ids, self.t, self.slot, purpose, step, n=self.coordinates
        ).numpy()
        return np.asarray(
            ((drawn >> 9 & 0x7FFFFF).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
        )


@dataclass(frozen=True, kw_only=True)
class Attack:
    """Base class of attacks. Has no effect.

    Attributes:
        fraction: share of all peers, drawn at random, that attack; 0.2 without peers.
        peers: the attackers by number, in place of a share.

    Raises:
        InputError: both are given, or no peer is.
    """

    fraction: Share | None = None
    peers: tuple[int, ...] | None = None

    name: ClassVar[str] = "own"
    """Its name on the command line."""

    def __post_init__(self) -> None:
        check_chosen(f"--attack {self.name}", self.fraction, self.peers)

    @property
    def falsifies(self) -> bool:
        """Whether attackers falsify their messages."""
        return self.per_edge or type(self).falsify is not Attack.falsify

    @property
    def per_edge(self) -> bool:
        """Whether an attacker sends a different message to each neighbour."""
        return type(self).falsify_edges is not Attack.falsify_edges

    @property
    def poisons(self) -> bool:
        """Whether attackers poison the examples on which they train."""
        return type(self).poison is not Attack.poison

    def chosen(self, peers: int, seed: int) -> Ints:
        """Return the attackers among all peers, ascending.

        Args:
            peers: P.
            seed: the run's seed.

        Raises:
            InputError: a peer does not exist, the share is less than one peer, or no peer is left
                that is honest.
        """
        if self.peers is not None:
            good = all(0 <= peer < peers for peer in self.peers)
            require(good, f"--attack {self.name}: peers", f"from 0 to {peers - 1}", self.peers)
            attackers = np.unique(self.peers)
        else:
            share = 0.2 if self.fraction is None else self.fraction
            order = randomness.generator(seed, "attackers").permutation(peers)
            attackers = np.sort(order[: round(share * peers)])
            good = len(attackers) > 0 or share == 0
            accepted = f"0 or enough for one of {peers} peers"
            require(good, f"--attack {self.name}: fraction", accepted, share)
        if len(attackers) == peers:
            raise InputError(f"--attack {self.name}: all {peers} peers attack; leave an honest one")
        return attackers.astype(np.int64)

    def knowing(self, largest: tuple[float, ...]) -> Attack:
        """Return the attack with the largest value of each part of the training inputs known to
        it.
        """
        return self

    def poison(self, inputs: Parts, labels: Array, classes: int) -> tuple[Parts, Array]:
        """Return the inputs and labels on which an attacker trains.

        Args:
            inputs: (n, *shape), those of its own examples; or a tuple of such parts.
            labels: (n,), theirs; (n, *places) of sequences, negative where they do not count.
            classes: the number of classes; 0 where labels are not classes.
        """
        return inputs, labels

    def falsify(self, view: AttackView) -> Rows:
        """Return the messages that the attackers send, (f, c)."""
        return view.updates.rows[view.attackers]

    def falsify_edges(self, view: AttackView, matrix: csr_array, edges: Ints) -> Rows:
        """Return the messages that attackers send over edges, (k, c).

        All neighbours of an attacker receive the same, unless `per_edge`.

        Args:
            view: as for `falsify`, with a row for each of P peers, also for those that are down.
            matrix: (P, P), the mixing matrix, w_vj in row v, without the weights of peers that are
                down.
            edges: (k, 2), the attacker and its neighbour.
        """
        return self.falsify(view)[np.searchsorted(view.ids, edges[:, 0])]

    def triggered(self, inputs: Parts, labels: Array) -> tuple[Parts, Array] | None:
        """Return test examples on which the accuracy is the attack's success rate.

        None for an attack without a success rate.

        Args:
            inputs: (n, *shape), those of the test examples; or a tuple of such parts.
            labels: (n,), theirs; (n, *places) of sequences, negative where they do not count.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class Pointwise(Attack):
    """Base class of attacks that falsify a coordinate from the messages in that coordinate alone.

    It sends what an honest peer sends.
    """

    def falsify(self, view: AttackView) -> Rows:
        """Return the messages that the attackers send, (f, c), computed block by block."""
        rows = view.updates.rows
        sent = np.empty((len(view.attackers), rows.shape[1]), rows.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # where peers diverge
            for block in blocks(sent.shape[1] if len(sent) else 0):
                sent[:, block] = self.falsify_block(view.within(block))
        return sent

    def falsify_block(self, view: AttackView) -> Rows:
        """Return what attackers send in one block, (f, c), or (c,) where all send the same."""
        return view.updates.rows[view.attackers]


ATTACKS: Registry[Callable[..., Attack]] = Registry("attack", "dfl.attacks")
"""Name -> frozen dataclass whose fields are the attack's options."""


@ATTACKS.register("none")
@dataclass(frozen=True, kw_only=True)
class Honest(Attack):
    """No peer attacks."""

    fraction: float = field(default=0.0, init=False)
    peers: tuple[int, ...] | None = field(default=None, init=False)
