"""The experiment on simulated time: its clock is that of a run, and one training serves all
links.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.core import randomness
from experiments import common
from experiments.messages_and_graphs import time_to_accuracy as experiment
from experiments.messages_and_graphs.time_to_accuracy import LINKS, Options
from tests.support.launched import here

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CHOSEN = ("ring", "one_peer_exponential", "server")
D, ROUNDS = 4810, 4
STEPS = 9
"""Local steps of a round on digits."""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The experiment on digits: its folder, and the cells that were launched for it."""
    out = tmp_path_factory.mktemp("experiment")
    with here() as launched, pytest.MonkeyPatch.context() as patch:
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {})
        experiment.experiment(
            Options(
                dataset="digits", seeds=1, rounds=ROUNDS, low=0.15, high=0.4, out=out, graphs=CHOSEN
            )
        )
    return out, launched


def table_of(ran: tuple[Path, list[str]]) -> dict[tuple[str, str], dict[str, float]]:
    return common.by_label(
        pd.read_csv(ran[0] / "table.csv", dtype={"width": str}), experiment.LABELS
    )


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(ran: tuple[Path, list[str]]) -> None:
    out, launched = ran
    assert len(launched) == len(CHOSEN) * len(experiment.WIDTHS)  # one training for every link
    graphs = ("ring", "one_peer_exponential", "server", "server_line")
    assert {*table_of(ran)} == {(graph, width) for graph in graphs for width in experiment.WIDTHS}
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert f"\nFinding: over 1 seeds and {ROUNDS} rounds." in (out / "table.md").read_text()


@pytest.mark.parametrize("graph", CHOSEN)
@pytest.mark.parametrize("width", experiment.WIDTHS)
def test_another_link_is_counted_as_a_run_counts_it(
    ran: tuple[Path, list[str]], graph: str, width: str
) -> None:
    """The clock of the experiment, on the link of the run, gives the seconds of the run exactly."""
    run = dfl.load(ran[0] / "cells" / f"graph={graph},width={width},seed=0")
    again = experiment.seconds(run, LINKS["phone"])
    assert again[run.rows["round"]].tolist() == run.rows["sim_seconds"].tolist()
    assert experiment.seconds(run, LINKS["datacenter"])[-1] < again[-1]


def test_rounds_take_what_their_bytes_and_their_slowest_peer_take(
    ran: tuple[Path, list[str]],
) -> None:
    """Compute times are equal, so rounds differ by messages of known size on known links."""
    rows = table_of(ran)
    whole, few = (rows["ring", width]["phone_round_s"] for width in ("float32", "4"))
    assert 0 < whole - few <= 2 * 4 * D * (1 - 1 / 8) * (1 / 1e6 + 8e-6 / 35.96) + 1e-3
    slowest = (
        STEPS
        * 0.01
        * np.exp(0.5 * randomness.generator(0, "pace of peers").standard_normal(common.PEERS).max())
    )
    for row in rows.values():
        assert slowest < row["datacenter_round_s"] < slowest + 0.002
        assert row["datacenter_round_s"] <= row["phone_round_s"]
    assert rows["server", "4"]["phone_round_s"] < rows["server_line", "4"]["phone_round_s"]


def curves() -> pd.DataFrame:
    """Two seeds, with rounds of 2 s on phones and of 1 s in a data center."""
    accuracy = {0: [0.1, 0.4, 0.6], 1: [0.1, 0.6, 0.5]}
    return pd.DataFrame(
        {
            "seed": seed,
            "round": 5 * k,
            "accuracy_mean": value,
            "phone": 10.0 * k,
            "datacenter": 5.0 * k,
        }
        for seed, values in accuracy.items()
        for k, value in enumerate(values)
    )


def test_time_to_a_target_is_a_mean_over_the_seeds() -> None:
    assert experiment.to_target(curves(), "phone", (0.5, False)) == pytest.approx(2 * (7.5 + 4) / 2)
    assert experiment.to_target(curves(), "datacenter", (0.5, False)) == pytest.approx(
        (7.5 + 4) / 2
    )


