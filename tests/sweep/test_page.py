"""The pages of sweeps and comparisons have their tables, curves and links."""

from __future__ import annotations

import errno
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pandas as pd
import pytest
from scipy import stats

import dfl
from dfl import compare
from dfl import report as reports
from dfl.core.errors import InputError
from dfl.report import report
from dfl.reporting.collection import Link
from dfl.reporting.console import make_console
from dfl.reporting.text import size
from dfl.store import manifest
from dfl.sweep import folder as sweep_folder
from dfl.sweep import grid, tables
from dfl.sweep.page import half_width, sweep_page, write_again
from dfl.sweep.status import read_states
from tests.reporting.test_page import HOSTILE, Seen
from tests.test_compare import run

GRID = """
rounds = 20
[sweep]
topology = ["ring", "star"]
bits = [2, 4]
seed = [0, 1]
"""


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return swept(tmp_path, GRID)


def swept(tmp_path: Path, text: str) -> Path:
    """Write the folder of a sweep by hand; the last cell has not run."""
    (tmp_path / "grid.toml").write_text(text)
    folder = tmp_path / "swept"
    cells = grid.read(tmp_path / "grid.toml", 4)
    sweep_folder.write(folder, cells.cells, cells.text)
    for k, cell in enumerate(cells.cells[:-1]):
        (folder / cell.name).rename(folder / "moved")
        settings: dict[str, Any] = cell.run.to_dict()
        run(folder / cell.name, rows=2 + k % 2, **settings | {"peers": 4})
        (folder / "moved/cell.toml").rename(folder / cell.name / "cell.toml")
        (folder / "moved/.dfl").rename(folder / cell.name / ".dfl")
        (folder / "moved").rmdir()
    return folder


def page_of(folder: Path) -> str:
    cells = grid.read(folder / "grid.toml", 4)
    return sweep_page(cells, read_states(folder, (cell.name for cell in cells.cells)), folder)


def data_of(page: str) -> dict[str, Any]:
    held = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    found: dict[str, Any] = json.loads(held[1])
    return found


def test_every_cell_is_linked(sweep: Path) -> None:
    (sweep / "topology=ring,bits=2,seed=0/report.html").write_text("its page")
    page = page_of(sweep)
    links = {unquote(link) for link in Seen(page).sources if not link.startswith("#")}
    every = {
        f"./topology={topology},bits={bits},seed={seed}/"
        for topology in ("ring", "star")
        for bits in (2, 4)
        for seed in (0, 1)
    }
    first = "./topology=ring,bits=2,seed=0/"
    assert links == every - {first} | {f"{first}report.html"}
    assert all((sweep / link).exists() for link in links)


def test_groups_have_means_and_intervals(sweep: Path) -> None:
    text = Seen(page_of(sweep)).text
    width = stats.t.ppf(0.975, 1) * pd.Series([0.3, 0.5]).std() / 2**0.5
    assert f"0.4 ± {width:.2g}" in text
    assert "7 of 8 cells done" in text
    assert "1 of 2" in text


def test_a_map_has_the_mean_and_the_interval_of_the_finished_cells(tmp_path: Path) -> None:
    """The last group has 2 of 3 cells done, with accuracies of 0.3 and 0.5."""
    folder = swept(tmp_path, GRID.replace("[0, 1]", "[0, 1, 2]"))
    seen = Seen(page_of(folder))
    two = half_width(pd.Series([0.3, 0.5]).std(), 2)
    assert two == pytest.approx(1.27, abs=0.01)
    by_group = {tuple(row[:2]): row[2:4] for row in seen.rows("groups")[1:]}
    assert by_group["star", "4"] == ["2 of 3", f"0.4 ± {two:.2g}"]
    more, fewer = (
        (f"{mean:.4g}", f"± {half_width(pd.Series(each).std(), 3):.2g}")
        for mean, each in ((1.1 / 3, [0.3, 0.5, 0.3]), (1.3 / 3, [0.5, 0.3, 0.5]))
    )
    assert by_group["ring", "2"] == ["3 of 3", " ".join(more)]
    head, *rows = seen.rows("map")
    assert head[1:] == ["2", "4"]
    assert rows == [
        ["ring", "".join(more), "".join(fewer)],
        ["star", "".join(more), f"0.4± {two:.2g}"],
    ]


