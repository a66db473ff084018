"""Averaging on graphs, and `python -m topologies`: its table, its figure, bad input."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from topologies import MIXINGS, TOPOLOGIES, WeightedGraph, build
from topologies.__main__ import main
from topologies.consensus import degree, disagreement, messages_per_round, rounds_until


def network(name: str, peers: int, mixing: str = "metropolis", **options: int) -> WeightedGraph:
    graph = partial(TOPOLOGIES[name], **options)
    return build(graph, MIXINGS[mixing], peers, np.random.default_rng(0))


def test_disagreement_shrinks_by_the_second_eigenvalue() -> None:
    found = disagreement(ring := network("ring", 16), 400)
    assert found[0] == 1
    assert found[400] / found[399] == pytest.approx(ring.spectrum.second)


@pytest.mark.parametrize(("name", "rounds"), [("complete", 1), ("one_peer_hypercube", 4)])
def test_exact_graphs_end_after_a_period(name: str, rounds: int) -> None:
    assert rounds_until(disagreement(network(name, 16), 10), 1e-12) == rounds


def test_push_sum_agrees_where_only_columns_sum_to_one() -> None:
    net = network("directed_random", 20, "out_degree", k=3)
    assert not net.rows_sum
    assert disagreement(net, 200)[-1] < 1e-12


def test_one_peer_agrees_with_itself() -> None:
    assert rounds_until(disagreement(network("ring", 1), 3), 1e-3) == 0
    assert rounds_until(np.array([1.0, 0.1, 0.01]), 1e-3) is None
    assert rounds_until(np.array([1.0, 0.1, 0.2, 0.01]), 0.1) == 3


def test_messages_and_degrees_are_those_of_a_round() -> None:
    assert (messages_per_round(network("star", 5)), degree(network("star", 5))) == (8, 4)
    one = network("one_peer_exponential", 12)
    assert (messages_per_round(one), degree(one)) == (12, 1)
    assert messages_per_round(network("random_matching", 7)) == 6


def test_the_command_prints_a_row_for_every_graph_and_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rounds.png"
    given = ["ring", "base_graph:k=1", "--peers", "16", "25", "--figure", str(path)]
    assert main(given) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:4] for row in rows[1:]] == [
        ["ring", "16", "2", "32"],
        ["ring", "25", "2", "50"],
        ["base_graph:k=1", "16", "1", "16"],
        ["base_graph:k=1", "25", "1", "24"],
    ]
    assert rows[1][4] == "0.05075"
    assert [row[-1] for row in rows[3:]] == ["4", "9"]
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rign"], "rign with --peers 16: unknown 'rign'"),
        (["hypercube", "--peers", "12"], "hypercube with --peers 12"),
        ([], "GRAPH"),
        (["ring", "--peers", "many"], "--peers: invalid int value: 'many'"),
        (["ring", "--colour", "red"], "--colour red"),
        (["equitopo:m=10000000000"], "equitopo of 16 peers has 320,000,000,000 directed edges"),
        (["ring", "--peers", "0"], "--peers 0: peers must be"),
        (["ring", "--mixing", "metro"], "--mixing: unknown 'metro'"),
        (["ring", "--seed", "-1"], "--seed must be at least 0, not -1"),
        (["regular:k=x"], "k must be int, not 'x'"),
        (["equitopo:directed=maybe"], "directed must be bool, not 'maybe'"),
        (["d_cliques"], "labels"),
        (
            ["d_cliques:between=star"],
            "between must be one of ring, fractal, small_world, complete, not 'star'",
        ),
        (["ring", "--figure", "no/folder/f.png"], "no/folder/f.png"),
        (["ring", "--figure", "f.xyz"], "f.xyz"),
        (["ring", "--figure", "f"], "--figure f"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("topologies: ")
    assert message in line