def test_what_is_lost_again_is_not_kept() -> None:
    rows = pd.DataFrame(
        {
            "seed": 0,
            "round": [0, 1, 2, 3],
            "accuracy_mean": [0.1, 0.9, 0.4, 0.6],
            "phone": [0, 2, 4, 6],
        }
    )
    assert experiment.to_target(rows, "phone", (0.5, False)) == 1
    assert experiment.to_target(rows, "phone", (0.5, True)) == 5
    assert np.isnan(experiment.to_target(rows, "phone", (0.7, True)))


def test_a_target_that_one_seed_misses_is_missed() -> None:
    rows = curves()
    rows.loc[rows["seed"] == 1, "accuracy_mean"] = 0.3
    assert np.isnan(experiment.to_target(rows, "phone", (0.5, False)))


def test_the_finding_is_read_off_the_table() -> None:
    nan = float("nan")
    table = pd.DataFrame({
        "graph": ["ring", "complete", "server"], "width": ["4", "float32", "8"],
        "phone_s_to_0.5": [20.0, 300.0, 10.0], "phone_s_to_0.75": [nan, 900.0, 30.0],
        "datacenter_s_to_0.5": [9.0, 4.0, nan], "datacenter_s_to_0.75": [nan, nan, nan],
    })  # fmt: skip
    table[["phone_s_keeps_0.75", "datacenter_s_keeps_0.75"]] = nan
    table = pd.concat(
        [table, table.assign(width="16", **{"phone_s_to_0.5": 50.0})], ignore_index=True
    )
    text = experiment.finding(table, Options())
    assert (
        "On links of a phone to 0.5: server in 8 bits 10 s, ring in 4 bits 20 s, "
        "complete in 16 bits 50 s." in text
    )
    assert (
        "On links of a phone to 0.75 (ring NOT with every seed): server in 8 bits 30 s, complete"
        in text
    )
    assert (
        "On links of a datacenter to 0.5 (server NOT with every seed): "
        "complete in float32 4 s, ring" in text
    )
    assert text.endswith(
        "datacenter keeps 0.75 (ring, complete, server NOT with every seed): none."
    )


def test_the_figure_shows_every_graph_on_every_link() -> None:
    graphs = ("ring", "server")
    rows = pd.concat(
        [curves().assign(graph=g, width=w) for g in graphs for w in experiment.WIDTHS],
        ignore_index=True,
    )
    figure = experiment.draw(rows, Options())
    for axes, pace in zip(figure.axes, (10, 5), strict=True):
        drawn = [np.asarray(line.get_xdata(), float).tolist() for line in axes.lines]
        assert drawn.count([pace, 2 * pace]) == len(graphs) * len(experiment.SHOWN)
        assert axes.get_xscale() == "log"
        assert "(s)" in axes.get_xlabel()
    looks = {
        (line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines[: len(graphs) * 2]
    }
    assert len(looks) == len(graphs) * len(experiment.SHOWN)


def test_only_lines_differ_between_links() -> None:
    runs = [cell.run for cell in experiment.grid(Options(seeds=2))]
    assert {run.links for run in runs} == {LINKS["phone"]}
    assert {run.rounds for run in runs} == {50}
    assert all(spec.endswith(experiment.DEVICES) for spec in LINKS.values())


def test_the_published_table_has_every_graph_and_adds_up() -> None:
    table = pd.read_csv(
        ROOT / "experiments/results/time_to_accuracy/table.csv", dtype={"width": str}
    )
    graphs = [*experiment.GRAPHS, *experiment.SERVERS]
    rows = common.by_label(table, experiment.LABELS)
    assert {*rows} == {(graph, width) for graph in graphs for width in experiment.WIDTHS}
    model = 4 * 199_210 / 1e6  # seconds of a float32 model on 8 Mbit/s
    for graph, messages in (("ring", 2), ("exponential", 4), ("complete", 15)):
        saved = rows[graph, "float32"]["phone_round_s"] - rows[graph, "4"]["phone_round_s"]
        assert saved == pytest.approx(messages * model * 7 / 8, rel=0.15)
        assert (
            rows[graph, "float32"]["datacenter_round_s"]
            < 0.2 * rows[graph, "float32"]["phone_round_s"]
        )
