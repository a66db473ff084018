"""Link models: the speeds of peers and of the links between them, from which `clock` counts.

To add a link model, write a frozen dataclass whose fields are its options and decorate it with
`@LINK_MODELS.register("its name")`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Interval

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.options import Share
from dfl.core.registry import Registry, example_with
from dfl.environment.clock import AccessLines, Connections, EdgeLinks, Floats, Ints
from dfl.environment.link_files import LATENCY_MS, MBPS, of_edges

LINK_MODELS: Registry[type[LinkModel]] = Registry("links", "dfl.links")
"""Name -> frozen dataclass whose fields are the options of a link model."""

OnRoot = Callable[[Callable[[], bytes]], bytes]
"""Calls a function on rank 0 and returns its bytes on every rank."""

Mbps = Annotated[float, Interval(ge=MBPS[0], le=MBPS[1])]
Milliseconds = Annotated[float, Interval(ge=LATENCY_MS[0], le=LATENCY_MS[1])]


@dataclass(frozen=True, kw_only=True)
class LinkModel:
    """No links, and no simulated clock; the base class of all link models."""

    name: ClassVar[str] = "own"
    """What the command line calls it."""

    def connections(
        self, peers: int, seed: int, edges: Ints | None, on_root: OnRoot
    ) -> Connections | None:
        """Return how messages get from node to node; None where there is no clock.

        Args:
            peers: P.
            seed: the run's seed.
            edges: (k,) sender * P + receiver of every edge that any round uses, ascending; None
                where there is no graph.
            on_root: reads files on rank 0.

        Raises:
            InputError: on every rank, if the model is about other edges.
        """
        return None

    def step_seconds(self, peers: int, seed: int) -> Floats | None:
        """Return the seconds of a local step of every peer, (P,); None where they are measured."""
        return np.zeros(peers)


LINK_MODELS.register("none")(LinkModel)


@dataclass(frozen=True, kw_only=True)
class Timed(LinkModel, ABC):
    """Base class of link models with a clock: how fast peers compute, whatever their links.

    Attributes:
        compute: none, training takes no time; constant, step_ms for every local step of every peer;
            lognormal, step_ms times exp(sigma * N(0, 1)), drawn once for every peer; or measured,
            the wall-clock seconds that each peer's training took in this launch, shared evenly by
            peers that train together. Only measured seconds differ between launches. What a server
            computes takes no time.
        step_ms: milliseconds of a local step; their median, where they are lognormal.
        sigma: standard deviation of the logarithm, where they are lognormal.
    """

    compute: Literal["none", "constant", "lognormal", "measured"] = "none"
    step_ms: Milliseconds | None = None
    sigma: Annotated[float, Interval(ge=0, le=10)] | None = None

    def __post_init__(self) -> None:
        needs = _NEEDS[self.compute]
        for name in ("step_ms", "sigma"):
            value = getattr(self, name)
            if (value is None) == (name in needs):
                wrong = f"needs {name}" if value is None else f"has no part for {name}={value:g}"
                raise InputError(f"--links {self.name}: compute={self.compute} {wrong}")

    @abstractmethod
    def connections(
        self, peers: int, seed: int, edges: Ints | None, on_root: OnRoot
    ) -> Connections:
        """See `LinkModel`."""

    def step_seconds(self, peers: int, seed: int) -> Floats | None:
        """See `LinkModel`."""
        if self.compute == "measured":
            return None
        drawn = randomness.generator(seed, "pace of peers").standard_normal(peers)
        return (self.step_ms or 0.0) / 1e3 * np.exp((self.sigma or 0.0) * drawn)


_NEEDS = {"none": (), "constant": ("step_ms",), "lognormal": ("step_ms", "sigma"), "measured": ()}


@LINK_MODELS.register("uplink")
@dataclass(frozen=True, kw_only=True)
class Uplink(Timed):
    """The same line for every peer; a server has its own.

    Attributes:
        mbps: Mbit/s at which a peer sends, one message after the other: 8 are 1 MB/s.
        down_mbps: Mbit/s at which it receives; unlimited where not given.
        latency_ms: milliseconds of a round trip to a server nearby, as a ping measures them. A
            message between peers takes as many, half of them at either end, and a message from or
            to the server half of them.
        server_mbps: Mbit/s at which a server sends, and at which it receives; unlimited where not
            given.
    """

    mbps: Mbps = 8.0
    down_mbps: Mbps | None = None
    latency_ms: Milliseconds = 0.0
    server_mbps: Mbps | None = None

    def connections(
        self, peers: int, seed: int, edges: Ints | None, on_root: OnRoot
    ) -> AccessLines:
        """Return a line for every peer, all alike, and the server's."""
        return _access_lines([self] * peers, self.server_mbps)


