"""A sweep of real runs, interrupted three times, ends as one that was not; `tests.interrupted_sweep` has 24 cells."""

from pathlib import Path

from tests.interrupted_sweep import GRID, check


def test_an_interrupted_sweep_of_runs(tmp_path: Path) -> None:
    happened = check(tmp_path, GRID + 'topology = ["ring", "complete"]\nbits = ["none", 4]\n', seed=1)
    assert happened[-1] == "the same sweep.csv, summary.csv and models of 4 cells"
    assert {path.name for path in (tmp_path / "parts/figures").iterdir()} == {
        "accuracy_by_round.png", "accuracy_by_bytes.png", "map_topology_by_bits.png",
    }  # fmt: skip
