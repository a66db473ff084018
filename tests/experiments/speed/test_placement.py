"""Tests of the experiment on the placement of peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.speed import placement

GRAPHS = ("ring", "geometric")


def test_messages_between_ranks_are_counted_once_for_each_rank() -> None:
    options = placement.Options(peers=12, ranks=(2, 3))
    two, three = placement.counted("ring", 0, options)
    # Each end of each block sends one message.
    assert two["consecutive"] == 4
    assert three["consecutive"] == 6
    assert two["used"] == two["consecutive"]
    both, _ = placement.counted("complete", 0, options)
    assert both["consecutive"] == both["cuthill_mckee"] == 12


def test_the_table_states_what_the_order_saves(tmp_path: Path) -> None:
    options = placement.Options(peers=64, ranks=(2,), seeds=2, graphs=GRAPHS, out=tmp_path / "out")
    placement.experiment(options)
    rows = [row for seed in range(2) for row in placement.counted("geometric", seed, options)]
    share = 1 - sum(row["used"] for row in rows) / sum(row["consecutive"] for row in rows)
    text = (tmp_path / "out/table.md").read_text()
    assert f"geometric {100 * share:.0f} %" in text
    table = {
        line.split(",")[0]: line.rstrip().split(",")
        for line in (tmp_path / "out/table.csv").read_text().splitlines()
    }
    assert float(table["geometric"][-1]) == pytest.approx(share, abs=1e-3)
    assert 0 < share < 1
    assert float(table["ring"][-1]) == 0
