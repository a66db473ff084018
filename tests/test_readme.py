"""The README: its code runs, and its numbers are those of the tables that they come from."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import dfl
from dfl.simulation.components import registries
from dfl.simulation.settle import settle
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep.grid import read

pytestmark = pytest.mark.slow

KINDS = registries()

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_two_commands_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    commands = "".join(blocks("sh"))
    assert (
        'pip install -e ".[mpi]" -c constraints.txt && '
        "mpirun -n 16 python -m dfl.run --topology ring" in commands
    )
    assert 'pip install -e ".[mpi,test]" -c constraints.txt && pytest' in commands
    assert {"mpi", "test"} <= set(extras)


def test_every_dependency_is_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *project["optional-dependencies"]["mpi"],
        *project["optional-dependencies"]["test"],
    ]
    names = {re.split(r"[<>=]", one)[0] for one in requirements}
    pinned = dict(
        line.split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert names <= set(pinned)
    assert pinned["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "line", [li for li in "".join(blocks("sh")).splitlines() if "dfl.run" in li and "pip" not in li]
)
def test_command_lines_are_understood(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dfl.run import read_command

    monkeypatch.chdir(tmp_path)
    Path("cell.toml").write_text("peers = 4\n")
    arguments = line.partition("#")[0].split("dfl.run", 1)[1].split()
    if "--resume" in arguments:
        claim(Path("runs/long"))
        begun = {
            "run": settle(dfl.Run(rounds=5000), 16).to_dict(),
            "exit": None,
            "ending": "running",
        }
        manifest.write(Path("runs/long"), begun)
    assert read_command(arguments, 16).run is not None


def test_the_grid_that_is_shown_is_one(tmp_path: Path) -> None:
    (tmp_path / "graphs.toml").write_text(
        next(block for block in blocks("toml") if "[sweep]" in block)
    )
    cells = read(tmp_path / "graphs.toml", 1).cells
    assert (
        f"\n[{len(cells)}/{len(cells)}] {cells[-1].name}: done, round {cells[-1].run.rounds}, "
        in README
    )


def test_the_way_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in dfl.simulate(dfl.Run(peers=4, rounds=2, out=Path("runs/ring"))):
        pass
    text: list[tuple[Any, ...]] = []
    exec(blocks("python")[0], {"print": lambda *arguments: text.append(arguments)})
    assert [row[0] for row in text] == [0, 10, 20]
    assert text[-1][1] > 0.9


EXTENSIONS = """
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
import networkx as nx, numpy as np, torch
from numpy.typing import NDArray
from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.algorithms.dfedavgm import State
from dfl.compression import COMPRESSORS
from dfl.datasets.data import DATASETS, Data
from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates
from dfl.robust.attacks import ATTACKS, Attack, AttackView

from topologies.graphs import pattern, topology
"""


@pytest.fixture
def restored() -> Iterator[None]:
    """Puts every registry back as it was."""
    with ExitStack() as kept:
        for registry in KINDS.values():
            kept.enter_context(registry.replaced())
        yield


@pytest.mark.usefixtures("restored")
def test_what_the_readme_adds_can_be_used() -> None:
    block = next(b for b in blocks("python") if "def wheel" in b)
    exec(EXTENSIONS + block.replace("csr_array", "object"), {"__name__": "readme"})
    *_, mixed = dfl.simulate(
        dfl.Run(peers=6, topology="wheel", algorithm="qdfedavgm", compressor="half", rounds=5)
    )
    *_, alone = dfl.simulate(dfl.Run(peers=6, algorithm="local", rounds=5))
    assert mixed["payload_bytes"] == 2 * 4810 * 20 * 5
    assert mixed["accuracy_mean"] > 0.8
    assert alone["payload_bytes"] == 0
    assert "blobs" in KINDS["dataset"]
    led: dict[str, Any] = {"algorithm": "fedavg", "aggregator": "first", "peers": 6, "rounds": 5}
    *_, honest = dfl.simulate(dfl.Run(**led))
    *_, silent = dfl.simulate(dfl.Run(**led, attack="silence:peers=0"))
    assert honest["accuracy_mean"] > 0.6 > 0.3 > silent["accuracy_mean"]


def test_the_round_shown_is_the_round_that_runs() -> None:
    shown = [line.strip() for block in blocks("python")[2:5] for line in block.splitlines()]
    source = "".join(
        (ROOT / f"dfl/algorithms/{name}.py").read_text()
        for name in ("dfedavgm", "replicas", "fedavg")
    )
    code = [line for line in shown if line and not line.startswith("def ")]
    assert len(code) == 13
    assert [line for line in code if line not in source] == []


def tables() -> list[tuple[str, pd.DataFrame]]:
    """Markdown tables of the README that name the file they came from: <!-- FILE.csv [where
    COLUMN=VALUE] -->.
    """
    found = re.findall(r"<!-- (\S+\.csv(?: where \w+=\w+)?) -->\n((?:\|.*\n)+)", README)
    rows = [
        (name, [[c.strip() for c in li.strip("|\n").split("|")] for li in text.splitlines()])
        for name, text in found
    ]
    return [(name, pd.DataFrame(lines[2:], columns=lines[0])) for name, lines in rows]


@pytest.mark.parametrize(("name", "table"), tables(), ids=[name for name, _ in tables()])
def test_numbers_are_those_of_their_files(name: str, table: pd.DataFrame) -> None:
    """Every row of the README is one row of the file, to the digits that it shows."""
    file, _, chosen = name.partition(" where ")
    source = pd.read_csv(ROOT / file, dtype=str, keep_default_na=False)
    if chosen:
        column, _, value = chosen.partition("=")
        source = source[source[column] == value]
    assert len(table) == len(source)
    for _, row in table.iterrows():
        alike = [
            all(agree(str(row[c]), str(exact[c])) for c in table.columns)
            for _, exact in source.iterrows()
        ]
        assert sum(alike) == 1, dict(row)


def agree(shown: str, exact: str) -> bool:
    """Return whether a cell is the value of the file, rounded to the digits that it shows."""
    if shown == exact:
        return True
    numbers = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
    if not (numbers.fullmatch(shown) and numbers.fullmatch(exact)):
        return False
    return abs(float(shown) - float(exact)) <= 0.5001 * 10.0 ** -len(shown.partition(".")[2])


def test_agreement_is_to_the_digits_shown() -> None:
    assert agree("0.56", "0.563726")
    assert agree("0.564", "0.563726")
    assert not agree("0.565", "0.563726")
    assert not agree("0.57", "0.563726")
    assert agree("ring", "ring")
    assert not agree("ring", "torus")
    assert agree("", "")
    assert not agree("", "0.5")


def test_some_numbers_are_checked() -> None:
    assert len(tables()) >= 2


def test_the_linters_are_those_of_ci() -> None:
    script = (ROOT / ".ci/run").read_text()
    assert all(
        command in script for command in ("ruff check .", "ruff format --check .", "\nmypy\n")
    )
    help_text = subprocess.run(
        [sys.executable, "-m", "dfl.run", "--help"], capture_output=True, text=True, cwd=ROOT
    )
    assert help_text.returncode == 0