@LINK_MODELS.register("phone")
@dataclass(frozen=True, kw_only=True)
class Phone(Uplink):
    """`uplink` with the means of mobile connections (Speedtest Global Index, September 2020)."""

    mbps: Mbps = 11.22
    down_mbps: Mbps | None = 35.96
    latency_ms: Milliseconds = 40.0


@LINK_MODELS.register("broadband")
@dataclass(frozen=True, kw_only=True)
class Broadband(Uplink):
    """`uplink` with the means of fixed connections (Speedtest Global Index, September 2020)."""

    mbps: Mbps = 45.74
    down_mbps: Mbps | None = 85.73
    latency_ms: Milliseconds = 21.0


@LINK_MODELS.register("dsl")
@dataclass(frozen=True, kw_only=True)
class DSL(Uplink):
    """`uplink` with the profile "DSL" of WebPageTest (its connectivity.ini.sample)."""

    mbps: Mbps = 0.384
    down_mbps: Mbps | None = 1.5
    latency_ms: Milliseconds = 50.0


@LINK_MODELS.register("datacenter")
@dataclass(frozen=True, kw_only=True)
class Datacenter(Uplink):
    """`uplink` with 10 Gbit/s and half a millisecond.

    That is the round trip within a data center (Dean, keynote of LADIS 2009).
    """

    mbps: Mbps = 10_000.0
    down_mbps: Mbps | None = 10_000.0
    latency_ms: Milliseconds = 0.5


def _access_lines(lines: Sequence[Uplink], server_mbps: float | None) -> AccessLines:
    """Return the line of every peer, and a server's."""
    up = _per_byte([*(line.mbps for line in lines), server_mbps])
    down = _per_byte([*(line.down_mbps for line in lines), server_mbps])
    delay = np.array([*(line.latency_ms / 2e3 for line in lines), 0.0])
    return AccessLines(up, down, delay)


def _per_byte(mbps: Sequence[float | None]) -> Floats:
    """Return the seconds that a byte takes at some Mbit/s; 0 where nothing limits it."""
    return np.array([0.0 if each is None else 8e-6 / each for each in mbps])


PRESETS: dict[str, type[Uplink]] = {line.name: line for line in (Phone, Broadband, DSL, Datacenter)}
"""The lines that `mixed` mixes, by name; a field of `Mixed` is the share of each."""


@LINK_MODELS.register("mixed")
@example_with(options="phone=0.75,broadband=0.25")
@dataclass(frozen=True, kw_only=True)
class Mixed(Timed):
    """Peers with different lines, drawn by the run's seed.

    Attributes:
        phone, broadband, dsl, datacenter: share of the peers that have this line; together 1.
        server_mbps: as in `uplink`.
    """

    phone: Share = 0.0
    broadband: Share = 0.0
    dsl: Share = 0.0
    datacenter: Share = 0.0
    server_mbps: Mbps | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole = sum(self._shares())
        if abs(whole - 1) > 1e-9:
            raise InputError(
                f"--links mixed: {', '.join(PRESETS)} must add up to 1, not to {whole:.10g}"
            )

    def _shares(self) -> list[float]:
        return [getattr(self, name) for name in PRESETS]

    def connections(
        self, peers: int, seed: int, edges: Ints | None, on_root: OnRoot
    ) -> AccessLines:
        """Return each peer's line, and the server's."""
        ends = np.round(np.cumsum(self._shares()) * peers)
        kinds = [each() for each in PRESETS.values()]
        order = randomness.generator(seed, "lines of peers").permutation(peers)
        lines = [kinds[k] for k in np.searchsorted(ends, order, side="right")]
        return _access_lines(lines, self.server_mbps)


@LINK_MODELS.register("links")
@dataclass(frozen=True, kw_only=True)
class PerEdge(Timed):
    """A link of its own for every edge of the graph, on which no message waits for another.

    Attributes:
        path: a CSV file of sender,receiver,mbps,latency_ms, with a line for every directed edge
            that any round uses; latency_ms is one way, from the sender to the receiver.
    """

    path: Path

    def connections(self, peers: int, seed: int, edges: Ints | None, on_root: OnRoot) -> EdgeLinks:
        """Return the edges of all rounds with their figures in the file, which rank 0 reads."""
        if edges is None:
            raise InputError(
                "--links links is about the edges of a graph, and no method on a graph runs here"
            )
        figures = on_root(lambda: of_edges(self.path, edges, peers).tobytes())
        mbps, latency_ms = np.frombuffer(figures).reshape(-1, 2).T
        return EdgeLinks(edges, 8e-6 / mbps, latency_ms / 1e3)
