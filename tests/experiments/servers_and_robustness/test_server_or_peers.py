"""The experiment on servers and peers: its bytes, targets, grid, finding and figure."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.core.errors import InputError
from dfl.simulation.defaults import settle
from experiments import common
from experiments.messages_and_graphs.graphs import network
from experiments.servers_and_robustness import server_or_peers as experiment
from experiments.servers_and_robustness.server_or_peers import METHODS, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
CHOSEN = ("fedavg", "fedavg_quarter", "ring", "ring_4_bits", "local_only")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The experiment on digits: its folder and its output."""
    out = tmp_path_factory.mktemp("experiment")
    few = ["--dataset", "digits", "--seeds", "1", "--rounds", "4", "--every", "2"]
    targets = ["--low", "0.2", "--high", "0.5"]
    done = run_experiment(
        "servers_and_robustness.server_or_peers", out, *few, *targets, "--methods", *CHOSEN
    )
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(ran: tuple[Path, str]) -> None:
    out, printed = ran
    table = pd.read_csv(out / "table.csv")
    assert table["method"].tolist() == list(CHOSEN)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert "\nFinding: over 1 seeds and rounds 4 to 4" in printed


def test_the_numbers_are_those_of_the_runs(ran: tuple[Path, str]) -> None:
    out, _ = ran
    table = common.by_label(pd.read_csv(out / "table.csv"), ["method"])
    for name, row in table.items():
        cell = dfl.load(out / "cells" / f"method={name},seed=0")
        end, peers = cell.rows.iloc[-1], cell.peers
        assert row["accuracy"] == pytest.approx(end["accuracy_mean"], rel=1e-5)
        assert row["worst_peer"] == pytest.approx(end["accuracy_min"], rel=1e-5)
        assert row["mean_model"] == pytest.approx(end["accuracy_mean_model"], rel=1e-5)
        assert row["total_MB"] == pytest.approx(end["payload_bytes"] / 1e6, rel=1e-5)
        server = name.startswith("fedavg")
        heaviest = (
            end["upload_bytes"] + end["download_bytes"]
            if server
            else 2 * peers["payload_bytes_sent"].max()
        )
        assert row["busiest_MB"] == pytest.approx(heaviest / 1e6, rel=1e-5)
        assert row["rounds_to_0.2"] == pytest.approx(cell.rounds_to(0.2), rel=1e-5, nan_ok=True)


def test_bytes_are_those_of_the_models(ran: tuple[Path, str]) -> None:
    table = common.by_label(pd.read_csv(ran[0] / "table.csv"), ["method"])
    d, rounds = 4810, 4
    assert table["fedavg"]["busiest_MB"] == pytest.approx(16 * 2 * 4 * d * rounds / 1e6, rel=1e-5)
    assert table["fedavg_quarter"]["busiest_MB"] == pytest.approx(
        4 * 2 * 4 * d * rounds / 1e6, rel=1e-5
    )
    assert table["ring"]["busiest_MB"] == pytest.approx(2 * 2 * 4 * d * rounds / 1e6, rel=1e-5)
    assert table["ring"]["total_MB"] == pytest.approx(16 * 2 * 4 * d * rounds / 1e6, rel=1e-5)
    assert table["ring_4_bits"]["busiest_MB"] == pytest.approx(
        table["ring"]["busiest_MB"] / 8, rel=1e-2
    )
    assert table["local_only"]["busiest_MB"] == table["local_only"]["total_MB"] == 0


@pytest.mark.parametrize(
    "graph", sorted({str(m["topology"]) for m in METHODS.values() if "topology" in m})
)
def test_every_node_receives_as_much_as_it_sends_and_as_all_others(graph: str) -> None:
    weights = network(graph).weights
    assert len(weights) == 1  # in every round
    edges = (weights[0].toarray() != 0) & ~np.eye(common.PEERS, dtype=bool)
    assert len({*edges.sum(0).tolist(), *edges.sum(1).tolist()}) == 1


def test_all_train_alike() -> None:
    cells = experiment.grid(Options(seeds=2, rounds=7))
    assert [cell.values["seed"] for cell in cells] == [0] * len(METHODS) + [1] * len(METHODS)
    varied = {"algorithm", "topology", "bits"}  # all that methods may differ in
    for cell in cells:
        run = cell.run
        first = cells[0 if run.seed == 0 else len(METHODS)].run
        assert {
            f.name for f in fields(run) if getattr(run, f.name) != getattr(first, f.name)
        } <= varied
    assert {cell.run.momentum for cell in cells} == {0.9}
    assert all(settle(cell.run, 1).algorithm for cell in cells)


