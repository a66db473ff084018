"""Faults of the simulated world: peers that are down or slow, links that lose messages.

Everything is a function of the seed, the round, and the peer or the directed link, so every rank
knows it of all of them, in any order, and after a resume. To add a fault, write a frozen dataclass
whose fields are its options and decorate it with `@FAULTS.register("its name")`; it overrides those
of the three methods of `Fault` that it has an effect on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import numpy as np
from annotated_types import Interval

from dfl.core import randomness
from dfl.core.options import BelowOne, Index, Positive, Share, check_chosen, require
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
    """No faults; the base class of all."""

    name: ClassVar[str] = "none"
    """Its name on the command line."""
    touches: ClassVar[str] = "nothing"
    """What it affects, links, peers, or only the work of peers."""

    def down(self, round_key: RoundKey) -> Bools:
        """Return which peers neither train nor send nor receive, (P,)."""
        return np.zeros(round_key.peers, bool)

    def pace(self, round_key: RoundKey) -> Floats:
        """Return the share of its local steps that every peer has time for, (P,)."""
        return np.ones(round_key.peers)

    def loses(self, links: Ints, round_key: RoundKey) -> Bools:
        """Return which of some directed links lose their message, (k,).

        Args:
            links: (k,) sender * (P + 1) + receiver.
            round_key: the round.
        """
        return np.zeros(len(links), bool)


FAULTS.register("none")(Fault)


@FAULTS.register("link_loss")
@dataclass(frozen=True, kw_only=True)
class LinkLoss(Fault):
    """Every link loses its message of a round with the same probability, independently (Bernoulli).

    Attributes:
        p: that probability.
    """

    p: Share = 0.1

    touches: ClassVar[str] = "links"

    def loses(self, links: Ints, round_key: RoundKey) -> Bools:
        """Return the links whose draw is below p."""
        return _drawn(round_key, "link loss", links) < self.p


@FAULTS.register("burst")
@dataclass(frozen=True, kw_only=True)
class Burst(Fault):
    """Every link has a good and a bad state, and loses more in the bad one.

    (Gilbert 1960; Elliott 1963.)

    In a share ρ = 1 / (length (1 - p)) of the rounds the state of a link is redrawn, bad with
    probability p; in all others it stays. A bad burst then ends with probability 1 / length. The
    state depends on the last round in which it was redrawn, so nothing needs to be remembered. The
    chain has run forever before round 0.

    Attributes:
        p: share of rounds in which a link is bad.
        length: mean rounds of a bad burst; at least 1 / (1 - p), the mean of independent rounds.
        bad, good: probabilities that a message is lost in the bad and in the good state.
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
        """Return the links whose draw is below the probability of their state."""
        return _drawn(round_key, "burst loss", links) < np.where(
            self.is_bad(links, round_key), self.bad, self.good
        )

    def is_bad(self, links: Ints, round_key: RoundKey) -> Bools:
        """Return which links are in the bad state, (k,)."""
        redrawn = 1 / (self.length * (1 - self.p))
        # A number of 24 bits is below the bound in this share of the rounds.
        share = math.ceil(redrawn * 2**24) / 2**24
        return _latest(round_key, "burst", links, redrawn) < share * self.p


@FAULTS.register("outage")
@dataclass(frozen=True, kw_only=True)
class Outage(Fault):
    """In every round an outage of a peer begins with the same probability.

    An outage that begins during another one prolongs it. Outages have occurred forever before round
    0.

    Attributes:
        p: the probability.
        length: rounds for which a peer is down.
    """

    p: Share = 0.01
    length: Annotated[int, Interval(ge=1, le=10_000)] = 5

    touches: ClassVar[str] = "peers"

    def down(self, round_key: RoundKey) -> Bools:
        """Return the peers with an outage that began in the last `length` rounds."""
        return _latest(round_key, "outage", np.arange(round_key.peers), self.p, self.length) < 1


