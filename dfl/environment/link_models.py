"""How fast are lines and peers? The kinds of `--links`, from which `dfl.environment.clock` counts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dfl.comm.plan import Arcs
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.registry import Registry
from dfl.environment.clock import Clock, Floats, Ints, Lines, Links, Ways
from dfl.environment.link_files import LATENCY_MS, MBPS, of_edges

if TYPE_CHECKING:
    from dfl.comm.transport import Network
    from dfl.training.task import Task

LINK_MODELS: Registry[type[LinkModel]] = Registry("links", "dfl.links")
"""Name -> frozen dataclass whose fields are the options of a kind of network."""


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """Nobody asks."""

    def start(self, network: Network, steps: Ints) -> Clock | None:
        """The clock of a network whose peers take so many local steps (P,) in a round; None where nobody asks.

        Raises:
            InputError: on every rank, if the network has other peers or edges than this is about.
        """
        return None


def with_clock(network: Network, speeds: LinkModel, task: Task, sizes: Ints) -> Task:
    """Give a network the clock that it is to have, and a problem, as it is trained on, what the clock measures.

    Args:
        network, speeds, task: which network, how fast it is, and the problem of this rank's peers.
        sizes: (P,) training examples of every peer.
    """
    network.clock = speeds.start(network, task.solver.steps_for(sizes))
    return replace(task, spent=network.clock.spent) if network.clock else task


LINK_MODELS.register("none")(LinkModel)


@dataclass(frozen=True, kw_only=True)
class Timed(LinkModel, ABC):
    """How fast peers compute, whatever their lines.

    Attributes:
        compute: none, training takes no time; constant, step_ms for every local step of every peer; lognormal, step_ms
            times exp(sigma * N(0, 1)), drawn once for every peer; or measured, the wall-clock seconds that each peer's
            training really took in this launch, shared evenly by peers that train together: the one thing here that
            another launch does not repeat. What a server computes takes no time.
        step_ms: milliseconds of a local step; their median, where they are lognormal.
        sigma: standard deviation of the logarithm, where they are lognormal.
    """

    compute: str = "none"
    step_ms: float | None = None
    sigma: float | None = None

    def __post_init__(self) -> None:
        self._check("compute", self.compute in _NEEDS, "none, constant, lognormal or measured")
        needs = _NEEDS[self.compute]
        for name in ("step_ms", "sigma"):
            value = getattr(self, name)
            if (value is None) == (name in needs):
                wrong = f"needs {name}" if value is None else f"has no part for {name}={value:g}"
                raise InputError(f"--links {self._name}: compute={self.compute} {wrong}")
        for name, (low, high) in RANGES.items():
            value = getattr(self, name, None)  # not all have all of them
            self._check(name, value is None or low <= value <= high, f"from {low:g} to {high:g}")

    @property
    def _name(self) -> str:
        return next(name for name, kind in LINK_MODELS.items() if kind is type(self))

    def _check(self, name: str, good: bool, accepted: str) -> None:
        if not good:
            raise InputError(
                f"--links {self._name}: {name} must be {accepted}, not {getattr(self, name)!r}"
            )

    def start(self, network: Network, steps: Ints) -> Clock:
        """The clock; see `LinkModel`."""
        return Clock(
            network, self.ways(network), steps, self._pace(network.layout.peers, network.seed)
        )

    @abstractmethod
    def ways(self, network: Network) -> Ways:
        """How words get from node to node; errors are those of `start`."""

    def _pace(self, peers: int, seed: int) -> Floats | None:
        """Seconds of a local step of every peer, (P,)."""
        if self.compute == "measured":
            return None
        drawn = randomness.generator(seed, "pace of peers").standard_normal(peers)
        return (self.step_ms or 0.0) / 1e3 * np.exp((self.sigma or 0.0) * drawn)


RANGES = {
    "mbps": MBPS, "down_mbps": MBPS, "server_mbps": MBPS, "latency_ms": LATENCY_MS, "step_ms": (0, 1e9),
    "sigma": (0, 10), "phone": (0, 1), "broadband": (0, 1), "dsl": (0, 1), "datacenter": (0, 1),
}  # fmt: skip
"""From where to where an option may be."""
_NEEDS = {"none": (), "constant": ("step_ms",), "lognormal": ("step_ms", "sigma"), "measured": ()}


@LINK_MODELS.register("uplink")
@dataclass(frozen=True, kw_only=True)
class Uplink(Timed):
    """The same line for every peer; a server has its own.

    Attributes:
        mbps: Mbit/s on which a peer speaks, to one after the other: 8 are 1 MB/s.
        down_mbps: Mbit/s on which it hears; unlimited where not given.
        latency_ms: milliseconds of a round trip to a server nearby, as a ping measures them: a word from peer to peer
            takes as many, half of them at either end, and one from or to the server half of them.
        server_mbps: Mbit/s on which a server speaks, and as many on which it hears; unlimited where not given.
    """

    mbps: float = 8.0
    down_mbps: float | None = None
    latency_ms: float = 0.0
    server_mbps: float | None = None

    def ways(self, network: Network) -> Lines:
        """A line for every peer, all alike, and the server's."""
        return _lines([self] * network.layout.peers, self.server_mbps)


