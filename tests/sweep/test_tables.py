"""Tables hold the last rows of the runs in the order of the grid, and means over finished cells."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console

from dfl.reporting.console import print_table
from dfl.store import manifest
from dfl.store.run_directory import claim
from dfl.sweep import folder as sweep_folder
from dfl.sweep.grid import Grid, read
from dfl.sweep.status import States, read_states
from dfl.sweep.tables import cells, curves, group_fields, summary, terminal_table, write

HEAD = "round,seconds,accuracy_mean,accuracy_min,payload_bytes\n"
ROWS = HEAD + "0,0.5,0.1,0.1,0\n4,{seconds},{accuracy},{worst},{payload}\n"


def swept(folder: Path, lists: str) -> Grid:
    """Write the folder of a sweep by hand: cell n ends with an accuracy of (n + 1) / 10."""
    claim(folder)
    (folder / "grid.toml").write_text(f"peers = 4\nrounds = 4\n[sweep]\n{lists}")
    grid = read(folder / "grid.toml", 1)
    sweep_folder.write(folder, grid.cells, grid.text)
    for n, cell in enumerate(grid.cells, 1):
        text = ROWS.format(seconds=n, accuracy=f"{n / 10:.4f}0", worst=n / 20, payload=1000 * n)
        (folder / cell.name / "metrics.csv").write_text(text)
        end(folder / cell.name, 0)
    return grid


def end(folder: Path, code: int | None) -> None:
    names = ["metrics.csv"] if code == 0 else []
    manifest.write(folder, {"run": {"rounds": 4}, "exit": code, "ending": "as it did"}, names)


def sight(grid: Grid, folder: Path) -> States:
    return read_states(folder, (cell.name for cell in grid.cells))


LISTS = 'topology = ["ring", "complete"]\nseed = [0, 1, 2]\nbits = ["none", 4]\n'


def test_the_table_has_the_last_row_of_every_cell_as_written(tmp_path: Path) -> None:
    grid = swept(tmp_path, LISTS)
    end(tmp_path / grid.cells[1].name, 3)
    (tmp_path / grid.cells[2].name / "run.json").unlink()
    end(tmp_path / grid.cells[3].name, 75)
    with (tmp_path / grid.cells[3].name / "metrics.csv").open("a") as file:
        file.write("8,9,0")  # a row that is not complete
    write(cells(grid, sight(grid, tmp_path)), tmp_path / "sweep.csv")
    lines = (tmp_path / "sweep.csv").read_text().splitlines()
    assert (
        lines[0]
        == "name,topology,seed,bits,status,round,accuracy_mean,accuracy_min,payload_bytes,seconds"
    )
    assert lines[1] == '"topology=ring,seed=0,bits=none",ring,0,none,done,4,0.10000,0.05,1000,1'
    assert lines[2] == '"topology=ring,seed=0,bits=4",ring,0,4,diverged,4,0.20000,0.1,2000,2'
    assert lines[3].split(",")[6:8] == ["waiting", "4"]
    assert lines[4] == '"topology=ring,seed=1,bits=4",ring,1,4,stopped,4,0.40000,0.2,4000,4'
    assert len(lines) == 13


def test_columns_of_some_cells_are_empty_in_others(tmp_path: Path) -> None:
    grid = swept(tmp_path, "seed = [0, 1]\n")
    (tmp_path / "seed=0/metrics.csv").unlink()
    end(tmp_path / "seed=0", None)
    (tmp_path / "seed=1/metrics.csv").write_text("round,seconds,more\n4,1,7\n")
    end(tmp_path / "seed=1", 0)
    table = cells(grid, sight(grid, tmp_path))
    assert list(table) == ["name", "seed", "status", "round", "more", "seconds"]
    assert table["more"].isna().tolist() == [True, False]


def test_the_summary_has_means_and_deviations_over_seeds(tmp_path: Path) -> None:
    grid = swept(tmp_path, LISTS)
    end(tmp_path / "topology=ring,seed=2,bits=4", 3)
    for seed in (0, 1, 2):
        end(tmp_path / f"topology=complete,seed={seed},bits=none", None)
    found = summary(cells(grid, sight(grid, tmp_path)), group_fields(grid))
    assert list(found) == [
        "topology",
        "bits",
        "seeds",
        "of",
        "accuracy_mean",
        "accuracy_mean_deviation",
        "accuracy_min",
        "accuracy_min_deviation",
        "payload_bytes",
        "payload_bytes_deviation",
    ]
    assert found[["topology", "bits"]].to_numpy().tolist() == [
        ["ring", "none"], ["ring", "4"], ["complete", "none"], ["complete", "4"],
    ]  # fmt: skip
    assert found["seeds"].tolist() == [3, 2, 0, 3]
    assert found["of"].tolist() == [3, 3, 3, 3]
    for row, accuracies in ((0, (0.1, 0.3, 0.5)), (1, (0.2, 0.4)), (3, (0.8, 1.0, 1.2))):
        assert found["accuracy_mean"][row] == pytest.approx(statistics.mean(accuracies))
        assert found["accuracy_mean_deviation"][row] == pytest.approx(statistics.stdev(accuracies))
        assert found["accuracy_min"][row] == pytest.approx(statistics.mean(accuracies) / 2)
    assert found["accuracy_mean"].isna().tolist() == [False, False, True, False]
    shown = console_text(found, group_fields(grid))
    assert shown[1].split()[:5] == ["ring", "none", "3", "0.3000", "0.2000"]
    assert shown[2].split()[2:5] == ["2", "of", "3"]
    assert shown[3].split()[2:] == ["0", "of", "3", *"------"]


def console_text(found: pd.DataFrame, by: list[str]) -> list[str]:
    console = Console(width=200, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(terminal_table(found, by))
    return captured.get().splitlines()


def test_a_sweep_over_seeds_alone_has_one_group(tmp_path: Path) -> None:
    grid = swept(tmp_path, "seed = [0, 1]\n")
    found = summary(cells(grid, sight(grid, tmp_path)), group_fields(grid))
    assert found.to_dict("records")[0] | {"accuracy_mean_deviation": 0} == {
        "seeds": 2,
        "of": 2,
        "accuracy_mean": pytest.approx(0.15),
        "accuracy_mean_deviation": 0,
        "accuracy_min": pytest.approx(0.075),
        "accuracy_min_deviation": pytest.approx(statistics.stdev((0.05, 0.1))),
        "payload_bytes": 1500,
        "payload_bytes_deviation": pytest.approx(statistics.stdev((1000, 2000))),
    }
    assert console_text(found, [])[0].split()[:3] == ["seeds", "accuracy", "std"]


def test_rounds_are_averaged_where_cells_of_a_group_end_at_different_ones(tmp_path: Path) -> None:
    grid = swept(tmp_path, LISTS)
    last = tmp_path / "topology=ring,seed=2,bits=4"
    (last / "metrics.csv").write_text(ROWS.format(seconds=1, accuracy=1, worst=1, payload=1))
    with (last / "metrics.csv").open("a") as file:
        file.write("10,2,0.9,0.8,20000\n")
    end(last, 0)
    found = summary(cells(grid, sight(grid, tmp_path)), group_fields(grid))
    assert found["round"].tolist() == [4, 6, 4, 4]
    assert found["round_deviation"].tolist() == [0, pytest.approx(12**0.5), 0, 0]
    shown = console_text(found, group_fields(grid))
    assert shown[0].split()[-2:] == ["round", "std"]
    assert shown[2].split()[-2:] == ["6.0", "3.5"]
    end(last, None)  # the others of its group end at one round
    assert "round" not in summary(cells(grid, sight(grid, tmp_path)), group_fields(grid))


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    grid = swept(tmp_path, "bits = [4, 8]\n")
    found = summary(cells(grid, sight(grid, tmp_path)), group_fields(grid))
    assert found["accuracy_mean_deviation"].isna().all()
    assert "std" not in console_text(found, ["bits"])[0]


def test_without_accuracy_the_loss_is_averaged(tmp_path: Path) -> None:
    grid = swept(tmp_path, "seed = [0, 1]\n")
    for seed, loss in ((0, 2.0), (1, 4.0)):
        text = f"round,train_loss,accuracy_mean,accuracy_min,payload_bytes\n0,{loss},nan,nan,10\n"
        (tmp_path / f"seed={seed}/metrics.csv").write_text(text)
        end(tmp_path / f"seed={seed}", 0)
    found = summary(cells(grid, sight(grid, tmp_path)), [])
    assert found["train_loss"].tolist() == [3.0]
    assert "accuracy_mean" not in found
    assert console_text(found, [])[0].split() == ["seeds", "loss", "std", "payload"]


def test_a_sweep_without_runs_has_a_table_and_no_curves(tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text("peers = 4\n[sweep]\nseed = [0, 1]\n")
    grid = read(tmp_path / "grid.toml", 1)
    sweep_folder.write(tmp_path / "out", grid.cells, grid.text)
    table = cells(grid, sight(grid, tmp_path / "out"))
    assert table["status"].tolist() == ["waiting", "waiting"]
    assert summary(table, [])[["seeds", "of"]].to_numpy().tolist() == [[0, 2]]
    assert curves(grid, sight(grid, tmp_path / "out")).empty


def test_curves_are_those_of_finished_cells(tmp_path: Path) -> None:
    grid = swept(tmp_path, LISTS)
    end(tmp_path / grid.cells[0].name, None)
    rows = curves(grid, sight(grid, tmp_path))
    assert len(rows) == 2 * 11
    assert grid.cells[0].name not in set(rows["cell"])
    first = rows[rows["cell"] == grid.cells[1].name]
    assert first[["topology", "seed", "bits"]].drop_duplicates().to_numpy().tolist() == [
        ["ring", "0", "4"]
    ]
    assert first["accuracy_mean"].tolist() == [0.1, 0.2]


@pytest.mark.parametrize("width", [200, 80, 60])
def test_a_narrow_terminal_has_all_labels(width: int) -> None:
    labels = {"topology": "clustered:between=0.015625", "partition": "dirichlet:alpha=0.0078125"}
    means = {"accuracy_mean": 0.9, "accuracy_min": 0.8, "payload_bytes": 12345678}
    figures = {
        column: value
        for name, mean in means.items()
        for column, value in ((name, mean), (f"{name}_deviation", 0.01))
    }
    found = pd.DataFrame([{**labels, "bits": "4", "seeds": 3, "of": 5, **figures}])
    console = Console(width=width)
    with console.capture() as captured:
        print_table(console, terminal_table(found, [*labels, "bits"]), 4, "summary.csv")
    head, *lines = captured.get().splitlines()
    rows = [line for line in lines if not line.startswith("no room")]
    assert max(map(len, (head, *rows))) <= width
    assert head.split()[:4] == ["topology", "partition", "bits", "seeds"]
    split = head.index("partition"), head.index("bits")
    assert "".join(line[: split[0]].strip() for line in rows) == labels["topology"]
    assert "".join(line[slice(*split)].strip() for line in rows) == labels["partition"]
    assert rows[0].split()[2:6] == ["4", "3", "of", "5"]
    measures = ["accuracy", "worst peer", "payload"]
    present = [name for name in measures if name in head]
    assert present
    assert head.count("std") in (len(present), 0)  # a mean has its deviation beside it
    assert "0.9000" in rows[0]
    if width == 200:
        assert (present, rows) == (measures, lines)
    else:
        assert lines[-1].endswith(": all columns are in summary.csv")
        assert [name for name in measures if name not in lines[-1]] == present
        assert len(present) < 3


def test_many_labels_leave_room_for_the_first_figure() -> None:
    names = [f"setting{k}" for k in range(6)]
    figures = {"seeds": 3, "of": 5, "accuracy_mean": 0.9, "accuracy_mean_deviation": math.nan}
    found = pd.DataFrame([{**dict.fromkeys(names, "spec:option=0.015625"), **figures}])
    console = Console(width=80)
    with console.capture() as captured:
        print_table(console, terminal_table(found, names), 7, "summary.csv")
    head, *rows = captured.get().splitlines()
    assert head.split() == [*names, "seeds", "accuracy"]
    assert rows[0].split()[-4:] == ["3", "of", "5", "0.9000"]
    assert "".join(row[:9].strip() for row in rows) == "spec:option=0.015625"
