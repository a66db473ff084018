"""`dfl.compare` labels runs by their differences, keeps the user's files and shows all runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread

from dfl import compare
from dfl.compare import figure, gather, page, screen, table
from dfl.core.errors import InputError
from dfl.reporting.collection import LINES
from dfl.store import manifest

HEAD = "round,seconds,train_loss,accuracy_mean,accuracy_min,consensus_distance,payload_bytes\n"


def run(folder: Path, rows: int = 3, code: int | None = 0, **settings: Any) -> Path:
    """Write a run directory by hand."""
    folder.mkdir(parents=True)
    record = {
        "run": {"peers": 4, "out": str(folder), **settings},
        "exit": code,
        "ending": "as it did",
    }
    if rows:
        lines = [
            f"{10 * t},{t},{2 - t / 10},{0.1 + t / 5},{t / 5},0.5,{1000 * t}\n" for t in range(rows)
        ]
        (folder / "metrics.csv").write_text(HEAD + "".join(lines))
    manifest.write(folder, record, ["metrics.csv"] if code == 0 and rows else [])
    return folder


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    monkeypatch.chdir(tmp_path)
    return [
        run(Path("runs/a"), topology="ring", seed=1),
        run(Path("runs/b"), rows=2, code=75, topology="torus", seed=1),
    ]


def called(monkeypatch: pytest.MonkeyPatch, *tokens: str) -> int:
    monkeypatch.setattr(sys, "argv", ["compare.py", *tokens])
    return compare.main()


def test_a_table_is_printed_and_a_file_and_a_figure_are_written(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, *map(str, two), "runs/a") == 0
    printed, error = capsys.readouterr()
    assert error == ""
    assert [line.split() for line in printed.splitlines()] == [
        [
            "topology",
            "status",
            "round",
            "accuracy",
            "worst",
            "peer",
            "loss",
            "consensus",
            "distance",
            "payload",
        ],
        ["ring", "done", "20", "0.5000", "0.4000", "1.8", "0.5", "2.00", "kB"],
        ["torus", "stopped", "10", "0.3000", "0.2000", "1.9", "0.5", "1.00", "kB"],
        ["look", "at", "report.html"],
    ]
    written = pd.read_csv("compare.csv", dtype=str)
    assert list(written)[:4] == ["folder", "status", "topology", "round"]
    assert written["folder"].tolist() == ["runs/a", "runs/b"]
    assert written["accuracy_mean"].tolist() == ["0.5", "0.30000000000000004"]
    assert np.ptp(imread("compare.png")) > 0
    assert called(monkeypatch, "runs/b") == 0  # its own files may be replaced
    assert called(monkeypatch, "runs/b", "--out", "new/folder") == 0
    assert Path("new/folder/compare.png").exists()


@pytest.mark.parametrize("name", ["compare.csv", "compare.png", "report.html"])
def test_foreign_files_are_not_overwritten(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    Path(name).write_text("my thesis")
    assert called(monkeypatch, *map(str, two)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"dfl: {name} ")
    assert "--out" in line
    assert Path(name).read_text() == "my thesis"
    assert sorted(path.name for path in Path().iterdir()) == [name, "runs"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("compare.csv", "name,folder,status\nmine,x,done\n"),
        ("report.html", "<html>my notes on dfl.compare</html>"),
    ],
)
def test_files_that_name_the_program_are_not_overwritten(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    Path(name).write_text(text)
    assert called(monkeypatch, *map(str, two)) == 2
    assert Path(name).read_text() == text


def test_a_run_is_compared_once_however_its_folder_is_spelled(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    again = ["runs/../runs/a", str(Path("runs/a").absolute())]
    assert called(monkeypatch, *map(str, two), *again) == 0
    assert pd.read_csv("compare.csv")["folder"].tolist() == ["runs/a", "runs/b"]


def test_a_folder_whose_name_is_no_text_is_read_again(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = run(Path("runs/n\udcff"), topology="star", seed=1)
    assert called(monkeypatch, *map(str, two), str(odd)) == 0
    assert compare.write_again(Path()).name == "report.html"


def test_the_page_of_a_run_is_not_overwritten(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path("report.html")
    page.write_text('<!doctype html><meta name="generator" content="dfl.run">')
    assert called(monkeypatch, *map(str, two)) == 2
    assert "report.html is the page of a run or a sweep" in capsys.readouterr().err
    assert called(monkeypatch, *map(str, two), "--no-report") == 0
    assert "dfl.run" in page.read_text()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        ("", "DIR is missing: give the folders of some runs"),
        ("runs/a runs", "runs is no run directory: its run.json cannot be read"),
        ("runs/a no/such", "no/such is no run directory"),
        ("runs/a runs/loop", "runs/loop is no run directory"),
        ("runs/a --out runs/a/run.json", "--out runs/a/run.json"),
        ("runs/a --out .", "--out . is not empty"),
        ("runs/a --out runs", "--out runs is not empty"),
        (f"runs/a --out {'x' * 300}", "--out xxx"),
        (f"{'x/' * 3000}", "x/x/x"),
        ("runs/a --ot x", "unknown flag '--ot' (did you mean --out?)"),
    ],
)
def test_bad_input_is_refused(
    two: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tokens: str,
    line: str,
) -> None:
    Path("runs/loop").symlink_to("loop")
    assert called(monkeypatch, *tokens.split()) == 2
    printed, error = capsys.readouterr()
    assert printed == ""
    assert error.startswith(f"dfl: {line}")
    assert error.count("\n") == 1
    assert not Path("compare.csv").exists()


def test_each_run_has_lines_of_its_own(two: list[Path]) -> None:
    made = figure(gather(two))
    by_round, by_bytes = made.axes
    means, worst = by_round.lines[::2], by_round.lines[1::2]
    assert [list(np.asarray(line.get_ydata())) for line in means] == [
        [0.1, 0.1 + 0.2, 0.5],
        [0.1, 0.1 + 0.2],
    ]
    assert [list(np.asarray(line.get_ydata())) for line in worst] == [[0, 0.2, 0.4], [0, 0.2]]
    assert [line.get_color() for line in means] == [line.get_color() for line in worst]
    assert all(
        thin.get_linewidth() < thick.get_linewidth()
        for thin, thick in zip(worst, means, strict=True)
    )
    assert [list(np.asarray(line.get_xdata())) for line in by_bytes.lines[::2]] == [
        [1000, 2000],
        [1000],
    ]
    assert [text.get_text() for text in made.legends[0].get_texts()] == [
        "topology=ring",
        "topology=torus (stopped)",
    ]
    assert (by_round.get_xlabel(), by_bytes.get_xscale()) == ("round", "log")


def test_an_incomplete_row_is_left_out(two: list[Path]) -> None:
    with (two[1] / "metrics.csv").open("a") as file:
        file.write("30,3,1.7,0.9")
    _, compared = gather(two)
    assert compared.rows["round"].tolist() == [0, 10]
    assert table(gather(two[1:]), Path())["accuracy_mean"].tolist() == ["0.30000000000000004"]


def test_a_run_without_rows_is_in_the_table_only(two: list[Path]) -> None:
    runs = gather([*two, run(Path("runs/c"), rows=0, code=None, topology="star")])
    assert table(runs, Path())["status"].tolist() == ["done", "stopped", "stopped"]
    assert screen(runs).row_count == 3
    assert len(figure(runs).axes[0].lines) == 4
    alone = figure(gather([Path("runs/c")]))
    assert not alone.axes[0].lines
    assert not alone.legends


def test_without_accuracy_the_loss_is_drawn(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    rows = pd.read_csv(folder / "metrics.csv").assign(accuracy_mean=np.nan, accuracy_min=np.nan)
    rows.to_csv(folder / "metrics.csv", index=False, na_rep="nan")
    manifest.write(folder, manifest.read(folder), ["metrics.csv"])
    axes = figure(gather([folder])).axes[0]
    assert len(axes.lines) == 1
    assert axes.get_title(loc="left") == "Train loss by round"


def test_a_quiet_comparison_prints_the_last_line(
    two: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(monkeypatch, *map(str, two), "--quiet", "--no-report") == 0
    assert capsys.readouterr().out == "look at    compare.png\n"


def test_the_page_is_written_again_from_any_folder(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert called(monkeypatch, *map(str, two), "--out", "both") == 0
    written = pd.read_csv("both/compare.csv", dtype=str)
    assert written["folder"].tolist() == ["../runs/a", "../runs/b"]

    def page(out: Path) -> str:
        """Return the page without the second in which it was written."""
        return re.sub("Written [^ ]+ by", "Written by", (out / "report.html").read_text())

    before = page(Path("both"))
    assert 'href="../runs/a/"' in before
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    for out in (Path("../both"), Path("../both").resolve()):
        compare.write_again(out)
        again = page(out)
        assert ">../runs/a<" in again
        assert again.replace(str(out), "both") == before


@pytest.mark.parametrize("text", ["", "folder,status,round\n"])
def test_a_comparison_without_runs_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "compare.csv").write_text(text)
    with pytest.raises(InputError, match=rf"{tmp_path}/compare\.csv names no runs"):
        compare.write_again(tmp_path)


def test_a_comparison_in_a_linked_folder_names_the_runs(
    two: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("deep/er").mkdir(parents=True)
    Path("link").symlink_to("deep/er")
    assert called(monkeypatch, *map(str, two), "--out", "link/both") == 0
    written = pd.read_csv("link/both/compare.csv", dtype=str)
    assert written["folder"].tolist() == ["../../../runs/a", "../../../runs/b"]
    assert compare.write_again(Path("deep/er/both")).exists()


def test_runs_without_rows_are_not_called_left_out(two: list[Path]) -> None:
    runs = gather([*two, run(Path("runs/c"), rows=0, code=None, topology="star")])
    assert "are drawn" not in page(runs, Path())
    more = [run(Path(f"runs/{seed}"), topology="ring", seed=seed) for seed in range(2, LINES + 3)]
    assert f"The first {LINES} runs with rows are drawn." in page(gather(more), Path())


def test_a_label_that_begins_with_an_underscore_is_in_the_legend(tmp_path: Path) -> None:
    runs = gather([run(tmp_path / "_a", topology="ring"), run(tmp_path / "_b", topology="ring")])
    texts = [text.get_text().strip() for text in figure(runs).legends[0].get_texts()]
    assert texts == ["_a", "_b"]