def test_bytes_and_rounds_have_intervals(sweep: Path) -> None:
    page = page_of(sweep)
    assert "Lines end where the first run of a group ends." in page
    width = stats.t.ppf(0.975, 1) * pd.Series([1000, 2000]).std() / 2**0.5
    text = Seen(page).text
    assert f"1.50 kB ± {size(width)}" in text
    assert "15 ± 63.5" in text
    for seed in (0, 1):
        run(folder := sweep / f"again{seed}", rows=3, rounds=20)
        cell = sweep / f"topology=ring,bits=2,seed={seed}"
        for name in ("run.json", "metrics.csv"):
            (folder / name).replace(cell / name)
    for name in ("topology=ring,bits=4", "topology=star,bits=2"):
        (sweep / f"{name},seed=1/run.json").unlink()
    page = page_of(sweep)
    assert "Lines end" not in page
    assert "2.00 kB ± 0 bytes" in Seen(page).text


def test_a_missing_number_stands_where_numbers_do(sweep: Path) -> None:
    """The last cell has no row; its dashes are aligned as the numbers above them."""
    page = page_of(sweep)
    dashes = re.findall(r'<td class="(\w+)">–</td>', page)  # noqa: RUF001
    assert dashes
    assert set(dashes) == {"number"}
    assert '<th scope="col" class="text">topology</th>' in page
    assert '<th scope="col" class="text">status</th>' in page


def test_curves_are_the_means_of_groups(sweep: Path) -> None:
    data = data_of(page_of(sweep))
    accuracy = data["charts"][0]
    assert [line["name"] for line in accuracy["lines"]] == [
        f"topology={topology}, bits={bits}" for topology in ("ring", "star") for bits in (2, 4)
    ]
    first = data["tables"][accuracy["lines"][0]["table"]]
    assert first["round"] == [0, 10]  # those that both cells evaluated
    assert first["mean"] == pytest.approx([0.1, 0.3])


def test_bands_are_a_standard_deviation_to_either_side(sweep: Path) -> None:
    cell = sweep / "topology=ring,bits=2,seed=1"
    rows = pd.read_csv(cell / "metrics.csv")
    rows.assign(accuracy_mean=rows["accuracy_mean"] + 0.2).to_csv(cell / "metrics.csv", index=False)
    manifest.write(cell, manifest.read(cell), ["metrics.csv"])
    data = data_of(page_of(sweep))
    line = data["charts"][0]["lines"][0]
    table = data["tables"][line["table"]]
    deviation = 0.02**0.5
    assert table[line["y"]] == pytest.approx([0.2, 0.4])
    assert table[line["low"]] == pytest.approx([0.2 - deviation, 0.4 - deviation], abs=1e-6)
    assert table[line["high"]] == pytest.approx([0.2 + deviation, 0.4 + deviation], abs=1e-6)


def test_a_line_looks_the_same_whatever_other_groups_have_finished(sweep: Path) -> None:
    def styles() -> dict[str, int]:
        lines = data_of(page_of(sweep))["charts"][0]["lines"]
        return {line["name"]: line["style"] for line in lines}

    whole = styles()
    assert list(whole.values()) == [0, 1, 2, 3]
    for seed in (0, 1):
        (sweep / f"topology=ring,bits=4,seed={seed}/run.json").unlink()
    del whole["topology=ring, bits=4"]
    assert styles() == whole


