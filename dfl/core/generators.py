"""The global random generators of torch, numpy and Python, from which a caller's code may draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch
else:
    from dfl.core.lazy import torch

States = dict[str, tuple[Any, ...]]
"""Whose generator, as a message names it -> its state."""


def states() -> States:
    """Return the states of the generators."""
    return {
        "torch's": (torch.get_rng_state(),),
        "numpy's": np.random.get_state(),  # type: ignore[dict-item]  # noqa: NPY002
        "Python's": random.getstate(),
    }


def drawn_since(before: States) -> str | None:
    """Return whose generator has left its state; None where none has."""
    for whose, state in states().items():
        if not all(map(np.array_equal, state, before[whose])):
            return whose
    return None


@contextmanager
def restored() -> Iterator[None]:
    """Restore the states of the generators at the end."""
    before = states()
    try:
        yield
    finally:
        torch.set_rng_state(*before["torch's"])
        np.random.set_state(before["numpy's"])  # noqa: NPY002
        random.setstate(before["Python's"])
