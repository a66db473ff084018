"""Every block of code in README and docs runs, is an excerpt of the source, or states why not."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.inference.estimators import ESTIMATORS
from dfl.simulation.components import registries
from dfl.simulation.defaults import settle
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep.grid import read
from tests.support.pages import BLOCKS, PAGES, ROOT, Block, blocks, commands

SHELL = [block for block in BLOCKS if block.language == "sh"]
RUN = re.compile(r"python -m (dfl( list|\.(run|sweep|compare|report|inference))|topologies)\b")
WITHOUT_FILES = ("digits", "gaussian")
"""Data sets that every machine has."""
ROUNDS = 21
"""Rounds of a run that a test cuts short."""


def runs() -> list[str]:
    """Return every command that starts a run, also of blocks that are not run as a whole."""
    shown = [block for block in SHELL if "changes the environment" not in block.mark]
    return sorted({line for block in shown for line in commands(block) if "dfl.run" in line})


def programs() -> list[tuple[str, str]]:
    """Return every other command with its page."""
    return [
        (block.page, line)
        for block in SHELL
        for line in commands(block)
        if not block.mark and "dfl.run" not in line
    ]


def test_every_block_has_a_way_to_be_checked() -> None:
    for block in BLOCKS:
        reason = re.fullmatch(r"not run: .{10,}|excerpt: \S+|", block.mark)
        assert reason or block.mark == "drawing: begin", (block.page, block.mark)
        languages = ("", "sh", "python", "toml", "mermaid", "{code-cell}", "{toctree}")
        other = ("{include} ../CHANGELOG.md", "{include} ../CONTRIBUTING.md", "{eval-rst}")
        assert block.language in (*languages, *other, "{image} front.png"), block.page


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.page)
def test_a_test_knows_every_program(block: Block) -> None:
    if not block.mark:
        assert [line for line in commands(block) if not RUN.search(line)] == []


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.mark.startswith("excerpt: ")], ids=str
)
def test_an_excerpt_is_what_runs(block: Block) -> None:
    source = (ROOT / block.mark.removeprefix("excerpt: ")).read_text()
    lines = [line.strip() for line in block.text.splitlines()]
    shown = [line for line in lines if line and not line.startswith("def ")]
    assert len(shown) >= 2
    assert [line for line in shown if line not in source] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # notes of runs
@pytest.mark.parametrize("line", runs())
def test_a_run_is_understood_and_runs(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dfl.run import read_command

    monkeypatch.chdir(tmp_path)
    Path("cell.toml").write_text("peers = 4\n")
    arguments = shlex.split(line.split("dfl.run", 1)[1].replace("/shared/", "shared/"))
    if "--resume" in arguments:
        claim(Path("runs/long"))
        begun = {
            "run": settle(dfl.Run(rounds=5000), 16).to_dict(),
            "exit": None,
            "ending": "running",
        }
        manifest.write(Path("runs/long"), begun)
    command = read_command(arguments, 16)
    assert command.run is not None
    if "--resume" in arguments or command.run.dataset not in WITHOUT_FILES:
        return
    cut = replace(command.run, rounds=min(command.run.rounds, ROUNDS), eval_every=ROUNDS, out=None)
    cut = replace(cut, profile=False)  # it needs a folder
    *_, last = dfl.simulate(cut)
    assert np.isfinite(last.train_loss)


@pytest.mark.slow
@pytest.mark.usefixtures("restored", "without_figures")
@pytest.mark.parametrize(("page", "line"), programs())
def test_a_command_runs(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    module, *arguments = shlex.split(line[line.index("python -m ") + len("python -m ") :])
    if module == "dfl.sweep":
        grid = next(block for block in blocks(ROOT / page) if "[sweep]" in block.text)
        Path(arguments[0]).write_text(grid.text)
        if not {"--dry-run", "--status", "--table"} & {*arguments}:
            arguments.append("--no-submit" if "--slurm" in arguments else "--dry-run")
    elif module in ("dfl.compare", "dfl.report"):
        arguments = [each.replace("*", "x") for each in arguments]
        for each in arguments:
            list(dfl.simulate(dfl.Run(peers=2, rounds=1, seed=len(each), out=Path(each))))
    elif module == "dfl.inference":
        patients().to_csv(arguments[0], index=False)
    monkeypatch.setattr("sys.argv", [module, *arguments])
    for loaded in (module, f"{module}.__main__"):  # of a loaded module, runpy warns
        monkeypatch.delitem(sys.modules, loaded, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=False)
    assert not ended.value.code


def patients() -> pd.DataFrame:
    """Return examples of four hospitals with a binary outcome."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "hospital": np.repeat(["a", "b", "c", "d"], 100),
            "age": rng.normal(size=400),
            "dose": rng.normal(size=400),
        }
    )
    chance = 1 / (1 + np.exp(-frame["age"] - 0.5 * frame["dose"]))
    return frame.assign(y=(rng.random(400) < chance).astype(int))


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "toml"], ids=lambda block: block.page
)
def test_toml_is_read(block: Block, tmp_path: Path) -> None:
    if "sweep" not in tomllib.loads(block.text):
        return
    (tmp_path / "graphs.toml").write_text(block.text)
    cells = read(tmp_path / "graphs.toml", 1).cells
    shown = (ROOT / block.page).read_text()
    if ": done, round" in shown:
        n, last = len(cells), cells[-1]
        assert f"\n[{n}/{n}] {last.name}: done, round {last.run.rounds}, " in shown