def test_lines_look_different_where_there_are_more_groups_than_styles(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfl.sweep.page.LINES", 2)
    for seed in (0, 1):
        (sweep / f"topology=ring,bits=4,seed={seed}/run.json").unlink()
    page = page_of(sweep)
    lines = data_of(page)["charts"][0]["lines"]
    assert {line["name"]: line["style"] for line in lines} == {
        "topology=ring, bits=2": 0,
        "topology=star, bits=2": 1,
    }
    assert "The first 2 of 3 groups are drawn." in page


def test_an_interval_is_that_of_student() -> None:
    for n in (2, 3, 10):
        low, high = stats.t.interval(0.95, n - 1, loc=0, scale=0.7 / n**0.5)
        assert half_width(0.7, n) == pytest.approx((high - low) / 2)


def test_a_sweep_without_a_finished_cell_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text(GRID)
    cells = grid.read(tmp_path / "grid.toml", 4)
    states = read_states(tmp_path, (cell.name for cell in cells.cells))
    assert "No cell has finished." in sweep_page(cells, states, tmp_path)


def test_the_page_of_a_folder_is_written_again(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert report(sweep) == write_again(sweep) == sweep / "report.html"
    one = run(Path("runs/one"), topology="ring")
    compare.compare([one, run(Path("runs/two"))], Path("compared"), make_console())
    before = data_of(Path("compared/report.html").read_text())
    Path("compared/report.html").unlink()
    assert data_of(report(Path("compared")).read_text()) == before
    with pytest.raises(InputError, match=r"runs holds no run.*but runs/\* hold runs: give those"):
        report(Path("runs"))
    with pytest.raises(InputError, match=r"compared/none holds no run.*no comparison$"):
        report(Path("compared/none"))


def test_a_page_of_the_user_is_not_overwritten(sweep: Path) -> None:
    own = sweep / "report.html"
    own.write_text("my notes on dfl.sweep")
    with pytest.raises(InputError, match=f"{own} was not written by dfl"):
        report(sweep)
    assert own.read_text() == "my notes on dfl.sweep"


def test_messages_of_reports_name_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def called(main: Callable[[], int], *tokens: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["report.py", *tokens])
        return main(), *capsys.readouterr()

    settings: dict[str, Any] = dfl.Run(peers=4).to_dict()
    odd = run(Path("two\nlines"), **settings)
    assert called(reports.main, str(odd)) == (0, "written: two\\nlines/report.html\n", "")
    assert called(reports.main, "") == (2, "", "dfl: FOLDERS must be a path, not ''\n")
    long = "x" * 300
    assert called(reports.main, long) == (
        2, "", f"dfl: {long} holds no run, no sweep and no comparison\n"
    )  # fmt: skip
    run(Path("runs/a"), **settings)
    no_run = "runs is no run directory: its run.json cannot be read (No such file or directory)"
    assert called(compare.main, "runs") == (
        2, "", f"dfl: {no_run}, but runs/* hold runs: give those\n"
    )  # fmt: skip

    def full(path: Path) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("dfl.reporting.page.atomically", full)
    message = "dfl: runs/a cannot be written to: Read-only file system\n"
    assert called(reports.main, "runs/a") == (2, "", message)
    assert called(compare.main, "runs/a", "--out=c", "--no-report")[0] == 0
    Path("c/report.html").write_text("mine")
    message = "dfl: c/report.html was not written by dfl and is left as it is: move it away\n"
    assert called(reports.main, "c") == (2, "", message)


def test_a_comparison_leads_to_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = compare.gather([run(Path("runs/a"), seed=1), run(Path("runs/b"), seed=2)])
    page = compare.page(runs, Path("compared"))
    assert {"./../runs/a/", "../runs/a/"} & set(Seen(page).sources)
    head, first, _ = Seen(page).rows("runs")
    assert dict(zip(head, first, strict=True)) == {
        "folder": "../runs/a", "status": "done", "seed": "1", "round": "20", "accuracy_mean": "0.5",
        "train_loss": "1.8", "consensus_distance": "0.5", "payload_bytes": "2.00 kB",
    }  # fmt: skip
    data = data_of(page)
    assert [line["name"] for line in data["charts"][0]["lines"]] == ["seed=1", "seed=2"]
    assert data["tables"][0]["payload_bytes"] == [0, 1000, 2000]


@pytest.mark.parametrize("name", [*HOSTILE, "javascript:alert(1)", "//elsewhere", "a b?c#d"])
def test_a_link_leads_to_a_folder_whatever_its_name(tmp_path: Path, name: str) -> None:
    link = Link.to(tmp_path / "none", name, name).href
    assert link.startswith(("./", "/", "../"))
    assert not set(link) & set("<>\"' ?#")


def test_tables_of_a_sweep_have_intervals_for_their_measures(sweep: Path) -> None:
    cells = grid.read(sweep / "grid.toml", 4)
    table = tables.cells(cells, read_states(sweep, (cell.name for cell in cells.cells)))
    summary = tables.summary(table, tables.group_fields(cells))
    assert {f"{name}_deviation" for name in tables.measures(table)} <= set(summary)
