"""The pages that are drawn from the code show it as it is."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def test_the_drawing_is_of_the_code() -> None:
    layers = runpy.run_path(str(DOCS / "layers.py"))
    text = (DOCS / "architecture.md").read_text()
    assert layers["page"](text) == text, "run python docs/layers.py"


def test_the_table_of_methods_is_what_they_declare() -> None:
    methods = runpy.run_path(str(DOCS / "methods.py"))
    assert methods["page"]() == (DOCS / "methods.md").read_text(), "run python docs/methods.py"
