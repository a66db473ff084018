"""The page of a sweep while its cells run: report.html, written again now and then."""

from __future__ import annotations

import time
from pathlib import Path

from dfl.core.errors import one_line
from dfl.core.files import Lock
from dfl.store.logs import LOG
from dfl.sweep.grid import Grid
from dfl.sweep.scheduler import Callback
from dfl.sweep.status import read_states

EVERY = 5.0
"""The least seconds between two refreshes of the page."""
SHARE = 0.05
"""The most of a sweep's time that the refreshes take."""


class LivePage:
    """Writes the page of a sweep now and then. A sweep goes on where that fails.

    Args:
        grid: the cells.
        folder: of the sweep.
        on: whether to write it at all.
    """

    def __init__(self, grid: Grid, folder: Path, on: bool = True) -> None:
        self.grid = grid
        self.folder = folder
        self.on = on
        self.due = time.perf_counter() + EVERY

    def after(self, callback: Callback) -> Callback:
        """Return a callback of the scheduler that calls another one, and then refreshes."""

        def both(folder: Path | None) -> None:
            callback(folder)
            self.refresh()

        return both

    def refresh(self) -> None:
        """Write the page, unless that was done a moment ago."""
        begun = time.perf_counter()
        if begun >= self.due:
            self._write(running=True)
            now = time.perf_counter()
            self.due = now + max(EVERY, (now - begun) / SHARE)

    def finish(self) -> None:
        """Write the page of a sweep that has ended."""
        self._write(running=False)

    def _write(self, running: bool) -> None:
        if not self.on:
            return
        try:
            from dfl.reporting.page import write
            from dfl.sweep.page import sweep_page

            names = (cell.name for cell in self.grid.cells)
            states = read_states(self.folder, names, models=False)  # nothing waits for the page
            with Lock(self.folder, patience=0):
                write(self.folder, sweep_page(self.grid, states, self.folder, running))
        except Exception as error:
            LOG.warning("no page of %s: %s", self.folder, one_line(error))
