"""The comparison of dfl with its baselines: its table, finding, figure and refusals."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.speed import benchmark_peers as peers
from experiments.speed.baselines import install, run
from experiments.speed.stopwatch import WORK
from tests.support.stub_baselines import environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
PUBLISHED = ROOT / "experiments/results/benchmark_peers"


def rounds(work: str, setup: run.Setup, *launches: list[float]) -> list[dict[str, object]]:
    labels = {
        "work": work,
        "system": setup.system,
        "processes": setup.processes,
        "threads": setup.threads,
        "style": setup.style,
        "version": "1.0",
    }
    return [
        {**labels, "repetition": number, "round": t, "seconds": seconds}
        for number, launch in enumerate(launches)
        for t, seconds in enumerate(launch)
    ]


@pytest.fixture
def measured() -> pd.DataFrame:
    """Rounds of two works: on A dfl has two set-ups and pfl two; gossipy is on both."""
    return pd.DataFrame(
        [
            *rounds("A", run.Setup("dfl", 2, 1), [0.1, 0.1, 0.1], [0.1, 0.2, 0.1]),
            *rounds("A", run.Setup("dfl", 1, 1), [0.3, 0.3, 0.3], [0.3, 0.3, 0.3]),
            *rounds("A", run.Setup("pfl", 1, 1), [0.5, 0.6, 0.5], [0.5, 0.5, 0.5]),
            *rounds("A", run.Setup("pfl", 2, 1), [0.2, 0.2, 0.2], [0.3, 0.3, 0.3]),
            *rounds("A", run.Setup("gossipy", 1, 1), [0.4, 0.4, 0.4], [0.4, 0.4, 0.4]),
            *rounds("C", run.Setup("dfl", 1, 1), [0.02, 0.02, 0.02], [0.02, 0.02, 0.02]),
            *rounds("C", run.Setup("gossipy", 1, 1), [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
        ]
    )


def test_the_table_compares_with_our_fastest(measured: pd.DataFrame) -> None:
    table = peers.tabulate(measured)
    rows = {(row["work"], row["system"], row["processes"]): row for row in table.to_dict("records")}
    assert len(rows) == 7
    assert {key for key, row in rows.items() if row["fastest"] == "yes"} == {
        ("A", "dfl", 2), ("A", "pfl", 2), ("A", "gossipy", 1), ("C", "dfl", 1), ("C", "gossipy", 1),
    }  # fmt: skip
    assert rows["A", "dfl", 2]["ms"] == 100
    assert rows["A", "dfl", 2]["ratio"] == 1
    pfl = rows["A", "pfl", 2]
    assert (pfl["ms"], pfl["ms_q1"], pfl["ms_q3"]) == (250, 200, 300)
    assert (pfl["ratio"], pfl["ratio_min"], pfl["ratio_max"]) == (2.5, 2, 3)
    gossipy = rows["C", "gossipy", 1]
    assert (gossipy["ratio"], gossipy["ratio_min"], gossipy["ratio_max"]) == (75, 50, 100)


def test_the_finding_is_computed(measured: pd.DataFrame) -> None:
    text = peers.finding(peers.tabulate(measured), measured)
    assert text.startswith("median of 6 rounds in 2 launches")
    assert (
        "A: dfl 100 ms a round, pfl 250 ms, 2.5 times that (2 to 3), "
        "gossipy 400 ms, 4 times that (4 to 4)" in text
    )
    assert "C: dfl 20 ms a round, gossipy 1,500 ms, 75 times that (50 to 100)." in text
    alone = measured[measured["system"] == "dfl"]
    assert "no baseline" in peers.finding(peers.tabulate(alone), alone)


def test_the_figure_has_a_panel_per_work(measured: pd.DataFrame) -> None:
    table = peers.tabulate(measured)
    panels = peers.draw(table).axes
    assert [axes.get_title()[0] for axes in panels] == ["A", "C"]
    assert all(axes.get_xscale() == "log" for axes in panels)
    dots = [line for line in panels[0].lines if line.get_marker() == "o"]
    assert [float(np.asarray(dot.get_xdata()).item()) for dot in dots] == [100, 300, 500, 250, 400]
    filled = [dot.get_markerfacecolor() != "white" for dot in dots]
    assert filled == [True, False, False, True, True]
    assert [text.get_text() for text in panels[1].texts] == ["20 ms", "1,500 ms, 75 times"]


def test_an_experiment_from_launch_to_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setups = (
        run.Setup("dfl", 1, 1),
        run.Setup("pfl", 1, 1),
        run.Setup("pfl", 2, 1),
        run.Setup("gossipy", 1, 1),
    )
    monkeypatch.setattr(run, "SETUPS", setups)
    envs, out = environment(tmp_path / "envs", "pfl"), tmp_path / "out"
    peers.experiment(
        peers.Options(
            out=out, envs=envs, works=("B",), baselines=("pfl",), rounds=2, warm_up=1, repetitions=2
        )
    )
    printed = capsys.readouterr()
    table, cells = pd.read_csv(out / "table.csv"), sorted(out.glob("cells/*.json"))
    assert list(table["system"]) == ["dfl", "pfl", "pfl"]  # gossipy was not given
    assert len(cells) == 2 * 3
    assert table["ms"].iloc[1] == 375
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.out.strip() == (out / "table.md").read_text().strip()
    assert "Finding: median of 4 rounds in 2 launches" in printed.out
    assert printed.err.count("B, pfl, ") == 4
    monkeypatch.setattr(run, "answer", lambda *_: pytest.fail("what was kept is measured again"))
    peers.experiment(
        peers.Options(
            out=out, envs=envs, works=("B",), baselines=("pfl",), repetitions=2, keep=True
        )
    )
    pd.testing.assert_frame_equal(pd.read_csv(out / "table.csv"), table)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--works", "F"], "--works must be among A, B, C, D, E, not F"),
        (
            ["--baselines", "pfl", "fedml"],
            "--baselines must be among pfl, gossipy, flower, blazefl, fedjax, torch, not fedml",
        ),
        (["--baselines", "gossipy"], "gossipy is not installed"),
    ],
)
def test_bad_input_is_a_line_and_code_2(
    tmp_path: Path, arguments: list[str], complaint: str
) -> None:
    command = [
        sys.executable,
        "-m",
        "experiments.speed.benchmark_peers",
        "--envs",
        str(tmp_path),
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert complaint in done.stderr
    if "installed" in complaint:
        assert f"python -m experiments.speed.baselines.install --envs {tmp_path}" in done.stderr


@pytest.mark.skipif(not PUBLISHED.exists(), reason="nothing has been published yet")
def test_what_was_published_is_whole() -> None:
    table = pd.read_csv(PUBLISHED / "table.csv")
    for work, own in table.groupby("work"):
        assert work in WORK
        assert list(own.loc[own["fastest"] == "yes", "system"]) == ["dfl", *install.BASELINES]
        assert own.loc[own["system"] == "dfl", "ratio"].min() == 1
    assert (table["ratio_min"] <= table["ratio_max"]).all()
    assert (table["ms_q1"] <= table["ms_q3"]).all()
    assert (PUBLISHED / "figure.png").read_bytes().startswith(b"\x89PNG")
