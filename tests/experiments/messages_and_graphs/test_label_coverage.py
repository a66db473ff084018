"""The experiment on label coverage: what it counts, its correlations, table, finding and figure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.sparse import csr_array

import dfl
from dfl.datasets import DATASETS, PARTITIONS, split_data
from experiments import common
from experiments.messages_and_graphs import label_coverage as experiment
from experiments.messages_and_graphs.label_coverage import GRAPHS, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

COMMITTED = Path(__file__).parents[3] / "experiments/results/label_coverage"
FEW = ("--dataset", "digits", "--seeds", "2", "--others", "1", "--rounds", "1")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The experiment on digits for one round: its folder and its output."""
    out = tmp_path_factory.mktemp("label_coverage")
    done = run_experiment("messages_and_graphs.label_coverage", out, *FEW)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(ran: tuple[Path, str]) -> None:
    out, printed = ran
    table = pd.read_csv(out / "table.csv")
    assert table["graph"].tolist() == list(GRAPHS)
    assert table["seeds"].tolist() == [2, 1, 1, 1, 1]
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert "\nFinding: the coverage is NOT shown to explain the accuracy within the ring" in printed
    assert len(pd.read_csv(out / "correlations.csv")) == 7


def test_the_numbers_are_those_of_the_runs(ran: tuple[Path, str]) -> None:
    out, _ = ran
    for row in pd.read_csv(out / "seeds.csv").to_dict("records"):
        run = dfl.load(out / "cells" / f"graph={row['graph']},seed={row['seed']}")
        assert row["accuracy_mean"] == pytest.approx(run.rows["accuracy_mean"].iloc[-1], rel=1e-5)
        assert row["accuracy_min"] == pytest.approx(run.rows["accuracy_min"].iloc[-1], rel=1e-5)


def test_the_coverage_of_a_ring_is_counted_by_hand(ran: tuple[Path, str]) -> None:
    """Once more from the sets of labels of a peer and of the two beside it."""
    out, _ = ran
    data = DATASETS["digits"](None)
    rows = pd.read_csv(out / "seeds.csv")
    seen = []
    for seed in (0, 1):
        split = split_data(PARTITIONS["shards"], data, peers=common.PEERS, seed=seed)
        labels = [{*data.train_labels[own].tolist()} for own in split.train]
        near = [
            len(labels[i - 1] | labels[i] | labels[(i + 1) % common.PEERS])
            for i in range(common.PEERS)
        ]
        row = rows[(rows["graph"] == "ring") & (rows["seed"] == seed)].iloc[0]
        assert row["coverage"] == pytest.approx(np.mean(near))
        assert row["coverage_min"] == min(near)
        seen.append(near)
    assert seen[0] != seen[1]
    assert (rows.loc[rows["graph"] == "complete", "coverage"] == 10).all()


def test_a_neighbourhood_is_a_peer_and_those_it_receives_from() -> None:
    """Peer 0 receives from 1, peer 1 from no peer, peer 2 from both, with no weight of its own."""
    weights = csr_array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    counts = np.array([[9, 0, 0, 1], [0, 3, 0, 2], [0, 0, 4, 0]])
    assert experiment.coverage(weights, counts).tolist() == [3, 2, 4]


def test_the_network_is_that_of_the_run() -> None:
    gaps = {graph: experiment.network_of(graph, 3).spectrum.gap for graph in GRAPHS}
    assert gaps["ring"] == pytest.approx((1 - math.cos(math.pi / 8)) * 2 / 3)
    assert gaps["star"] == pytest.approx(1 / 16)
    assert gaps["complete"] == pytest.approx(1)
    assert gaps["torus"] == pytest.approx(0.4)
    assert min(gaps, key=gaps.__getitem__) == "chain"


def test_the_ring_has_more_seeds_and_every_run_the_standard_setting() -> None:
    cells = experiment.grid(Options())
    graphs = [cell.values["graph"] for cell in cells]
    assert {graph: graphs.count(graph) for graph in GRAPHS} == {
        graph: 13 if graph == "ring" else 5 for graph in GRAPHS
    }
    for cell in cells:
        assert (cell.run.topology, cell.run.seed) == (cell.values["graph"], cell.values["seed"])
        assert (cell.run.peers, cell.run.partition) == (16, "shards:per_peer=2")
        assert common.with_tail(cell.run).eval_last == 5


def test_one_cell_alone_has_its_row(ran: tuple[Path, str], tmp_path: Path) -> None:
    cell = "graph=star,seed=0"
    done = run_experiment("messages_and_graphs.label_coverage", tmp_path, *FEW, "--only", cell)
    assert done.returncode == 0, done.stderr
    head, row = (line.split(",") for line in done.stdout.splitlines())
    seeds = pd.read_csv(ran[0] / "seeds.csv", dtype=str).set_index("graph")
    assert row[head.index("accuracy_mean")] == seeds.loc["star", "accuracy_mean"]
    assert [path.name for path in (tmp_path / "cells").glob("*=*")] == [cell]


