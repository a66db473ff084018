"""Docstrings as data: what a component is, what its options mean, and the papers it is from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dfl.core.options import Component, options

_HEADING = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Source):\s*(.*)")
_ENTRY = re.compile(r" {4}(\w+(?:, \w+)*): (.*)")
_CITATION = re.compile(r" ?\(((?=[^()]*[A-Za-z])[^()]*\b(?:(?:19|20)\d\d|arXiv)\b[^()]*)\)")
"""A name with a year or an arXiv number in parentheses; a lone year belongs to the text."""


@dataclass(frozen=True)
class Described:
    """What the docstring of a component states.

    Attributes:
        summary: its first paragraph, on one line, without the papers.
        body: the paragraphs after it, line by line as they are written.
        options: option -> its meaning, on one line, of those that are described.
        source: the papers that it names, on one line; empty where it names none.
    """

    summary: str
    body: str
    options: Mapping[str, str]
    source: str


def described(component: Component) -> Described:
    """Return what the docstring of a component states, and of its options those of its bases."""
    text, sections = _parts(inspect.getdoc(component) or "")
    summary, _, body = text.partition("\n\n")
    meanings: dict[str, str] = {}
    for each in reversed(getattr(component, "__mro__", (component,))):
        own = _parts(inspect.cleandoc(each.__doc__ or ""))[1]
        meanings |= _meanings([*own.get("Args", ()), *own.get("Attributes", ())])
    given = _joined(sections.get("Source", ()))
    return Described(
        summary=re.sub(":$", ".", _CITATION.sub("", _joined(summary.split("\n")))),
        body=body.strip("\n"),
        options={name: meanings[name] for name in options(component) if name in meanings},
        source="; ".join(dict.fromkeys([*([given.rstrip(".")] if given else []), *cited(text)])),
    )


def cited(text: str) -> list[str]:
    """Return the papers that a text names in parentheses, by their years."""
    return [_joined([each]).rstrip(".") for each in _CITATION.findall(text)]


def _parts(doc: str) -> tuple[str, dict[str, list[str]]]:
    """Return a docstring before its first section, and the lines of each section."""
    text: list[str] = []
    sections: dict[str, list[str]] = {}
    lines = text
    for line in doc.split("\n"):
        if heading := _HEADING.fullmatch(line):
            lines = sections.setdefault(heading[1], [])
            line = heading[2]
        lines.append(line)
    return "\n".join(text).strip(), sections


def _meanings(lines: Sequence[str]) -> dict[str, str]:
    """Return the entries of a section, `name, name: text` with further lines below it."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            found |= {name: [entry[2]] for name in names}
        else:
            for name in names:
                found[name].append(line)
    return {name: _joined(parts).rstrip(".") for name, parts in found.items()}


def _joined(lines: Sequence[str]) -> str:
    return " ".join(" ".join(lines).split())