def curves() -> pd.DataFrame:
    """Two seeds of a method, with bytes that grow by 4 MB a round in all and by 1 MB at the busiest
    node.
    """
    accuracy = {0: [0.1, 0.4, 0.6], 1: [0.1, 0.6, 0.5]}
    rows = [
        {
            "seed": seed,
            "round": 5 * k,
            "accuracy_mean": value,
            "total_MB": 20.0 * k,
            "busiest_MB": 5.0 * k,
        }
        for seed, values in accuracy.items()
        for k, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_what_it_takes_to_a_target_is_a_mean_over_the_seeds() -> None:
    taken = experiment.to_target(curves(), 0.5)
    assert taken["rounds"] == pytest.approx((7.5 + 4) / 2)
    assert taken["total_MB"] == pytest.approx(4 * (7.5 + 4) / 2)
    assert taken["busiest_MB"] == pytest.approx((7.5 + 4) / 2)


def test_a_target_that_one_seed_misses_is_missed() -> None:
    rows = curves()
    rows.loc[rows["seed"] == 1, "accuracy_mean"] = 0.3
    assert np.isnan([*experiment.to_target(rows, 0.5).values()]).all()


def test_a_server_receives_uploads_and_sends_downloads() -> None:
    run = pd.DataFrame(
        {"round": [0, 5], "upload_bytes": [0.0, 30.0], "download_bytes": [0.0, 50.0]}
    )
    assert experiment.busiest(run, pd.Series([15, 15])).tolist() == [0, 80]


def test_a_peer_receives_as_much_as_it_sends() -> None:
    run = pd.DataFrame(
        {"round": [0, 5, 10], "upload_bytes": np.nan, "download_bytes": np.nan}
    )  # beside servers
    assert experiment.busiest(run, pd.Series([30, 40, 40])).tolist() == [0, 40, 80]
    assert experiment.busiest(run[["round"]], pd.Series([30, 40])).tolist() == [0, 40, 80]


def test_a_method_without_messages_has_no_bytes() -> None:
    run = pd.DataFrame({"round": [0, 5], "upload_bytes": [0, 0], "download_bytes": [0, 0]})
    assert experiment.busiest(run, pd.Series([0, 0])).tolist() == [0, 0]


def hand_made() -> pd.DataFrame:
    """A server that is quick, peers who are cheap, and one end."""
    nan = float("nan")
    return pd.DataFrame(
        {
            "method": ["fedavg", "ring", "pooled"], "accuracy": [0.9, 0.6, 0.97],
            "rounds_to_0.5": [5.0, 40.0, 1.0], "total_MB_to_0.5": [100.0, 800.0, 0.0],
            "busiest_MB_to_0.5": [100.0, 50.0, 0.0], "rounds_to_0.75": [20.0, nan, 2.0],
            "total_MB_to_0.75": [400.0, nan, 0.0], "busiest_MB_to_0.75": [400.0, nan, 0.0],
        }
    )  # fmt: skip


def test_the_finding_is_read_off_the_table() -> None:
    text = experiment.finding(hand_made(), Options())
    assert "accuracies are fedavg 0.900, ring 0.600, pooled 0.970." in text
    assert (
        "Megabytes to 0.5: in all fedavg 100.0, ring 800.0; "
        "at the busiest node ring 50.0, fedavg 100.0." in text
    )
    assert "Megabytes to 0.75 (ring NOT with every seed): in all fedavg 400.0;" in text
    assert "pooled 0.0" not in text  # which sends nothing


def test_a_target_that_no_method_reaches_is_named() -> None:
    table = hand_made().iloc[1:]
    assert experiment.finding(table, Options()).endswith(
        "No method with messages reaches 0.75 with every seed."
    )


def test_the_figure_has_a_look_for_every_method() -> None:
    rows = pd.concat([curves().assign(method=name) for name in METHODS], ignore_index=True)
    figure = experiment.draw(rows, Options())
    by_round, by_bytes, by_busiest = figure.axes
    lines = [line for line in by_round.lines if line.get_label() in experiment.NAMES.values()]
    assert [line.get_label() for line in lines] == [experiment.NAMES[name] for name in METHODS]
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == len(METHODS)
    sending = len(METHODS) - len(experiment.ENDS)
    for axes, grows in ((by_bytes, 4), (by_busiest, 1)):
        drawn = [
            np.asarray(line.get_xdata(), float)
            for line in axes.lines
            if len(np.asarray(line.get_xdata())) == 2
        ]
        assert sum(x.tolist() == [5 * grows, 10 * grows] for x in drawn) == sending
        assert "(MB)" in axes.get_xlabel()
        assert axes.get_xscale() == "log"


def test_the_figure_has_the_given_methods_only() -> None:
    rows = pd.concat(
        [curves().assign(method=name) for name in ("ring", "fedavg")], ignore_index=True
    )
    figure = experiment.draw(rows, Options(methods=("ring", "fedavg")))
    shown = [
        line.get_label()
        for line in figure.axes[0].lines
        if line.get_label() in experiment.NAMES.values()
    ]
    assert shown == ["DFedAvgM, ring", "FedAvg, all clients"]


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(
        InputError, match=r"--methods must be among fedavg, fedavg_quarter, .*, not gossip"
    ):
        Options(methods=("ring", "gossip"))


def test_the_published_table_has_every_method_and_bytes_that_add_up() -> None:
    table = pd.read_csv(ROOT / "experiments/results/server_or_peers/table.csv")
    assert table["method"].tolist() == list(METHODS)
    row = common.by_label(table, ["method"])
    model = 4 * 199_210 * 50 / 1e6  # bytes of a model, every round
    assert row["fedavg"]["busiest_MB"] == pytest.approx(32 * model, rel=1e-4)
    assert row["fedavg_quarter"]["busiest_MB"] == pytest.approx(8 * model, rel=1e-4)
    assert row["complete"]["busiest_MB"] == pytest.approx(30 * model, rel=1e-4)
    assert row["ring"]["busiest_MB"] == pytest.approx(4 * model, rel=1e-4)
    assert row["ring_4_bits"]["busiest_MB"] == pytest.approx(4 * model / 8, rel=1e-3)
    assert row["complete"]["accuracy"] == pytest.approx(
        row["fedavg"]["accuracy"], abs=2e-3
    )  # the same, in theory
