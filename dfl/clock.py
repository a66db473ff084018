"""How long would it take in the field? From bytes said and steps taken to simulated seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

NETWORKS: dict[str, type[Speeds]] = {}
"""Name -> frozen dataclass whose fields are the options of a kind of network."""


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Nobody asks."""


def network(name: str) -> Callable[[type[Speeds]], type[Speeds]]:
    """Register a kind of network under `name`."""

    def register(kind: type[Speeds]) -> type[Speeds]:
        NETWORKS[name] = kind
        return kind

    return register


network("none")(Speeds)
