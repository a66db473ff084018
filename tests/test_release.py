"""What is released: its name, its files, and that it runs without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dfl.core.version import DISTRIBUTION, VERSION

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STEM = f"{DISTRIBUTION.replace('-', '_')}-{VERSION}"
CONDA = {"matplotlib": "matplotlib-base", "torch": "pytorch"}
"""Names on conda-forge that differ."""
TOP = {
    "pyproject.toml", "dfl", "topologies", "experiments", "tests", "README.md", "docs", ".ci",
    "LICENSE", "constraints.txt", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "MANIFEST.in",
    "apptainer.def", "environment.yml", ".github", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip
"""What the top level of the checkout may have."""


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=]", one)[0] for one in requirements}


def test_name_and_version_come_from_one_place() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert PROJECT["dynamic"] == ["version"]
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    other = [line for line in PROJECT["optional-dependencies"]["bench"] if "[" in line]
    assert other == [f"{DISTRIBUTION}[mpi]"]


def test_nothing_else_is_committed_at_the_top() -> None:
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("no checkout of git")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:  # as where the checkout is another user's
        pytest.skip(f"git cannot read the checkout: {listed.stderr.strip()}")
    assert {line.partition("/")[0] for line in listed.stdout.splitlines()} <= TOP


def test_the_environment_of_conda_has_what_the_project_needs() -> None:
    lines = (ROOT / "environment.yml").read_text().splitlines()
    given = names([line.removeprefix("  - ") for line in lines if line.startswith("  - ")])
    needed = names(PROJECT["dependencies"] + PROJECT["optional-dependencies"]["mpi"])
    assert given == {CONDA.get(each, each) for each in needed} | {"python", "pip", "conda-forge"}
    same = {each for each in PROJECT["dependencies"] if not names([each]) & CONDA.keys()}
    assert {f"  - {each}" for each in same} <= set(lines)


def test_the_container_installs_files_that_there_are() -> None:
    text = (ROOT / "apptainer.def").read_text()
    sections = dict(re.findall(r"^%(\w+)\n(.*?)(?=^%|\Z)", text, re.MULTILINE | re.DOTALL))
    copied = dict(line.split() for line in sections["files"].strip().splitlines())
    assert all((ROOT / source).exists() for source in copied)
    assert {"pyproject.toml", "dfl", "topologies", *PROJECT["license-files"]} <= set(copied)
    assert PROJECT["readme"] in copied
    for name in ("post", "environment", "runscript", "test"):
        subprocess.run(["sh", "-n", "-c", sections[name]], check=True)


def test_the_workflow_runs_what_ci_runs() -> None:
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    assert [line.strip() for line in text.splitlines() if " run:" in line] == ["- run: .ci/run"]
    versions = re.findall(r"\"(3\.\d+)\"", text)
    known = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if ":: 3." in each]
    assert [versions[0], versions[-1]] == [known[0], known[-1]]
    assert PROJECT["requires-python"] == f">={known[0]}"


BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
)


def build(what: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", BUILD, what, str(target)]
    ended = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return target / ended.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the source distribution, and the wheel that is built from nothing but it."""
    folder = tmp_path_factory.mktemp("release")
    source, dist = folder / "source", folder / "dist"
    source.mkdir()
    dist.mkdir()
    for file in ROOT.iterdir():
        if file.is_file() and not file.is_symlink() and file.name != ".git":
            shutil.copy(file, source)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("dfl", "topologies"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("tests", "docs", "experiments"):
        (source / name).mkdir()
        (source / name / "test_nothing.py").touch()
    archive = build("build_sdist", source, dist)
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return archive, build("build_wheel", folder / STEM, dist)


def packaged() -> set[str]:
    return {
        str(file.relative_to(ROOT))
        for name in ("dfl", "topologies")
        for file in (ROOT / name).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


@pytest.mark.slow
def test_the_archives_carry_what_they_need_and_no_more(built: tuple[Path, Path]) -> None:
    archive, wheel = built
    assert (archive.name, wheel.name) == (f"{STEM}.tar.gz", f"{STEM}-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if not name.startswith(f"{STEM}.dist-info/")}
        metadata = file.read(f"{STEM}.dist-info/METADATA").decode()
        assert f"{STEM}.dist-info/licenses/LICENSE" in file.namelist()
    assert held == packaged()
    assert {"dfl/py.typed", "topologies/py.typed"} <= held
    assert f"\nName: {DISTRIBUTION}\nVersion: {VERSION}\n" in metadata
    with tarfile.open(archive) as tar:
        sources = {name.partition("/")[2] for name in tar.getnames()} - {""}
    folders = {name.partition("/")[0] for name in sources if "/" in name}
    assert folders == {"dfl", "topologies", f"{DISTRIBUTION.replace('-', '_')}.egg-info"}
    assert packaged() <= sources
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff"} <= sources


@pytest.mark.slow
@pytest.mark.skipif(find_spec("twine") is None, reason="twine is not installed")
def test_the_package_index_would_take_them(built: tuple[Path, Path]) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.slow
def test_it_runs_from_an_empty_folder_without_the_checkout(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment)
    python = environment / "bin/python"
    install = ["pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", *install, str(built[1])],
        check=True, capture_output=True, cwd=empty, env=clean,
    )  # fmt: skip
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))

    def run(*command: str) -> str:
        ended = subprocess.run(
            [environment / "bin" / command[0], *command[1:]],
            cwd=empty, env=clean, capture_output=True, text=True,
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    where = run("python", "-c", "import dfl, topologies; print(dfl.__file__, topologies.__file__)")
    assert all(Path(each).is_relative_to(packages) for each in where.split())
    assert run("dfl", "--version") == f"dfl {VERSION}\n"
    last = run("dfl", "run", "--peers", "4", "--rounds", "2").splitlines()[-1]
    page = empty / last.split()[-1]
    assert page.name == "report.html"
    assert page.stat().st_size > 1000
    assert json.loads((page.parent / "run.json").read_text())["exit"] == 0
    assert {each.name for each in empty.iterdir()} == {"runs"}