@dataclass(frozen=True, kw_only=True)
class _Some(Fault):
    """Base class of faults of a share of the peers, or of some by their numbers."""

    fraction: Share | None = None
    peers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_chosen(f"--faults {self.name}", self.fraction, self.peers)

    def chosen(self, round_key: RoundKey, *address: int) -> Bools:
        """Return which peers are affected, (P,).

        Raises:
            InputError: a peer does not exist, or the share is less than one peer.
        """
        affected = np.zeros(round_key.peers, bool)
        if self.peers is not None:
            inside = all(0 <= peer < round_key.peers for peer in self.peers)
            accepted = f"from 0 to {round_key.peers - 1}"
            require(inside, f"--faults {self.name}: peers", accepted, self.peers)
            affected[list(self.peers)] = True
            return affected
        share = 0.2 if self.fraction is None else self.fraction
        many = round(share * round_key.peers)
        someone = many > 0 or share == 0
        accepted = f"0 or enough for one of {round_key.peers} peers"
        require(someone, f"--faults {self.name}: fraction", accepted, share)
        generator = randomness.generator(round_key.seed, self.name, *address)
        affected[generator.permutation(round_key.peers)[:many]] = True
        return affected


@FAULTS.register("leave")
@dataclass(frozen=True, kw_only=True)
class Leave(_Some):
    """Some peers leave for good.

    Attributes:
        fraction: share of all peers, drawn at random, that leave; 0.2 without peers.
        peers: numbers of the peers that leave, in place of a share.
        at: the first round without them.
    """

    at: Index = 10

    touches: ClassVar[str] = "peers"

    def down(self, round_key: RoundKey) -> Bools:
        """Return the peers that have left."""
        return self.chosen(round_key) & (round_key.t >= self.at)


@FAULTS.register("join")
@dataclass(frozen=True, kw_only=True)
class Join(Leave):
    """Some peers join late, with the starting point of all.

    Attributes:
        fraction: share of all peers, drawn at random, that join late; 0.2 without peers.
        peers: numbers of the peers that join late, in place of a share.
        at: the first round with them.
    """

    def down(self, round_key: RoundKey) -> Bools:
        """Return the peers that have not joined."""
        return self.chosen(round_key) & (round_key.t < self.at)


@FAULTS.register("stragglers")
@dataclass(frozen=True, kw_only=True)
class Stragglers(_Some):
    """Some peers have time for only a part of their local steps, and for one at least.

    Attributes:
        fraction: share of all peers, drawn at random in every round; 0.2 without peers.
        peers: numbers of the slow peers, in place of a share.
        work: share of a peer's steps, rounded (halves to even).
        fixed: whether the same peers are slow in all rounds.
    """

    work: Annotated[float, Interval(gt=0, le=1)] = 0.5
    fixed: bool = False

    touches: ClassVar[str] = "work"

    def pace(self, round_key: RoundKey) -> Floats:
        """Return `work` for slow peers, 1 for the others."""
        slow = self.chosen(round_key) if self.fixed else self.chosen(round_key, round_key.t)
        return np.where(slow, self.work, 1.0)


def _drawn(round_key: RoundKey, purpose: str, ids: Ints) -> NDArray[np.float32]:
    """Return a uniform number in [0, 1) for each id in a round, (k,)."""
    row = randomness.uniform(round_key.seed, purpose, ids, n=slice(round_key.t, round_key.t + 1))
    return np.asarray(row[:, 0].numpy())


def _latest(
    round_key: RoundKey, purpose: str, ids: Ints, below: float, rounds: float = math.inf
) -> Floats:
    """Return the last number below a bound that each id has drawn, (k,); 1 where there is none.

    Rounds are places in a row of random numbers, those before round 0 as well. The numbers have 48
    bits, of which the first 24 decide whether they are below the bound: among those below a small
    bound the first 24 alone take few values.

    Args:
        round_key: the last round to look at.
        purpose: addresses the numbers.
        ids: (k,).
        below: the bound.
        rounds: how many rounds to look at.
    """
    found = np.ones(len(ids))
    left = np.arange(len(ids))
    end = round_key.t + 1
    first = end - rounds
    window = 2
    while len(left) and end > first and below:
        window = min(2 * window, 64)
        begin = max(end - window, first)
        places = slice(int(begin), end)
        drawn = randomness.uniform(round_key.seed, purpose, ids[left], n=places)
        latest_first = drawn.numpy()[:, ::-1]
        hit = latest_first < below
        some = hit.any(1)
        hits = left[some]
        last = np.arange(len(hits)), hit[some].argmax(1)
        low = randomness.uniform(round_key.seed, f"{purpose}, low bits", ids[hits], n=places)
        found[hits] = latest_first[some][last]
        found[hits] += low.numpy()[:, ::-1][last] * 2.0**-24
        left = left[~some]
        end = int(begin)
    return found
