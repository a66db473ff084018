"""What goes wrong in the simulated world: who is up in a round, and which link speaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

FAULTS: dict[str, type[Fault]] = {}
"""Name -> frozen dataclass whose fields are the fault's options."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Nothing goes wrong."""


def fault(name: str) -> Callable[[type[Fault]], type[Fault]]:
    """Register a fault under `name`."""

    def register(kind: type[Fault]) -> type[Fault]:
        FAULTS[name] = kind
        return kind

    return register


fault("none")(Fault)
