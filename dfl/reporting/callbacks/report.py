"""The page of a run, report.html: the callback that writes it, and refreshes it as the run goes on.

The page is made from the files of the run directory alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.files import writing
from dfl.store import manifest
from dfl.store.callbacks import Callback, Outcome, Peers, RunInfo
from dfl.store.logs import LOG
from dfl.store.record import ended

if TYPE_CHECKING:
    from dfl.reporting.run_page import Drawing

EVERY = 2.0
"""The least seconds between two refreshes of a page."""
SHARE = 0.05
"""The most of a run's time that the refreshes take."""


class Report(Callback):
    """Writes `report.html` into the directory of a run.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.due = 0.0
        self.drawing: Drawing | None = None

    def start(self, info: RunInfo) -> None:
        """Count the time to the first refresh from here."""
        self.due = time.perf_counter() + EVERY

    def evaluated(self, t: int, peers: Peers) -> None:
        """Refresh the page, unless that was done a moment ago; a run goes on without it."""
        begun = time.perf_counter()
        if begun >= self.due:
            try:
                self.write({})
            except InputError as error:
                LOG.warning("no report after round %d: %s", t, error)
            now = time.perf_counter()
            self.due = now + max(EVERY, (now - begun) / SHARE)

    def finish(self, outcome: Outcome) -> None:
        """Write the page of a run that is finished.

        Raises:
            InputError: the folder cannot be written to.
        """
        self.write(ended(None))

    def close(self, error: BaseException | None) -> None:
        """Write the page of a run that an error ended; that error is the one to report."""
        if error is not None:
            with suppress(Exception):
                self.write(ended(error))

    def write(self, entries: Mapping[str, object]) -> Path:
        """Write the page, and return its path.

        Args:
            entries: entries that replace those of run.json, as on how the run ended.

        Raises:
            InputError: a file of the run is damaged, or the folder cannot be written to.
        """
        from dfl.reporting import page, run_page
        from dfl.store.history import read_start

        if self.drawing is None and (start := read_start(self.folder)):
            self.drawing = run_page.draw(start)
        record = {**manifest.read(self.folder), **entries}
        text = run_page.run_page(self.folder, record, self.drawing)
        with writing(str(self.folder)):
            return page.write(self.folder, text)
