"""A small run with checkpoints, for Python and for the command line."""

from __future__ import annotations

from typing import Any

import dfl

SETTINGS: dict[str, Any] = {
    "peers": 4,
    "rounds": 6,
    "model": "softmax",
    "examples_per_peer": 10,
    "eval_every": 2,
    "checkpoint_every": 2,
}
FLAGS = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]


def small(**settings: Any) -> dfl.Run:
    """Return the run, with changed settings."""
    return dfl.Run(**SETTINGS | settings)
