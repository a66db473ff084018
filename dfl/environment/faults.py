"""What goes wrong in the simulated world: who is up in a round, who is slow, and which link loses its words.

Whatever happens is a function of the seed, the round, and the peer or the directed link, so that every rank can say it
of all of them, in any order, and after a resume. To add a fault, write a frozen dataclass whose fields are its options
and decorate it with `@FAULTS.register("its name")`; it answers those of the three questions of `Fault` that it has a part in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import numpy as np
from annotated_types import Interval

from dfl.core import randomness
from dfl.core.options import BelowOne, Index, Positive, Share, require
from dfl.core.registry import Registry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]
    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]


FAULTS: Registry[type[Fault]] = Registry("faults", "dfl.faults")
"""Name -> frozen dataclass whose fields are the fault's options."""


class RoundKey(NamedTuple):
    """A round t of a run with some seed and P peers."""

    peers: int
    seed: int
    t: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Nothing goes wrong."""

    name: ClassVar[str] = "none"
    """What the command line calls it."""
    touches: ClassVar[str] = "nothing"
    """Whom it befalls: links, peers, or only their work."""

    def down(self, round_key: RoundKey) -> Bools:
        """Which peers neither train nor speak nor hear, (P,)."""
        return np.zeros(round_key.peers, bool)

    def pace(self, round_key: RoundKey) -> Floats:
        """Share of its local steps for which every peer has the time, (P,)."""
        return np.ones(round_key.peers)

    def loses(self, links: Ints, round_key: RoundKey) -> Bools:
        """Which of some directed links lose what is said over them, (n,); a link is sender * (P + 1) + receiver."""
        return np.zeros(len(links), bool)


FAULTS.register("none")(Fault)


@FAULTS.register("link_loss")
@dataclass(frozen=True, kw_only=True)
class LinkLoss(Fault):
    """Every link loses what is said over it in a round with the same probability, whatever else happens (Bernoulli).

    Attributes:
        p: that probability.
    """

    p: Share = 0.1

    touches: ClassVar[str] = "links"

    def loses(self, links: Ints, round_key: RoundKey) -> Bools:
        """Those whose draw says so."""
        return _drawn(round_key, "link loss", links) < self.p


@FAULTS.register("burst")
@dataclass(frozen=True, kw_only=True)
class Burst(Fault):
    """Every link has good and bad spells, and loses more in the bad ones (Gilbert 1960; Elliott 1963).

    The chain of two states is one in which a link is drawn anew, bad with probability p, in a share ρ = 1 / (length
    (1 - p)) of the rounds, and stays what it was in all others: a bad spell then ends with probability 1 / length. So
    its state hangs on the last round in which it was drawn anew, and there is nothing to remember. It has run forever
    before round 0.

    Attributes:
        p: share of rounds in which a link is bad.
        length: mean rounds of a bad spell; at least 1 / (1 - p), where spells are as short as chance makes them.
        bad, good: probabilities that a word is lost in a bad and in a good spell.
    """

    p: BelowOne = 0.1
    length: Positive = 5.0
    bad: Share = 1.0
    good: Share = 0.0

    touches: ClassVar[str] = "links"

    def __post_init__(self) -> None:
        good = 1 <= self.length * (1 - self.p) <= 1e4
        accepted = f"from 1 / (1 - p) = {1 / (1 - self.p):g} to 1e4 / (1 - p)"
        require(good, f"--faults {self.name}: length", accepted, self.length)

    def loses(self, links: Ints, round_key: RoundKey) -> Bools:
        """Those whose draw says so, which is another one in a bad spell."""
        return _drawn(round_key, "burst loss", links) < np.where(
            self.spell(links, round_key), self.bad, self.good
        )

    def spell(self, links: Ints, round_key: RoundKey) -> Bools:
        """Which links are in a bad spell, (n,)."""
        anew = 1 / (self.length * (1 - self.p))
        return _latest(round_key, "burst", links, anew) < anew * self.p


@FAULTS.register("outage")
@dataclass(frozen=True, kw_only=True)
class Outage(Fault):
    """In every round every peer is struck with the same probability, and is down from then on for some rounds.

    Who is struck while it is down is down for longer. It has gone on forever before round 0.

    Attributes:
        p: that probability.
        length: rounds.
    """

    p: Share = 0.01
    length: Annotated[int, Interval(ge=1, le=10_000)] = 5

    touches: ClassVar[str] = "peers"

    def down(self, round_key: RoundKey) -> Bools:
        """Those who were struck not long ago."""
        return _latest(round_key, "outage", np.arange(round_key.peers), self.p, self.length) < 1


@dataclass(frozen=True, kw_only=True)
class _Some(Fault):
    """What befalls a share of the peers, or some by their numbers."""

    fraction: Share = 0.2
    peers: tuple[int, ...] | None = None

    def chosen(self, round_key: RoundKey, *address: int) -> Bools:
        """Whom it befalls, (P,).

        Raises:
            InputError: a peer that there is not, or a share that is nobody.
        """
        found = np.zeros(round_key.peers, bool)
        if self.peers:
            inside = all(0 <= peer < round_key.peers for peer in self.peers)
            accepted = f"from 0 to {round_key.peers - 1}"
            require(inside, f"--faults {self.name}: peers", accepted, self.peers)
            found[list(self.peers)] = True
            return found
        many = round(self.fraction * round_key.peers)
        someone = many > 0 or self.fraction == 0
        accepted = f"0 or enough for one of {round_key.peers} peers"
        require(someone, f"--faults {self.name}: fraction", accepted, self.fraction)
        found[
            randomness.generator(round_key.seed, self.name, *address).permutation(round_key.peers)[
                :many
            ]
        ] = True
        return found


@FAULTS.register("leave")
@dataclass(frozen=True, kw_only=True)
class Leave(_Some):
    """Some peers are gone for good.

    Attributes:
        fraction: share of all peers, drawn at random, that leave.
        peers: those who leave by number, in place of a share.
        at: the first round without them.
    """

    at: Index = 10

    touches: ClassVar[str] = "peers"

    def down(self, round_key: RoundKey) -> Bools:
        """Those who have left."""
        return self.chosen(round_key) & (round_key.t >= self.at)


@FAULTS.register("join")
@dataclass(frozen=True, kw_only=True)
class Join(Leave):
    """Some peers are not there yet; they begin where all do.

    Attributes:
        fraction: share of all peers, drawn at random, that join late.
        peers: those who join late by number, in place of a share.
        at: the first round with them.
    """

    def down(self, round_key: RoundKey) -> Bools:
        """Those who have not joined."""
        return self.chosen(round_key) & (round_key.t < self.at)


@FAULTS.register("stragglers")
@dataclass(frozen=True, kw_only=True)
class Stragglers(_Some):
    """Some peers have the time for a part of their local steps only, though for one at least.

    Attributes:
        fraction: share of all peers, drawn at random in every round.
        peers: the slow ones by number, in place of a share.
        work: share of a peer's steps, rounded (halves to even).
        fixed: whether those who are slow in one round are slow in all.
    """

    work: Annotated[float, Interval(gt=0, le=1)] = 0.5
    fixed: bool = False

    touches: ClassVar[str] = "work"

    def pace(self, round_key: RoundKey) -> Floats:
        """Less for those who are slow."""
        slow = self.chosen(round_key) if self.fixed else self.chosen(round_key, round_key.t)
        return np.where(slow, self.work, 1.0)


def _drawn(round_key: RoundKey, purpose: str, ids: Ints) -> NDArray[np.float32]:
    """A uniform number in [0, 1) of each of some ids in a round, (n,)."""
    row = randomness.uniform(round_key.seed, purpose, ids, n=slice(round_key.t, round_key.t + 1))
    return np.asarray(row[:, 0].numpy())


def _latest(
    round_key: RoundKey, purpose: str, ids: Ints, below: float, rounds: float = math.inf
) -> NDArray[np.float32]:
    """The last number below a bound that each of some ids has drawn, (n,); 1 for none in that many rounds up to now.

    Rounds are places in a row of random numbers, and those before round 0 are places like others.
    """
    found, left, end = np.ones(len(ids), np.float32), np.arange(len(ids)), round_key.t + 1
    first, window = end - rounds, 2
    while len(left) and end > first and below:
        window = min(2 * window, 64)
        begin = max(end - window, first)
        drawn = randomness.uniform(
            round_key.seed, purpose, ids[left], n=slice(int(begin), end)
        ).numpy()[:, ::-1]
        hit = drawn < below
        some = hit.any(1)
        found[left[some]] = drawn[some, hit[some].argmax(1)]
        left, end = left[~some], int(begin)
    return found
