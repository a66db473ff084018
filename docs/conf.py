"""Configuration of Sphinx: sphinx-build -W docs DIR."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import docstrings  # noqa: E402
import generate  # noqa: E402
import layers  # noqa: E402

from dfl.core.version import VERSION  # noqa: E402

project = "dfl"
author = "the authors of dfl"
version = release = VERSION
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = f"dfl {VERSION}"
html_static_path = ["_static"]
html_css_files = ["dfl.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "auto"
nb_merge_streams = True
nb_execution_raise_on_error = True
nb_execution_timeout = 120
suppress_warnings = ["mystnb.unknown_mime_type"]

nitpicky = True
nitpick_ignore_regex = [
    # Other packages, whose lists of names would have to be fetched.
    ("py:.*", r"(collections|networkx|np|numpy|pathlib|pd|scipy|torch)\..*"),
    ("py:class", "Module|NDArray|Path|Tensor|csr_array|partial"),
    # Aliases, and classes that annotations name without their module.
    (
        "py:class",
        "Assumption|Estimator|Group|Ids|Ints|LogDensity|Model|Part|RoundKey|ServerDataRule",
    ),
    ("py:class", r"topologies\.sequences\.T"),
    # Attributes that share a line of a docstring: the first is read as of the type of the second.
    ("py:class", "model|scale|test_inputs|train|train_groups|train_protected"),
]
default_role = "code"
smartquotes = False
toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_use_ivar = True


def setup(app: Any) -> None:
    """Write the generated pages before the sources are read."""
    app.connect("builder-inited", lambda app: generate.write())
    app.connect("source-read", _draw)
    app.connect("autodoc-process-docstring", _as_rst, priority=400)


def _draw(app: Any, name: str, source: list[str]) -> None:
    """Show the drawing of the imports as a picture: Mermaid would be fetched from elsewhere."""
    before, begin, rest = source[0].partition(layers.BEGIN)
    if name == "architecture" and begin:
        picture = "![A dot where the row imports the column](_generated/layers.png)\n"
        source[0] = before + picture + rest.partition(layers.END)[2]


def _as_rst(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make equations and code of a docstring literal blocks, and its asterisks plain ones."""
    lines[:] = docstrings.restructured(lines)
