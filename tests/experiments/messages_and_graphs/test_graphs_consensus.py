"""The experiment on consensus by graph: its table, figure and finding."""

from pathlib import Path

import pandas as pd
import pytest

from experiments.messages_and_graphs.graphs_consensus import GRAPHS
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

COMMITTED = Path(__file__).parents[3] / "experiments/results/graphs_consensus/table.csv"


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(tmp_path: Path) -> None:
    few = ("--peers", "16", "25", "--rounds", "100")
    done = run_experiment("messages_and_graphs.graphs_consensus", tmp_path, *few)
    assert done.returncode == 0, done.stderr
    table = pd.read_csv(tmp_path / "table.csv").set_index(["peers", "graph"])
    assert len(table) == 2 * len(GRAPHS) - 2  # 25 peers have no hypercubes
    assert table.loc[(16, "base_graph:k=1"), "rounds_to_1e-12"] == 4
    assert table.loc[(25, "base_graph:k=1"), "rounds_to_1e-12"] == 9
    assert table.loc[(16, "ring"), "MB_per_peer_to_1e-3"] != 0
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "Finding: 16 peers: fewest rounds base_graph:k=4 (2)" in done.stdout


def test_base_graphs_are_exact_for_every_number_in_the_committed_table() -> None:
    table = pd.read_csv(COMMITTED)
    base = table[table["graph"].str.startswith("base_graph")]
    assert set(base["peers"]) == {16, 25, 100, 1000}
    assert (base["rounds_to_1e-3"] == base["rounds_to_1e-12"]).all()
    assert (base["spectral_gap"] == 1).all()
