"""The pages of the documentation, and the blocks of code in them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(
        path
        for path in sorted(DOCS.rglob("*.md"))
        if not path.relative_to(DOCS).parts[0].startswith("_")
    ),
]

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """A block of code of a page.

    A comment on the line above is its mark: "not run: WHY", or "excerpt: FILE" where it shows lines
    of a file.

    Attributes:
        page: its page, from the root.
        language: of the fence.
        text: its lines.
        mark: the comment above it, or "".
        output: the block without a language that follows it directly, which shows what it prints;
            or None.
    """

    page: str
    language: str
    text: str
    mark: str
    output: str | None


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text()
    found = list(_BLOCK.finditer(text))
    result = []
    for match, following in zip(found, [*found, None][1:], strict=True):
        between = text[match.end() : following.start()] if following else ""
        shows = following is not None and not following["language"] and not between.strip()
        output = following["text"] if following and shows else None
        name = str(page.relative_to(ROOT))
        language = match["language"].strip()
        result.append(Block(name, language, match["text"], match["mark"] or "", output))
    return result


BLOCKS = [block for page in PAGES for block in blocks(page)]


def commands(block: Block) -> list[str]:
    """Return the commands of a block of sh, a line each, without comments."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [bare for line in lines if (bare := line.partition(" #")[0].strip())]
