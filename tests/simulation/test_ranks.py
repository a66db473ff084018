"""Runs under a real mpirun: the same bytes on one and three ranks, and after a kill.

`tests/comm/test_mpi.py` and `tests/store/test_survival.py` have more of both.
"""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import dfl
from tests.mpi import layouts
from tests.support.mpirun import mpirun
from tests.support.stopping import same

pytestmark = pytest.mark.usefixtures("no_figures")

HARD = dfl.Run(
    peers=7,
    rounds=12,
    eval_every=5,
    checkpoint_every=2,
    topology="one_peer_exponential",
    bits=3,
    attack="sign_flip:peers=2",
    model="mlp:hidden=12",
    faults="link_loss:p=0.2+outage:p=0.05",
)
DIRECTED = replace(HARD, topology="directed_random", attack="none")
"""Peers have other numbers of incoming edges than of outgoing ones."""
JOB = """
import os, signal, sys
import dfl
from dataclasses import replace
from pathlib import Path
from dfl.simulation import prepare
from tests.mpi.layouts import shuffled
from tests.simulation import test_ranks

_, folder, run, order = sys.argv
if order == "shuffled":
    prepare.placed = shuffled

class Kill(dfl.Callback):
    def row(self, row):
        if row.round == 5:
            os.kill(os.getpid(), signal.SIGKILL)

if Path(folder).exists():
    run, callbacks = dfl.resumed(Path(folder)), []
else:
    run, callbacks = replace(getattr(test_ranks, run), out=Path(folder)), [Kill()]
for row in dfl.simulate(run, callbacks):
    pass
"""
GEOMETRIC = """
import sys
import dfl
from dfl.core.layout import Layout
from dfl.simulation import prepare

for order in ("placed", "consecutive"):
    if order == "consecutive":
        prepare.placed = lambda matrices, peers, ranks: Layout(peers, ranks)
    out = f"{sys.argv[1]}/{order}"
    for row in dfl.simulate(dfl.Run(peers=40, topology="geometric", rounds=1, out=out)):
        pass
"""
WIRE = """
import sys
import dfl

_, folder, *methods = sys.argv
for method in methods:
    run = dfl.Run(peers=4, algorithm=method, rounds=1, out=f"{folder}/{method}")
    for row in dfl.simulate(run):
        pass
"""
REFUSED_ROUND = """
import dfl

class Refuse(dfl.Callback):
    def round(self, t):
        if t == 3:
            raise dfl.InputError("a callback ends this run")

try:
    for row in dfl.simulate(dfl.Run(peers=4, rounds=8, eval_every=8), [Refuse()]):
        pass
except dfl.InputError as error:
    print(error)
"""
OTHER_ROWS = """
import sys
from dataclasses import dataclass
import dfl
from dfl.algorithms import Algorithm
from torch import Tensor

@dataclass(frozen=True)
class State:
    x: Tensor
    kept: Tensor

@dataclass(frozen=True, kw_only=True)
class Longer(Algorithm[State]):
    def init(self, x, copies, net):
        return State(x, x.new_zeros(len(x) + 1, 3))

    def round(self, state, task, net):
        return state

run = dfl.Run(
    peers=40, topology="geometric", rounds=1, checkpoint_every=1, algorithm=Longer(),
    out=sys.argv[1],
)
for row in dfl.simulate(run):
    pass
"""


def test_a_sample_of_runs_is_the_same_on_one_and_three_ranks(tmp_path: Path) -> None:
    folders = [tmp_path / "1", tmp_path / "3"]
    layouts.main(folders[0], "few")
    done = mpirun(3, "-m", "tests.mpi.layouts", str(folders[1]), "few")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    names = [sorted(each.name for each in folder.iterdir()) for folder in folders]
    assert names[0] == names[1]
    assert len(names[0]) == 8
    for name in names[0]:
        same(folders[0] / name, folders[1] / name)


@pytest.mark.parametrize(
    ("name", "before", "ranks", "after"),
    [
        ("HARD", "consecutive", 1, "consecutive"),
        ("HARD", "shuffled", 3, "shuffled"),
        ("DIRECTED", "shuffled", 3, "shuffled"),
        ("DIRECTED", "consecutive", 3, "shuffled"),
    ],
)
def test_a_job_whose_rank_0_is_killed_is_resumed_on_other_ranks(
    tmp_path: Path, name: str, before: str, ranks: int, after: str
) -> None:
    (tmp_path / "job.py").write_text(JOB)
    command = [str(tmp_path / "job.py"), str(tmp_path / "killed"), name]
    killed = mpirun(2, *command, before)
    assert killed.returncode not in (0, 1, 2), killed.stderr
    resumed = mpirun(ranks, *command, after)
    assert resumed.returncode == 0, resumed.stderr
    list(dfl.simulate(replace(globals()[name], out=tmp_path / "whole")))
    same(tmp_path / "whole", tmp_path / "killed")


def test_ranks_host_peers_that_are_close_on_the_graph(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(GEOMETRIC)
    done = mpirun(2, str(tmp_path / "job.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    wire = {
        order: dfl.load(tmp_path / order).rows["wire_bytes"].iloc[-1]
        for order in ("placed", "consecutive")
    }
    ranks = pd.read_csv(tmp_path / "placed" / "peers.csv")["rank"].tolist()
    assert sorted(ranks) == [0] * 20 + [1] * 20
    assert ranks != sorted(ranks)
    assert wire["placed"] < 0.9 * wire["consecutive"]


def test_a_row_counts_for_every_rank_that_receives_it(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(WIRE)
    wire = {}
    for ranks in (2, 4):
        command = str(tmp_path / "job.py"), str(tmp_path / str(ranks)), "pooled", "fedavg"
        done = mpirun(ranks, *command)
        assert done.returncode == 0, done.stderr
        for method in ("pooled", "fedavg"):
            rows = dfl.load(tmp_path / str(ranks) / method).rows
            wire[method, ranks] = rows["wire_bytes"].iloc[-1]
    row = 4 * 4810
    assert wire["pooled", 2] == row + 1  # a byte is for an error of rank 0
    assert wire["pooled", 4] == 3 * wire["pooled", 2]
    # Two ranks aggregate 4096 and 714 coordinates: of 4 updates, those that they do not host.
    assert wire["fedavg", 4] == 3 * row + 3 * (row + 4 * 8)
    assert wire["fedavg", 2] == 2 * row + (row + 4 * 8)


def test_every_rank_stops_by_an_error_of_a_callback_between_evaluations(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(REFUSED_ROUND)
    done = mpirun(2, str(tmp_path / "job.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("a callback ends this run") == 2


def test_rows_of_neither_peers_nor_edges_are_refused(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(OTHER_ROWS)
    done = mpirun(2, str(tmp_path / "job.py"), str(tmp_path / "run"))
    assert "dfl: the state of Longer has 42 rows of 'kept': " in done.stderr
    assert "in `incoming`" in done.stderr
