"""Pages of HTML that need no network: templates, their data, and the file.

A page is one file. Its data stand in it as JSON, which its script reads with `JSON.parse`; names
that users chose are text everywhere. Its content security policy admits nothing but its own script.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dfl.core.files import atomically
from dfl.core.version import VERSION
from dfl.store.run_directory import PAGE, refuse_foreign_page

if TYPE_CHECKING:
    import pandas as pd
    from jinja2 import Environment

POINTS = 1000
"""The most points of a line."""
MISSING = 2**16 - 1
"""The code of a number that is missing in a packed array."""
X = {
    "round": "round",
    "payload_bytes": "bytes sent by all peers",
    "sim_seconds": "simulated seconds",
    "seconds": "seconds",
}
"""Labels of the columns that may be the x axis."""


class Line(NamedTuple):
    """A line of a chart.

    Attributes:
        table: the number of the table that has its columns.
        y: the column.
        name: for the legend.
        low, high: the columns of its band; empty without one.
        style: the number of its colour and dashes; None for its place among the lines.
    """

    table: int
    y: str
    name: str
    low: str = ""
    high: str = ""
    style: int | None = None


def chart(
    title: str, lines: Iterable[Line], *, unit: str = "", log: bool = False, x: str = ""
) -> dict[str, object]:
    """Return the data of a chart.

    Args:
        title: its heading.
        lines: its lines.
        unit: what is measured, for the y axis.
        log: whether the y axis is logarithmic.
        x: the column of the x axis where readers cannot choose it.
    """
    return {
        "title": title,
        "unit": unit,
        "log": log,
        "x": x,
        "lines": [line._asdict() for line in lines],
    }


def columns(
    rows: pd.DataFrame | Mapping[str, ArrayLike], names: Iterable[str]
) -> dict[str, list[float | int | None]]:
    """Return columns of numbers for a page, at `POINTS` rows or fewer, the last one among them."""
    shown = {
        name: np.asarray(rows[name], dtype=np.float64)
        for name in dict.fromkeys(names)
        if name in rows
    }
    chosen = spread(max(map(len, shown.values()), default=0), POINTS)
    return {name: list(map(number, values[chosen].tolist())) for name, values in shown.items()}


def spread(count: int, most: int) -> list[int]:
    """Return at most so many of the numbers 0 to count - 1, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def number(value: float) -> float | int | None:
    """Return a number with six digits for a page, a whole one with all; None where not finite."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.6g}")


def packed(values: ArrayLike) -> dict[str, object]:
    """Return numbers of any shape in 16 bits each, for `unpacked` in page.js.

    Whole numbers that span less than 2^16 keep their values; others are rounded to one of 65,535
    steps between the least and the greatest. What is not finite is missing.
    """
    held = np.asarray(values, dtype=np.float64).ravel()
    finite = np.isfinite(held)
    known = held[finite]
    low, high = (float(known.min()), float(known.max())) if len(known) else (0.0, 0.0)
    whole = bool((known == np.rint(known)).all()) and high - low < MISSING
    step = 1.0 if whole or high == low else (high - low) / (MISSING - 1)
    codes = np.full(len(held), MISSING, dtype="<u2")
    codes[finite] = np.rint((known - low) / step).astype("<u2")
    return {"low": low, "step": step, "codes": base64.b64encode(codes.tobytes()).decode()}


def floats(values: ArrayLike) -> dict[str, object]:
    """Return numbers of any shape in 32 bits each, for `unpacked` in page.js; not finite ones are
    missing.
    """
    held = np.asarray(values, dtype="<f4").ravel()
    known = np.where(np.isfinite(held), held, np.float32(np.nan))
    return {"floats": base64.b64encode(known.astype("<f4").tobytes()).decode()}


def decimals(value: float, form: str = ".4g") -> str:
    """Return a number as text, and a dash where it is not finite."""
    return f"{value:{form}}" if math.isfinite(value) else "–"  # noqa: RUF001


def render(template: str, content: Mapping[str, Any], data: Mapping[str, object]) -> str:
    """Return a page.

    Args:
        template: the name of the file in `templates`.
        content: its variables; all text is escaped.
        data: for its script.
    """
    from jinja2.utils import htmlsafe_json_dumps

    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    own = {
        "style": _asset("page.css"),
        "script": script,
        "digest": digest,
        "version": VERSION,
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "data": htmlsafe_json_dumps(data, separators=(",", ":"), allow_nan=False),
    }
    return _templates().get_template(template).render({**own, **content})


def write(folder: Path, page: str) -> Path:
    """Write a page into a directory, whole or not at all, and return its path.

    Raises:
        InputError: it would replace a page that dfl did not write.
        OSError: it cannot be written.
    """
    refuse_foreign_page(folder)
    with atomically(folder / PAGE) as part, part.open("wb") as file:
        file.write(page.encode(errors="backslashreplace"))
    return folder / PAGE


def pairs(values: Mapping[str, object]) -> Sequence[tuple[str, str]]:
    """Return names and values as text, for a table."""
    return [(name, "–" if value is None else str(value)) for name, value in values.items()]  # noqa: RUF001


@cache
def _templates() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("dfl.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _asset(name: str) -> str:
    return files("dfl.reporting").joinpath("templates", name).read_text(encoding="utf-8")
