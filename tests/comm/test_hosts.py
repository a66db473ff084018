"""A run on two hosts: the results of one host, and its end where they lose each other."""

import time
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

import dfl
from dfl.comm.stalls import read
from tests.conftest import eventually
from tests.support.mpirun import CLOCKS
from tests.support.two_hosts import Hosts, obstacle, two_hosts

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there are two hosts"),
]

FEW = ["--peers", "8", "--seed", "3", "--eval-every", "50"]
SMALL = ["--model", "softmax", "--local-steps", "1", "--rounds", "200", "--checkpoint-every", "10"]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as pair:
        yield pair


@pytest.fixture(autouse=True)
def plugged(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plug the cable in after a test, and assert that no process is left."""
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    yield
    hosts.plug("up")
    assert eventually(lambda: not hosts.running(), 10), hosts.running()


def same(folder: Path, alone: Path) -> None:
    """Assert that a run has the results that it has on one rank, to the bit."""
    for _ in dfl.simulate(dfl.Run.from_dict(dfl.load(folder).run.to_dict() | {"out": str(alone)})):
        pass
    assert (folder / "state.safetensors").read_bytes() == (alone / "state.safetensors").read_bytes()
    a, b = (
        pd.read_csv(run / "metrics.csv", dtype=str).drop(columns=CLOCKS) for run in (folder, alone)
    )
    pd.testing.assert_frame_equal(a, b)


RUN = """
import os, platform
from dfl.comm.mpi import connect
from dfl.run import main
world = connect()
place = f"{world.rank} {platform.node()} {world.local_rank} {world.minimum(-world.rank)}"
os.write(2, f"{place}\\n".encode())
main()
"""


def test_two_hosts_give_the_results_of_one_and_ranks_are_counted_on_each(
    hosts: Hosts, tmp_path: Path
) -> None:
    """Messages between them go through the cable: those of two of the four edges between ranks."""
    (tmp_path / "run.py").write_text(RUN)
    command = [str(tmp_path / "run.py"), *FEW, "--rounds", "20", "--out"]
    before = hosts.moved()
    job = hosts.mpirun(2, *command, str(tmp_path / "two"))
    _, errors = job.communicate(timeout=240)
    moved = hosts.moved() - before
    assert job.returncode == 0, errors
    expected = ["0 alpha 0 (-3,)", "1 alpha 1 (-3,)", "2 beta 0 (-3,)", "3 beta 1 (-3,)"]
    assert sorted(errors.splitlines()) == expected
    same(tmp_path / "two", tmp_path / "one")
    wire = dfl.load(tmp_path / "two").rows["wire_bytes"].iloc[-1]
    assert wire == 8 * 20 * 4810 * 4  # each rank sends one row to either side
    assert wire / 2 <= moved < 3 * wire
    assert "on beta" in (tmp_path / "two" / "logs" / "rank-2.log").read_text()


def test_hosts_that_lose_each_other_end_and_can_be_resumed(hosts: Hosts, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = hosts.mpirun(2, "-m", "dfl.run", *FEW, *SMALL, "--timeout", "5", "--out", str(folder))
    assert eventually(
        lambda: len([*folder.glob("checkpoint/*.json")]) == 2 or job.poll() is not None, 240
    )
    assert job.poll() is None, job.communicate()
    ranks = [shown.pid for r in range(4) if (shown := read(folder / "heartbeats" / str(r)))]
    assert len(ranks) == 4
    hosts.plug("down")
    begun = time.monotonic()
    assert eventually(lambda: not set(ranks) & set(hosts.running()), 30), "some rank waits still"
    seconds = time.monotonic() - begun
    _, errors = job.communicate(timeout=30)
    assert job.returncode != 0
    assert seconds >= 5
    logs = [(folder / "logs" / f"rank-{rank}.log").read_text() for rank in range(4)]
    # The lines of beta cannot reach the terminal.
    between = "between ranks 0, 1 on alpha and ranks 2, 3 on beta"
    for text in (errors, "".join(logs[:2]), "".join(logs[2:])):
        assert f"messages do not get through {between}" in text
        assert "no sign of life" not in text
    assert dfl.load(folder).record["exit"] is None
    assert eventually(lambda: not hosts.running(), 20), hosts.running()
    list(dfl.simulate(dfl.resumed(folder)))
    same(folder, tmp_path / "whole")
