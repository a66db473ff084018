"""Reading metrics.csv: complete rows, tables without rows, damaged tables."""

import math
from pathlib import Path

import pytest

import dfl
from dfl.core.errors import InputError
from dfl.store import manifest, tables

TABLE = "round,seconds,loss\n0,0.1,nan\n10,0.2,inf\n"


def test_complete_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    for text in (TABLE, TABLE + "20,", TABLE + "20,0.3,0.4", TABLE + '20,"0'):
        path.write_text(text)
        found = tables.read(path)
        assert found.text == TABLE
        assert found.last == {"round": "10", "seconds": "0.2", "loss": "inf"}
        assert len(found.values) == 2
    with pytest.raises(FileNotFoundError):
        tables.read(tmp_path / "none")


@pytest.mark.parametrize("text", ["", "rou", "round,seconds\n"])
def test_a_table_without_rows_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text(text)
    assert tables.read(tmp_path / "metrics.csv").last == {}
    manifest.write(tmp_path, {"run": {}, "exit": None, "ending": "running"})
    result = dfl.load(tmp_path)
    assert result.rows.empty
    assert result.rows.columns[0] == "round"
    assert math.isnan(result.rounds_to(0.5))


def test_a_loss_reaches_its_target_from_above(tmp_path: Path) -> None:
    lines = [
        "round,train_loss,accuracy_mean,perplexity_mean",
        "0,2.0,0.25,8", "10,1.0,0.5,4", "20,0.5,0.75,2",
    ]  # fmt: skip
    (tmp_path / "metrics.csv").write_text("\n".join(lines) + "\n")
    manifest.write(tmp_path, {"run": {}, "exit": None, "ending": "running"})
    result = dfl.load(tmp_path)
    assert result.rounds_to(0.75, "train_loss") == 15
    assert result.rounds_to(0.625) == 15
    assert result.rounds_to(3, "perplexity_mean") == 15
    assert math.isnan(result.rounds_to(0.4, "train_loss"))
    with pytest.raises(dfl.InputError, match=r"has no column 'loss'.*train_loss"):
        result.rounds_to(0.4, "loss")
    with pytest.raises(dfl.InputError, match=r"target must be a number, not '0.4'"):
        result.rounds_to("0.4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("\n", "first line"),
        ("{}", "first line"),
        ("seconds,round\n0.1,0\n", "first line"),
        ("round,a,a\n0,1,2\n", "first line"),
        ("round,a\n0,\n", "line 2"),
        ("round,a\n0,1\n\n", "line 3"),
        ("round,a\n0,1\n1,-nan\n", "line 3"),
        ("round,a\n0.5,1\n", "'0.5'"),
        ("round,a\n-1,1\n", "'-1'"),
        ("round,a\nnan,1\n", "'nan'"),
        ("round,a\n3,1\n3,1\n", "'3' after 3"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        tables.read(path)
    assert str(caught.value).startswith(f"{path} is damaged: ")
    assert named in str(caught.value)
