"""`until`: a run stops at a goal. The costs of a server are counted and shown."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.evaluation.goals import Goal, reached
from dfl.evaluation.metrics import rounds_to
from dfl.reporting.text import size
from tests.conftest import Command
from tests.reporting.callbacks.test_report import small
from tests.reporting.callbacks.test_terminal import dry, shown

MEAN = float(np.full(100, 0.99).mean())
"""The mean of 100 accuracies of 0.99, which rounding makes smaller."""


def rows(**settings: Any) -> list[dict[str, float]]:
    return list(
        dfl.simulate(small(**{"rounds": 30, "eval_every": 1, "examples_per_peer": 100, **settings}))
    )


@pytest.mark.parametrize(
    ("until", "column", "sign"),
    [
        ("accuracy=0.8", "accuracy_mean", 1),
        ("accuracy_min=0.7", "accuracy_min", 1),
        ("train_loss=0.5", "train_loss", -1),
    ],
)
def test_a_run_stops_at_the_first_evaluation_that_reaches_the_goal(
    until: str, column: str, sign: int
) -> None:
    wanted = float(until.partition("=")[2])
    stopped = rows(until=until)
    assert sign * stopped[-1][column] >= sign * wanted
    assert all(sign * row[column] < sign * wanted for row in stopped[:-1])
    whole = rows()
    assert len(stopped) < len(whole)
    for row, expected in zip(stopped, whole, strict=False):
        assert {**row, "seconds": 0} == {**expected, "seconds": 0}


def test_round_0_does_not_reach_a_goal() -> None:
    """All peers start from the same model, at a consensus distance of 0."""
    assert len(rows(until="consensus_distance=0.001", rounds=2)) == 3


def test_a_goal_that_is_not_reached_does_not_stop_the_run() -> None:
    assert rows(until="accuracy=1", rounds=3)[-1]["round"] == 3


@pytest.mark.parametrize(
    ("figure", "at_least", "expected"),
    [
        (0.98999, True, False),
        (MEAN, True, True),
        (0.99, True, True),
        (0.991, True, True),
        (0.99001, False, False),
        (0.99 + (0.99 - MEAN), False, True),
        (0.99, False, True),
        (0.98, False, True),
        (math.nan, True, False),
        (math.nan, False, False),
    ],
)
def test_a_figure_reaches_a_goal_that_only_rounding_keeps_it_from(
    figure: float, at_least: bool, expected: bool
) -> None:
    assert MEAN < 0.99
    assert reached({"x": figure}, Goal("x", 0.99, at_least)) == expected


def test_rounding_is_relative_to_the_goal() -> None:
    assert not reached({"x": 5e-13}, Goal("x", 1e-13, at_least=False))
    assert reached({"x": -0.5 + 1e-13}, Goal("x", -0.5, at_least=False))
    assert math.isnan(rounds_to([0, 10], [0.0, 5e-14], 1e-13))


@pytest.mark.usefixtures("without_figures")
def test_a_run_that_reached_its_goal_is_complete(tmp_path: Path) -> None:
    stopped = rows(until="accuracy=0.8", out=tmp_path / "run")
    done = dfl.load(tmp_path / "run")
    assert done.record["ending"] == "finished"
    assert len(done.rows) == len(stopped)
    assert done.peers["accuracy"].mean() == pytest.approx(stopped[-1]["accuracy_mean"])
    assert stopped[-2]["round"] < done.rounds_to(0.8) <= stopped[-1]["round"]
    assert math.isnan(done.rounds_to(0.999))
    assert done.state


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("accuracy", "--until must be written FIGURE=VALUE, as accuracy=0.97, not 'accuracy'"),
        (
            "acuracy=0.9",
            "--until: unknown figure 'acuracy' (did you mean accuracy?); choose from accuracy, ",
        ),
        ("accuracy=97", "--until accuracy must be from 0 to 1, not 97.0"),
        ("accuracy_min=-0.1", "--until accuracy_min must be from 0 to 1, not -0.1"),
        ("consensus_distance=-1", "--until consensus_distance must be 0 or more, not -1.0"),
        ("accuracy=high", "--until accuracy must be a number, not 'high'"),
        (
            "validation_accuracy=0.9",
            "--until validation_accuracy=0.9 needs validation examples",
        ),
    ],
)
def test_an_invalid_goal_is_refused(dfl_run: Command, value: str, line: str) -> None:
    assert dfl_run.refused("--until", value).startswith(line)


@pytest.mark.parametrize(
    ("accuracy", "target", "expected"),
    [
        ([0.1, 0.5, 0.9], 0.7, 15.0),
        ([0.1, 0.8, 0.2, 0.9], 0.85, 25.0),  # the best so far counts
        ([0.1, 0.8, 0.2, 0.9], 0.8, 10.0),
        ([0.5, 0.9], 0.4, 0.0),
        ([0.5, 0.5, 0.6], 0.5, 0.0),
        ([math.nan, 0.5, math.nan, 0.9], 0.7, 20.0),
        ([0.1, 0.9 - 1e-13], 0.9, 10.0),  # but for rounding
        ([0.1, 0.9 - 1e-13, 0.5, 0.92], 0.9, 10.0),
        ([0.1, 0.9 - 1e-9, 0.9], 0.9, 20.0),
    ],
)
def test_rounds_to_a_target(accuracy: list[float], target: float, expected: float) -> None:
    assert rounds_to([0, 10, 20, 30][: len(accuracy)], accuracy, target) == pytest.approx(expected)
    assert math.isnan(rounds_to([0, 10, 20, 30][: len(accuracy)], accuracy, 0.95))
    assert math.isnan(rounds_to([0, 10], [math.nan, math.nan], 0.5))


@pytest.mark.usefixtures("without_figures")
def test_upload_and_download_are_counted_separately(tmp_path: Path) -> None:
    """Three rounds of two of four clients, in messages of 4 bits: by the formulas."""
    run = small(algorithm="fedavg:fraction=0.5", bits=4, out=tmp_path / "run")
    *_, last = dfl.simulate(run)
    d = dfl.load(run.out or "").record["model"]["parameters"]
    up, down = 3 * 2 * (-(-4 * d // 8) + 4), 3 * 2 * 4 * d
    assert (last["upload_bytes"], last["download_bytes"], last["payload_bytes"]) == (
        up,
        down,
        up + down,
    )
    assert last["parameters_k_plus_m"] == 3 * (4 + 2) * d
    peers = pd.read_csv(tmp_path / "run" / "peers.csv")
    assert (peers["payload_bytes_sent"].sum(), peers["payload_bytes_received"].sum()) == (up, down)


def test_a_server_is_shown_instead_of_a_graph(tmp_path: Path) -> None:
    run = small(
        algorithm="fedavg:fraction=0.5",
        attack="alie:peers=1",
        aggregator="median",
        out=tmp_path / "run",
    )
    text = shown(run)
    assert "server     sends 2 models per round" in text
    assert "aggregator median" in text
    assert "attack     alie:peers=1: 1 peer of 4" in text
    assert "6.16 kB per round" in text  # two rows down and two up, of 385 parameters
    assert "mixing" not in text
    drawn = {file.stem for file in (tmp_path / "run" / "figures").iterdir()}
    assert drawn == {"accuracy_by_round", "accuracy_by_bytes", "label_distribution"}
    done = dfl.load(tmp_path / "run")
    assert [len(value) for value in done.state.values()] == [1] * 4
    assert all(
        (a == b).all()
        for a, b in zip(done.model(3).parameters(), done.mean_model().parameters(), strict=True)
    )


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedsgd", "fedprox", "fltrust:root=10", "local_only", "pooled"]
)
def test_a_dry_run_shows_the_bytes_per_round(algorithm: str) -> None:
    """The bytes per round of the header are those of a run."""
    run = small(algorithm=algorithm, rounds=1)
    *_, last = dfl.simulate(run)
    text = dry(run)
    payload = size(last["payload_bytes"])
    sent = (
        f": {payload} per round, {payload} in all" if last["payload_bytes"] else "messages   none"
    )
    assert sent in text
    assert ("server     none: no messages" in text) == (algorithm == "local_only")


def test_the_summary_of_a_run_with_a_server(tmp_path: Path) -> None:
    """One model has no best and no worst peer; trust, backdoor and the goal have a line each."""
    run = small(
        algorithm="fltrust:root=20",
        attack="backdoor:peers=1",
        rounds=30,
        eval_every=1,
        until="accuracy=0.2",
    )
    *_, last = dfl.simulate(run)
    lines = dict(line.split(maxsplit=1) for line in shown(run).splitlines())
    assert lines["until"] == "accuracy=0.2 reached"
    assert lines["accuracy"] == f"{last['accuracy_mean']:.4f} of the server's model"
    assert lines["backdoor"].startswith(f"{last['backdoor_success_mean']:.4f} of the examples")
    assert (
        lines["payload"]
        == f"{size(last['upload_bytes'])} up to the server, {size(last['download_bytes'])} down"
    )
    assert not {"best", "worst", "of", "consensus"} & set(lines)
    honest, attackers = (float(part.split()[0]) for part in lines["trust"].split(", "))
    assert 0 <= attackers <= 1
    assert 0 < honest <= 1
    assert "until      accuracy=1 not reached" in shown(small(until="accuracy=1"))
    best = next(
        line for line in shown(small(attack="sign_flip:peers=0+1+2")).splitlines() if "best" in line
    )
    assert best.endswith("peer 3")  # the other peers are attackers