def test_a_correlation_has_the_interval_of_fisher() -> None:
    x, y = pd.Series([1.0, 2, 3, 4, 5, 6]), pd.Series([1.0, 3, 2, 5, 4, 7])
    expected = stats.pearsonr(x, y)
    low, high = expected.confidence_interval(0.95)
    assert experiment.pearson(x, y) == pytest.approx((expected.statistic, low, high))
    r, wide, _ = experiment.pearson(x, y, groups=3)  # of n - 2 points, if the two means are known
    assert r == pytest.approx(expected.statistic)
    assert math.atanh(r) - math.atanh(wide) == pytest.approx(1.959964 / math.sqrt(6 - 2 - 3))
    assert math.isnan(experiment.pearson(x[:3], y[:3])[1])
    assert all(map(math.isnan, experiment.pearson(0 * x, y)))


def runs(slope: float = 0.1) -> pd.DataFrame:
    """Two graphs of five runs: the accuracy rises with the coverage by `slope` at a graph, and by
    0.3 from the first to the second, whose coverage is smaller.
    """
    rows: list[dict[str, Any]] = [
        {
            "graph": graph, "seed": seed, "spectral_gap": gap, "coverage": first + seed,
            "coverage_min": first, "accuracy_mean": start + slope * seed + 0.01 * (seed % 2),
            "accuracy_min": 0.1,
        }
        for graph, gap, first, start in (("ring", 0.05, 4.0, 0.2), ("torus", 0.4, 3.0, 0.5))
        for seed in range(5)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_correlations_within_graphs_leave_the_graph_out() -> None:
    found = common.by_label(experiment.correlations(runs()), ["over", "with"])
    points = {"the ring": 5, "the other graphs": 5, "all graphs": 10}
    for over, number in points.items():
        assert found[f"within {over}", "coverage"]["points"] == number
        assert found[f"within {over}", "coverage"]["correlation"] > 0.99
    assert found["graphs", "coverage"]["correlation"] == pytest.approx(-1)
    assert found["graphs", "spectral_gap"]["correlation"] == pytest.approx(1)
    flat = runs()
    flat["coverage"] = flat["coverage"] + flat["seed"] ** 2  # ranks at a graph stay
    again = common.by_label(experiment.correlations(flat), ["over", "with"])
    assert again["within all graphs", "coverage"]["correlation"] < 0.99
    gaps = [cells["runs", "spectral_gap"]["correlation"] for cells in (found, again)]
    assert gaps[0] == gaps[1] > 0.7


def test_a_graph_with_one_coverage_says_nothing_within_graphs() -> None:
    rows = runs()
    complete = rows[rows["graph"] == "torus"].assign(graph="complete", coverage=10.0)
    complete["accuracy_mean"] = [0.9, 0.1, 0.8, 0.2, 0.7]
    with_complete = common.by_label(
        experiment.correlations(pd.concat([rows, complete])), ["over", "with"]
    )
    without = common.by_label(experiment.correlations(rows), ["over", "with"])
    for over in ("the ring", "the other graphs", "all graphs"):
        cell = f"within {over}", "coverage"
        assert with_complete[cell] == without[cell]
    assert with_complete["runs", "coverage"]["points"] == 15


def test_the_table_has_the_correlation_of_each_graph() -> None:
    table = common.by_label(experiment.tabulate(runs(slope=-0.1)), ["graph"])
    assert table["ring"]["correlation"] < -0.9
    assert table["torus"]["coverage"] == 5
    assert table["torus"]["accuracy"] == pytest.approx(0.5 - 0.2 + 0.004)
    assert table["ring"]["seeds"] == 5


def test_the_finding_states_what_was_not_shown() -> None:
    for slope, verdict in ((0.1, "explains part of"), (0.0, "is NOT shown to explain")):
        rows = runs(slope)
        text = experiment.finding(experiment.tabulate(rows), experiment.correlations(rows))
        assert text.count(f"the coverage {verdict} the accuracy within") == 3
        assert "over 2 graphs 1.00 with the gap and -1.00 with the coverage" in text
        assert "By rising gap: ring" in text


def test_the_ring_is_left_out_of_the_other_graphs() -> None:
    rows = runs()
    rows.loc[rows["graph"] == "ring", "accuracy_mean"] *= -1
    found = common.by_label(experiment.correlations(rows), ["over", "with"])
    assert found["within the ring", "coverage"]["correlation"] < -0.99
    assert found["within the other graphs", "coverage"]["correlation"] > 0.99
    assert found["within the ring", "coverage"] == pytest.approx(
        {
            **found["within the ring", "coverage"],
            "correlation": experiment.tabulate(rows)["correlation"].iloc[0],
        }
    )


def test_the_figure_has_a_marker_per_run() -> None:
    rows = runs()
    by_coverage, by_gap = experiment.draw(rows, Options()).axes
    for axes, column in ((by_coverage, "coverage"), (by_gap, "spectral_gap")):
        drawn = [np.asarray(line.get_xdata(), float).tolist() for line in axes.lines]
        assert drawn == [rows.loc[rows["graph"] == g, column].tolist() for g in ("ring", "torus")]
        assert len({line.get_color() for line in axes.lines}) == 2


def test_the_committed_correlations_are_those_of_its_seeds() -> None:
    given, seeds = (pd.read_csv(COMMITTED / f"{name}.csv") for name in ("correlations", "seeds"))
    pd.testing.assert_frame_equal(given, experiment.correlations(seeds), rtol=5e-4)
