"""The callback that shows a run in a notebook while it goes on: progress, figures and curves."""

from __future__ import annotations

import math
from html import escape
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dfl.core.errors import InputError
from dfl.reporting.callbacks.figures import title
from dfl.reporting.text import size
from dfl.store.callbacks import Callback, Outcome, Row, RunInfo

WIDTH, HEIGHT = 480, 120
"""The size of the drawing in pixels."""
CURVES = (("accuracy_mean", "#0072B2"), ("accuracy_min", "#D55E00"))
"""The columns that are drawn where labels are classes, with their colours."""


class Live(Callback):
    """Shows a run in a notebook: `dfl.simulate(run, callbacks=[dfl.Live()])`.

    Raises:
        InputError: at the start, IPython is not installed.
    """

    def __init__(self) -> None:
        self.handle: Any = None
        self.rows: list[Row] = []
        self.heading = ""
        self.rounds = 0
        self.t = 0

    def start(self, info: RunInfo) -> None:
        """Show the run at its first round, with the evaluations before a resume."""
        if find_spec("IPython") is None:
            raise InputError("dfl.Live needs IPython, which is not installed: pip install ipython")
        self.rows = list(info.earlier)
        self.t = info.resumed[0] if info.resumed else 0
        self.heading, self.rounds = title(info.run), info.run.rounds
        self.handle = _ipython().display(_ipython().HTML(self.page()), display_id=True)

    def round(self, t: int) -> None:
        """Show that t rounds are done, a hundred times in a run at most."""
        self.t = t
        if t % max(self.rounds // 100, 1) == 0:
            self._show()

    def row(self, row: Row) -> None:
        """Show an evaluation."""
        self.rows.append(row)
        self.t = row.round
        self._show()

    def finish(self, outcome: Outcome) -> None:
        """Show the last round."""
        self._show()

    def page(self, ending: str = "") -> str:
        """Return what the notebook shows now, as HTML."""
        last = self.rows[-1] if self.rows else None
        figures = _figures(last) if last else ""
        return (
            f"<div><strong>{escape(self.heading)}</strong><br/>"
            f'<progress value="{self.t}" max="{max(self.rounds, 1)}"></progress> '
            f"round {self.t:,} of {self.rounds:,}{escape(ending)}<br/>{escape(figures)}<br/>"
            f"{drawing(self.rows)}</div>"
        )

    def close(self, error: BaseException | None) -> None:
        """Show what ended the run, if not its last round."""
        if error is not None:
            self._show(f", ended by {type(error).__name__}: {error}")

    def _show(self, ending: str = "") -> None:
        if self.handle is not None:
            self.handle.update(_ipython().HTML(self.page(ending)))


def _ipython() -> Any:
    """Return the module that shows things in notebooks."""
    return import_module("IPython.display")


def drawing(rows: list[Row]) -> str:
    """Return the curves of evaluations so far as SVG; empty where there are less than two."""
    if len(rows) < 2:
        return ""
    accurate = not math.isnan(rows[-1].accuracy_mean)
    curves = CURVES if accurate else (("train_loss", CURVES[0][1]),)
    last = rows[-1].round or 1
    known = [row[name] for row in rows for name, _ in curves if math.isfinite(row[name])]
    low, top = (0.0, 1.0) if accurate else (min([0.0, *known]), max([0.0, *known]))
    lines = []
    for column, colour in curves:
        points = " ".join(
            f"{row.round / last * WIDTH:.1f},{(top - row[column]) / (top - low or 1) * HEIGHT:.1f}"
            for row in rows
            if math.isfinite(row[column])
        )
        lines.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{column}</title></polyline>"
        )
    return (
        f'<svg viewBox="0 -2 {WIDTH} {HEIGHT + 4}" width="{WIDTH}" height="{HEIGHT + 4}" '
        f'role="img" aria-label="{", ".join(name for name, _ in curves)} by round">'
        f"{''.join(lines)}</svg>"
    )


def _figures(row: Row) -> str:
    accuracy = f"accuracy {row.accuracy_mean:.4f} (worst peer {row.accuracy_min:.4f}), "
    return (
        f"{'' if math.isnan(row.accuracy_mean) else accuracy}loss {row.train_loss:.4g}, "
        f"consensus distance {row.consensus_distance:.3g}, {size(row.payload_bytes)} sent"
    )
