"""The page of several runs, those of a sweep or of a comparison: tables, maps and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

from matplotlib import colormaps
from matplotlib.colors import Normalize, to_hex

from dfl.reporting.page import X, decimals, render
from dfl.reporting.text import size
from dfl.store.run_directory import PAGE

LINES = 30
"""The most lines of a chart: page.js has as many styles."""
TITLES = {
    "accuracy_mean": "Accuracy",
    "test_loss_mean": "Test loss",
    "train_loss": "Training loss",
    "consensus_distance": "Consensus distance",
}
"""Headings of the columns of metrics.csv that are drawn."""


@dataclass(frozen=True)
class Link:
    """A name that leads to a file."""

    href: str
    text: str

    @classmethod
    def to(cls, folder: Path, seen_from: str, text: str) -> Link:
        """Return a link to the page of a run, or to its folder where it has none.

        Args:
            folder: of the run.
            seen_from: the path of that folder as the page needs it.
            text: the name.
        """
        page = f"/{PAGE}" if (folder / PAGE).exists() else "/"
        start = "" if seen_from.startswith(("/", ".")) else "./"  # a name may look like a scheme
        path = quote(seen_from, errors="surrogateescape")
        return cls(f"{start}{path}{page}", text)


@dataclass(frozen=True)
class Cell:
    """A field of a table: its text, the number by which it is sorted, and its links."""

    text: str = ""
    value: float | None = None
    links: tuple[Link, ...] = ()

    @classmethod
    def of(cls, column: str, value: float, spread: float = math.nan) -> Cell:
        """Return a number of a column, with the half width of its interval where that is known."""
        if not math.isfinite(value):
            return cls("–")  # noqa: RUF001
        either = f" ± {_text(column, spread, '.2g')}" if math.isfinite(spread) else ""
        return cls(f"{_text(column, value, '.4g')}{either}", float(value))


def _text(column: str, value: float, form: str) -> str:
    """Return a number of a column as text, in a form if it is neither bytes nor a round."""
    if column.endswith("bytes"):
        return size(value)
    return f"{value:,.1f}".removesuffix(".0") if column == "round" else f"{value:{form}}"


@dataclass(frozen=True)
class Table:
    """A table: its place on the page, its heading, a note, its columns and rows."""

    id: str
    title: str
    note: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @cached_property
    def numeric(self) -> list[bool]:
        """Whether each column has a number in some row."""
        return [any(row[k].value is not None for row in self.rows) for k in range(len(self.head))]


@dataclass(frozen=True)
class Map:
    """A map of two fields: its title, the text of its corner, its columns, and rows of fields."""

    title: str
    corner: str
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Mapping[str, str]]]]


def shaded(value: float, spread: float, scale: tuple[float, float]) -> dict[str, str]:
    """Return a field of a map: its text, its colour on a scale, and the colour of the text."""
    if not math.isfinite(value):
        return {"text": "none finished", "note": "", "colour": "", "ink": ""}
    share = float(Normalize(*scale)(value)) if scale[1] > scale[0] else 0.5
    note = f"± {spread:.2g}" if math.isfinite(spread) else ""
    ink = "#000000" if share > 0.55 else "#ffffff"
    return {
        "text": decimals(value),
        "note": note,
        "colour": to_hex(colormaps["viridis"](share)),
        "ink": ink,
    }


def collection_page(
    content: Mapping[str, Any],
    tables: Sequence[Table],
    curves: tuple[Sequence[Mapping[str, object]], Sequence[Mapping[str, object]]],
    maps: Sequence[Map] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return the page of several runs.

    Args:
        content: generator, kind, title, subtitle, folder, map_note where there are maps, and the
            status of what is still running.
        tables: the first stands before the maps and the curves.
        curves: the tables that charts draw from, and the charts.
        maps: of two fields.
        notes: lines above the curves.
    """
    first, *others = tables
    sections = [(first.id, first.title), *([("map", "Map")] if maps else []), ("curves", "Curves")]
    sections += [(each.id, each.title) for each in others]
    drawn, charts = curves
    own: dict[str, Any] = {
        "status": None,
        "sections": sections,
        "tables": tables,
        "maps": maps,
        "points": notes,
        "map_note": "",
    }
    data = {"live": content.get("status") is not None, "x": X, "tables": drawn, "charts": charts}
    return render("runs.html", {**own, **content}, data)
