"""The README: one page, whose commands are those of the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_it_is_one_page() -> None:
    assert len(README.splitlines()) <= 180


def test_the_two_commands_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert (
        'pip install -e ".[mpi]" -c constraints.txt && '
        "mpirun -n 16 python -m dfl.run --topology ring" in README
    )
    assert '\npip install -e ".[mpi,test]" -c constraints.txt && pytest\n' in README
    assert {"mpi", "test", "docs"} <= set(extras)


def test_every_dependency_is_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [*project["dependencies"], *extras["mpi"], *extras["test"], *extras["docs"]]
    names = {re.split(r"[<>=]", one)[0] for one in requirements}
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert names <= set(pinned)
    assert pinned["torch"] == "2.13.0"


def test_links_lead_to_files() -> None:
    """Sphinx checks those of the other pages."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        assert [each for each in links if not (ROOT / each).exists()] == []


@pytest.mark.slow
def test_the_linters_are_those_of_ci() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert all(
        command in script for command in ("ruff check .", "ruff format --check .", "\nmypy\n")
    )
    help_text = subprocess.run(
        [sys.executable, "-m", "dfl.run", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert help_text.returncode == 0
