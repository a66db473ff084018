"""Tables for notebooks: HTML of plain text, in which everything is escaped."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape


def table(title: str, rows: Mapping[str, object]) -> str:
    """Return a table of names and values under a title."""
    lines = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(str(value))}</td></tr>'
        for name, value in rows.items()
    )
    return f"<div><strong>{escape(title)}</strong><table>{lines}</table></div>"
