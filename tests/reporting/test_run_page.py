"""The page of a run has what its directory holds, in every way that a run can end."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dfl
from dfl.reporting import run_page
from dfl.reporting.callbacks import report
from dfl.reporting.callbacks.report import Report
from dfl.run import read_command
from dfl.store import manifest
from dfl.store.history import History, read_evaluations, read_start
from tests.conftest import Command
from tests.reporting.test_page import Seen, unpacked
from tests.support.growth import growth
from tests.support.small_run import small

pytestmark = pytest.mark.usefixtures("without_figures")


def data_of(folder: Path) -> dict[str, Any]:
    page = (folder / "report.html").read_text()
    held = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    found: dict[str, Any] = json.loads(held[1])
    return found


def text_of(folder: Path) -> str:
    return Seen((folder / "report.html").read_text()).text


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory, no_figures: None) -> Path:
    folder = tmp_path_factory.mktemp("run") / "attacked"
    run = small(
        out=folder, peers=6, topology="grid", attack="sign_flip:peers=2+5", validation=0.2,
        faults="link_loss:p=0.3", links="broadband", partition="shards:per_peer=2",
    )  # fmt: skip
    list(dfl.simulate(run))
    return folder


def test_curves_are_the_rows_of_the_run(attacked: Path) -> None:
    data, rows = data_of(attacked), dfl.load(attacked).rows
    (table,) = data["tables"]
    for name in rows:
        wanted = [None if np.isnan(x) else x for x in rows[name]]
        assert table[name] == pytest.approx(wanted, rel=1e-5), name
    drawn = {line["y"] for chart in data["charts"] for line in chart["lines"]}
    assert {"accuracy_mean", "train_loss", "consensus_distance", "messages_lost"} <= drawn
    assert not data["live"]


def test_peers_are_those_of_the_run(attacked: Path) -> None:
    peers, table = data_of(attacked)["peers"], dfl.load(attacked).peers
    assert peers["rounds"] == dfl.load(attacked).rows["round"].tolist()
    assert peers["attackers"] == [2, 5]
    last = {name: unpacked(rows)[-6:] for name, rows in peers["moving"].items()}
    last |= {name: unpacked(value) for name, value in peers["fixed"].items()}
    numbers = [name for name in table if name not in ("peer", "labels")]
    assert set(numbers) <= set(last)
    for name in numbers:
        np.testing.assert_allclose(last[name], table[name], atol=1e-4, rtol=1e-4)


def test_figures_that_fall_by_many_powers_of_ten_keep_their_digits(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(90, 2)).astype("f4")
    numbers = (x[:60], 1000 * x[:60, 0]), (x[60:], 1000 * x[60:, 0])
    run = dfl.Run(
        peers=3, rounds=30, eval_every=10, dataset=numbers, model=torch.nn.Linear(2, 1),
        loss="squared_error", lr=0.05, batch_size=10, out=tmp_path / "run",
    )  # fmt: skip
    list(dfl.simulate(run))
    moving = data_of(tmp_path / "run")["peers"]["moving"]
    shown = unpacked(moving["train_loss"]).reshape(-1, 3)
    assert shown[0].min() > 1e5 * shown[-1].max()
    peers = dfl.load(tmp_path / "run").peers
    np.testing.assert_allclose(shown[-1], peers["train_loss"], rtol=1e-3)
    charts = {each["title"]: each for each in data_of(tmp_path / "run")["charts"]}
    lines = [line["y"] for line in charts["Test loss"]["lines"]]
    assert lines == ["test_loss_mean", "test_loss_max", "test_loss_mean_model"]


def test_the_graph_and_the_labels_are_those_of_the_run(attacked: Path) -> None:
    data = data_of(attacked)
    edges = unpacked(data["graph"]["edges"]).reshape(-1, 2).astype(int)
    assert sorted(tuple(sorted(edge)) for edge in edges.tolist()) == [
        (0, 1), (0, 3), (1, 2), (1, 4), (2, 5), (3, 4), (4, 5),
    ]  # fmt: skip
    assert data["graph"]["mutual"]
    counts = unpacked(data["labels"]["counts"]).reshape(6, 10)
    for own, labels in zip(counts, dfl.load(attacked).peers["labels"], strict=True):
        held = " ".join(f"{k}:{int(own[k])}" for k in np.flatnonzero(own))
        assert held == labels


@pytest.mark.parametrize(
    ("topology", "title"),
    [
        ("grid", "Eigenvalues"),
        ("directed_random:k=2", "Moduli of the eigenvalues"),
        ("one_peer_exponential", None),
        ("random_out", None),
    ],
)
def test_the_spectrum_is_that_of_the_matrix_by_which_every_round_averages(
    tmp_path: Path, topology: str, title: str | None
) -> None:
    list(dfl.simulate(small(out=tmp_path, rounds=1, peers=6, topology=topology)))
    data = data_of(tmp_path)
    if title is None:
        assert "spectrum" not in data
        assert "Spectral gap" in text_of(tmp_path)
        return
    start = read_start(tmp_path)
    assert start is not None
    assert start.weights is not None
    values = np.linalg.eigvals(start.weights.toarray())
    wanted = np.sort(values.real if title == "Eigenvalues" else abs(values))[::-1]
    spectrum = data["spectrum"]
    assert spectrum["chart"]["title"] == title
    np.testing.assert_allclose(spectrum["table"]["value"], wanted, atol=1e-5)
    assert spectrum["table"]["index"] == [1, 2, 3, 4, 5, 6]


def test_the_command_repeats_the_run(attacked: Path, tmp_path: Path) -> None:
    again = run_page._again(dfl.load(attacked).record)
    tokens = shlex.split(again)
    assert tokens[:3] == ["python", "-m", "dfl.run"]
    command = read_command([*tokens[3:], "--out", str(tmp_path / "again")], 1)
    assert command.run is not None
    *_, last = dfl.simulate(command.run)
    wanted = dfl.load(attacked).rows.iloc[-1].to_dict()
    assert {**last, "seconds": 0} == {**wanted, "seconds": 0}


def test_the_page_is_written_again_from_the_directory(attacked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(attacked, folder)
    before = data_of(folder)
    (folder / "report.html").unlink()
    assert Report(folder).write({}) == folder / "report.html"
    assert data_of(folder) == before


def test_the_settings_warnings_and_attackers_are_there(attacked: Path) -> None:
    text = text_of(attacked)
    for wanted in ("sign_flip:peers=2+5", "2 peers: 2, 5", "finished, round 6 of 6", "torch"):
        assert wanted in text


def test_no_report_writes_none(dfl_run: Command) -> None:
    flags = ("--peers=2", "--rounds=1", "--model=softmax", "--examples-per-peer=5")
    assert dfl_run(*flags, "--out=with").code == 0
    assert dfl_run(*flags, "--out=without", "--no-report").code == 0
    assert Path("with/report.html").exists()
    assert not Path("without/report.html").exists()
    assert Path("without/history").exists()


def test_a_server_has_peers_and_no_graph(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path, algorithm="fedavg:fraction=0.5")))
    data = data_of(tmp_path)
    assert unpacked(data["graph"]["edges"]).size == 0
    assert "spectrum" not in data
    assert "payload_bytes_received" in data["peers"]["moving"]


def test_too_many_peers_are_not_drawn(
    attacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(attacked, tmp_path, dirs_exist_ok=True)
    note = "Peers are not drawn: there are too many."
    for most, shown in ((6, True), (5, False)):
        monkeypatch.setattr(run_page, "PEERS", most)
        Report(tmp_path).write(manifest.read_now(tmp_path))
        assert ("graph" in data_of(tmp_path), note in text_of(tmp_path)) == (shown, not shown)
        assert data_of(tmp_path)["peers"]["moving"]


def test_a_run_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "EVERY", 0.0)
    rows = dfl.simulate(small(out=tmp_path))
    next(rows)
    assert data_of(tmp_path)["live"]
    assert "running, round 0 of 6" in text_of(tmp_path)
    rows.close()  # type: ignore[attr-defined]
    assert not data_of(tmp_path)["live"]
    assert "interrupted (round 0 of 6)" in text_of(tmp_path)


def test_a_page_is_not_refreshed_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[int]()
    monkeypatch.setattr(report, "EVERY", 60.0)
    monkeypatch.setattr(Report, "write", lambda self, ended: written.append(1))
    list(dfl.simulate(small(out=tmp_path, rounds=30, eval_every=1)))
    assert len(written) == 1


def test_a_run_goes_on_where_its_page_cannot_be_refreshed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "EVERY", 0.0)
    monkeypatch.setattr(report, "SHARE", 1e9)
    rows = dfl.simulate(small(out=tmp_path))
    next(rows)
    (tmp_path / "history/start.safetensors").write_bytes(b"damaged")
    assert next(rows).round == 2
    assert "no report after round 2" in (tmp_path / "logs/rank-0.log").read_text()
    rows.close()  # type: ignore[attr-defined]


def test_a_run_that_diverged_says_so(tmp_path: Path) -> None:
    with pytest.raises(dfl.DivergedError):
        list(dfl.simulate(small(out=tmp_path, lr=1e38)))
    assert "DivergedError" in text_of(tmp_path)


def test_a_run_without_a_history_has_its_curves(attacked: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(attacked, folder)
    shutil.rmtree(folder / "history")
    Report(folder).write({})
    data = data_of(folder)
    assert data["tables"] == data_of(attacked)["tables"]
    assert "peers" not in data


def test_own_objects_are_repeated_from_python_only(tmp_path: Path) -> None:
    from torch import nn

    list(dfl.simulate(small(out=tmp_path, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))))
    assert "only Python can repeat it" in text_of(tmp_path)


@pytest.mark.slow
def test_the_page_of_a_thousand_peers_stays_small_and_fast(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 3000)
    inputs = rng.normal(size=(3000, 8)).astype(np.float32)
    run = dfl.Run(
        peers=1000, topology="geometric:radius=0.06", model="softmax", dataset=(inputs, labels),
        rounds=2, eval_every=1, local_steps=1, out=tmp_path,
    )  # fmt: skip
    list(dfl.simulate(run))
    history = History(tmp_path)
    held = read_evaluations(tmp_path)
    assert held is not None
    peers = {name: rng.normal(size=1000) for name in held.columns}
    for t in range(3, 100):
        history.evaluated(t, peers)
    fewer = tmp_path / "fewer"
    shutil.copytree(tmp_path, fewer)
    for t in range(100, 500):
        history.evaluated(t, peers)
    assert growth(lambda: Report(tmp_path).write({}), lambda: Report(fewer).write({})) < 5
    assert (tmp_path / "report.html").stat().st_size < 3_000_000
    shown = data_of(tmp_path)["peers"]["rounds"]
    assert (shown[0], shown[-1]) == (0, 499)
    assert "slider has 100 of 500 evaluations" in text_of(tmp_path)


@pytest.mark.slow
def test_the_start_of_a_run_does_not_wait_for_its_page() -> None:
    """What a page needs is imported when it is written."""
    code = (
        "import sys, dfl.run, dfl.reporting.simulate, dfl.reporting.callbacks.report;"
        "import dfl.store.history;"
        "print([name for name in ('jinja2', 'matplotlib', 'networkx') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
