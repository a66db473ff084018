"""`run_grid` returns the rows of all cells, keeps finished ones, and refuses bad grids."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx
import numpy as np
import pandas as pd
import pytest

import dfl
import dfl.reporting.simulate
from dfl.algorithms import ALGORITHMS
from dfl.algorithms.gossip.dfedavgm import DFedAvgM
from dfl.core.errors import InputError, Suspended
from dfl.robust.aggregators import Aggregate, Updates
from dfl.store import manifest
from dfl.sweep import Cell, combinations, run_grid, runner, scheduler
from dfl.sweep.live_page import LivePage
from dfl.sweep.status import DAMAGED, DONE, read_state
from dfl.training.schedules import SCHEDULES
from tests.support.launched import here
from tests.support.sweeping import ROOT

SETTINGS: dict[str, Any] = {
    "peers": 3,
    "rounds": 2,
    "eval_every": 1,
    "model": "softmax",
    "examples_per_peer": 20,
}


def cells(*seeds: int, **changes: Any) -> tuple[Cell, ...]:
    return combinations(SETTINGS | changes, {"seed": seeds})


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the runs that are simulated in this process."""
    seeds: list[int] = []
    simulate = dfl.reporting.simulate.simulate

    def recording(run: dfl.Run) -> Iterator[dict[str, float]]:
        seeds.append(run.seed)
        return simulate(run)

    monkeypatch.setattr("dfl.reporting.simulate.simulate", recording)
    return seeds


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Have every run in this process raise an error."""

    def fail(run: dfl.Run) -> Iterator[dict[str, float]]:
        raise error

    monkeypatch.setattr("dfl.reporting.simulate.simulate", fail)


@pytest.fixture
def fake_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(scheduler, "PAUSE", 0.02)
    monkeypatch.setattr(
        scheduler, "command", lambda folder: ["-m", "tests.support.fake_cell", str(folder), "0.05"]
    )


def test_rows_in_process_are_those_of_the_runs(tmp_path: Path) -> None:
    grid = combinations(SETTINGS, {"seed": [0, 1], "bits": ["none", 4]})
    rows = run_grid(grid, tmp_path / "out", in_process=True)
    assert rows["seed"].tolist() == [0] * 6 + [1] * 6
    assert rows["round"].tolist() == [0, 1, 2] * 4
    for cell in grid:
        own = rows[(rows["seed"] == cell.run.seed) & (rows["bits"].isna() == (not cell.run.bits))]
        expected = pd.DataFrame(dfl.simulate(cell.run))
        for name in ("accuracy_mean", "train_loss", "consensus_distance", "payload_bytes"):
            assert own[name].tolist() == pytest.approx(expected[name].tolist(), rel=1e-14)
    loaded = dfl.load(tmp_path / "out" / "seed=0,bits=none")
    assert loaded.rows["round"].tolist() == [0, 1, 2]
    assert loaded.run.seed == 0


@pytest.mark.slow
def test_launches_give_the_same_rows(tmp_path: Path) -> None:
    grid = cells(0, 1)
    here = run_grid(grid, tmp_path / "here", in_process=True)
    launched = run_grid(grid, tmp_path / "launched", jobs=2, keep_models=False)
    clocks = ["seconds"]
    pd.testing.assert_frame_equal(
        here.drop(columns=clocks), launched.drop(columns=clocks), check_exact=True
    )
    assert not list(tmp_path.glob("*/*/state.safetensors"))
    assert read_state(tmp_path / "launched/seed=0").status == "done"
    assert manifest.damage(tmp_path / "launched/seed=0") == ""


def test_finished_cells_are_not_run_again(tmp_path: Path, simulated: list[int]) -> None:
    first = run_grid(cells(0), tmp_path, in_process=True)
    rows = run_grid(cells(0, 1), tmp_path, in_process=True)
    assert simulated == [0, 1]
    pd.testing.assert_frame_equal(rows[rows["seed"] == 0], first)
    assert len(run_grid(cells(1), tmp_path, in_process=True)) == 3
    moved = run_grid(cells(0, data_dir=str(tmp_path)), tmp_path, in_process=True)
    pd.testing.assert_frame_equal(moved, first)
    assert simulated == [0, 1]


def test_an_interrupted_cell_is_run_again(tmp_path: Path, simulated: list[int]) -> None:
    run_grid(cells(0), tmp_path, in_process=True)
    (tmp_path / "seed=0/run.json").unlink()
    run_grid(cells(0), tmp_path, in_process=True)
    assert simulated == [0, 0]


def own_cells(scale: float = 1.0) -> tuple[Cell, ...]:
    """Two methods, of which one is an object, on a graph and data of the caller."""
    x = scale * np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    y = (x[:, 0] > 0).astype(int)
    settings = SETTINGS | {
        "peers": 4,
        "topology": nx.cycle_graph(4),
        "dataset": ((x[:48], y[:48]), (x[48:], y[48:])),
        "examples_per_peer": 10,
    }
    return combinations(settings, {"algorithm": ["dfedavgm", DFedAvgM()], "seed": [0]})


def test_cells_with_objects_run_in_process(tmp_path: Path, simulated: list[int]) -> None:
    grid = own_cells()
    rows = run_grid(grid, tmp_path, in_process=True)
    of_name, of_object = (part for _, part in rows.groupby("algorithm", sort=False))
    assert of_object["algorithm"].unique().tolist() == ["own:DFedAvgM()"]
    assert of_name["train_loss"].tolist() == of_object["train_loss"].tolist()
    assert simulated == [0, 0]
    pd.testing.assert_frame_equal(run_grid(own_cells(), tmp_path, in_process=True), rows)
    assert simulated == [0, 0]
    run_grid(own_cells(scale=2), tmp_path, in_process=True)
    assert simulated == [0] * 4


NET = """
from torch import nn
def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, bias={bias}))
"""
"""A model file."""


def test_a_cell_runs_again_with_another_model_file(tmp_path: Path, simulated: list[int]) -> None:
    net = tmp_path / "net.py"
    net.write_text(NET.format(bias=True))
    grid = cells(0, model=f"{net}:make")
    for _ in range(2):
        run_grid(grid, tmp_path / "out", in_process=True)
    assert simulated == [0]
    net.write_text(NET.format(bias=False))
    run_grid(grid, tmp_path / "out", in_process=True)
    assert simulated == [0, 0]


def test_a_cell_that_is_damaged_while_others_run_keeps_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its run.json would otherwise vouch for the damaged file."""
    grid, folder = cells(0, 1), tmp_path / "grid"
    with here():
        run_grid(grid[:1], folder)
    done = folder / grid[0].name
    run_here = runner._run_here

    def damaging(page: LivePage, left: Sequence[Cell]) -> None:
        (done / "metrics.csv").write_text("round,accuracy_mean\n0,1\n")
        run_here(page, left)

    monkeypatch.setattr(runner, "_run_here", damaging)
    run_grid(grid, folder, in_process=True, keep_models=False)
    assert read_state(done).status == DAMAGED
    assert (done / "state.safetensors").exists()
    assert read_state(folder / grid[1].name).status == DONE