@pytest.fixture
def restored() -> Iterator[None]:
    """Puts every registry back as it was."""
    import topologies

    graphs = dict(topologies.TOPOLOGIES)
    with ExitStack() as kept:
        for registry in registries().values():
            kept.enter_context(registry.replaced())
        yield
    for name in set(topologies.TOPOLOGIES) - set(graphs):
        del topologies.TOPOLOGIES[name]


def run_page(page: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run the blocks of Python of a page, one after the other, and return their names.

    What a block prints is compared with the block of output below it.
    """
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)
    patients().to_csv("patients.csv", index=False)
    for block in blocks(ROOT / page):
        if block.language == "python" and not block.mark:
            printed = StringIO()
            with redirect_stdout(printed):
                exec(compile(block.text, page, "exec"), module.__dict__)
            if block.output is not None:
                assert printed.getvalue() == block.output
    return vars(module)


PYTHON = sorted({b.page for b in BLOCKS if b.language == "python" and not b.mark})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # notes of runs
@pytest.mark.usefixtures("restored", "without_figures")
@pytest.mark.parametrize("page", PYTHON)
def test_the_code_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = run_page(page, monkeypatch)
    if page == "README.md":
        assert names["row"].round == 20
        assert names["row"].accuracy_mean > 0.9
    if page == "docs/how-to/own-method.md":
        assert names["halved"].payload_bytes == 2 * 4810 * 12 * 5
        assert names["halved"].accuracy_mean > 0.8
        assert names["alone"].payload_bytes == 0
        assert names["honest"].accuracy_mean > 0.6 > 0.3 > names["silent"].accuracy_mean
        assert list(names["last"].groups) == ["dfedavgm", "own:PlainGossip(step=0.5)"]
    if page == "docs/how-to/own-graph.md":
        assert names["hub"].payload_bytes == 4 * 4810 * 28 * 5


def test_experiments_that_pages_name_exist() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"experiments(?:\.\w+){2,}", re.sub(r"\s+", " ", text)))
    assert len(named) > 5
    files = {each: ROOT / (each.replace(".", "/") + ".py") for each in named}
    members = {each: ROOT / (each.rpartition(".")[0].replace(".", "/") + ".py") for each in named}
    assert [each for each in named if not (files[each].exists() or members[each].exists())] == []


def test_every_topology_is_in_the_table() -> None:
    text = (ROOT / "docs/how-to/own-graph.md").read_text()
    rows = "".join(re.findall(r"^\|.*", text, re.M))
    assert [name for name in registries()["topology"] if not re.search(f"`{name}[`:]", rows)] == []


def test_every_method_has_its_paper() -> None:
    text = (ROOT / "docs/papers.md").read_text()
    named = [*registries()["algorithm"], *ESTIMATORS]
    assert [name for name in named if not re.search(rf"^\| .*`{name}[`:]", text, re.M)] == []


def test_pages_are_found() -> None:
    assert len(PAGES) > 20
    assert len(PYTHON) > 5
