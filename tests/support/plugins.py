"""Packages that add components by entry points, as an installer leaves them on the path."""

import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path

PACKAGE = Path(__file__).parent / "plugin_package"


def declare(folder: Path, package: str, groups: Mapping[str, Mapping[str, str]]) -> None:
    """Write the metadata of an installed package whose entry points are `groups`, by name."""
    info = folder / f"{package.replace('-', '_')}-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in groups.items()
    ]
    (info / "entry_points.txt").write_text("\n\n".join(lines))


def install(folder: Path) -> None:
    """Put the package of `plugin_package` into a folder as if it were installed there."""
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    declare(folder, project["name"], project["entry-points"])
    shutil.copytree(PACKAGE / "dfl_example", folder / "dfl_example")
