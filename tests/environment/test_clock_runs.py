"""Simulated time of a run: by its bytes and its steps, and the same on any number of ranks."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.comm.mpi import World
from dfl.comm.network import Network
from dfl.comm.plan import Arcs
from dfl.core.errors import InputError
from dfl.environment.link_models import LINK_MODELS, PRESETS
from dfl.reporting import plots
from dfl.simulation.prepare import prepare
from dfl.store.callbacks import COLUMNS
from tests.comm.test_transport import size
from tests.conftest import Command

FEW: dict[str, Any] = {
    "peers": 8,
    "examples_per_peer": 40,
    "model": "softmax",
    "rounds": 3,
    "eval_every": 1,
}
D = 650
"""Parameters of the model."""
STEP = 0.02 * 4
"""Seconds of the 4 local steps of 20 ms that 40 examples make."""
STEADY = "compute=constant,step_ms=20"


def rows(**settings: Any) -> list[dict[str, float]]:
    return list(dfl.simulate(dfl.Run(**{**FEW, **settings})))


def seconds(network: str, **settings: Any) -> list[float]:
    return [row["sim_seconds"] for row in rows(links=network, **settings)]


@pytest.mark.parametrize(
    ("topology", "degree"),
    [("ring", 2), ("exponential", 3), ("complete", 7), ("one_peer_exponential", 1)],
)
@pytest.mark.parametrize("bits", [None, 4, 1])
def test_equal_peers_take_the_time_of_steps_and_messages(
    topology: str, degree: int, bits: int | None
) -> None:
    """Rounds * (c + k B / rate) with the bytes that are sent, also on a changing graph."""
    found = seconds(f"uplink:mbps=0.08,{STEADY}", topology=topology, bits=bits)
    each = STEP + degree * size(bits, D, 256 if bits == 1 else 0) / 1e4
    assert found == pytest.approx([0, each, 2 * each, 3 * each])


def test_fewer_bits_take_proportionally_less_time() -> None:
    *_, whole = seconds("uplink:mbps=0.08")
    *_, few = seconds("uplink:mbps=0.08", bits=4)
    scales = 3 * 2 * 4 / 1e4  # four bytes a message
    assert few - scales == pytest.approx(whole / 8)


def test_different_messages_to_each_neighbour_take_the_same_time() -> None:
    plain, per_edge = (seconds("uplink", attack=attack) for attack in ("none", "dissensus"))
    assert plain == per_edge


def test_a_round_of_a_server_takes_broadcast_training_and_uploads() -> None:
    """It sends float32 and receives 4 bits; half of the peers are clients."""
    network = f"uplink:mbps=0.08,down_mbps=0.16,server_mbps=0.32,latency_ms=400,{STEADY}"
    found = seconds(network, algorithm="fedavg:fraction=0.5", bits=4)
    down = 4 * D
    up = size(4, D)
    line = 4e4  # bytes a second of the server
    own = 1e4  # bytes a second of a peer
    # Models leave the server one by one; the last peer to receive one is the last to send, and the
    # server's line is free by then.
    each = 4 * down / line + 0.2 + down / (2 * own) + STEP + up / own + 0.2 + up / line
    assert down / line > up / line
    assert found == pytest.approx([0, each, 2 * each, 3 * each])


def test_stragglers_of_fedprox_take_the_same_time() -> None:
    steady = f"uplink:{STEADY}"
    whole, less = (
        seconds(steady, algorithm=f"fedprox:stragglers={part}", local_epochs=3) for part in (0, 0.5)
    )
    assert whole == less


def test_a_server_waits_for_the_peer_with_most_steps() -> None:
    setting = prepare(
        dfl.Run(**{**FEW, "partition": "quantity:alpha=0.5", "local_epochs": 2}), World()
    )
    most = 2 * int(np.ceil(setting.task.examples.sizes / 10).max())
    network = "datacenter:compute=constant,step_ms=1000"
    found = seconds(network, partition="quantity:alpha=0.5", local_epochs=2, algorithm="fedavg")
    assert found[-1] == pytest.approx(3 * most, rel=0.01)
    assert most > 8


def test_fedsgd_takes_the_time_of_one_step() -> None:
    assert seconds("datacenter:compute=constant,step_ms=1000", algorithm="fedsgd")[
        -1
    ] == pytest.approx(3, rel=0.01)


def test_local_only_takes_the_time_of_its_steps() -> None:
    assert seconds(f"phone:{STEADY}", algorithm="local_only") == pytest.approx(
        [0, STEP, 2 * STEP, 3 * STEP]
    )


def test_sharing_a_part_of_a_model_takes_less_time() -> None:
    """All parameters for one round, and then the bias of the head."""
    found = seconds("uplink:mbps=0.08", share="*.bias", share_all_until="1")
    assert np.diff(found) == pytest.approx([2 * 4 * D / 1e4, 80 / 1e4, 80 / 1e4])


def test_a_clock_changes_nothing_else() -> None:
    plain, timed = (rows(links=network, bits=4) for network in ("none", f"phone:{STEADY}"))
    assert all(tuple(row)[: len(COLUMNS)] == COLUMNS and "sim_seconds" not in row for row in plain)
    assert all(tuple(row)[: len(COLUMNS) + 1] == (*COLUMNS, "sim_seconds") for row in timed)
    for row in (*plain, *timed):
        del row["seconds"]
        row.pop("sim_seconds", None)
    assert plain == timed


def test_measured_seconds_are_those_of_training() -> None:
    """Peers that train together share the seconds, others take their own, and none exceeds them."""
    for engine in ("batched", "loop"):
        begun = time.perf_counter()
        setting = prepare(
            dfl.Run(**{**FEW, "links": "datacenter:compute=measured", "engine": engine}), World()
        )
        clock = setting.network.clock
        train_seconds = setting.task.train_seconds
        assert clock is not None
        assert train_seconds is not None
        train(setting)
        assert (train_seconds > 0).all()
        assert train_seconds.sum() < time.perf_counter() - begun
        assert (np.ptp(train_seconds) == 0) == (engine == "batched")
        longest = train_seconds.max()
        clock.end_round()
        assert clock.seconds == longest
        assert not train_seconds.any()


def train(setting: Any) -> None:
    from dfl.training.sgd import sgd
    from tests.support.quadratic import states

    sgd(next(states(setting, 0)).x, setting.task, 0)


def test_mixed_lines_have_their_shares() -> None:
    setting = prepare(
        dfl.Run(**{**FEW, "peers": 20, "links": "mixed:phone=0.25,dsl=0.7,broadband=0.05"}),
        World(),
    )
    lines = connections_of(setting.network)
    known = {name: 8e-6 / kind().mbps for name, kind in PRESETS.items()}
    counts = {name: int((lines.up[:-1] == pace).sum()) for name, pace in known.items()}
    assert counts == {"phone": 5, "broadband": 1, "dsl": 14, "datacenter": 0}
    assert lines.down[:-1][lines.up[:-1] == known["dsl"]] == pytest.approx(8e-6 / 1.5)
    assert (lines.up[-1], lines.down[-1], lines.delay[-1]) == (0, 0, 0)
    again, other = (
        connections_of(prepare(replace(setting.run, seed=seed), World()).network) for seed in (0, 1)
    )
    assert np.array_equal(lines.up, again.up)
    assert not np.array_equal(lines.up, other.up)


def connections_of(network: Network) -> Any:
    assert network.clock is not None
    return network.clock.connections


def links(tmp_path: Path, change: Any = list, **settings: Any) -> dfl.Run:
    """Return a run on a file with figures of every edge, whose lines `change` alters."""
    run = dfl.Run(**{**FEW, "topology": "ring", **settings})
    weights = prepare(run, World()).network.schedule.weights
    pairs = sorted({(i, j) for w in weights for i, j in zip(*(Arcs.of(w)[:2]), strict=True)})
    lines = [
        "sender,receiver,mbps,latency_ms",
        *(f"{i},{j},{0.08 * (1 + j)},{i}" for i, j in pairs),
    ]
    (tmp_path / "links.csv").write_text("\n".join(change(lines)) + "\n")
    return replace(run, links=f"links:path={tmp_path / 'links.csv'}")


@pytest.mark.parametrize("topology", ["ring", "one_peer_exponential"])
def test_links_are_read_from_a_file(tmp_path: Path, topology: str) -> None:
    run = links(tmp_path, topology=topology, rounds=1)
    last = [row["sim_seconds"] for row in dfl.simulate(run)][-1]
    received = {"ring": [(1, 0), (7, 0), (2, 1)], "one_peer_exponential": [(0, 1), (7, 0)]}[
        topology
    ]
    times = [4 * D / (1e4 * (1 + j)) + i / 1e3 for i, j in received]
    assert last == pytest.approx(max(times))
    *_, short = dfl.simulate(
        links(
            tmp_path,
            lambda lines: ["\ufeff" + lines[1], *lines[2:], ""],
            topology=topology,
            rounds=1,
        )
    )
    assert short["sim_seconds"] == last  # without a header, with a byte-order mark


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda lines: [*lines, "0,3,8,1"], "links.csv, line 18: 0 to 3 is no edge of the graph"),
        (lambda lines: [*lines, "0,16,8,1"], "links.csv, line 18: 0 to 16 is no edge of the graph"),
        (lambda lines: [*lines, lines[1]], "links.csv, line 18: 0 to 1 is there already"),
        (lambda lines: lines[:-1], "links.csv has no line for 7 to 6, an edge of the graph"),
        (
            lambda lines: [*lines[:2], "0,7,fast,1", *lines[3:]],
            "line 3: mbps must be a number, not 'fast'",
        ),
        (
            lambda lines: [*lines[:2], "0,7,0,1", *lines[3:]],
            "line 3: mbps must be from 1e-06 to 1e+09, not 0",
        ),
        (
            lambda lines: [*lines[:2], "0,7,8,-1", *lines[3:]],
            "3: latency_ms must be from 0 to 1e+09, not -1",
        ),
        (
            lambda lines: [*lines[:2], "0.0,7,8,1", *lines[3:]],
            "line 3: sender must be a whole number, not '0.0'",
        ),
        (
            lambda lines: [*lines[:2], "0,7,8", *lines[3:]],
            "line 3 must be sender,receiver,mbps,latency_ms, not '0,7,8'",
        ),
        (lambda lines: ["\udcff"], "is no CSV file"),
    ],
)
def test_a_bad_file_of_links_is_refused(tmp_path: Path, change: Any, complaint: str) -> None:
    try:
        run = links(tmp_path, change)
    except UnicodeEncodeError:
        (tmp_path / "links.csv").write_bytes(b"\xff\xfe\x00")
        run = dfl.Run(**{**FEW, "links": f"links:path={tmp_path / 'links.csv'}"})
    with pytest.raises(InputError, match="--links links: ") as refused:
        prepare(run, World())
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("modem", "--links: unknown 'modem'"),
        ("uplink:speed=3", "--links uplink: unknown option 'speed'"),
        ("uplink:mbps=0", "--links uplink: mbps must be from 1e-06 to 1e+09, not 0.0"),
        (
            "uplink:down_mbps=-1",
            "--links uplink: down_mbps must be from 1e-06 to 1e+09, not -1.0",
        ),
        (
            "phone:server_mbps=0",
            "--links phone: server_mbps must be from 1e-06 to 1e+09, not 0.0",
        ),
        ("dsl:latency_ms=-1", "--links dsl: latency_ms must be from 0 to 1e+09, not -1.0"),
        (
            "uplink:compute=slow",
            "compute must be none, constant, lognormal or measured, not 'slow'",
        ),
        ("uplink:compute=constant", "--links uplink: compute=constant needs step_ms"),
        ("uplink:compute=lognormal,step_ms=3", "--links uplink: compute=lognormal needs sigma"),
        ("uplink:step_ms=3", "--links uplink: compute=none has no part for step_ms=3"),
        ("uplink:compute=measured,step_ms=3", "compute=measured has no part for step_ms"),
        (
            "uplink:compute=constant,step_ms=-3",
            "--links uplink: step_ms must be from 0 to 1e+09, not -3.0",
        ),
        ("mixed", "--links mixed: phone, broadband, dsl, datacenter must add up to 1, not to 0"),
        ("mixed:phone=0.5,dsl=0.6", "must add up to 1, not to 1.1"),
        ("mixed:phone=0.5,dsl=0.5000001", "must add up to 1, not to 1.0000001"),
        ("mixed:phone=1.5,dsl=-0.5", "--links mixed: phone must be from 0 to 1, not 1.5"),
        ("links:path=any.csv,step_ms=1", "--links links: compute=none has no part for step_ms=1"),
        (
            "links:path=/none/such",
            "--links links: path /none/such cannot be read (No such file or directory)",
        ),
    ],
)
def test_bad_link_models_are_refused(dfl_run: Command, spec: str, complaint: str) -> None:
    assert complaint in dfl_run.refused("--peers", "4", "--links", spec)


def test_link_models_without_a_part_in_the_method_are_refused(dfl_run: Command) -> None:
    pooled = dfl_run.refused("--peers", "4", "--algorithm", "pooled", "--links", "phone")
    assert pooled == "--links phone has no part in --algorithm pooled: leave it out"
    served = dfl_run.refused(
        "--peers", "4", "--algorithm", "fedavg", "--links", "links:path=any.csv"
    )
    assert "edges of a graph" in served


def test_the_terminal_prints_the_simulated_time(dfl_run: Command) -> None:
    ended = dfl_run(
        "--peers", "4", "--rounds", "2", "--model", "softmax", "--links", "uplink:mbps=0.08"
    )
    lines = dict(line.partition(" ")[::2] for line in ended.out.splitlines())
    assert lines["links"].strip() == "uplink:mbps=0.08"
    assert lines["time"].endswith("s, 1.04 s on the simulated links")
    slow = dfl_run(
        "--peers", "4", "--rounds", "2", "--model", "softmax", "--links", "uplink:mbps=0.00008"
    )
    assert "0:17:20 on the simulated links" in slow.out
    plain = dfl_run("--peers", "4", "--rounds", "2", "--model", "softmax")
    assert "links" not in plain.out


def test_a_figure_shows_accuracy_by_simulated_time() -> None:
    table = pd.DataFrame(rows(links="uplink"))
    axes = plots.accuracy_by_sim_seconds(table, "a run").axes[0]
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == table["sim_seconds"].tolist()
    assert "seconds" in axes.get_xlabel()
    peers = {"accuracy": np.ones(8), "train_loss": np.ones(8)}
    none = np.zeros((8, 0), np.int64)
    assert "accuracy_by_sim_seconds" in plots.figures(table, peers, (), none)
    assert "accuracy_by_sim_seconds" not in plots.figures(
        table.drop(columns="sim_seconds"), peers, (), none
    )


def test_every_link_model_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs/concepts/simulated-time.md").read_text()
    assert [name for name in LINK_MODELS if f"`{name}" not in text] == []
