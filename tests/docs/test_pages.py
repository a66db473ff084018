"""The generated pages show what the code has."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import dfl.sweep
from dfl.algorithms import assumptions
from dfl.algorithms.assumptions import Assumption
from dfl.config import Run
from dfl.core.options import options
from dfl.core.registry import flag
from dfl.evaluation.goals import FALLING
from dfl.simulation.components import registries
from dfl.store.callbacks import FURTHER
from tests.support.pages import DOCS, ROOT


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS))
        return runpy.run_path(str(DOCS / "generate.py"))


def test_every_component_has_its_options_on_the_page(generate: dict[str, Any]) -> None:
    text = generate["components"]()
    for kind, registry in registries().items():
        assert f"(kind-{kind.replace('_', '-')})=" in text
        for name in registry:
            section = text.split(f"\n### {name}\n")
            assert len(section) >= 2, name
            assert all(f"| `{key}` |" in text for key in options(registry[name]))


def test_the_api_lists_public_names_and_assumptions() -> None:
    text = (DOCS / "api.md").read_text()
    names = [*(f":: dfl.{name}" for name in dfl.__all__)]
    names += [f":: dfl.sweep.{name}" for name in dfl.sweep.__all__]
    names += [f"`{k}`" for k, v in vars(assumptions).items() if isinstance(v, Assumption)]
    assert [name for name in names if name not in text] == []


def test_every_flag_is_on_the_page(
    generate: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(generate["command_line"].__globals__, "help_text", lambda command: command)
    text = generate["command_line"]()
    for name in options(Run):
        (line,) = [li for li in text.splitlines() if li.startswith(f"| `{flag(name)}` |")]
        assert line.rstrip("| ").count("|") == 4, line


def test_every_experiment_with_results_has_a_page(generate: dict[str, Any]) -> None:
    pages = generate["lab_book"]()
    contents = pages["lab-book/index.md"]
    for folder in (ROOT / "experiments/results").iterdir():
        text = pages[f"lab-book/{folder.name}.md"]
        assert "python -m experiments." in text
        assert "## table.csv" in text
        assert f"\n{folder.name} <{folder.name}>\n" in contents
        (row,) = re.findall(rf"^\| \[.+\]\({folder.name}\.md\) \| (.+)\. \|$", contents, re.M)
        assert row == "None yet" or row[1:] in " ".join(text.split())


def test_a_long_table_is_named_and_not_shown(generate: dict[str, Any]) -> None:
    folder = ROOT / "experiments/results/robust_gossip"
    assert [*generate["rows"](folder / "seeds.csv")] == [
        "1,160 rows, in `experiments/results/robust_gossip/seeds.csv`."
    ]
    lines = (folder / "table.csv").read_text().splitlines()
    assert len([*generate["rows"](folder / "table.csv")]) == 1 + len(lines)


def test_a_line_that_begins_with_a_per_cent_sign_is_no_comment() -> None:
    docstrings = runpy.run_path(str(DOCS / "docstrings.py"))
    assert docstrings["markdown"]("54\n% of 3 % are.") == "54\n\\% of 3 % are."


def test_equations_of_docstrings_are_code() -> None:
    docstrings = runpy.run_path(str(DOCS / "docstrings.py"))
    text = "What x_i is:\n\n    x_i <- sum_j w_ij z_j\n\nfor (P, *shape)."
    assert docstrings["markdown"](text) == (
        "What x\\_i is:\n\n```text\nx_i <- sum_j w_ij z_j\n```\n\nfor (P, \\*shape)."
    )
    lines = ["A (p, *s).", "", "    x * y", "", "Args:", "    x: *y"]
    expected = ["A (p, \\*s).", "", "::", "", "    x * y", "", "Args:", "    x: \\*y"]
    assert docstrings["restructured"](lines) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"topology": "ring", "bits": 4, "faults": "link_loss:p=0.3", "links": "phone"},
        {"algorithm": "fedavg", "ensemble": True, "validation": 0.1},
        {"algorithm": "fltrust:root=50", "attack": "backdoor:fraction=0.3"},
    ],
    ids=str,
)
def test_every_column_is_described(
    settings: dict[str, Any], generate: dict[str, Any], tmp_path: Path, without_figures: None
) -> None:
    text = generate["columns"]()
    for _ in dfl.simulate(dfl.Run(peers=8, rounds=2, out=tmp_path / "run", **settings)):
        pass
    of_run, of_peers = text.split("## peers.csv")
    run = dfl.load(tmp_path / "run")
    assert [name for name in run.rows.columns if f"| `{name}` |" not in of_run] == []
    assert [name for name in run.peers.columns if f"| `{name}` |" not in of_peers] == []
    assert [name for name in FALLING if f"| `{name}` |" not in of_run] == []


def test_a_method_observes_no_column_that_is_described_for_other_runs() -> None:
    described = {*runpy.run_path(str(DOCS / "columns.py"))["DESCRIBED"]}
    assert described - {*FURTHER} == {"relative_squared_error"}  # which quantized methods observe
