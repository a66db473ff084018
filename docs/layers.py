"""Draw the packages of dfl and their imports into docs/architecture.md: python docs/layers.py.

The drawing is read off the import statements, those for type checking included. The site has it as
a matrix.
"""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- drawing: begin -->\n", "<!-- drawing: end -->"
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]
LAYERS = tuple(tuple(line.split(" | ")) for line in CONTRACTS[0]["layers"])
"""The packages and modules of dfl, the highest layer first, as import-linter holds them."""


def package(module: str) -> str:
    """Return the part of dfl, or topologies, to which a dotted module belongs."""
    parts = module.split(".")
    return parts[0] if parts[0] != "dfl" or len(parts) == 1 else parts[1]


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports, dotted."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found


def label(part: str) -> str:
    """Return what a part is called in its folder."""
    module = (ROOT / "dfl" / f"{part}.py").exists()
    return f"{part}.py" if module else f"{part}/"


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of parts of which the first imports the second."""
    found: set[tuple[str, str]] = set()
    for path in sorted((ROOT / "dfl").rglob("*.py")):
        inside = path.relative_to(ROOT).with_suffix("").parts
        if len(inside) == 2 and inside[1] == "__init__":
            continue
        own = package(".".join(inside))
        others = {package(each) for each in imports(path) if re.match(r"(dfl|topologies)\.", each)}
        found |= {(own, other) for other in others - {own, "dfl"}}
    return found


def drawing() -> str:
    """Return the drawing as a Mermaid flowchart and a table of the layers."""
    lines = ["```mermaid", "flowchart TD"]
    for number, layer in enumerate(LAYERS):
        nodes = "; ".join(f'{name}["{label(name)}"]' for name in layer)
        lines.append(f"  subgraph L{number}[ ]\n    direction LR\n    {nodes}\n  end")
    lines.append('  topologies["topologies/"]')
    for own, other in sorted(arrows()):
        if other not in ("core", "config"):  # everything may use these
            lines.append(f"  {own} --> {other}")
    return "\n".join([*lines, "```"]) + "\n"


def draw(path: Path) -> None:
    """Draw the same imports as a matrix, for the site: a dot where the row imports the column."""
    from matplotlib.figure import Figure

    names = [*(name for layer in LAYERS for name in layer), "topologies"]
    place = {name: k for k, name in enumerate(names)}
    figure = Figure(figsize=(8, 7.5), layout="constrained")
    axes = figure.subplots()
    for own, other in arrows():
        if other not in ("core", "config"):
            axes.plot(place[other], place[own], "o", color="#0072B2", markersize=8)
    ends = [sum(map(len, LAYERS[:k])) - 0.5 for k in range(1, len(LAYERS) + 1)]
    for end in ends:
        axes.axhline(end, color="0.85", linewidth=0.8, zorder=0)
        axes.axvline(end, color="0.85", linewidth=0.8, zorder=0)
    axes.plot([-0.5, len(names) - 0.5], [-0.5, len(names) - 0.5], color="0.6", linewidth=0.8)
    axes.set_xticks(range(len(names)), [label(name) for name in names], rotation=60, ha="left")
    axes.set_yticks(range(len(names)), [label(name) for name in names])
    axes.set(xlim=(-0.5, len(names) - 0.5), ylim=(len(names) - 0.5, -0.5), ylabel="imports")
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    figure.savefig(path, dpi=120)


def page(text: str) -> str:
    """Return a page with the drawing put between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawing()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