@LINK_MODELS.register("phone")
@dataclass(frozen=True, kw_only=True)
class Phone(Uplink):
    """`uplink` with the means of mobile connections worldwide (Speedtest Global Index, September 2020)."""

    mbps: float = 11.22
    down_mbps: float | None = 35.96
    latency_ms: float = 40.0


@LINK_MODELS.register("broadband")
@dataclass(frozen=True, kw_only=True)
class Broadband(Uplink):
    """`uplink` with the means of fixed connections worldwide (Speedtest Global Index, September 2020)."""

    mbps: float = 45.74
    down_mbps: float | None = 85.73
    latency_ms: float = 21.0


@LINK_MODELS.register("dsl")
@dataclass(frozen=True, kw_only=True)
class DSL(Uplink):
    """`uplink` with the profile "DSL" of WebPageTest, on which web pages are tested (its connectivity.ini.sample)."""

    mbps: float = 0.384
    down_mbps: float | None = 1.5
    latency_ms: float = 50.0


@LINK_MODELS.register("datacenter")
@dataclass(frozen=True, kw_only=True)
class Datacenter(Uplink):
    """`uplink` with 10 Gbit/s and half a millisecond, Dean's round trip within a data center (LADIS 2009)."""

    mbps: float = 10_000.0
    down_mbps: float | None = 10_000.0
    latency_ms: float = 0.5


def _lines(lines: Sequence[Uplink], server_mbps: float | None) -> Lines:
    """The line of every peer, and a server's."""
    up = _per_byte([*(line.mbps for line in lines), server_mbps])
    down = _per_byte([*(line.down_mbps for line in lines), server_mbps])
    return Lines(up, down, np.array([*(line.latency_ms / 2e3 for line in lines), 0.0]))


def _per_byte(mbps: Sequence[float | None]) -> Floats:
    """Seconds that a byte takes at so many Mbit/s; none where nothing limits it."""
    return np.array([0.0 if each is None else 8e-6 / each for each in mbps])


CLASSES: dict[str, type[Uplink]] = {
    "phone": Phone,
    "broadband": Broadband,
    "dsl": DSL,
    "datacenter": Datacenter,
}
"""The kinds of line that `mixed` may mix."""


@LINK_MODELS.register("mixed")
@dataclass(frozen=True, kw_only=True)
class Mixed(Timed):
    """Peers with lines of several kinds, drawn by the run's seed.

    Attributes:
        phone, broadband, dsl, datacenter: share of the peers that have such a line; together 1.
        server_mbps: as in `uplink`.
    """

    phone: float = 0.0
    broadband: float = 0.0
    dsl: float = 0.0
    datacenter: float = 0.0
    server_mbps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if abs((whole := sum(self._shares())) - 1) > 1e-9:
            raise InputError(
                f"--links mixed: {', '.join(CLASSES)} must add up to 1, not to {whole:g}"
            )

    def _shares(self) -> list[float]:
        return [getattr(self, name) for name in CLASSES]

    def ways(self, network: Network) -> Lines:
        """Each peer's line, and the server's."""
        peers = network.layout.peers
        ends, kinds = (
            np.round(np.cumsum(self._shares()) * peers),
            [each() for each in CLASSES.values()],
        )
        order = randomness.generator(network.seed, "lines of peers").permutation(peers)
        return _lines(
            [kinds[k] for k in np.searchsorted(ends, order, side="right")], self.server_mbps
        )


@LINK_MODELS.register("links")
@dataclass(frozen=True, kw_only=True)
class PerEdge(Timed):
    """A line of its own for every edge of the graph, on which no other word is waited for.

    Attributes:
        path: a CSV file of sender,receiver,mbps,latency_ms, with a line for every directed edge that any
            round uses; latency_ms is the way from the one to the other.
    """

    path: Path

    def ways(self, network: Network) -> Links:
        """The edges of all rounds, with what the file says of them, which rank 0 reads."""
        peers = network.layout.peers
        if not network.weights:
            raise InputError(
                "--links links is about the edges of a graph, and here nobody speaks over one"
            )
        arcs = [Arcs.of(matrix) for matrix in network.weights]
        edges = np.unique(np.concatenate([each.sender * peers + each.receiver for each in arcs]))
        said = network.world.from_root(lambda: of_edges(self.path, edges, peers).tobytes())
        mbps, latency_ms = np.frombuffer(said).reshape(-1, 2).T
        return Links(edges, 8e-6 / mbps, latency_ms / 1e3)