@pytest.mark.slow
def test_a_launched_cell_with_another_model_file_is_refused(tmp_path: Path) -> None:
    net = tmp_path / "net.py"
    net.write_text(NET.format(bias=True))
    run_grid(cells(0, model=f"{net}:make"), tmp_path / "out")
    net.write_text(NET.format(bias=False))
    assert read_state(tmp_path / "out/seed=0").status == "changed"
    with pytest.raises(InputError, match=r"seed=0: the file of --model .* is not the one"):
        run_grid(cells(0, 1, model=f"{net}:make"), tmp_path / "out")


def test_launches_with_objects_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"topology, dataset.*in_process"):
        run_grid(own_cells(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_graph_gives_the_peers_of_combinations() -> None:
    settings = {"topology": nx.cycle_graph(5), "rounds": 1}
    assert [cell.run.peers for cell in combinations(settings, {"seed": [0]})] == [5]


def test_graphs_that_vary_give_the_peers_of_combinations() -> None:
    graphs = [nx.path_graph(6), nx.path_graph(5)]
    assert [cell.run.peers for cell in combinations({"rounds": 1}, {"topology": graphs})] == [6, 5]
    with pytest.raises(InputError, match="peers"):
        combinations({"rounds": 1}, {"topology": [nx.path_graph(6), "ring"]})


def test_objects_of_one_description_are_numbered_in_the_order_given() -> None:
    """A further object leaves the names of those before it as they are."""
    graphs = [nx.cycle_graph(6), nx.path_graph(6), nx.path_graph(5), nx.complete_graph(6)]
    lists = {"topology": graphs, "bits": ["none", 4], "algorithm": ["qdfedavgm"]}
    found = combinations({"rounds": 1}, lists)
    assert [cell.values["topology"] for cell in found[::2]] == [
        "own:Graph(6 nodes)", "own:Graph(6 nodes) 2", "own:Graph(5 nodes)", "own:Graph(6 nodes) 3",
    ]  # fmt: skip
    assert [cell.values["bits"] for cell in found] == [None, 4] * 4
    assert all(cell.run.topology is graphs[k // 2] for k, cell in enumerate(found))
    names = [cell.name for cell in found]
    assert len(set(names)) == 8
    fewer = combinations({"rounds": 1}, {**lists, "topology": graphs[:3]})
    assert [cell.name for cell in fewer] == names[:6]
    with pytest.raises(InputError, match="is the same run as"):
        combinations({"rounds": 1}, {"topology": [graphs[0], graphs[0]]})


def test_graphs_of_one_size_run_in_folders_of_their_own(tmp_path: Path) -> None:
    graphs = [nx.path_graph(4), nx.complete_graph(4)]
    settings = {name: value for name, value in SETTINGS.items() if name != "peers"}
    rows = run_grid(combinations(settings, {"topology": graphs}), tmp_path, in_process=True)
    chain, complete = (part for _, part in rows.groupby("topology", sort=False))
    payload = [part["payload_bytes"].iloc[-1] for part in (chain, complete)]
    assert payload[1] == 2 * payload[0]  # 12 and 6 directed edges


def test_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    run_grid(cells(0), tmp_path, in_process=True)
    with pytest.raises(InputError, match="seed=0 with another lr"):
        run_grid(cells(0, lr=0.01), tmp_path, in_process=True)


def test_labels_may_be_chosen_by_the_caller(tmp_path: Path) -> None:
    run = dfl.Run.from_dict(SETTINGS)
    values = {"method": "plain", "k": 3, "mix": (1, 2, 3), "pair": [1, 2]}
    rows = run_grid([Cell(values, run)], tmp_path, in_process=True)
    assert len(rows) == 3
    for name, value in values.items():
        assert rows[name].tolist() == [value] * 3


def test_a_diverged_cell_has_the_rows_before_its_divergence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = cells(0, lr=1e30, model="mlp")
    for _ in range(2):
        rows = run_grid(grid, tmp_path, in_process=True)
        assert 0 < len(rows) < 3
    assert capsys.readouterr().err.count("no longer finite") == 1
    state = read_state(tmp_path / "seed=0")
    assert state.status == "diverged"
    assert "no longer finite" in state.reason


@pytest.mark.parametrize(
    ("grid", "options", "message"),
    [
        ([Cell({"seed": 0}, dfl.Run(peers=3, attack="nonsense"))], {}, "cell seed=0: --attack"),
        ([dfl.Run(peers=3)], {}, "cells must be of class Cell.* not a value of type Run"),
        ([{"seed": 1}], {}, "cells must be of class Cell.* not {'seed': 1}"),
        ([Cell({}, dfl.Run(peers=3))], {}, "a cell needs values"),
        ([Cell({"../../a": 1}, dfl.Run(peers=3))], {}, r"the label '../../a' of a cell must be"),
        ([Cell({".a": 1}, dfl.Run(peers=3))], {}, r"the label '.a' of a cell must be"),
        ([Cell({1: 2}, dfl.Run(peers=3))], {}, "the label 1 of a cell must be"),  # type: ignore[dict-item]
        (
            [Cell({"train_loss": 1}, dfl.Run(peers=3))],
            {},
            "the label train_loss of a cell is a col",
        ),
        (
            [Cell({"payload_bytes": 1}, dfl.Run(peers=3))],
            {},
            "the label payload_bytes of a cell is a column",
        ),
        (
            [Cell({"accuracy_mean_deviation": 1}, dfl.Run(peers=3))],
            {},
            "the label accuracy_mean_deviation of a cell is a column",
        ),
        ([Cell({"a": 1}, dfl.Run(peers=n)) for n in (3, 4)], {}, "two cells are called a=1"),
        ([Cell({"a": 1}, dfl.Run(peers=3, out=Path("x")))], {}, "cell a=1: out"),
        ([Cell({"a": 1}, dfl.Run(peers=3))], {"in_process": True, "jobs": 2}, "in_process"),
        (
            [Cell({"a": 1}, dfl.Run(peers=3))],
            {"in_process": True, "keep_models": True},
            "in_process keeps no models",
        ),
        ([Cell({"a": 1}, dfl.Run(peers=3))], {"jobs": 0}, "jobs and ranks"),
    ],
)
def test_bad_grids_and_options_are_refused_before_any_run(
    tmp_path: Path, grid: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_grid(grid, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("fake_cells")
def test_a_failed_cell_is_raised_after_the_others_have_run(tmp_path: Path) -> None:
    grid = combinations({"rounds": 3, "model": "softmax"}, {"peers": [13, 4, 5]})
    with pytest.raises(InputError, match="peers=13: --topology torus with 13 peers"):
        run_grid(grid, tmp_path, jobs=2)
    assert [read_state(tmp_path / cell.name).status for cell in grid] == ["failed", "done", "done"]


def test_a_cell_in_process_that_cannot_be_read_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, OSError("plain"))
    with pytest.raises(InputError, match="seed=0: plain"):
        run_grid(cells(0), tmp_path, in_process=True)
    state = read_state(tmp_path / "seed=0")
    assert (state.status, "plain" in state.reason) == ("failed", True)


def test_a_cell_that_is_refused_with_other_objects_is_no_longer_done(tmp_path: Path) -> None:
    graphs = nx.cycle_graph(4), nx.empty_graph(4)
    given = [dfl.Run.from_dict({**SETTINGS, "peers": 4, "topology": each}) for each in graphs]
    run_grid([Cell({"k": 0}, given[0])], tmp_path, in_process=True)
    with pytest.raises(InputError, match="k=0"):
        run_grid([Cell({"k": 0}, given[1])], tmp_path, in_process=True)
    assert read_state(tmp_path / "k=0").status == "failed"


def test_a_failed_cell_in_process_is_raised_after_the_others(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    grid = [
        Cell({"k": k}, dfl.Run.from_dict({**SETTINGS, **more}))
        for k, more in enumerate([{"dataset": "mnist", "data_dir": missing}, {}])
    ]
    with pytest.raises(InputError, match=r"k=0: .*none"):
        run_grid(grid, tmp_path / "out", in_process=True)
    states = [read_state(tmp_path / "out" / cell.name) for cell in grid]
    assert [state.status for state in states] == ["failed", "done"]
    assert "none" in states[0].reason


def test_other_errors_of_a_cell_in_process_do_not_stop_the_others(tmp_path: Path) -> None:
    """The error of an object of the caller is the cause of the one that is raised at the end."""

    def wrong(updates: Updates) -> Aggregate:
        if np.abs(updates.rows).max() > 1e-6:
            raise ArithmeticError("does not\nconverge")
        return Aggregate(updates.mix(updates.weights))

    settings = SETTINGS | {"algorithm": "fedavg"}
    grid = combinations(settings, {"aggregator": [wrong, "median"], "seed": [0, 1]})
    with pytest.raises(InputError, match=r"does not converge \(1 more cells failed\)$") as raised:
        run_grid(grid, tmp_path, in_process=True)
    assert isinstance(raised.value.__cause__, ArithmeticError)
    states = [read_state(tmp_path / cell.name) for cell in grid]
    assert [state.status for state in states] == ["failed", "failed", "done", "done"]
    assert "does not converge" in states[1].reason
    log = (tmp_path / grid[0].name / "output.log").read_text()
    assert log.startswith("Traceback")
    assert "in wrong" in log


@pytest.mark.usefixtures("fake_cells")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Suspended)]
)
def test_a_signal_stops_the_cells_and_the_call_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[BaseException]
) -> None:
    grid = cells(0, 1, rounds=5)
    start = scheduler.Scheduler._start_waiting

    def start_and_stop(*given: Any) -> None:
        start(*given)
        signal.raise_signal(number)

    with monkeypatch.context() as context:
        context.setattr(scheduler.Scheduler, "_start_waiting", start_and_stop)
        with pytest.raises(error):
            run_grid(grid, tmp_path, jobs=1)
    rows = run_grid(grid, tmp_path, jobs=2)
    assert rows["round"].tolist() == [0, 1, 2, 3, 4, 5] * 2


def test_combinations_take_any_iterable_except_strings_and_mappings() -> None:
    grid = combinations({"peers": 3}, {"seed": range(2), "lr": (x for x in (0.1, 0.2))})
    assert [cell.name for cell in grid] == [
        f"seed={seed},lr={lr}" for seed in (0, 1) for lr in (0.1, 0.2)
    ]
    for wrong in ("ring", {"ring": 1}, 3, ()):
        with pytest.raises(InputError, match="topology must be a list"):
            combinations({"peers": 3}, {"topology": wrong})  # type: ignore[dict-item]


def test_what_a_cell_in_process_does_not_keep_is_refused(tmp_path: Path) -> None:
    run_grid([Cell({"seed": 0}, dfl.Run.from_dict(SETTINGS))], tmp_path, in_process=True)
    result = dfl.load(tmp_path / "seed=0")
    reads: dict[str, list[Callable[[], object]]] = {
        "models": [lambda: result.model(0), result.mean_model],
        "state.safetensors": [lambda: result.state],
        "peers.csv": [lambda: result.peers],
        "history": [lambda: result.history],
    }
    for name, each in reads.items():
        for read in each:
            with pytest.raises(InputError, match=f"seed=0 has no {name}: run_grid ran it in_pro"):
                read()


def test_names_that_only_this_process_knows_are_refused_for_launches(tmp_path: Path) -> None:
    def halved(t: int, rounds: int) -> float:
        return 0.5

    @dataclass(frozen=True, kw_only=True)
    class Renamed(DFedAvgM):
        pass

    with ALGORITHMS.replaced(), SCHEDULES.replaced():
        ALGORITHMS.register("renamed")(Renamed)
        SCHEDULES.register("halved")(halved)
        grid = combinations(SETTINGS, {"algorithm": ["dfedavgm", "renamed"], "seed": [0]})
        with pytest.raises(InputError) as caught:
            run_grid(grid, tmp_path / "out")
        assert str(caught.value).startswith(
            f"cell {grid[1].name}: --algorithm renamed was registered in this process"
        )
        assert "in_process=True" in str(caught.value)
        with pytest.raises(InputError, match="--lr-schedule halved was registered in this process"):
            run_grid(cells(0, lr_schedule="halved"), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert len(run_grid(grid, tmp_path / "here", in_process=True)) == 6


def test_a_label_with_the_name_of_a_method_s_column_is_refused(tmp_path: Path) -> None:
    run = dfl.Run.from_dict(SETTINGS | {"faults": "link_loss:p=0.5"})
    with pytest.raises(InputError, match=r"the label messages_lost of cell .* is a column"):
        run_grid([Cell({"messages_lost": 1}, run)], tmp_path, in_process=True)
