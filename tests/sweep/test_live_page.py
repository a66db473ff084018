"""The page of a sweep is there while its cells run, and leads to each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dfl
import dfl.reporting.simulate
from dfl.core.errors import InputError
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep import Cell, live_page, run_grid
from dfl.sweep.grid import Grid
from tests.reporting.test_page import Seen
from tests.sweep.test_page import data_of
from tests.sweep.test_runner import SETTINGS, cells, failing, fake_cells

__all__ = ["fake_cells"]


def text_of(folder: Path) -> str:
    return Seen((folder / "report.html").read_text()).text


def is_live(folder: Path) -> bool:
    return bool(data_of((folder / "report.html").read_text())["live"])


def test_the_page_is_refreshed_after_a_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "EVERY", 0.0)
    monkeypatch.setattr(live_page, "SHARE", 1e9)
    seen = list[str]()
    simulate = dfl.reporting.simulate.simulate

    def watched(run: dfl.Run) -> Iterator[dict[str, float]]:
        if run.seed == 1:
            assert is_live(tmp_path)
            seen.append(text_of(tmp_path))
        return simulate(run)

    monkeypatch.setattr("dfl.reporting.simulate.simulate", watched)
    run_grid(cells(0, 1), tmp_path, in_process=True)
    assert "running, 1 of 2 cells done" in seen[0]
    assert not is_live(tmp_path)
    assert "2 of 2 cells done; varied: seed" in text_of(tmp_path)


def test_no_models_are_read_for_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be gigabytes, and signals wait meanwhile."""
    (cell,) = cells(0)
    folder = tmp_path / cell.name
    folder.mkdir()
    for name in (files := ["metrics.csv", "state.safetensors"]):
        (folder / name).write_text("round,accuracy_mean,payload_bytes\n1,0.5,8\n")
    manifest.write(folder, {"run": {}, "exit": 0}, files)
    read = list[str]()

    def note(folder: Path, name: str, known: object) -> str:
        read.append(name)
        return ""

    monkeypatch.setattr(manifest, "damaged", note)
    live_page.LivePage(Grid("", ("seed",), (cell,)), tmp_path).finish()
    assert read == ["metrics.csv"]
    assert "1 of 1 cells done" in text_of(tmp_path)


@pytest.mark.usefixtures("fake_cells")
def test_the_page_is_refreshed_while_programs_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "EVERY", 0.0)
    written = list[bool]()
    write = live_page.LivePage._write

    def counted(self: live_page.LivePage, running: bool) -> None:
        written.append(running)
        write(self, running)

    monkeypatch.setattr(live_page.LivePage, "_write", counted)
    run_grid(cells(0, 1), tmp_path, jobs=2)
    assert written[0]
    assert written[-1] is False
    links = Seen((tmp_path / "report.html").read_text()).sources
    assert {"./seed%3D0/", "./seed%3D1/"} <= set(links)


def test_a_sweep_goes_on_where_its_page_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_page, "EVERY", 0.0)
    claim(tmp_path)
    (tmp_path / "report.html").mkdir()
    assert len(run_grid(cells(0), tmp_path, in_process=True)) == 3


@pytest.mark.parametrize("part", ["live_page.read_states", "page.sweep_page"])
def test_an_error_of_the_page_is_logged_and_hides_no_other(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: str,
) -> None:
    def wrong(*_: object, **__: object) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr(f"dfl.sweep.{part}", wrong)
    assert len(run_grid(cells(0), tmp_path, in_process=True)) == 3
    failing(monkeypatch, InputError("no data"))
    with pytest.raises(InputError, match="no data"):
        run_grid(cells(1), tmp_path, in_process=True)
    assert [record.getMessage() for record in caplog.records if record.name == "dfl"] == [
        f"no page of {tmp_path}: ValueError: two lines"
    ] * 2


def test_a_page_is_not_asked_for(tmp_path: Path) -> None:
    run_grid(cells(0), tmp_path, in_process=True, report=False)
    assert not (tmp_path / "report.html").exists()


def test_cells_may_have_labels_that_others_have_not(tmp_path: Path) -> None:
    run = dfl.Run.from_dict(SETTINGS)
    other: dict[str, Any] = SETTINGS | {"bits": 4}
    grid = [Cell({"width": "float32"}, run), Cell({"bits": 4}, dfl.Run.from_dict(other))]
    run_grid(grid, tmp_path, in_process=True)
    text = text_of(tmp_path)
    assert "2 of 2 cells done; varied: width, bits" in text
    assert "width=none, bits=4" in str(data_of((tmp_path / "report.html").read_text())["charts"])


def test_the_page_of_a_grid_that_failed_is_not_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, InputError("no data"))
    with pytest.raises(InputError, match="no data"):
        run_grid(cells(0), tmp_path, in_process=True)
    assert not is_live(tmp_path)
