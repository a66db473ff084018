"""Text of docstrings as Markdown and as the markup of Sphinx."""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Source):")


def attributes(path: Path, name: str) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field."""
    tree = ast.parse(path.read_text())
    found: dict[str, str] = {}
    for body in (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name):
        for before, after in pairwise(body):
            if isinstance(before, ast.AnnAssign) and isinstance(after, ast.Expr):
                assert isinstance(before.target, ast.Name)
                if isinstance(after.value, ast.Constant):
                    found[before.target.id] = inspect.cleandoc(str(after.value.value))
    return found


def markdown(text: str) -> str:
    """Return text with its indented lines as code blocks."""
    lines: list[str] = []
    block: list[str] = []
    for line in [*text.splitlines(), "."]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
            continue
        if block:
            lines += ["```text", *inspect.cleandoc("\n".join(block)).splitlines(), "```", ""]
            block = []
        lines.append(_escaped(line))
    return "\n".join(lines[:-1]).strip()


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def restructured(lines: list[str]) -> list[str]:
    """Return the lines of a docstring for Sphinx: indented text outside of sections is literal."""
    found: list[str] = []
    section = literal = False
    for line in lines:
        indented = line.startswith("    ")
        if line and not indented:
            section, literal = bool(_SECTION.fullmatch(line)), False
        elif indented and not section and not literal and found and not found[-1]:
            found += ["::", ""]
            literal = True
        found.append(line if literal else line.replace("*", "\\*"))
    return found


def _escaped(line: str) -> str:
    """Return a line whose characters Markdown leaves as they are, but for code in backticks.

    A line that begins with % would be a comment.
    """
    parts = re.split(r"(`[^`]*`)", re.sub(r"^%", r"\\%", line))
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<\[\]$])", r"\\\1", part) for part in parts
    )
