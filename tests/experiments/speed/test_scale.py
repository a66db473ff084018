"""The experiment on scale: seconds and memory by stage, rows per peer, and the exponent of a
round.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dfl.core.errors import InputError
from experiments.speed import launch, probe, scale
from tests.support.launched import run_experiment
from tests.support.mpirun import ENV, ROOT

pytestmark = pytest.mark.slow

STAGES = {"build", "rounds", "look", "report"}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, str]:
    """The experiment on few peers: its table and its output."""
    out = tmp_path_factory.mktemp("scale")
    few = [
        "--peers",
        "20",
        "60",
        "--ranks",
        "2",
        "--messages",
        "8",
        "--rounds",
        "5",
        "--beyond",
        "80",
    ]
    done = run_experiment("speed.scale", out, *few)
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return pd.read_csv(out / "table.csv"), done.stdout


def test_a_row_per_run(experiment: tuple[pd.DataFrame, str]) -> None:
    table, _ = experiment
    assert table["peers"].tolist() == [20, 60, 80]
    assert (table["ranks"] == 2).all()
    stages = table[["build_seconds", "look_seconds", "report_seconds"]]
    assert (stages > 0).all().all()
    assert (table["wall_seconds"] > stages.sum(axis=1) + table["round_seconds"] * 4).all()
    per_peer = table["microseconds_per_peer"] * table["peers"] / 1e6
    assert per_peer.tolist() == pytest.approx(table["round_seconds"].tolist(), rel=1e-4)
    assert table["peak_MB"].between(2 * 100, 2 * 1000).all()
    assert np.isnan(table["rows_per_peer"][0])


def test_runs_beyond_the_grid_are_reported_separately(experiment: tuple[pd.DataFrame, str]) -> None:
    finding = experiment[1].partition("Finding: ")[2]
    assert "2 ranks, 8 bits: from 20 to 60 peers a round goes from" in finding
    assert "80 peers on 2 ranks, 8 bits: " in finding
    assert "within 2 GiB" in finding
    assert "NOT within" not in finding


@pytest.fixture
def probed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> dict[str, Any]:
    """The output of the probe for a small run in this process."""
    probe.main(probe.Options(peers=30, rounds=6, features=20, examples=15, out=tmp_path / "run"))
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_probe_distinguishes_the_stages(probed: dict[str, Any], tmp_path: Path) -> None:
    assert set(probed["seconds"]) == set(probed["stages"]) == STAGES
    assert (probed["ranks"], probed["hosted"], probed["parameters"]) == (1, 30, 210)
    assert 0 < 4 * probed["round"] < 2 * probed["seconds"]["rounds"]
    assert probed["peaks"] == [pytest.approx(max(probed["stages"].values()), rel=0.2)]
    assert (tmp_path / "run" / "figures" / "graph.png").exists()
    rows = pd.read_csv(tmp_path / "run" / "metrics.csv")
    assert rows["round"].tolist() == [0, 6]


def test_peaks_are_those_of_their_stage() -> None:
    watch = probe.Probe(rounds=3)
    before = np.ones(40_000_000)
    watch.peaks.clear()
    del before
    watch._end("build")
    watch.row({})
    assert watch.peaks["build"] - watch.peaks["look"] > 200e6
    assert watch.seconds["build"] > watch.seconds["look"] >= 0


def found(hosted: int, memory: float, message: str = "float32", ranks: int = 1) -> dict[str, Any]:
    labels = {"ranks": ranks, "message": message, "hosted": hosted, "parameters": 650}
    return labels | {"stages": {"rounds": int(memory)}}


def test_rows_per_peer() -> None:
    """Three rows of 650 floats and the data for each, over a process of 300 MB."""
    each = 3 * 4 * 650 + 60 * (64 * 4 + 8)
    runs = [found(n, 300e6 + n * each) for n in (100, 1_000, 10_000)]
    others = [found(50, 1e6, ranks=2), found(50, 1e6, message="8")]
    assert np.isnan(scale.rows_per_peer(runs[0], runs + others))
    assert [scale.rows_per_peer(run, runs + others) for run in runs[1:]] == pytest.approx([3, 3])


def table(exponent: float, rows: float, peak: float) -> pd.DataFrame:
    peers = np.array([100, 1_000, 10_000, 100_000])
    flat = dict.fromkeys(["build_seconds", "look_seconds", "report_seconds", "wall_seconds"], 7.0)
    grown = {
        "peers": peers,
        "round_seconds": 1e-5 * peers**exponent,
        "rows_per_peer": rows,
        "peak_MB": peak,
    }
    return pd.DataFrame({"ranks": 1, "message": "float32", **grown, **flat})


@pytest.mark.parametrize("exponent", [0.9, 1.0, 1.7])
def test_the_exponent_is_that_of_the_rounds(exponent: float) -> None:
    assert scale.grows(table(exponent, 3.0, 500.0)) == pytest.approx(exponent)
    assert np.isnan(scale.grows(table(exponent, 3.0, 500.0)[:1]))


def test_missed_bounds_are_in_capitals() -> None:
    good, bad = (
        scale.finding(table(1.0, *numbers), 10_000) for numbers in ((3.9, 2000.0), (4.1, 2200.0))
    )
    assert "as peers to the power 1.00" in good
    assert "3.9 rows of d floats beside its data (at most 4)" in good
    assert "(within 2 GiB)" in good
    assert "(MORE than 4)" in bad
    assert "(NOT within 2 GiB)" in bad
    assert "100,000 peers on 1 rank, float32: 7 s to build, 1.00 s a round" in good


def test_the_grid_ends_beyond() -> None:
    options = scale.Options(peers=(10, 20), ranks=(1, 2), messages=("float32", "8"), beyond=99)
    cells = scale.grid(options)
    assert len(cells) == 2 * 2 * 2 + 1
    assert cells[:3] == [(1, 10, "float32"), (1, 20, "float32"), (1, 10, "8")]
    assert cells[-1] == (2, 99, "float32")
    assert scale.grid(scale.Options(beyond=0))[-1] == (2, 10_000, "8")


@pytest.mark.parametrize(("message", "bits"), [("float32", None), ("8", "8")])
def test_a_cell_launches_its_run(
    message: str, bits: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def launched(ranks: int, *arguments: str) -> dict[str, Any]:
        calls.append((ranks, dict(zip(arguments[2::2], arguments[3::2], strict=True))))
        return {"wall": 1.0}

    monkeypatch.setattr(scale, "launch", launched)
    found = scale.measure(scale.Options(rounds=7), 2, 50, message)
    (ranks, flags), *_ = calls
    assert found == {"wall": 1.0, "peers": 50, "message": message}
    assert (ranks, flags["--peers"], flags["--rounds"], flags.get("--bits")) == (2, "50", "7", bits)
    assert not Path(flags["--out"]).exists()


def test_the_run_of_the_probe() -> None:
    run = probe.Options(peers=300, bits=8, rounds=9).run
    assert (run.peers, run.bits, run.rounds, run.eval_every) == (300, 8, 9, 9)
    assert run.dataset == "gaussian:features=64,examples=18000"
    assert (run.topology, run.model, run.out) == ("regular:k=4", "softmax", None)


def test_the_figure_has_a_line_per_cell() -> None:
    both = pd.concat(
        [table(1.0, 3.0, 500.0), table(0.9, 5.0, 700.0).assign(message="8")], ignore_index=True
    )
    left, middle, right = scale.draw(both).axes
    assert [line.get_label() for line in left.lines] == [
        "1 rank, float32",
        "1 rank, 8 bits",
        "in proportion",
    ]
    assert [line.get_label() for line in middle.lines] == [
        "1 rank, float32",
        "1 rank, 8 bits",
        "2 GiB",
    ]
    assert {line.get_label() for line in right.lines} == {
        "build",
        "look",
        "report",
        "a round, to compare",
    }
    x, y = (np.asarray(values, dtype=float) for values in left.lines[-1].get_data())
    assert y[1] / y[0] == pytest.approx(x[1] / x[0])


def test_a_launch_reads_the_last_line() -> None:
    text = launch.launch(
        1, "-c", "import time; time.sleep(0.3); print('noise'); print('{\"a\": 1}')"
    )
    assert text["a"] == 1
    assert 0.3 < text["wall"] < 30
    # One rank prints, as in the measurements: the launcher may join the lines of two.
    ranks = "import os as o; o.environ['PMI_RANK'] == '0' and print([int(o.environ['PMI_SIZE'])])"
    assert launch.launch(2, "-c", ranks)["found"] == [2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_launch_is_refused_with_its_message(ranks: int) -> None:
    with pytest.raises(InputError, match=f"on {ranks} ranks: .*"):
        launch.launch(ranks, "-c", "raise SystemExit('no such thing')")


def test_several_ranks_need_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *arguments, **more: None)
    with pytest.raises(InputError, match=r"2 ranks need mpirun: .*\[mpi\]"):
        launch.launch(2, "-c", "pass")


def test_a_run_that_cannot_be_done_is_one_line(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.speed.scale",
        "--peers",
        "3",
        "--ranks",
        "1",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("scale: ")
    assert "regular needs 1 <= k < peers" in done.stderr
    assert done.stderr.count("\n") == 1
