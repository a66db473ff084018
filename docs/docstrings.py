"""Docstrings of the code as Markdown: paragraphs, equations and sections."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Source|Sources):$")
_ENTRY = re.compile(r"((?:\*{0,2}\w+)(?:, \*{0,2}\w+)*): (.*)")


@dataclass
class Docstring:
    """A docstring, read.

    Attributes:
        summary: its first paragraph.
        body: what follows, before the sections; equations are code blocks.
        entries: name -> description, of the sections Args and Attributes.
        source: the section Source.
    """

    summary: str = ""
    body: str = ""
    entries: dict[str, str] = field(default_factory=dict)
    source: str = ""


def read(text: str | None) -> Docstring:
    """Return a docstring in parts."""
    found = Docstring()
    if not text:
        return found
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(text).splitlines():
        if match := _SECTION.fullmatch(line):
            name = match[1]
            sections[name] = []
        else:
            sections[name].append(line)
    summary, _, body = "\n".join(sections.pop("")).partition("\n\n")
    found.summary, found.body = _joined(summary), markdown(body)
    for name, lines in sections.items():
        if name in ("Args", "Attributes"):
            found.entries |= _entries(lines)
        elif name in ("Source", "Sources"):
            found.source = _joined(inspect.cleandoc("\n".join(lines)))
    return found


def described(component: object) -> dict[str, str]:
    """Return the entries of a component, those of its base classes included."""
    found: dict[str, str] = {}
    for each in reversed(component.__mro__ if isinstance(component, type) else [component]):
        found |= read(each.__doc__).entries
    return found


def markdown(text: str) -> str:
    """Return text with its indented lines as code blocks."""
    lines: list[str] = []
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("    ") or (block and not line):
            block.append(line)
            continue
        if block:
            lines += ["```text", *inspect.cleandoc("\n".join(block)).splitlines(), "```", ""]
            block = []
        lines.append(_escaped(line))
    if block:
        lines += ["```text", *inspect.cleandoc("\n".join(block)).splitlines(), "```"]
    return "\n".join(lines).strip()


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


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return _escaped(_joined(text)).replace("|", "\\|")


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


def _entries(lines: list[str]) -> dict[str, str]:
    """Return the entries of a section, "name, name: description", by name."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc("\n".join(lines)).splitlines():
        match = None if line.startswith(" ") else _ENTRY.fullmatch(line)
        if match:
            names = [each.lstrip("*") for each in match[1].split(", ")]
            found |= dict.fromkeys(names, match[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def _joined(text: str) -> str:
    return " ".join(text.split())


def _escaped(line: str) -> str:
    """Return a line whose characters Markdown leaves as they are, but for code in backticks."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<\[\]$])", r"\\\1", part) for part in parts
    )
