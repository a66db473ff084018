"""The functions that users call from Python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dfl.config import Run
from dfl.reporting.default import default_callbacks
from dfl.simulation import loop
from dfl.store.callbacks import Callback, as_callbacks

if TYPE_CHECKING:
    from dfl.datasets.data import Data
    from dfl.simulation.setup import Models
    from dfl.training.losses import Loss


def simulate(
    run: Run,
    model: Models | None = None,
    data: Data | None = None,
    loss: Loss | None = None,
    callbacks: Sequence[Callback] = (),
) -> Iterator[dict[str, float]]:
    """Run a simulation as `dfl.simulation.loop.simulate` does, with figures in `run.out`."""
    every = (*default_callbacks(run), *as_callbacks(callbacks))
    return loop.simulate(run, model, data, loss, every)


simulate.__doc__ = loop.simulate.__doc__
