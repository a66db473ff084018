"""What a notebook shows: live progress, tables and figures of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.reporting.callbacks.live import drawing
from dfl.reporting.lines import COLOURS, run_styles

SMALL: dict[str, Any] = {"peers": 3, "rounds": 4, "eval_every": 1, "model": "softmax"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return the folders of two runs."""
    folders = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {})
        for topology in ("ring", "complete"):
            folder = tmp_path_factory.mktemp("runs") / f"{topology} <b>$"
            list(dfl.simulate(dfl.Run(**SMALL, topology=topology, out=folder)))
            folders.append(folder)
    return folders


def test_a_frame_has_the_settings_that_are_asked_for(runs: list[Path]) -> None:
    every = pd.concat([dfl.load(each).to_frame("topology", "bits") for each in runs])
    assert every.groupby("topology")["round"].count().to_dict() == {"complete": 5, "ring": 5}
    assert every["bits"].isna().all()
    pd.testing.assert_frame_equal(dfl.load(runs[0]).to_frame(), dfl.load(runs[0]).rows)
    with pytest.raises(dfl.InputError, match=r"'topolgy'.*topology"):
        dfl.load(runs[0]).to_frame("topolgy")


def test_a_run_is_shown_as_a_table_without_markup_of_its_own(runs: list[Path]) -> None:
    result = dfl.load(runs[0])
    page = result._repr_html_()
    tree = ElementTree.fromstring(page)
    assert "finished" in "".join(tree.itertext())
    assert "<b>" not in page
    cells = [each.text for each in tree.iter("td")]
    names = [each.text for each in tree.iter("th")]
    shown = dict(zip(names, cells, strict=True))
    assert (shown["model"], shown["peers"]) == ("softmax", "3")
    assert "seed" not in shown
    assert shown["accuracy_mean"] == f"{result.rows['accuracy_mean'].iloc[-1]:.6g}"


def test_runs_are_drawn_with_what_distinguishes_them(runs: list[Path]) -> None:
    figure = dfl.plot.accuracy([dfl.load(runs[0]), runs[1]])
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == ["topology=ring", "topology=complete"]
    measured = dfl.load(runs[1]).rows["accuracy_mean"].tolist()
    assert np.asarray(axes.lines[1].get_ydata()).tolist() == measured
    assert figure._repr_png_().startswith(b"\x89PNG")
    by_bytes = dfl.plot.accuracy(str(runs[0]), x="payload_bytes").axes[0]
    assert np.size(by_bytes.lines[0].get_xdata()) == 4  # round 0 is left of a logarithmic axis
    assert dfl.plot.consensus(runs).axes[0].get_ylabel() == "consensus distance"
    assert dfl.plot.loss(runs).axes[0].lines
    with pytest.raises(dfl.InputError, match="seconds"):
        dfl.plot.accuracy(runs, x="seconds")  # type: ignore[arg-type]
    with pytest.raises(dfl.InputError, match="runs"):
        dfl.plot.accuracy([])


def test_runs_that_differ_in_their_seed_only_have_one_colour() -> None:
    seeds = [{"bits": bits, "seed": seed} for bits in ("4", "8") for seed in "012"]
    styles = run_styles(seeds)
    assert [each["color"] for each in styles] == [COLOURS[0]] * 3 + [COLOURS[1]] * 3
    assert len({str(each) for each in styles}) == 6
    for alike in (seeds[:3], seeds[::3]):
        colours = [each["color"] for each in run_styles(alike)]
        assert len(set(colours)) == len(alike)
    many = [{"bits": bits, "seed": str(seed)} for bits in "48" for seed in range(13)]
    assert len({str(each) for each in run_styles(many)}) == len(many)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a stand-in for IPython shows, in order."""
    pages: list[str] = []

    def display(page: str, display_id: bool) -> SimpleNamespace:
        pages.append(page)
        return SimpleNamespace(update=pages.append)

    stand_in = ModuleType("IPython.display")
    vars(stand_in).update(display=display, HTML=str)
    monkeypatch.setitem(sys.modules, "IPython.display", stand_in)
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setattr("dfl.reporting.callbacks.live.find_spec", lambda name: True)
    return pages


def test_a_run_is_shown_while_it_goes_on(shown: list[str]) -> None:
    rows = list(dfl.simulate(dfl.Run(**SMALL), callbacks=[dfl.Live()]))
    trees = [ElementTree.fromstring(page) for page in shown]
    values = [int(next(tree.iter("progress")).attrib["value"]) for tree in trees]
    assert (values[0], values[-1]) == (0, 4)
    assert values == sorted(values)
    assert f"accuracy {rows[-1].accuracy_mean:.4f}" in shown[-1]
    (points, _) = [each.get("points") or "" for each in trees[-1].iter("polyline")]
    assert len(points.split()) == len(rows)
    assert not list(trees[0].iter("polyline"))


def test_a_resumed_run_is_shown_from_its_first_round(shown: list[str], tmp_path: Path) -> None:
    for row in dfl.simulate(dfl.Run(**SMALL, checkpoint_every=2, out=tmp_path / "run")):
        if row.round == 3:
            break
    list(dfl.simulate(dfl.resumed(tmp_path / "run"), callbacks=[dfl.Live()]))
    first, last = (ElementTree.fromstring(shown[k]) for k in (0, -1))
    assert next(first.iter("progress")).attrib["value"] == "2"
    curves = [next(tree.iter("polyline")).attrib["points"] for tree in (first, last)]
    assert [len(points.split()) for points in curves] == [2, 5]


def test_a_run_that_fails_shows_why(shown: list[str]) -> None:
    with pytest.raises(dfl.DivergedError):
        list(dfl.simulate(dfl.Run(**SMALL | {"model": "mlp", "lr": 1e30}), callbacks=[dfl.Live()]))
    assert "DivergedError" in shown[-1]


def test_drawn_points_are_those_of_the_rows() -> None:
    rows = [
        dfl.Row(round=t, accuracy_mean=a, accuracy_min=float("nan"))
        for t, a in ((0, 0.0), (5, 0.5), (10, 1.0))
    ]
    tree = ElementTree.fromstring(drawing(rows))
    assert [each.get("points") for each in tree.iter("polyline")] == [
        "0.0,120.0 240.0,60.0 480.0,0.0",
        "",
    ]


def test_it_needs_ipython(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dfl.reporting.callbacks.live.find_spec", lambda name: None)
    with pytest.raises(dfl.InputError, match="IPython"):
        list(dfl.simulate(dfl.Run(**SMALL), callbacks=[dfl.Live()]))


CODE = """
import dfl
*_, last = dfl.simulate(dfl.Run(peers=3, rounds=4, eval_every=1, out="run"), [dfl.Live()])
dfl.load("run")
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_real_notebook_shows_a_run_its_table_and_its_figure(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook()
    book.cells = [nbformat.v4.new_code_cell(each) for each in (CODE, 'dfl.plot.accuracy("run")')]
    nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    live, table = [each["data"]["text/html"] for each in book.cells[0].outputs if "data" in each]
    assert 'value="4"' in live
    assert "<polyline" in live
    assert "<table>" in table
    (figure,) = book.cells[1].outputs
    assert "image/png" in figure["data"]


def test_losses_below_0_stay_within_the_picture() -> None:
    losses = ((0, 3.0), (4, -5.0))
    rows = [dfl.Row(round=t, train_loss=loss, accuracy_mean=float("nan")) for t, loss in losses]
    tree = ElementTree.fromstring(drawing(rows))
    assert [each.get("points") for each in tree.iter("polyline")] == ["0.0,0.0 480.0,120.0"]
